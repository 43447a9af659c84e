"""L2: padding does not change results."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import pad, unpad
from weft.batches.state import State
from weft.proofs._laws.compare import larger, whole
from weft.proofs._strategies.images import ImageScenario, Resolution
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import LawViolation, assert_equal, visible
from weft.values.trees import tree_map


def padding_is_inert(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L2: `unpad(f(pad(b, d)))` equals `f(b)` for each d that covers b, whatever padding and
    unwritten memory contain."""
    step = whole(scenario, device)
    params = scenario.params(1, device)
    for batch_index, batch in enumerate(scenario.batches(device)):
        for descriptor in larger(batch.descriptor, ladder):
            before = _run_to(scenario, step, params, batch_index, device, poison=0.0)
            poisoned = _run_to(scenario, step, params, batch_index, device, poison=float("nan"))
            state, out = step(params, before, batch)
            other, padded = step(
                params, _garbage_scratch(poisoned), _garbage_tail(pad(batch, descriptor), batch)
            )
            unpadded = unpad(padded, batch.descriptor)
            # Within a tolerance: a product of more rows may add up in another order.
            assert_equal("L2 padding is inert: output", unpadded, out, exact=False)
            # Unwritten memory is 0 in one run and NaN in the other, so NaN is read as 0 here.
            unwritten = tree_map(
                lambda x: x.nan_to_num(0.0, torch.inf) if x.is_floating_point() else x,
                visible(other),
            )
            assert_equal("L2 padding is inert: state", unwritten, visible(state), exact=False)


def _run_to(
    scenario: Scenario, step: Any, params: Any, index: int, device: str, *, poison: float
) -> Any:
    state = scenario.state(1, device, poison=poison)
    for batch in scenario.batches(device)[:index]:
        state, _ = step(params, state, batch)
    return state


def _garbage_scratch(state: Sequence[State]) -> Sequence[State]:
    """Put stale data into the state's row that padding points to."""
    for s in state:
        s.positions[-1], s.last_tokens[-1] = 1, 3
        s.sampling.floats[-1] = float("nan")
        for other in (s.sampling.ints, s.sampling.bias_ids, s.sampling.allowed, s.sampling.counts):
            other[-1] = 77  # the stale row uses penalties, a mask and min_tokens
        s.block_table[-1], s.adapters[-1] = s.block_table[0], 1
    return state


def _garbage_tail(padded: Batch, batch: Batch) -> Batch:
    """The padded batch with token 2 in place of the padding's tokens."""
    tail = padded.input_ids.clone()
    tail[batch.descriptor.num_tokens :] = 2
    return attrs.evolve(padded, input_ids=tail)


def stage_padding_is_inert(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L2 between stages: NaN in the padding of a received buffer reaches neither requests nor
    pages."""
    stages = scenario.stages(2, device)
    params = scenario.params(2, device)
    state = list(scenario.state(2, device))
    other = list(scenario.state(2, device))
    for batch in scenario.batches(device)[:1]:
        for descriptor in larger(batch.descriptor, ladder)[:1]:
            state[0], x = stages[0](params[0], state[0], batch, None)
            state[1], out = stages[1](params[1], state[1], batch.after_first(), x)
            wide = pad(x, descriptor)
            tail = torch.full_like(wide.hidden_states, float("nan"))
            tail[: x.hidden_states.shape[0]] = x.hidden_states
            wide = attrs.evolve(wide, hidden_states=tail)
            other[1], padded = stages[1](
                params[1], other[1], pad(batch.after_first(), descriptor), wide
            )
            assert_equal(
                "L2 padding is inert: output", unpad(padded, batch.descriptor), out, exact=False
            )
            assert_equal(
                "L2 padding is inert: state", visible(other[1:]), visible(state[1:]), exact=False
            )


def image_padding_is_inert(
    scenario: ImageScenario, ladder: Sequence[Resolution], device: str = "cpu"
) -> None:
    """L2 for a custom descriptor: padding two dimensions with NaN changes neither images nor the
    state, and unpadding is the inverse of padding."""
    step = scenario.step()
    params = scenario.params(device)
    for image in scenario.images(device):
        for resolution in larger(image.resolution, ladder):
            state, out = step(params, scenario.state(device), image)
            wide = pad(image, resolution)
            assert_equal(
                "L2 padding is inert: there and back", unpad(wide, image.resolution), image
            )
            pixels = torch.where(wide.valid[..., None], wide.pixels, float("nan"))
            other, padded = step(params, scenario.state(device), attrs.evolve(wide, pixels=pixels))
            assert_equal(
                "L2 padding is inert: image", unpad(padded, image.resolution), out, exact=False
            )
            assert_equal("L2 padding is inert: state", other, state, exact=False)
            if padded.resolution != resolution or (
                padded.pixels.shape[0],
                padded.pixels.shape[1],
            ) != (
                resolution.height,
                resolution.width,
            ):
                raise LawViolation(
                    f"L2 padding is inert: {tuple(padded.pixels.shape)} for '{resolution}'"
                )
