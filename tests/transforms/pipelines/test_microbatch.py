"""microbatch: a step on parts of its batch is the step on the whole."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output
from weft.errors import DescriptorError, DonatedError, ProgramError
from weft.proofs import assert_equal
from weft.proofs.strategies import Rows
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import microbatch
from weft.values.donation import clone, donated_argnames, donates
from weft.values.trees import axes, pytree

LAW = "micro-batches are one batch"


@pytree
@attrs.frozen(eq=False)
class Columns:
    x: Tensor = attrs.field(metadata=axes(None, "num_reqs"))


def test_sized_outputs_are_joined_along_the_dimension_that_follows_the_batch() -> None:
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Columns]:
        return state, Columns(torch.stack([batch.rows, 2 * batch.rows]))

    batch = Batch.decode([3, 1, 4, 5])
    assert_equal(LAW, microbatch(step, 2)(None, 0, batch), step(None, 0, batch))


def test_outputs_that_hold_a_descriptor_hold_the_whole_batchs() -> None:
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Rows]:
        return state, Rows(batch.descriptor, batch.input_ids[:, None] * 1.0)

    _, out = microbatch(step, 2)(None, 0, Batch.decode([3, 1, 4, 5]))
    assert out.descriptor == BatchDescriptor.uniform(4)


def test_the_state_goes_through_the_parts_in_order() -> None:
    def step(params: int, state: list[Any], batch: Tensor) -> tuple[list[Any], Tensor]:
        return [*state, batch.tolist()], batch * params

    state, out = microbatch(step, 3)(2, [], torch.arange(5))
    assert (state, out.tolist()) == ([[0], [1, 2], [3, 4]], [0, 2, 4, 6, 8])


def counting() -> Any:
    @donates("state")
    def step(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state.add_(batch.sum()), batch * params

    return step


def test_donation_is_declared_and_done() -> None:
    cut = microbatch(counting(), 2)
    assert donated_argnames(cut) == ("state",)
    state = torch.zeros(())
    cut(torch.tensor(2.0), state, torch.ones(4))
    with pytest.raises(DonatedError, match=r"donated to step\(state\)"):
        cut(torch.tensor(2.0), state, torch.ones(4))


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_it_commutes_with_graphify(parts: int) -> None:
    params = torch.tensor(2.0)
    state = torch.zeros(())
    ways = [
        microbatch(graphify(counting()), parts),
        graphify(microbatch(counting(), parts)),
        counting(),
    ]
    states = [clone(state) for _ in ways]
    for batch in (torch.arange(5.0), torch.arange(5.0) + 1, torch.arange(3.0)):
        results = [way(params, s, batch) for way, s in zip(ways, states, strict=True)]
        states = [s for s, _ in results]
        for result in results:
            assert_equal(LAW, result, results[-1])


@pytest.mark.parametrize("parts", [0, -1, "2", None, 2.0, True])
def test_a_wrong_number_of_parts_is_refused_at_once(parts: Any) -> None:
    with pytest.raises(ProgramError) as error:
        microbatch(counting(), parts)
    assert str(error.value) == (
        f"microbatch(step, {parts!r})\n  saw: parts={parts!r}\n  instead: a whole number >= 1"
    )


@pytest.mark.parametrize("returned", [torch.ones(2, 2), [1, 2], (1, 2, 3), None])
def test_a_step_that_returns_no_pair_is_refused(returned: Any) -> None:
    """A tensor of two rows would unpack into two values."""
    with pytest.raises(ProgramError) as error:
        microbatch(lambda params, state, batch: returned, 2)(None, None, torch.ones(4, 2))
    assert error.value.problem == f"it returned {kind_of(returned)}" + " of 3" * isinstance(
        returned, tuple
    )
    assert error.value.instead == "return (state, out)"


def test_a_sum_of_as_many_columns_as_rows_is_the_readers_to_avoid() -> None:
    """`join` sees only sizes: it refuses an output of another size, and joins any output of the
    same size, as documented."""

    def step(params: Any, state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        return state, batch.sum(0)

    with pytest.raises(DescriptorError, match="not one entry a request"):
        microbatch(step, 2)(None, 0, torch.ones(6, 2))
    assert microbatch(step, 2)(None, 0, torch.ones(4, 2))[1].tolist() == [2, 2, 2, 2]


def test_more_parts_than_requests() -> None:
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Output]:
        return state, Output(batch.rows, batch.rows * 1.0)

    _, out = microbatch(step, 100)(None, 0, Batch.decode([7, 8]))
    assert out.token_ids.tolist() == [7, 8]
