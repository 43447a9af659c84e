"""Code that a replay could not repeat is refused with its line, and a refused capture leaves no
trace."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from graphified import LAW, X, agree
from torch import Tensor

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.backends.host_reads import refusal
from weft.transforms.graphs.calls.key import CacheInfo
from weft.transforms.graphs.graphify import graphify

PINNING: dict[str, Callable[[Tensor], Any]] = {
    "a factory": lambda x: x + torch.empty(2, pin_memory=True).zero_(),
    "like": lambda x: torch.zeros_like(x, pin_memory=True) + x,
    "a method": lambda x: x.pin_memory(),
}


@pytest.mark.parametrize("way", PINNING)
def test_pinned_memory_is_refused(way: str) -> None:
    with pytest.raises(
        CaptureError, match=r"allocates pinned host memory\n\s+at .*test_refusals.py"
    ):
        graphify(PINNING[way])(torch.ones(2))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group with this process alone."""
    file = Path(tmp_path_factory.mktemp("group")) / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{file}")
    yield
    dist.destroy_process_group()


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y


def _functional(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x * 2, "sum", dist.group.WORLD))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", [_in_place, _functional])
def test_collectives_are_captured_if_asked_for(step: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"is a collective operation, which waits for other ranks"
    ):
        graphify(step)(torch.ones(2))
    with pytest.raises(CaptureError, match=r"graphify\(\.\.\., collectives=True\) on every rank"):
        graphify(step).lower(torch.ones(2))
    g = graphify(step, collectives=True)
    for value in (1.0, 3.0):
        assert g(torch.full((2,), value)).tolist() == [2 * value] * 2
    assert g.cache_info().captures == 1


# Each function's fault stands on the line below its def: the test looks for that line in the error.

OUTSIDE = torch.zeros(4)


def reads_item(x: Tensor) -> Any:
    return x * x[1].item()


def reads_tolist(x: Tensor) -> Any:
    return x * sum(x.tolist())


def reads_numpy(x: Tensor) -> Any:
    return x * x.numpy().sum()


def reads_asarray(x: Tensor) -> Any:
    return x * float(x.__array__().sum())


def reads_bool(x: Tensor) -> Any:
    return x if x.sum() > 0 else -x


def reads_float(x: Tensor) -> Any:
    return x * math.sqrt(x[1])


def reads_int(x: Tensor) -> Any:
    return x * int(x[1])


def reads_index(x: Tensor) -> Any:
    return [x * i for i in range(x.long()[2])]


def reads_slice(x: Tensor) -> Any:
    return x[: x.long()[2]]


def reads_print(x: Tensor) -> Any:
    print(x)


def reads_format(x: Tensor) -> Any:
    return x, f"{x}"


def reads_format_number(x: Tensor) -> Any:
    return x, f"{x[1]:.2f}"


def reads_contains(x: Tensor) -> Any:
    return x * (2 if 3.0 in x else 1)


def reads_equal(x: Tensor) -> Any:
    return x * torch.equal(x, x)


def reads_allclose(x: Tensor) -> Any:
    return x * torch.allclose(x, x)


def reads_new_tensor_of_scalars(x: Tensor) -> Any:
    return torch.tensor([x[0], x[1]])


def reads_dlpack(x: Tensor) -> Any:
    return x * float(np.from_dlpack(x).sum())


def reads_storage_item(x: Tensor) -> Any:
    return x * x.storage()[1]


def reads_storage_tolist(x: Tensor) -> Any:
    return x * sum(x.storage().tolist())


def reads_storage_bytes(x: Tensor) -> Any:
    return x * x.untyped_storage()[3]


def shape_nonzero(x: Tensor) -> Any:
    return x.nonzero()


def shape_unique(x: Tensor) -> Any:
    return x.unique()


def shape_where(x: Tensor) -> Any:
    return torch.where(x > 1)


def mask_read(x: Tensor) -> Any:
    return x[x > 1]


def mask_write(x: Tensor) -> Any:
    (x * 1)[x > 1] = torch.zeros(())  # a number would be a masked_fill_ since torch 2.15


def writes_argument(x: Tensor) -> Any:
    return x.add_(1)


def writes_view_of_argument(x: Tensor) -> Any:
    x[1:].detach().zero_()


def writes_out_argument(x: Tensor) -> Any:
    return torch.add(x, 1, out=x)


def writes_foreach(x: Tensor) -> Any:
    torch._foreach_add_([x * 1, x], 1.0)


def writes_outside(x: Tensor) -> Any:
    OUTSIDE.copy_(x)


def writes_outside_index(x: Tensor) -> Any:
    OUTSIDE[0] = x[0]


def writes_outside_batch_norm(x: Tensor) -> Any:
    return torch.nn.functional.batch_norm(x[:, None], OUTSIDE[:1], OUTSIDE[:1] + 1, training=True)


def writes_storage_item(x: Tensor) -> Any:
    x.storage()[0] = 1.0


def writes_storage(x: Tensor) -> Any:
    x.untyped_storage().fill_(0)


def writes_outside_storage(x: Tensor) -> Any:
    (x + OUTSIDE, OUTSIDE.untyped_storage().fill_(0))


BRANCH = "a branch on a tensor's value"
SHAPE = "has a result whose shape, or value on the host, depends on data"
MASK = "indexing with a boolean mask, whose shape or work depends on data"
NOT_OWN = "of shape (4,), which it does not own"
REFUSED: dict[Callable[[Tensor], Any], str] = {
    reads_item: "Tensor.item reads a tensor on the host",
    reads_tolist: "Tensor.tolist reads a tensor on the host",
    reads_numpy: "Tensor.numpy reads a tensor on the host",
    reads_asarray: "Tensor.__array__ reads a tensor on the host",
    reads_bool: BRANCH,
    reads_float: "Tensor.__float__ reads a tensor on the host",
    reads_int: "Tensor.__int__ reads a tensor on the host",
    reads_index: "Tensor.__index__ reads a tensor on the host",
    reads_slice: "a tensor's value is read on the host",
    reads_print: "Tensor.__repr__ reads a tensor on the host",
    reads_format: "reads a tensor on the host",
    reads_format_number: "read",
    reads_contains: "a tensor's value is read on the host",
    reads_equal: f"aten.equal.default {SHAPE}",
    reads_allclose: f"aten.allclose.default {SHAPE}",
    reads_new_tensor_of_scalars: "read",
    reads_dlpack: "read",
    reads_storage_item: "Tensor.item reads a tensor on the host",
    reads_storage_tolist: "Tensor.item reads a tensor on the host",
    reads_storage_bytes: "a tensor's value is read on the host",
    shape_nonzero: f"aten.nonzero.default {SHAPE}",
    shape_unique: f"aten._unique2.default {SHAPE}",
    shape_where: f"aten.nonzero.default {SHAPE}",
    mask_read: MASK,
    mask_write: MASK,
    writes_argument: f"aten.add_.Tensor writes to x {NOT_OWN}",
    writes_view_of_argument: "aten.zero_.default writes to x of shape (3,), which it does not own",
    writes_out_argument: f"aten.add.out writes to x {NOT_OWN}",
    writes_foreach: f"aten._foreach_add_.Scalar writes to x {NOT_OWN}",
    writes_outside: f"aten.copy_.default writes to a tensor from outside it {NOT_OWN}",
    writes_outside_index: "writes to a tensor from outside it of shape (), which it does not own",
    writes_storage_item: "writes to x of shape (), which it does not own",
    writes_storage: "aten.fill_.Scalar writes to x of shape (16,), which it does not own",
    writes_outside_storage: (
        "writes to a tensor from outside it of shape (16,), which it does not own"
    ),
    writes_outside_batch_norm: (
        "writes to a tensor from outside it of shape (1,), which it does not own"
    ),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_a_replay_could_not_repeat_is_refused_with_its_line(
    fn: Callable[[Tensor], Any],
) -> None:
    OUTSIDE.zero_()
    x = X.clone()
    with pytest.raises(CaptureError) as error:
        graphify(fn)(x)
    line = fn.__code__.co_firstlineno + 1
    text = Path(__file__).read_text().splitlines()[line - 1].strip()
    assert error.value.call == f"graphify({fn.__name__})"
    assert REFUSED[fn] in error.value.problem
    assert error.value.problem.endswith(f"\n       at {__file__}:{line}: {text}")
    writes = fn.__name__.startswith("writes")
    assert ("donate the argument" in error.value.instead) is writes
    assert ("torch.where" in error.value.instead) is not writes
    assert_equal("a refused capture leaves no trace", (x, OUTSIDE), (X, torch.zeros(4)))


def test_a_write_to_params_is_refused_by_its_path() -> None:
    with pytest.raises(CaptureError, match=r"writes to params\['w'\] of shape \(4,\)"):
        graphify(lambda params, x: params["w"].add_(x))({"w": torch.ones(4)}, X)


def test_a_tensor_made_inside_may_be_written_to_even_where_it_was_resized() -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        return out.mul_(2)

    agree(fn, (X,), (X + 1,))


def test_storages_that_the_function_makes_may_be_read_and_written() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y.untyped_storage().fill_(0)
        return y + 1, copy.deepcopy(x) * 3

    agree(fn, (X,), (X + 1,))


def test_a_mask_in_where_and_masked_fill_is_not_refused() -> None:
    agree(lambda x: (torch.where(x > 1, x, 0.0), x.masked_fill(x > 1, 5.0)), (X,), (X - 2,))


def test_a_failed_capture_leaves_state_and_memo_usable() -> None:
    def fn(s: Tensor, x: Tensor, bad: bool) -> Tensor:
        s.add_(x)
        return s.mul_(x.sum().item()) if bad else s

    g = graphify(fn, donate_argnames=("s",))
    state = torch.ones(4)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"Tensor\.item"):
            g(state, X, True)
        assert state.tolist() == [1.0] * 4
    assert_equal(LAW, g(state, X, False), X + 1)
    assert g.cache_info() == CacheInfo(captures=1, replays=1, eager=0, currsize=1)
    assert torch.equal(X * 1, X)  # the modes are gone


def test_an_error_of_the_function_itself_passes_through() -> None:
    def fn(s: Tensor, x: Tensor) -> Tensor:
        s.add_(1)
        raise KeyError("mine")

    g = graphify(fn, donate_argnames=("s",))
    state = torch.ones(4)
    with pytest.raises(KeyError, match="mine"):
        g(state, X)
    assert state.tolist() == [1.0] * 4
    assert bool(X.sum() > 0)  # the modes are gone


def test_an_error_of_the_device_is_told_with_the_line_that_raised_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    said = str(refusal("graphify(f)", "CUDA refused: it waits", "do not", caught.value))
    assert said.startswith("graphify(f)\n  saw: CUDA refused: it waits\n       at ")
    assert "test_refusals.py" in said
    assert ": torch.ones(2) @ torch.ones(3)\n  instead: do not" in said
