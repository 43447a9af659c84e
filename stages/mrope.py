"""mRoPE: three positions a token, in time, height and width; how the first stage finds them, and who may say them.

A prompt's tokens stand where its batch says. All behind it stand, in all three, at their place in the request moved by
the request's delta, which the state holds: so a decode batch names rows alone. A request of text has a delta of 0, and
three equal positions turn a head as one does.
"""

import torch
from torch import Tensor

from weft.batch import Batch, ResolvedBatch
from weft.errors import DescriptorError
from weft.outputs import IntermediateTensors
from weft.state import State


def mrope_position_delta(positions: Tensor) -> int:
    """How far the tokens behind a prompt stand from their places: they go on behind the largest of its positions.

    Args:
        positions: [3, n], all of the prompt's.

    >>> mrope_position_delta(torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]))
    -2
    """
    return int(positions.max()) + 1 - positions.shape[1]


def mrope_positions(state: State, batch: Batch, resolved: ResolvedBatch) -> Tensor:
    """Where each token stands in time, height and width: [num_tokens, 3] int64. Pure, and without a host read."""
    owner, _ = batch.owners()
    in_order = (resolved.positions + state.mrope_position_deltas[batch.rows[owner]])[:, None]
    if batch.positions is None:
        return in_order.repeat(1, 3)
    given = batch.positions.T
    return torch.where(given >= 0, given, in_order).contiguous()


def check_positions(stage: str, batch: Batch, x: IntermediateTensors | None, has_mrope: bool) -> None:
    """Refuse what only the first stage takes at another, and positions where there is no mRoPE.

    Args:
        stage: its name.
        x: what it got from the one before.
        has_mrope: whether the model has it.

    Raises:
        DescriptorError: it is so; or what came from the stage before lacks the positions.
    """
    call = f"{stage}(params, state, batch, x)"
    if x is not None and batch.after_first() is not batch:
        name = "positions" if batch.positions is not None else "inputs_embeds"
        seen = f"batch.{name}, which the first stage alone takes"
        raise DescriptorError(call, seen, "batch.after_first(); what the first stage makes of them comes with x")
    if batch.positions is not None and not has_mrope:
        seen = "batch.positions, and a model without mRoPE (no mrope_section in its rope_parameters)"
        raise DescriptorError(call, seen, "a batch without positions: a token stands where it does in its request")
    if has_mrope and x is not None and x.positions is None:
        seen = "no x.positions, in a model with mRoPE"
        raise DescriptorError(call, seen, "attrs.evolve(y, hidden_states=...) of what the stage before returned")
