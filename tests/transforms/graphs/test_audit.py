"""Effects that a replay would not repeat, which a capture refuses: each with the words of its
error."""

import asyncio
import copy
import gc
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from graphified import refusal
from torch import Tensor, library
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import weft
from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify

X = torch.arange(3.0)
INDEX = torch.tensor(1)
LENGTHS = torch.tensor([3, 1])
SEQUENCES = torch.zeros(2, 3, 1)


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file) + 1


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    return pad_packed_sequence(pack_padded_sequence(x, lengths, batch_first=True))[0]


READS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "apply_": (
        "Tensor.apply_ runs Python on each element",
        lambda x: x.clone().apply_(lambda v: v * 2),
        (X,),
    ),
    "map_": (
        "Tensor.map_ runs Python on each element",
        lambda x: x.clone().map_(x, lambda a, b: a + b),
        (X,),
    ),
    "asarray": (
        "asarray of a list of tensors reads them",
        lambda x: torch.asarray([x[0], x[1]]),
        (X,),
    ),
    "tensor": ("tensor of tensors reads them", lambda x: torch.tensor([x[0], x[1]]), (X,)),
    "Tensor": ("Tensor.__index__ reads a tensor", lambda x: torch.Tensor([x[0], x[1]]), (X,)),
    "new": ("new of a list of tensors reads them", lambda x: x.new([x[0], x[1]]), (X,)),
    "an index": (
        "an index that is a list of tensors reads them",
        lambda x, i: x[[[i, i]]],
        (X, INDEX),
    ),
    "an index written": (
        "an index that is a list of tensors",
        lambda x, i: x.clone().__setitem__([[i]], 9.0),
        (X, INDEX),
    ),
    "a slice": ("a tensor's value is read on the host", lambda x, i: x[i:], (X, INDEX)),
    "tensordot": (
        "tensordot with a tensor of dims reads it on the host",
        lambda x, d: torch.tensordot(x, x, dims=d),
        (X, INDEX[None]),
    ),
    "pack": ("_pack_padded_sequence reads the lengths", packed, (SEQUENCES, LENGTHS)),
    "pad": (
        "_pad_packed_sequence reads the lengths",
        lambda x, n: pad_packed_sequence(PackedSequence(x, n))[0],
        (torch.zeros(3, 1), torch.tensor([2, 1])),
    ),
    "pickle": (
        "pickle (torch.save) reads a tensor on the host",
        lambda x: pickle.loads(pickle.dumps(x)) + 1,
        (X,),
    ),
    "save": ("pickle (torch.save) reads a tensor on the host", saved, (X,)),
    "storage": (
        "a tensor's value is read on the host",
        lambda x: x * sum(x.untyped_storage().tolist()),
        (X,),
    ),
    "dlpack": ("Tensor.__dlpack__ reads a tensor", lambda x: torch.from_dlpack(x) + 1, (X,)),
}


@pytest.mark.parametrize("way", READS)
def test_a_read_on_the_host_is_refused(way: str) -> None:
    problem, fn, args = READS[way]
    said = refusal(fn, *args)
    assert f"saw: {problem}" in said
    assert f"       at {__file__}:" in said or "torch/nn/utils" in said


def test_copies_that_keep_the_storage_are_no_pickle() -> None:
    g = graphify(lambda x: (copy.deepcopy(x) * 2, copy.copy(x) * 3))
    for x in (X, X + 5):
        assert_equal("a copy", g(x), (x * 2, x * 3))


@library.custom_op("weft_tests::as_many", mutates_args=())
def as_many(x: Tensor) -> Tensor:
    """As many ones as the first element says: its schema does not show that it reads a value."""
    return torch.ones(int(x.numpy()[0]))


def test_a_replay_with_a_result_of_another_shape_raises() -> None:
    g = graphify(lambda x: as_many(x) + 1)
    assert g(torch.tensor([2.0])).shape == (2,)
    with pytest.raises(CaptureError) as caught:
        g(torch.tensor([1.0]))
    assert (
        str(caught.value)
        == "a replay of weft_tests.as_many.default\n  saw: a result of shape (1,), which had shape"
        " (2,) at the capture, so it depends on data\n  instead: call that operator outside the"
        " graphified function"
    )


def test_gradients_that_lie_on_an_argument_are_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        for p.grad in (None, torch.ones(3)):
            said = refusal(
                lambda params: params if params.grad is None else params - params.grad, p
            )
            assert (
                "saw: .grad of a tensor from outside is not an argument, so a replay does not read"
                " it again" in said
            )
            assert "instead: pass the gradients as a separate argument" in said


def test_gradients_of_its_own_are_seen() -> None:
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (y**3).sum().backward()
        return y.grad if y.grad is not None else x

    g = graphify(slope)
    for x in (X, X + 1, X + 2):
        assert_equal("the gradient", g(x), 3 * x**2)


@attrs.frozen
class Holder:
    x: Any


async def later(x: Tensor) -> Tensor:
    return x * 2


OPAQUE: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a namespace": (" is of class SimpleNamespace", lambda x: types.SimpleNamespace(x=x)),
    "a class": ("['a'] is of class Holder", lambda x: {"a": Holder(x * 2)}),
    "a generator": (" is of class generator", lambda x: (x * i for i in range(3))),
    "a set": ("[1] is of class set", lambda x: (x * 2, {1})),
}


@pytest.mark.parametrize("way", OPAQUE)
def test_a_result_that_is_no_pytree_is_refused(way: str) -> None:
    problem, fn = OPAQUE[way]
    said = refusal(fn, X)
    assert (
        f"saw: its result{problem}, which is neither a tensor, a plain value nor a pytree" in said
    )
    assert (
        "instead: return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
        in said
    )


def test_functions_that_await_are_refused_at_once() -> None:
    with pytest.raises(
        CaptureError, match="a function that yields or awaits, so that a call does not run it"
    ):
        graphify(later)
    assert asyncio.run(later(X)).tolist() == [0, 2, 4]


def test_an_object_that_was_passed_in_may_be_returned() -> None:
    holder = Holder(3)
    g = graphify(lambda x, h: (x * h.x, h), static_argnames="h")
    for _ in range(2):
        assert g(X, holder)[1] is holder


KEPT: list[Any] = []
LEAKS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "its argument": ("an argument, or a view of one, is", lambda x: KEPT.append(x) or x * 2),
    "a view": ("an argument, or a view of one, is", lambda x: KEPT.append(x[1:]) or x * 2),
    "what it made": ("a tensor that it made is", lambda x: KEPT.append(x + 1) or x * 2),
}


@pytest.mark.parametrize("way", LEAKS)
def test_a_tensor_kept_outside_is_refused(way: str) -> None:
    problem, fn = LEAKS[way]
    said = refusal(fn, X)
    KEPT.clear()
    assert f"saw: {problem} kept and not returned (float32[" in said
    gc.collect()
    assert_equal("and not after", graphify(lambda x: (x, x[1:], x * 2))(X), (X, X[1:], X * 2))


def keep(x: Tensor) -> Tensor:
    KEPT.append(x)
    return x


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: keep(x * 2),
        lambda x: {"a": x + 1, "b": keep(x * 2)[1:]},
        lambda x: (keep(x * 2), KEPT[-1].view(-1)),
        lambda x: (y := x * 2, keep(y[:2]))[0],
    ],
)
def test_a_result_that_is_kept_too_is_refused(fn: Callable[[Tensor], Any], lends: bool) -> None:
    """A replay would make it anew for the caller, and not where the function keeps it."""
    with pytest.raises(CaptureError) as error:
        graphify(fn, outputs="borrow" if lends else "safe")(X)
    said = str(error.value)
    KEPT.clear()
    assert "saw: a tensor that it returns (float32[" in said
    assert "is kept too: in a cache, a global or an attribute" in said
    assert "instead: return it alone, and keep it outside the function" in said


def test_a_result_may_be_returned_twice_and_in_parts() -> None:
    graph = graphify(lambda x: ((y := x * 2), y, y[1:], {"a": [y.view(-1)]}))
    for call in range(3):
        doubled = (X + call) * 2
        assert_equal("call", graph(X + call), (doubled, doubled, doubled[1:], {"a": [doubled]}))


def test_results_that_require_grad_are_refused() -> None:
    said = refusal(lambda x: (x, (x * 2).requires_grad_()), X)
    assert said.endswith(
        "saw: its result[1] requires grad, which a replay does not record\n"
        "  instead: return x.detach(), and call requires_grad_() on what was returned"
    )


def asserts(x: Tensor) -> Tensor:
    torch._assert_async(x.sum() > 0)
    return x + 1


CHECKS: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, torch.ones(2)),
    "cholesky": torch.linalg.cholesky,
    "assert_async": asserts,
}


@pytest.mark.parametrize("way", CHECKS)
def test_a_replay_raises_what_the_function_raises(way: str) -> None:
    fn = CHECKS[way]
    g = graphify(lambda x: fn(x))
    for scale in (1.0, 2.0):
        assert_equal("a check that holds", g(scale * torch.eye(2)), fn(scale * torch.eye(2)))
    with pytest.raises(RuntimeError) as expected:
        fn(torch.zeros(2, 2))
    with pytest.raises(type(expected.value)) as error:
        g(torch.zeros(2, 2))
    assert str(error.value) == str(expected.value)
    assert_equal("a check that holds again", g(torch.eye(2)), fn(torch.eye(2)))


def test_printing_is_no_capture() -> None:
    with weft.no_capture(replay=False):
        assert graphify(lambda x: f"{x}")(X) == "tensor([0., 1., 2.])"


class _Printing(torch.autograd.Function):
    """Its derivative makes text of its gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, slope: Tensor) -> Tensor:
        return slope * len(str([slope]))


PRINTING: dict[str, Callable[[Tensor], Any]] = {
    "in a derivative": torch.func.grad(lambda x: _Printing.apply(x).sum()),
    "in vmap": torch.vmap(lambda x: x * len(str(x))),
    "in a hook": torch.func.grad(
        lambda x: [y := x * x, y.register_hook(lambda slope: slope * len(str(slope))), y.sum()][2]
    ),
}


@pytest.mark.parametrize("name", PRINTING)
def test_after_a_refusal_in_the_middle_of_a_print_torch_is_whole(name: str) -> None:
    """torch holds a guard of its dispatcher in a frame while it makes the text of a tensor."""
    x = torch.tensor([1.0, 2.0])
    graph = graphify(PRINTING[name])
    for call in (graph, graph.memory_estimate):
        with pytest.raises(CaptureError):
            call(x)
    assert torch.func.grad(lambda y: (y * y).sum())(x).tolist() == [2, 4]
    assert torch.vmap(torch.func.grad(lambda y: y * y))(x).tolist() == [2, 4]


def test_data_of_an_argument_is_not_set() -> None:
    """No operator does it, so no replay repeats it."""

    def step(params: dict[str, Tensor], slope: Tensor) -> Tensor:
        params["w"].data = params["w"].data - slope
        return params["w"].sum()

    with pytest.raises(CaptureError, match=r"x\.data = \.\.\. on a tensor from outside it"):
        graphify(step)({"w": torch.zeros(2)}, torch.ones(2))


def test_data_of_its_own_tensor_is_set() -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        y.data = y.data + 1
        return y

    graph = graphify(step)
    for value in (1.0, 2.0):
        assert graph(torch.tensor([value])).tolist() == [2 * value + 1]
