"""Random traces: requests with arrivals, parameters and aborts, and the model and memory that serve
them."""

import itertools
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from weft.batches.state import State
from weft.proofs._strategies.engine.adapters import NUM_ADAPTERS, hold_adapters, slots
from weft.proofs._strategies.engine.drafts import Drafts
from weft.proofs._strategies.engine.embeds import images, with_mrope
from weft.proofs._strategies.models import configs
from weft.proofs._strategies.sampling import sampling_params
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import DecoderStage
from weft.stages.decoder import decoder_stage
from weft.stages.layout import StageLayout, empty_states, split_layers
from weft.stages.params import slice_params
from weft.stages.random_weights import random_params
from weft.transforms.engine.options import (
    Speculation,
    query_lens,
    spare_pages,
    with_drafter,
    with_drafting,
)
from weft.transforms.engine.requests.host_state import Budget, Request
from weft.transforms.engine.requests.prompts import EmbedsPrompt, ids_of, read_content
from weft.transforms.engine.requests.step_time import StepTime
from weft.values.trees import tree_map

# The standard deviation of the weights, large enough that differences show.
_STD = 0.3


def step_times(
    max_limit: int, max_tokens: int = 5, max_seconds: int = 9
) -> st.SearchStrategy[StepTime]:
    """Limits on a step's time and measured step times, in whole seconds.

    Args:
        max_limit: the greatest limit.
        max_tokens, max_seconds: the greatest differences between one measured step and the next.
    """
    # Increments, summed up below: a step with more tokens never takes less time.
    points = st.lists(
        st.tuples(st.integers(1, max_tokens), st.integers(0, max_seconds)), min_size=1, max_size=3
    )
    curve = points.map(
        lambda increments: tuple(
            zip(*map(itertools.accumulate, zip(*increments, strict=True)), strict=True)
        )
    )
    return st.builds(
        StepTime, st.integers(1, max_limit), curve, st.integers(0, 2), st.integers(0, 5)
    )


@attrs.frozen
class Arrival:
    """A request, and when it arrives.

    It arrives before tick `tick` and is aborted before tick `aborted` (None: never). `behind` is
    the id of the request with the same prompt whose pages it waits for (None: it does not wait)."""

    tick: int
    request: Request
    aborted: int | None = None
    behind: str | None = None


@attrs.frozen(eq=False, repr=False)
class Trace:
    """A random model, and requests that arrive and end.

    Args:
        config: the model's configuration.
        arrivals: the requests, in order of their ticks.
        budget: the limits of a step.
        num_pages, page_size: the sizes of the KV cache.
        window: the number of ticks scheduled before the tokens of the first of them are read.
        reads_late: whether a pipeline's tokens are read once they have returned to all ranks,
            rather than once per window.
        seed: the seed of the weights.
        drafts: how tokens are drafted. None: they are not.
    """

    config: ModelConfig
    arrivals: tuple[Arrival, ...]
    budget: Budget
    num_pages: int
    page_size: int
    window: int
    reads_late: bool
    seed: int
    drafts: Drafts | None = None

    def __repr__(self) -> str:
        return (
            f"Trace({self.config.architecture}, {self.config.num_layers} layers, seed={self.seed},"
            f" {self.budget}, num_pages={self.num_pages}, page_size={self.page_size},"
            f" window={self.window}, reads_late={self.reads_late}, arrivals={self.arrivals}"
            + (f", {self.drafts})" if self.drafts else ")")
        )

    @property
    def num_adapters(self) -> int:
        """The number of the model's adapters: 0 if no request names one."""
        if any(a.request.adapter >= 0 for a in self.arrivals):
            return NUM_ADAPTERS
        return 0

    def layouts(self, num_stages: int) -> tuple[StageLayout, ...]:
        """The split of the model's layers."""
        return split_layers(self.config.num_layers, num_stages)

    def stages(self, num_stages: int, device: torch.device | str = "cpu") -> list[DecoderStage]:
        """The model's stages on a device, which return their logits; the first one drafts."""
        if self.drafts:
            count = self.drafts.num_tokens
        else:
            count = 0
        layouts = self.layouts(num_stages)
        options: dict[str, Any] = {"keep_logits": True, "num_drafts": count, "device": device}
        stages = [decoder_stage(self.config, layout, **options) for layout in layouts]
        if self.drafts:
            return with_drafter(self.speculation(device), stages)
        return stages

    def speculation(self, device: torch.device | str = "cpu") -> Speculation:
        """The drafter; the trace must have `drafts`."""
        assert self.drafts is not None, "they are"
        return self.drafts.speculation(self.config, self.seed, _STD, device)

    def params(self, num_stages: int, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """The weights of each stage, with standard deviation 0.3 so that differences show."""
        # Drawn on the CPU, so that they are the same on every device.
        (whole,) = self.layouts(1)
        params = random_params(
            self.config, whole, seed=self.seed, device="cpu", dtype=torch.float32, std=_STD
        )
        params = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, params)
        stages = [
            (slice_params(params, layout), self.config, layout)
            for layout in self.layouts(num_stages)
        ]
        stage_params = tuple(
            hold_adapters(*stage, self.seed) if self.num_adapters else stage[0] for stage in stages
        )
        if self.drafts:
            return ((stage_params[0], self.speculation(device).params), *stage_params[1:])
        return stage_params

    def state(self, num_stages: int, device: torch.device | str = "cpu") -> tuple[State, ...]:
        """An empty state for each stage."""
        if self.drafts:
            speculation = self.speculation(device)
        else:
            speculation = None
        if speculation:
            spare = spare_pages(speculation, self.page_size)
        else:
            spare = 0
        layouts = self.layouts(num_stages)
        states = empty_states(
            self.config,
            layouts,
            max_num_reqs=self.budget.max_num_reqs,
            num_pages=self.num_pages,
            max_pages=self.budget.max_pages + spare,
            page_size=self.page_size,
            device=device,
        )
        if speculation:
            return with_drafting(speculation, states, layouts)
        return states


@st.composite
def traces(
    draw: st.DrawFn,
    min_layers: int = 1,
    max_layers: int = 3,
    max_requests: int = 6,
    alone: int = 2,
    page_sizes: tuple[int, ...] = (2, 4),
    adapters: bool = False,
    drafts: st.SearchStrategy[Drafts] | st.SearchStrategy[Drafts | None] | None = None,
    embeds: bool = False,
) -> Trace:
    """A model, and up to `max_requests` requests with prompts of 1 to 12 tokens, some of which
    share a beginning.

    Some requests end at a stop token, and some are aborted. One in `alone` + 1 is followed by
    another request with the same prompt. Rows, pages and tokens per step may be scarce. With
    `adapters`, some requests have one. With `drafts`, tokens are drafted. With `embeds`, the model
    has mRoPE, and some prompts have an image."""
    config = draw(configs(min_layers, max_layers))
    config = with_mrope(config) if embeds else config
    page_size = draw(st.sampled_from(page_sizes))
    # 2 first, and below four requests first: examples shrink towards loads in which requests wait.
    num_rows = draw(st.sampled_from((2, 1, 2, 3, 4)))
    num_cohorts = draw(st.integers(1, 3))
    count = draw(st.sampled_from([n for n in (4, 3, 6, 2, 5, 1) if n <= max_requests]))
    adapter_slots = (draw(slots(count)) if adapters else ()) or (-1,) * count
    arrivals = [
        draw(_arrivals(config, index, adapter)) for index, adapter in enumerate(adapter_slots)
    ]
    if embeds:
        arrivals = [
            draw(_with_image(config, one, i % 2)) if draw(st.integers(0, 3)) < 3 else one
            for i, one in enumerate(arrivals)
        ]
    arrivals += [
        draw(_followers(config, arrival))
        for arrival in arrivals
        if draw(st.integers(0, alone)) == 0
    ]
    longest = max(len(a.request.prompt) + a.request.max_tokens for a in arrivals)
    max_pages = -(-longest // page_size)
    size = -(-num_rows // num_cohorts)
    # With `size`, just enough for the decodes of a cohort, prompts come in the smallest chunks.
    tokens = draw(st.sampled_from((size, size + 3, 16)))
    mixed = draw(st.booleans())
    drafted = None if drafts is None else draw(drafts)
    speculation = None if drafted is None else Speculation(drafted.num_tokens)
    budget = Budget(num_rows, tokens, max_pages, num_cohorts, mixed, query_lens(speculation))
    window, reads_late = draw(st.sampled_from(((4, False), (1, True), (2, False), (3, True))))
    return Trace(
        config,
        tuple(sorted(arrivals, key=lambda a: a.tick)),
        budget,
        # With memory for the longest request alone, others wait or are preempted.
        draw(st.sampled_from((max_pages, max_pages + 2, max_pages * num_rows))),
        page_size,
        window,
        reads_late,
        draw(st.integers(0, 999)),
        drafted,
    )


@st.composite
def _followers(draw: st.DrawFn, config: ModelConfig, leader: Arrival) -> Arrival:
    """A request with the leader's prompt, which may wait for the leader's pages."""
    sampling = draw(sampling_params(config.vocab_size))
    request = attrs.evolve(leader.request, id=f"{leader.request.id}[1]", sampling=sampling)
    behind = draw(st.sampled_from((leader.request.id, None)))
    # At a later tick the leader may have ended, and there would be nothing to wait for.
    tick = leader.tick + (0 if behind else draw(st.sampled_from((0, 1, 2, 6))))
    return Arrival(
        tick, request, draw(st.one_of(st.integers(tick + 1, tick + 5), st.none())), behind
    )


def _with_image(config: ModelConfig, arrival: Arrival, image: int) -> st.SearchStrategy[Arrival]:
    def with_prompt(prompt: EmbedsPrompt) -> Arrival:
        request = attrs.evolve(
            arrival.request, prompt=tuple(ids_of(prompt)), prompt_content=read_content(prompt)
        )
        return attrs.evolve(arrival, request=request)

    return images(arrival.request.prompt, config.hidden_size, image).map(with_prompt)


@st.composite
def _arrivals(draw: st.DrawFn, config: ModelConfig, index: int, adapter: int) -> Arrival:
    token = st.integers(0, config.vocab_size - 1)
    begin = draw(st.sampled_from(((1, 2, 3, 4, 5, 6, 7, 8), (5, 6, 7, 8), (1, 2, 3, 4), ())))
    prompt: tuple[int, ...] = (
        *begin,
        *draw(st.lists(token, min_size=0 if begin else 1, max_size=4)),
    )
    request = Request(
        f"request {index}",
        prompt,
        draw(st.integers(1, 7)),
        draw(sampling_params(config.vocab_size)),
        priority=draw(st.sampled_from((0, 0, 1))),
        adapter=adapter,
    )
    tick = draw(st.sampled_from((0, 1, 2, 0, 4, 6)))
    return Arrival(tick, request, draw(st.one_of(st.integers(tick + 1, tick + 5), st.none())))


@st.composite
def timed_traces(draw: st.DrawFn) -> Trace:
    """Requests with prompts of several pages, and a limit in seconds on their steps."""
    trace = draw(traces(max_layers=1))
    prompts = st.lists(st.integers(3, 9), min_size=1, max_size=40)
    requests = [attrs.evolve(one.request, prompt=tuple(draw(prompts))) for one in trace.arrivals]
    arrivals = [
        # The prompts are new, so that nobody can wait for another's pages.
        attrs.evolve(one, request=request, behind=None)
        for one, request in zip(trace.arrivals, requests, strict=True)
    ]
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    budget = attrs.evolve(
        trace.budget,
        max_num_tokens=draw(st.integers(8, 64)),
        max_pages=-(-longest // trace.page_size),
        query_lens=(1,),
        step_time=draw(step_times(400, 20, 60)),
    )
    num_pages = draw(st.integers(1, 3)) * budget.max_pages
    return attrs.evolve(
        trace, arrivals=tuple(arrivals), budget=budget, num_pages=num_pages, drafts=None
    )
