"""`CompletionState`: what it copies as a completion grows, by counting the elements that torch's
operators write."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.batches.sampling import SamplingParams
from weft.transforms.engine import completion
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.requests.host_state import Request

WIDTH = 4
# Requests in each step.
NUM_ROWS = 3


class ElementsJoined(TorchDispatchMode):
    """Counts the elements of what is joined."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.count += result.numel()
        return result


def states_of(step: int) -> Tensor:
    """What a step captured of each of its rows, other values in each step."""
    return torch.arange(NUM_ROWS * WIDTH).reshape(NUM_ROWS, WIDTH) + 1000.0 * step


@pytest.mark.parametrize(
    ("most_steps", "most_rows"),
    [(8, 2**17), (2**10, 8 * NUM_ROWS)],
    ids=["by steps", "by the rows of steps"],
)
def test_each_captured_value_is_copied_once(
    most_steps: int, most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_MAX_LENT", most_steps)
    monkeypatch.setattr(completion, "_MAX_ROWS_LENT", most_rows)
    num_steps = 200
    row = 1
    state = CompletionState(Request("a", (1,), num_steps, SamplingParams()), None)
    state.token_ids += [0] * num_steps
    with ElementsJoined() as joined:
        for step in range(num_steps):
            state.append_captured({"layer": states_of(step)}, row)
    assert num_steps * WIDTH * 0.9 < joined.count <= num_steps * WIDTH
    expected = torch.stack([states_of(step)[row] for step in range(num_steps)])
    assert torch.equal(state.captured["layer"], expected)
    assert torch.equal(state.captured_of(3, 150)["layer"], expected[3:150])


def test_a_part_is_copied_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_MAX_LENT", 8)
    state = CompletionState(Request("a", (1,), 100, SamplingParams()), None)
    state.token_ids += [0] * 100
    for step in range(100):
        state.append_captured({"layer": states_of(step)}, 0)
    with ElementsJoined() as joined:
        for step in range(100):
            [value] = state.captured_of(step, step + 1)["layer"]
            assert torch.equal(value, states_of(step)[0])
    assert joined.count == 100 * WIDTH
