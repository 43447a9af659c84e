"""pipeline: its programs, its errors, and that it equals the composition of its stages."""

import functools
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusal import refused
from scaling import LAW, PARAMS, STATES, scale, stepped
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import IntermediateTensors
from weft.effects import parse_listing
from weft.errors import DonatedError, ProgramError
from weft.proofs import assert_equal
from weft.proofs.strategies import Function, stage_lists
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import microbatch, scan
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads
from weft.values.donation import clone, donated_argnames, donates
from weft.values.schema import Schema, TensorSchema


def test_the_programs_print_and_parse() -> None:
    step = pipeline([scale] * 3, microbatches=2, advance=stepped)
    text = str(step)
    assert text.splitlines()[:7] == [
        "rank 0 of 3",
        "  run stage 0 [mb 0]",
        "  send to 1 [mb 0]",
        "  run stage 0 [mb 1]",
        "  send to 1 [mb 1]",
        "  broadcast from 2 [mb 0]",
        "  run advance [mb 0]",
    ]
    ranks = ["rank" + part for part in text.split("rank")[1:]]
    assert parse_listing("\n".join(ranks)) == step.programs(2)
    assert repr(step) == "<pipeline of 3 stages, 2 micro-batches>"


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 50])
@pytest.mark.parametrize("advance", [None, stepped])
def test_it_is_the_composition(stages: int, microbatches: int, advance: Any) -> None:
    batch = torch.arange(5.0)
    step = pipeline([scale] * stages, microbatches=microbatches, advance=advance)
    plain = compose([scale] * stages, advance=advance)
    state = STATES[:stages]
    other = STATES[:stages]
    for _ in range(2):
        state, out = plain(PARAMS[:stages], state, batch)
        other, other_out = step(PARAMS[:stages], other, batch)
        assert isinstance(other, tuple)
        assert_equal(LAW, (other, other_out), (state, out))


@settings(deadline=None, max_examples=25)
@given(stage_lists(), st.integers(1, 6), st.integers(1, 4))
def test_any_stages_graphified_or_not(
    functions: list[Function], rows: int, microbatches: int
) -> None:
    stages = [f.fn for f in functions]
    params = [f.params for f in functions]
    state = [f.state for f in functions]
    x = torch.linspace(-2, 2, rows * 4).view(rows, 4)
    expected = compose(stages)(params, state, x)
    for parts in (stages, [graphify(stage, reference_argnames=("params",)) for stage in stages]):
        step = pipeline(parts, microbatches=microbatches)
        for _ in range(2):
            assert_equal(LAW, step(params, state, x), expected, exact=microbatches == 1)


def test_each_graphified_stage_captures_once() -> None:
    stages = [graphify(scale, reference_argnames=("p",)) for _ in range(2)]
    step = pipeline(stages, microbatches=2)
    plain = compose([scale] * 2)
    for batch in (
        torch.arange(8.0),
        torch.arange(8.0) + 1,
    ):  # parts of 16 bytes, which are aligned alike
        assert_equal(LAW, step(PARAMS[:2], STATES[:2], batch), plain(PARAMS[:2], STATES[:2], batch))
    assert [(s.cache_info().captures, s.cache_info().replays) for s in stages] == [(1, 4), (1, 4)]


def test_a_whole_pipeline_as_one_graph() -> None:
    step = pipeline([scale] * 3, microbatches=2, advance=stepped)
    whole = graphify(step)
    plain = compose([scale] * 3, advance=stepped)
    for batch in (torch.arange(4.0), torch.arange(4.0) - 7):
        assert_equal(LAW, whole(PARAMS, STATES, batch), plain(PARAMS, STATES, batch))
    assert whole.cache_info().captures == 1


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("advance", [None, stepped])
def test_results_of_stages_that_lend_are_all_there_at_the_end(stages: int, advance: Any) -> None:
    lending = [graphify(scale, outputs="borrow") for _ in range(stages)]
    step = pipeline(lending, microbatches=3, advance=advance)
    plain = compose([scale] * stages, advance=advance)
    state = STATES[:stages]
    other = STATES[:stages]
    for i in range(3):
        state, out = plain(PARAMS[:stages], state, torch.arange(6.0) + i)
        other, other_out = step(PARAMS[:stages], other, torch.arange(6.0) + i)
        assert_equal(LAW, (other, other_out), (state, out))


def test_advance_feeds_the_last_output_to_every_stage() -> None:
    step = pipeline(
        [scale] * 2, advance=lambda s, batch, out: (s, batch.tolist(), out.tolist()), microbatches=1
    )
    state, _ = step(PARAMS[:2], STATES[:2], torch.ones(1))
    assert [entry[1:] for entry in state] == [([1.0], [6.0])] * 2


def test_advance_runs_for_each_micro_batch_with_its_own_output() -> None:
    calls: list[tuple[list[float], list[float]]] = []

    def advance(s: Any, batch: Tensor, out: Tensor) -> Any:
        calls.append((batch.tolist(), out.tolist()))
        return s

    pipeline([scale] * 2, advance=advance, microbatches=2)(
        PARAMS[:2], STATES[:2], torch.arange(3.0)
    )
    assert sorted(calls) == sorted([([0.0], [0.0])] * 2 + [([1.0, 2.0], [6.0, 12.0])] * 2)


def test_micro_batches_never_outnumber_requests() -> None:
    ran: list[int] = []

    def stage(p: None, s: int, batch: Batch, x: Tensor | None) -> tuple[int, Tensor]:
        ran.append(batch.descriptor.num_reqs)
        return s + 1, batch.rows if x is None else x

    step = pipeline([stage, stage], microbatches=4)
    assert step((None, None), (0, 0), Batch.decode([3, 4, 5]))[0] == (3, 3)
    assert ran == [1] * 6
    assert step((None, None), (0, 0), Batch.decode(range(4)))[0] == (4, 4)


@pytest.mark.parametrize("transform", [pipeline, compose])
def test_an_error_in_a_stage_says_which(transform: Any) -> None:
    def broken(params: Any, state: Any, batch: Any, x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        transform([scale, broken])(PARAMS[:2], STATES[:2], torch.ones(1))
    assert error.value.__notes__ == ["in stage 1 (broken)"]
    with pytest.raises(ProgramError, match=r"stage 0 \(one\)\n  saw: it returned a Tensor"):
        transform([one])(PARAMS[:1], STATES[:1], torch.ones(1))


def one(params: Any, state: Any, batch: Any, x: Any) -> Any:
    return batch


HIDDEN = Schema((TensorSchema("hidden_states", ("num_tokens", 4), torch.float32),))


def hidden(width: int, dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    def stage(p: Any, s: Any, batch: Batch, x: Any) -> tuple[Any, IntermediateTensors]:
        return s, IntermediateTensors(torch.ones(batch.descriptor.num_tokens, width, dtype=dtype))

    return stage


def test_a_declared_schema_that_fits_any_number_of_tokens() -> None:
    step = pipeline([hidden(4), hidden(7)], schema=HIDDEN, microbatches=2)
    assert "  send to 1 [mb 1]: hidden_states[num_tokens, 4] float32" in str(step).splitlines()
    for rows in ([0], [0, 1, 2]):
        assert step((0, 0), (0, 0), Batch.decode(rows))[1].hidden_states.shape == (len(rows), 7)


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        (hidden(8), "hidden_states[num_tokens, 8] float32"),
        (hidden(4, torch.float64), "hidden_states[num_tokens, 4] float64"),
        (lambda p, s, batch, x: (s, torch.ones(1, 4)), "[1, 4] float32"),
    ],
)
def test_a_value_of_another_schema_is_refused_with_both(stage: Any, problem: str) -> None:
    with pytest.raises(ProgramError) as error:
        pipeline([stage, hidden(4)], schema=HIDDEN)((0, 0), (0, 0), Batch.decode([0]))
    assert str(error.value) == (
        f"rank 0: 'send to 1 [mb 0]: {HIDDEN}'\n  saw: a value of schema {problem}\n"
        f"  instead: return {HIDDEN} from the stage"
    )


def donating() -> Callable[..., Any]:
    return donates("s")(lambda p, s, batch, x: (s.add_(p), batch if x is None else x + s))


def test_donated_states_move_through_the_micro_batches() -> None:
    step = pipeline([donating()] * 2, microbatches=3)
    plain = compose([scale] * 2)
    assert donated_argnames(plain) == donated_argnames(pipeline([scale])) == ()
    states = tuple(torch.zeros(2))
    step(PARAMS[:2], states, torch.ones(3))
    with pytest.raises(DonatedError, match="donated to"):
        step(PARAMS[:2], states, torch.ones(3))


def test_a_donating_stage_makes_the_whole_donate_its_state() -> None:
    @donates("state")
    def stage(
        params: Tensor, state: Tensor, batch: Tensor, x: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return state.add_(params), batch if x is None else x + state

    for step in (pipeline([stage] * 2), compose([stage] * 2)):
        assert donated_argnames(step) == ("state",)
        whole = graphify(step)
        states = tuple(torch.zeros(2))
        for i in (1.0, 2.0):
            states, out = whole(PARAMS[:2], states, torch.ones(2))
            assert_equal(
                LAW,
                (states, out),
                ((2 * torch.tensor(i), 3 * torch.tensor(i)), torch.full((2,), 1 + 3 * i)),
            )


@pytest.mark.parametrize("ladder", [None, [BatchDescriptor.uniform(4)]])
@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("make", [compose, pipeline])
def test_states_in_a_list_are_donated_as_those_in_a_tuple(
    make: Any, kind: Any, ladder: Any
) -> None:
    def stage(p: Any, s: Tensor, batch: Batch, x: Any) -> tuple[Tensor, Batch]:
        return s + p, batch

    step = graphify(make([stage, stage]), donate_argnames=["state"], ladder=ladder)
    state = kind([torch.zeros(3), torch.ones(3)])
    places = [one.data_ptr() for one in state]
    for _ in range(3):
        state, _ = step((1.0, 2.0), state, Batch.decode([0, 1, 2]))
        assert type(state) is kind
    assert [one.tolist() for one in state] == [[3.0] * 3, [7.0] * 3]
    assert [one.data_ptr() for one in state] == places
    assert step.cache_info().captures == 1


def test_a_failing_stage_raises_its_own_error() -> None:
    def failing(p: Any, s: Any, batch: Any, x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pipeline([scale, failing])(PARAMS[:2], STATES[:2], torch.ones(1))


def test_a_batch_that_was_padded_and_cut_gives_its_requests_their_outputs() -> None:
    from weft.batches.padding import pad

    def stage(p: Any, s: Any, batch: Batch, x: Any) -> tuple[Any, Tensor]:
        return s, batch.rows * 10 if x is None else x + 1

    padded = pad(Batch.decode([3, 4]), BatchDescriptor.uniform(5))
    _, out = pipeline([stage, stage], microbatches=3)((0, 0), (0, 0), padded)
    assert out.tolist()[:2] == [31, 41]


def test_programs_are_data_for_any_number_of_micro_batches() -> None:
    step = pipeline([scale] * 2, microbatches=4)
    assert step.programs(3) is step.programs(3)
    assert [len(p.effects) for p in step.programs(3)] == [6, 6]
    assert attrs.asdict(step.programs(1)[0], recurse=False)["rank"] == 0
    assert_equal(LAW, clone(step(PARAMS[:2], STATES[:2], torch.ones(2))[1]), torch.full((2,), 6.0))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_ranks_outside_a_transform_of_torch_func_are_refused(transform: Any) -> None:
    """torch.func's levels belong to one thread: gradients through other threads would be zero."""

    def last(step: Any) -> Any:
        return lambda x: step(PARAMS[:2], STATES[:2], x * torch.ones(3))[1].sum()

    x = torch.ones(2) if transform is torch.func.vmap else torch.tensor(1.0)
    expected = transform(last(compose([scale] * 2)))(x)
    assert_equal(LAW, transform(last(pipeline([scale] * 2)))(x), expected)
    with pytest.raises(ProgramError, match=r"inside a torch\.func transform"):
        transform(last(pipeline([scale] * 2, transport=Threads())))(x)


def test_stages_of_which_python_knows_no_signature_are_taken() -> None:
    assert len(pipeline([functools.partial(scale), graphify(scale), map, Callable4()]).stages) == 4


class Callable4:
    def __call__(self, *args: Any) -> Any:
        return scale(*args)


@pytest.mark.parametrize("make", [Local, Threads], ids=["local", "threads"])
def test_a_stream_to_whose_ranks_nothing_returns_gives_all_outputs(make: Any) -> None:
    step = pipeline([scale] * 2, transport=make())
    batches = [torch.ones(2), 2 * torch.ones(2)]
    for jobs in (None, [Job()] * 2, [Job(False)] * 2, [Job(), Job(False)]):
        _, outs = step.stream(PARAMS[:2], STATES[:2], batches, jobs)
        assert [out.tolist() for out in outs] == [[6.0, 6.0], [12.0, 12.0]]


@donates("state")
def sums(params: Any, state: Tensor, batch: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stage returns its state as its output, which the next micro-batch overwrites."""
    state.add_(batch.sum())
    return state, state.expand(len(batch))


def passes_batch(
    params: Any, state: Tensor, batch: Tensor, x: Tensor | None
) -> tuple[Tensor, Tensor]:
    return state, batch


def passes_on(params: Any, state: Tensor, batch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    time.sleep(0.01)  # the first stage is micro-batches ahead
    return state, x + 0


@pytest.mark.parametrize(
    "stages", [[sums, passes_on], [passes_batch, sums], [sums]], ids=["first", "last", "alone"]
)
@pytest.mark.parametrize("make", [Local, Threads], ids=["local", "threads"])
def test_what_a_stage_returns_of_a_donated_state_is_not_overwritten(
    make: Any, stages: list[Any]
) -> None:
    step = pipeline(stages, microbatches=4, transport=make())
    _, out = step([None] * len(stages), [torch.zeros(()) for _ in stages], torch.arange(1.0, 9.0))
    assert out.tolist() == [3.0, 3.0, 10.0, 10.0, 21.0, 21.0, 36.0, 36.0]


def keeps_input(params: Any, state: Tensor, batch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + state


def returns_input(params: Any, state: Tensor, batch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return state, x


@pytest.mark.parametrize("make", [Local, Threads], ids=["local", "threads"])
def test_what_a_stage_keeps_or_returns_of_a_lent_input_is_its_own(make: Any) -> None:
    """The lender overwrites its result in the next call. This also holds with one micro-batch,
    whose programs have no fence."""
    params = (torch.tensor(2.0), None)
    state = (torch.zeros(()), torch.zeros(2))
    step = pipeline([graphify(scale, outputs="borrow"), returns_input], transport=make())
    outs = [step(params, state, torch.full((2,), n))[1] for n in (1.0, 5.0)]
    assert [out.tolist() for out in outs] == [[2.0, 2.0], [10.0, 10.0]]

    step = pipeline([graphify(scale, outputs="borrow"), keeps_input], transport=make())
    new, _ = step(params, state, torch.ones(2))
    assert step(params, new, torch.full((2,), 10.0))[1].tolist() == [22.0, 22.0]


@pytest.mark.parametrize("transform", ["microbatch", "scan", "compose", "pipeline"])
def test_the_state_of_a_lent_step_is_kept(transform: str) -> None:
    def stage(params: Any, state: Any, batch: Any, x: Any = None) -> Any:
        return state + batch.sum(), batch * params

    lent = [graphify(stage, outputs="borrow") for _ in range(2)]
    step: Any = {
        "microbatch": lambda: microbatch(lent[0], 2),
        "scan": lambda: scan(lent[0], 2),
        "compose": lambda: compose([lent[0], lent[0]]),
        "pipeline": lambda: pipeline(lent, microbatches=2),
    }[transform]()
    one = torch.ones(())
    zero = torch.zeros(())
    params, state = (
        ((one, one), (zero, zero)) if transform in ("compose", "pipeline") else (one, zero)
    )
    first, _ = step(params, state, torch.ones(4))
    kept = clone(first)
    step(params, state, torch.ones(4) * 5)
    assert_equal("L9 ownership", first, kept)


def test_a_lent_stage_has_one_rank() -> None:
    lent = graphify(scale, outputs="borrow")
    problem = "stages 0 and 2 are one function, which lends its results"
    instead = 'a graph for each stage, or one of graphify(stage, outputs="safe")'
    with refused(ProgramError, "pipeline(<3 stages>)", problem, instead):
        pipeline([lent, graphify(scale, outputs="borrow"), lent])
    pipeline([graphify(scale)] * 3)
