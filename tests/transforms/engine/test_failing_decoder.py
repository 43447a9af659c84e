"""A decoder of two layers: donation, failures of one of its stages, and what its pipeline refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import REMEDY, USE_THE_NEW, at, refused
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.state import advance
from weft.errors import CaptureError, DonatedError, ProgramError
from weft.proofs import assert_equal
from weft.stages.config import parse_config
from weft.stages.decoder import decoder_stage
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import slice_params
from weft.stages.random_weights import random_params
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.transforms.pipelines.microbatch import microbatch
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.values.donation import clone, donates


@pytest.fixture(scope="module")
def tiny() -> Model:
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    config = parse_config(fields, source="a test")
    params = random_params(config, split_layers(2, 1)[0], seed=0, dtype=torch.float32, std=0.3)
    return Model(config, params, None, Path("nowhere"))


LADDER = make_ladder("full", Limits(2, 64))
WIDE = (BatchDescriptor(8, 3),)


class Decoder:
    """The tiny model over several stages: its parameters, fresh states, and its stages, which can
    be made to fail."""

    def __init__(self, model: Model, num_stages: int) -> None:
        self.model = model
        self.layouts = split_layers(2, num_stages)
        self.params = tuple(slice_params(model.params, layout) for layout in self.layouts)
        self.stages = [decoder_stage(model.config, layout) for layout in self.layouts]
        self.broken = False

    def state(self) -> Any:
        return make_state(self.model, self.layouts, [20, 20])

    def failing_last(self) -> list[Callable[..., Any]]:
        """The stages, the last of which branches on its result while `broken`."""
        last: Callable[..., Any] = self.stages[-1]

        @donates("state")
        def failing(params: Any, state: Any, batch: Batch, x: Any) -> Any:
            state, out = last(params, state, batch, x)
            if self.broken and bool((out.token_ids > 5).any()):
                return state, out
            return state, out

        self.line = at(failing, "bool(")
        return [*self.stages[:-1], failing]


def prefill() -> Batch:
    return Batch.ragged([0, 1], [[1, 2, 3], [4]])


def test_a_failed_capture_of_a_decoder_leaves_its_state_and_the_next_call_works(
    tiny: Model,
) -> None:
    decoder = Decoder(tiny, 2)
    plain = compose(decoder.stages, advance=advance)
    graph = graphify(compose(decoder.failing_last(), advance=advance), ladder=LADDER)
    state, _ = plain(decoder.params, decoder.state(), prefill())
    before = clone(state)
    decode = Batch.decode([0, 1])
    decoder.broken = True
    for fails in (graph, graph.capture):
        with refused(
            CaptureError, "graphify(step)", "a branch on a tensor's value" + decoder.line, REMEDY
        ):
            fails(decoder.params, state, decode)
        assert_equal("after a failed capture", state, before)
    decoder.broken = False
    expected = plain(decoder.params, before, decode)
    assert_equal("after the next call", graph(decoder.params, state, decode), expected)


def test_a_failed_capture_of_one_stage_leaves_that_stages_state(tiny: Model) -> None:
    """In a pipeline the stages before it have run by then and own their state: they say so, and a
    copy kept by `weft.clone` starts the step again."""
    decoder = Decoder(tiny, 2)
    step = pipeline(
        [graphify(stage, ladder=LADDER) for stage in decoder.failing_last()], advance=advance
    )
    plain = compose(decoder.stages, advance=advance)
    state, _ = plain(decoder.params, decoder.state(), prefill())
    before = clone(state)
    kept = clone(state)
    decode = Batch.decode([0, 1])
    decoder.broken = True
    with refused(
        CaptureError, "graphify(<any>)", "a branch on a tensor's value" + decoder.line, REMEDY
    ):
        step(decoder.params, state, decode)
    assert_equal("the failed stage's state", state[1], before[1])
    with pytest.raises(DonatedError, match=r"donated to stage 0 of 2\(state\)"):
        _ = state[0].positions
    decoder.broken = False
    assert_equal(
        "after the next call",
        step(decoder.params, kept, decode),
        plain(decoder.params, before, decode),
    )


TAKERS: dict[str, tuple[int, Callable[[Decoder], Callable[..., Any]], str]] = {
    "stage": (1, lambda d: lambda p, s, b: _bare(d, p, s, b), "stage 0 of 1(state)"),
    "compose": (1, lambda d: compose(d.stages, advance=advance), "stage 0 of 1(state)"),
    "compose of two": (2, lambda d: compose(d.stages, advance=advance), "stage 0 of 2(state)"),
    "graphify": (1, lambda d: graphify(compose(d.stages, advance=advance)), "step(state)"),
    "graphify, a ladder": (
        2,
        lambda d: graphify(compose(d.stages, advance=advance), ladder=WIDE),
        "step(state)",
    ),
    "pipeline": (
        2,
        lambda d: pipeline(d.stages, microbatches=2, advance=advance),
        "stage 0 of 2(state)",
    ),
    "pipeline of graphs": (
        2,
        lambda d: pipeline([graphify(s) for s in d.stages], microbatches=2, advance=advance),
        "stage 0 of 2(state)",
    ),
    "graph of a pipeline": (
        2,
        lambda d: graphify(pipeline(d.stages, advance=advance)),
        "pipeline of 2 stages(state)",
    ),
    "micro-batches": (
        1,
        lambda d: microbatch(compose(d.stages, advance=advance), 2),
        "stage 0 of 1(state)",
    ),
}


def _bare(decoder: Decoder, params: Any, state: Any, batch: Batch) -> Any:
    """One stage called by hand, as a step."""
    first: Callable[..., Any] = decoder.stages[0]
    new, out = first(params[0], state[0], batch, None)
    return (advance(new, batch, out),), out


@pytest.mark.parametrize("taker", TAKERS)
def test_a_donated_state_used_twice_names_who_took_it(taker: str, tiny: Model) -> None:
    """By a second step and by a mere look; the state that the step returned is whole all the same."""
    num_stages, make, name = TAKERS[taker]
    decoder = Decoder(tiny, num_stages)
    step = make(decoder)
    old = decoder.state()
    state, _ = step(decoder.params, old, prefill())
    with refused(DonatedError, "State.kv_pages", f"this State was donated to {name}", USE_THE_NEW):
        step(decoder.params, old, prefill())
    with refused(DonatedError, "State.positions", f"this State was donated to {name}", USE_THE_NEW):
        _ = old[0].positions

    plain = compose(decoder.stages, advance=advance)
    expected, _ = plain(decoder.params, decoder.state(), prefill())
    decode = Batch.decode([0, 1])
    for _ in range(2):
        state, out = step(decoder.params, state, decode)
        expected, expected_out = plain(decoder.params, expected, decode)
        assert_equal("tokens after a refused call", out.token_ids, expected_out.token_ids)
        assert_equal("state after a refused call", state, expected, exact=False)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_each_stage_names_itself(num_stages: int, tiny: Model) -> None:
    decoder = Decoder(tiny, num_stages)
    old = Decoder(tiny, num_stages).state()
    compose(decoder.stages)(decoder.params, old, prefill())
    for index, state in enumerate(old):
        problem = f"this State was donated to stage {index} of {num_stages}(state)"
        with refused(DonatedError, "State.block_table", problem, USE_THE_NEW):
            _ = state.block_table


def test_a_copy_may_be_donated_as_often_as_wanted(tiny: Model) -> None:
    decoder = Decoder(tiny, 2)
    step = graphify(compose(decoder.stages, advance=advance))
    state = decoder.state()
    first = step(decoder.params, clone(state), prefill())
    assert_equal("from a copy of one state", step(decoder.params, clone(state), prefill()), first)
    assert_equal("the state of which copies were donated", state, decoder.state())


def test_a_donated_tensor_used_twice_names_who_took_it() -> None:
    """Tensors of research code are marked when donated, and every transform refuses them, whichever
    one took them."""

    @donates("state")
    def count(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state.add_(batch.sum()), batch * params

    params, batch = torch.ones(2), torch.ones(3, 2)
    for first in (count, graphify(count), pipeline([_as_stage(count)])):
        alone = first.__name__ == "count"
        old = torch.zeros(5)
        first(*((params, old, batch) if alone else ((params,), (old,), batch)))
        problem = "a tensor of shape (5,) that was donated to count(state)"
        with refused(DonatedError, "count(state)", problem, USE_THE_NEW):
            count(params, old, batch)
        with refused(DonatedError, "count(...)", f"state, {problem}", USE_THE_NEW):
            graphify(count)(params, old, batch)
        with refused(
            DonatedError,
            "pipeline(<1 stages>)(params, state, batch)",
            f"state[0], {problem}",
            USE_THE_NEW,
        ):
            pipeline([_as_stage(count)])((params,), (old,), batch)


def _as_stage(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, state, batch, x: step(params, state, batch if x is None else x)


def test_one_state_for_two_stages_is_refused(tiny: Model) -> None:
    decoder = Decoder(tiny, 2)
    for step in (compose(decoder.stages), pipeline(decoder.stages)):
        state = decoder.state()[0]
        problem = "this State was donated to stage 0 of 2(state)"
        with refused(DonatedError, "State.kv_pages", problem, USE_THE_NEW):
            step(decoder.params, (state, state), prefill())


@pytest.mark.parametrize("microbatches", [0, -1, 1.5])
def test_no_number_of_micro_batches(microbatches: Any, tiny: Model) -> None:
    call = f"pipeline(<2 stages>, microbatches={microbatches})"
    with refused(ProgramError, call, f"microbatches={microbatches}", "a whole number >= 1"):
        pipeline(Decoder(tiny, 2).stages, microbatches=microbatches)


@pytest.mark.parametrize("transform", [compose, pipeline])
def test_params_and_states_are_one_a_stage(transform: Callable[..., Any], tiny: Model) -> None:
    """Seen before the first stage runs, so that the state is still there."""
    decoder = Decoder(tiny, 2)
    call = f"{transform.__name__}(<2 stages>)(params, state, batch)"
    step = transform(decoder.stages, advance=advance)
    state = decoder.state()
    instead = "pass a tuple or list with one entry a stage"
    with refused(ProgramError, call, "params has 1 entries", instead):
        step(decoder.params[:1], state, prefill())
    with refused(ProgramError, call, "state has 3 entries", instead):
        step(decoder.params, (*state, state[0]), prefill())
    with refused(ProgramError, call, "state is a State", instead):
        step(decoder.params, state[0], prefill())
    assert_equal("the state after a refused call", state, decoder.state())


def test_the_name_of_a_transport_is_none_of_them(tiny: Model) -> None:
    limits = Limits(max_num_reqs=1, max_num_tokens=4)
    call = "make_runner(model, limits, num_stages=2)"
    with refused(
        ProgramError,
        call,
        "transport='local'",
        "Local(), Threads() or Distributed(), of weft.transforms",
    ):
        make_runner(tiny, limits, num_stages=2, transport="local")  # type: ignore[arg-type]
