"""Prompts with embeddings and positions: pages are shared by content, and invalid prompts are
refused."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import weft
from weft.batches.sampling import SamplingParams, for_request
from weft.errors import RequestError
from weft.ops.requests import EMBEDDED
from weft.proofs._strategies.engine.embeds import with_mrope
from weft.proofs._strategies.engine.engines import small_model
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine, num_unfinished
from weft.transforms.engine.options import EngineLimits, resolve_limits
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.requests.prompts import EmbedsPrompt, ids_of, read_content
from weft.transforms.engine.scheduler import add, schedule
from weft.transforms.engine.split import Split
from weft.transforms.pipelines.transports.threads import Threads

LIMITS = EngineLimits(
    max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=24
)
TEXT = [1, 2, 3, 4]
IDS = [*TEXT, *[EMBEDDED] * 6, 5, 6]
POSITIONS = torch.tensor(
    [
        [0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 7, 8],
        [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 7, 8],
    ]
)


@pytest.fixture(scope="module")
def model() -> Model:
    return attrs.evolve(small_model(), config=with_mrope(small_model().config))


def embeds(seed: int = 0) -> Tensor:
    return torch.randn(len(IDS), 8, generator=torch.Generator().manual_seed(seed))


def image(seed: int = 0, positions: Tensor | None = POSITIONS) -> EmbedsPrompt:
    return EmbedsPrompt(IDS, embeds(seed), positions)


def served(
    engine: Engine, prompt: Any, sampling: SamplingParams | None = None, max_tokens: int = 6
) -> list[list[int]]:
    name = engine.add(prompt, sampling, max_tokens=max_tokens)
    tracks = {output.index: output.track for output in engine if output.id == name}
    return [tracks[index].token_ids for index in sorted(tracks)]


def test_pages_are_shared_by_content(model: Model) -> None:
    """Prompts with the same image in the same place share its pages; all share those of the text
    before it."""
    engine = Engine(model, LIMITS, graph="none")
    alone = {seed: served(Engine(model, LIMITS, graph="none"), image(seed)) for seed in (0, 1)}
    assert alone[0] != alone[1]
    moved = POSITIONS.clone()
    moved[1, 5:] += 1
    cases = (
        (image(0), 0),
        (image(0), 11),
        (image(1), 4),
        (image(0, moved), 4),
        (image(0, None), 4),
        ([*TEXT, 7], 4),
    )
    for prompt, num_prefix_tokens in cases:
        before = engine.stats().prefix_tokens
        got = served(engine, prompt)
        assert engine.stats().prefix_tokens - before == num_prefix_tokens
        assert got == served(Engine(model, LIMITS, graph="none"), prompt)


def test_what_was_generated_is_found_where_it_stands(model: Model) -> None:
    """The next turn's prompt gives the tokens of the last turn the positions that they had."""
    engine = Engine(model, LIMITS, graph="none")
    (tokens,) = served(engine, image(), max_tokens=5)
    ids = [*IDS, *tokens, 3]
    more = torch.arange(9, 15).expand(3, -1)
    again = EmbedsPrompt(
        ids, torch.cat([embeds(), torch.zeros(6, 8)]), torch.cat([POSITIONS, more], dim=1)
    )
    before = engine.stats().prefix_tokens
    assert served(engine, again, max_tokens=3) == served(
        Engine(model, LIMITS, graph="none"), again, max_tokens=3
    )
    assert engine.stats().prefix_tokens - before == 16
    text = EmbedsPrompt(ids_of(again), again.inputs_embeds)
    before = engine.stats().prefix_tokens
    served(engine, text, max_tokens=3)
    assert engine.stats().prefix_tokens - before == 4


@pytest.mark.parametrize("graph", ["none", "full_and_piecewise"])
def test_completions_preemption_and_penalties(model: Model, graph: str) -> None:
    """Several completions of a prompt, with few pages and with many; penalties do not count an
    image's tokens."""
    sampling = SamplingParams(
        temperature=1.0, seed=7, n=3, repetition_penalty=1.3, frequency_penalty=0.2
    )
    plenty = Engine(model, LIMITS, graph=graph)
    scarce = Engine(model, attrs.evolve(LIMITS, num_pages=8), graph=graph)
    expected = served(plenty, image(), sampling, max_tokens=10)
    assert len({tuple(tokens) for tokens in expected}) == 3
    assert served(scarce, image(), sampling, max_tokens=10) == expected
    assert (plenty.stats().preempted, scarce.stats().preempted > 0) == (0, True)


def test_embeddings_alone_and_their_copies(model: Model) -> None:
    """A prompt of embeddings alone; changing the tensor later has no effect."""
    embed_tokens = model.params.embed_tokens
    assert embed_tokens is not None
    ids = [1, 5, 9, 2, 7]
    expected = served(Engine(model, LIMITS, graph="none"), ids)
    engine = Engine(model, LIMITS, graph="none")
    inputs_embeds = embed_tokens[ids].clone()
    engine.add(EmbedsPrompt(inputs_embeds=inputs_embeds), max_tokens=6)
    inputs_embeds.zero_()
    assert [output.track.token_ids for output in engine][-1:] == expected
    (completion,) = weft.generate(
        model, [EmbedsPrompt(inputs_embeds=embed_tokens[ids])], max_tokens=6
    )
    assert [completion.token_ids] == expected


def test_ranks_after_the_first_get_neither(model: Model) -> None:
    budget = resolve_limits(LIMITS, model, Split(Threads(), 2)).budget
    host = Engine(model, LIMITS, pipeline=2)._host
    content = read_content(image())
    sampling = for_request(SamplingParams(temperature=0.0), (), 0)
    _, (work,) = schedule(
        add(host, Request("a", tuple(IDS), 3, sampling, prompt_content=content), budget), budget
    )
    first = work.place("cpu").batch
    later = work.place("cpu", first=False).batch
    assert first.inputs_embeds is not None
    assert torch.equal(first.inputs_embeds, embeds())
    assert first.positions is not None
    assert torch.equal(first.positions, POSITIONS)
    assert (later.inputs_embeds, later.positions, later.descriptor) == (
        None,
        None,
        first.descriptor,
    )


@pytest.mark.parametrize("transport", [None, Threads()], ids=["local", "threads"])
def test_stages(model: Model, transport: Any) -> None:
    expected = served(Engine(model, LIMITS, graph="none"), image())
    engine = Engine(
        model, attrs.evolve(LIMITS, max_num_tokens=5), pipeline=3, graph="full", transport=transport
    )
    assert served(engine, image()) == expected


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no embeddings": ({"inputs_embeds": None}, "inputs_embeds=None", "a row for each"),
    "another width": (
        {"inputs_embeds": torch.zeros(12, 4)},
        "inputs_embeds of shape [12, 4], torch.float32",
        (
            "a row for each of the prompt's 12 tokens, some of which are EMBEDDED (-2): [12, 8],"
            " torch.float32"
        ),
    ),
    "another dtype": (
        {"inputs_embeds": embeds().half()},
        "inputs_embeds of shape [12, 8], torch.float16",
        "a row",
    ),
    "two rows": (
        {"positions": POSITIONS[:2]},
        "positions of shape [2, 12], torch.int64",
        "[3, 12], torch.int64: get_rope_index(...)[0][:, 0]",
    ),
    "before the start": (
        {"positions": POSITIONS - 1},
        "the least position=-1",
        "positions from 0 to 2147483647",
    ),
    "far past the end": (
        {"positions": POSITIONS + 2**62},
        f"the least position={2**62}",
        "positions from 0 to 2147483647",
    ),
    "a token that is none": (
        {"token_ids": [*IDS[:-1], 99]},
        "the prompt holds 99",
        "token ids are ints",
    ),
    "no token": ({"token_ids": []}, "the prompt has 0 tokens", "a prompt of 1 to"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(model: Model, case: str) -> None:
    changes, problem, instead = WRONG[case]
    engine = Engine(model, LIMITS, graph="none")
    with pytest.raises(RequestError) as caught:
        engine.add(attrs.evolve(image(), **changes), max_tokens=2)
    assert caught.value.call.startswith("engine.add(prompt, ")
    assert caught.value.problem.startswith(problem)
    assert caught.value.instead.startswith(instead)
    with pytest.raises(RequestError, match=r"weft\.generate\(model, prompts"):
        weft.generate(model, [TEXT, attrs.evolve(image(), **changes)], max_tokens=2)
    assert num_unfinished(engine) == 0


def test_what_a_model_or_a_request_cannot_have() -> None:
    engine = Engine(small_model(), LIMITS, graph="none", num_logprobs=1)
    with pytest.raises(
        RequestError,
        match=r"saw: positions of shape \[3, 12\], (.|\n)*<Model Qwen3ForCausalLM.*> has no mRoPE",
    ):
        engine.add(image(), max_tokens=2)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    with pytest.raises(
        RequestError,
        match=r"saw: prompt_logprobs=1\n.* without prompt_logprobs: embeddings have none",
    ):
        engine.add(image(positions=None), sampling, max_tokens=2)
    with pytest.raises(RequestError, match="the prompt holds -2"):
        engine.add(IDS, max_tokens=2)
    with pytest.raises(RequestError, match="without token_ids, inputs_embeds is None"):
        EmbedsPrompt()
    with pytest.raises(RequestError, match="inputs_embeds is a list"):
        EmbedsPrompt(inputs_embeds=[[1.0]])  # type: ignore[arg-type]
    assert len(served(engine, image(positions=None))[0]) == 6


@pytest.mark.parametrize(
    ("num_logprobs", "instead"), [(5, r"Engine\(\.\.\., num_logprobs=5\)"), (999, "at most [0-9]+")]
)
def test_too_many_logprobs_are_refused_with_what_to_write(num_logprobs: int, instead: str) -> None:
    engine = Engine(small_model(), LIMITS, graph="none", num_logprobs=1)
    for params in (
        SamplingParams(logprobs=num_logprobs),
        SamplingParams(prompt_logprobs=num_logprobs),
    ):
        with pytest.raises(
            RequestError, match=f"saw: .*logprobs={num_logprobs}\n  instead: {instead}"
        ):
            engine.add([1], params, max_tokens=1)
