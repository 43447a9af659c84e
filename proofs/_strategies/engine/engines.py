"""Random loads of an engine: a small model, the engine's options, and prompts that arrive, fork and
end."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from hypothesis import strategies as st

from weft.batches.sampling import SamplingParams
from weft.ops.sampling.logits import pack_bits
from weft.proofs._strategies.engine.drafts import Drafts, lookups, models
from weft.proofs._strategies.sampling import sampling_params
from weft.stages.adapters.adapter import Adapter
from weft.stages.config import ModelConfig, parse_config
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_adapter, random_params
from weft.stages.shares import adaptable
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.graphs.ladder import MODES
from weft.transforms.pipelines.transports import Transport

VOCABULARY = 12
_STD = 0.5


@functools.cache
def small_model(seed: int = 0) -> Model:
    """A model of three layers without a tokenizer, with large weights so that differences show."""
    config = parse_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            # As many as the engines have that serve one request alone, in a single page
            # (`_laws.engine`).
            "max_position_embeddings": 24,
            "tie_word_embeddings": False,
        },
        source="a small model",
    )
    (whole,) = split_layers(3, 1)
    params = random_params(config, whole, seed=seed, device="cpu", dtype=torch.float32, std=_STD)
    return Model(config, params, None, Path("small"))


@functools.cache
def small_adapters(version: int = 0) -> dict[str, Adapter]:
    """Two adapters for the small model."""
    return adapters_of(small_model().config, version)


def adapters_of(config: ModelConfig, version: int = 0) -> dict[str, Adapter]:
    """Two adapters for a model: one for attention only, and one of a larger LoRA rank for all
    layers that can have one.

    All versions have the same shapes but different values."""
    names = [name for layer in range(config.num_layers) for name in adaptable(config, layer)]
    parts = {"of attention": [name for name in names if "self_attn" in name], "of all": names}
    return {
        name: random_adapter(
            config,
            targets,
            rank=(1, max(2, config.hidden_size // 16))[index],
            seed=index + 2 * version,
            std=0.5,
        )
        for index, (name, targets) in enumerate(parts.items())
    }


@functools.cache
def small_speculation(drafts: Drafts, device: torch.device | str = "cpu") -> Speculation:
    """Drafting options for `small_model()`."""
    return drafts.speculation(small_model().config, 0, _STD, device)


@attrs.frozen
class Half:
    """A mask that allows a random half of some tokens after each prefix, as ids or as bits, or
    sometimes any token.

    Args:
        seed: determines which tokens are allowed.
        tokens: the tokens to choose from.
        vocab_size: the number of ids in the model's vocabulary.
    """

    seed: int
    tokens: tuple[int, ...] = attrs.field(default=tuple(range(VOCABULARY)), repr=False)
    vocab_size: int = attrs.field(default=VOCABULARY, repr=False)

    def __call__(self, said: Sequence[int]) -> torch.Tensor | list[int] | None:
        if (ids := self.allowed(said)) is None:
            return None
        # Ids and bits by turns: both forms must reach the device in the steps of one request.
        if len(said) % 2:
            return pack_bits(ids, self.vocab_size)
        return ids

    def allowed(self, said: Sequence[int]) -> list[int] | None:
        """The tokens allowed next, or None for any token."""
        chosen = random.Random(f"{self.seed} {list(said)}")
        # A mask may also allow everything in the midst of a completion.
        if chosen.random() < 0.8:
            return sorted(chosen.sample(self.tokens, len(self.tokens) // 2))
        return None


@attrs.frozen
class Call:
    """A prompt that arrives before step `step` of the engine, and is aborted before step `aborted`
    (None: never). Its id is its index in the load."""

    step: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    priority: int
    aborted: int | None
    adapter: str | None
    mask: Half | None


@attrs.frozen
class Load:
    """An engine's limits and options, and the prompts that arrive."""

    limits: EngineLimits
    pipeline: int
    graph: str
    run_ahead: int
    calls: tuple[Call, ...]
    drafts: Drafts | None = None

    def engine(
        self,
        run_ahead: int | None = None,
        model: Model | None = None,
        transport: Transport | None = None,
    ) -> Engine:
        """The engine. By default it serves `small_model()`, in this thread.

        Args:
            run_ahead: replaces the load's `run_ahead`.
            model: another model.
            transport: where the stages run.
        """
        model = model or small_model()
        return Engine(
            model,
            self.limits,
            pipeline=self.pipeline,
            graph=self.graph,
            transport=transport,
            run_ahead=self.run_ahead if run_ahead is None else run_ahead,
            num_logprobs=max(1, *(call.sampling.logprobs or 0 for call in self.calls)),
            seed=0,
            adapters=(
                adapters_of(model.config) if any(call.adapter for call in self.calls) else None
            ),
            speculation=(
                None if self.drafts is None else small_speculation(self.drafts, model.device)
            ),
        )


@st.composite
def loads(
    draw: st.DrawFn,
    modes: tuple[str, ...] = MODES,
    masks: bool = False,
    adapters: bool = True,
    stages: tuple[int, int] = (1, 3),
) -> Load:
    """Up to four prompts, some of which share a beginning, ask for several completions, or have
    adapters.

    The engine's rows, pages and tokens per step may be scarce, and it may draft.

    Args:
        modes: the graph modes to draw from.
        masks: whether most prompts have a mask. There are then more prompts, which arrive closer
            together, so that they share steps.
        adapters: whether some loads have adapters.
        stages: the fewest and the most stages.
    """
    page_size = draw(st.sampled_from((2, 4)))
    rows = draw(st.integers(3 if masks else 1, 5))
    num_stages = draw(st.integers(*stages))
    names = draw(
        st.sampled_from(((None,), (None,), (None, *small_adapters())) if adapters else ((None,),))
    )
    calls = tuple(
        draw(_calls(names, masks)) for _ in range(draw(st.integers(3 if masks else 1, 4)))
    )
    longest = max(len(call.prompt) + call.max_tokens for call in calls)
    pages = -(-longest // page_size)
    limits = EngineLimits(
        max_num_reqs=rows,
        max_num_tokens=-(-rows // num_stages) + draw(st.sampled_from((0, 3, 20))),
        max_model_len=longest,
        page_size=page_size,
        # With no page to spare, one request fills the memory, and others wait or are preempted.
        num_pages=pages + draw(st.sampled_from((0, 1, 3, 30))),
        mixed=draw(st.booleans()),
    )
    drafts = draw(st.one_of(st.none(), lookups(), models()))
    return Load(
        limits, num_stages, draw(st.sampled_from(modes)), draw(st.integers(0, 3)), calls, drafts
    )


@st.composite
def _calls(draw: st.DrawFn, adapters: tuple[str | None, ...], masks: bool) -> Call:
    # Beginnings of one or more full pages, which the prefix cache can share.
    begin = draw(st.sampled_from(((), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7))))
    rest = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=0 if begin else 1, max_size=4))
    sampling = draw(sampling_params(VOCABULARY))
    n = draw(st.sampled_from((1, 1, 1, 3)))
    told = draw(st.sampled_from((None, None, 0)))
    sampling = attrs.evolve(sampling, n=n, prompt_logprobs=told)
    step = draw(st.integers(0, 2 if masks else 8))
    aborted = draw(st.one_of(st.none(), st.none(), st.integers(step + 1, step + 6)))
    priority = draw(st.sampled_from((0, 0, 1)))
    adapter = draw(st.sampled_from(adapters))
    most = draw(st.integers(3 if masks else 1, 5))
    if masks:
        mask = draw(st.sampled_from((Half(0), Half(1), None)))
    else:
        mask = None
    # Other constraints could leave none of the tokens that the mask allows.
    if mask is not None:
        sampling = attrs.evolve(sampling, allowed_token_ids=None, bad_token_ids=(), min_tokens=0)
    return Call(step, (*begin, *rest), sampling, most, priority, aborted, adapter, mask)
