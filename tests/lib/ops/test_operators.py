"""Every operator of weft under torch's own operator checks, and its derivatives."""

from typing import Any

import pytest
import torch
from operator_cases import CALLS, IN_FP8, INVARIANT, Args, arguments, tensors_in
from paged_cases import Request, Shape, assert_matches, draw_case
from torch import Tensor, library

from weft.errors import DerivativeError
from weft.ops.attention.paged import paged_attention
from weft.torchapi.private import overload_of
from weft.transforms.graphs.graphify import graphify

FP8 = torch.float8_e4m3fn
ALL_CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
CASES = arguments()
WIDE = arguments(torch.float64)
EACH = [(name, index) for name, cases in CASES.items() for index in range(len(cases))]
PLAIN = CALLS.keys() - IN_FP8 - INVARIANT.keys()
# The cases with a derivative by their floating-point arguments. Those of `INVARIANT` have the same.
SMOOTH = [(name, i) for name, i in EACH if name in PLAIN and (name, i) != ("run_experts", 3)]


def ids_of(pairs: list[tuple[str, int]]) -> list[str]:
    return [f"{name}-{index}" for name, index in pairs]


def test_every_operator_has_a_case() -> None:
    """An operator that is not in `operator_cases` was not checked."""
    names = {
        name.removeprefix("weft::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("weft::")
    }
    assert names == set(CASES)
    assert names - {"send", "recv", "collective"} == set(CALLS)


@pytest.mark.one_of(15, 3)
@pytest.mark.parametrize(("name", "index"), EACH, ids=ids_of(EACH))
def test_torch_s_check_of_operators_passes(name: str, index: int) -> None:
    op = overload_of(f"weft::{name}")
    args = fresh(CASES[name][index])
    checks = dict.fromkeys(ALL_CHECKS)
    if any(isinstance(x, Tensor) and x.dtype == FP8 for x in args):
        del checks["test_schema"]  # which multiplies the arguments, and torch has no product of FP8
    if any(x.dtype == FP8 for x in results(op(*fresh(args)))):
        del checks["test_aot_dispatch_dynamic"]  # which subtracts the results
    library.opcheck(op, args, test_utils=tuple(checks))


def fresh(args: Args) -> Args:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in args)


def results(returned: Any) -> list[Tensor]:
    return [
        x
        for x in (returned if isinstance(returned, tuple | list) else (returned,))
        if x is not None
    ]


@pytest.mark.parametrize(("name", "index"), SMOOTH, ids=ids_of(SMOOTH))
def test_the_functional_form_is_the_operator(name: str, index: int) -> None:
    """The functional form returns the operator's results and the new values of written arguments.
    It writes to none itself, except `k` and `v` of attention."""
    args = fresh(CASES[name][index])
    written = fresh(CASES[name][index])
    kept = fresh(CASES[name][index])
    expected = results(overload_of(f"weft::{name}")(*written))
    in_place = [
        i
        for i, (a, b) in enumerate(zip(written, kept, strict=True))
        if isinstance(a, Tensor) and not torch.equal(a, b)
    ]
    expected += [written[i] for i in in_place]
    with torch.autograd.forward_ad.dual_level():
        outputs = results(CALLS[name](*args))
    if (name, index) == ("paged_attention", 1):
        outputs = [*outputs, args[3]]
        in_place = []
    assert len(outputs) >= len(expected)
    for a, b in zip(outputs, expected, strict=False):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)
    assert all(torch.equal(a, b) for i in in_place for a, b in [(args[i], kept[i])])


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("name", "index"), SMOOTH, ids=ids_of(SMOOTH))
def test_derivatives_are_those_of_small_differences(
    name: str, index: int, runs_nightly: bool
) -> None:
    """In float64, backward and forward, of a batch of vectors too, and the second backward. A short
    run compares products of the Jacobian with random vectors, and `--nightly` compares each entry."""
    args = WIDE[name][index]
    places = [place for place in tensors_in(args) if args[place].dtype == torch.float64]

    def function(*tensors: Tensor) -> list[Tensor]:
        call_args = list(args)
        for place, tensor in zip(places, tensors, strict=True):
            call_args[place] = tensor.clone()  # which attention may write to
        outputs = results(CALLS[name](*call_args))
        return [x for x in outputs if x.is_floating_point()]

    tensors = [args[place].clone().requires_grad_() for place in places]
    if not places or not any(x.requires_grad for x in function(*tensors)):
        return
    fast = not runs_nightly
    assert torch.autograd.gradcheck(
        function, tensors, check_forward_ad=True, check_batched_grad=True, fast_mode=fast
    )
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=fast)


# The derivatives with NaN wherever nothing may read: in padding, the rest of last pages, and
# unowned pages.
PAGED = [
    Shape((Request(past=5, new=3), Request(new=9), Request(past=2, new=1)), tail=2),
    Shape((Request(past=3, new=1), Request(past=9, new=1), Request(padded=True, new=1)), seed=1),
    Shape(
        (Request(new=4, dead=2), Request(), Request(past=7, new=2, dead=1)),
        tail=1,
        kv_heads=1,
        seed=2,
    ),
    Shape((Request(past=9, new=4), Request(past=7, new=2, dead=1)), tail=1, seed=3, window=3),
]


@pytest.mark.parametrize("shape", PAGED, ids=str)
def test_attention_and_its_gradients_read_nothing_that_they_may_not(shape: Shape) -> None:
    case = draw_case(shape)
    *tensors, pages = (x.clone().requires_grad_() for x in case.args[:4])
    out = paged_attention(*tensors, written := pages.clone(), *case.args[4:])
    assert_matches(case, out.detach(), written.detach())
    out.sum().backward()
    for x in (*tensors, pages):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad.any()
    assert not tensors[0].grad[case.args[0].isnan()].any()


def test_gradients_of_attention_reach_what_another_request_wrote() -> None:
    """Two requests share a page: in one call the first writes its start, and the second reads it."""
    q, k, v = torch.randn(3, 3, 1, 2, generator=torch.Generator().manual_seed(0)).unbind(0)
    where = (
        torch.tensor([0, 1, 4]),
        torch.tensor([[0, 0], [0, 1]]).int(),
        torch.tensor([0, 2, 3]).int(),
    )
    pages = torch.zeros(2, 2, 4, 1, 2)

    def second(v: Tensor) -> Tensor:
        lengths = torch.tensor([2, 5]).int()
        return paged_attention(q, k, v, pages.clone(), *where, lengths, 2, 1.0)[2].sum()

    weights = (torch.cat([k[:2], torch.zeros(2, 1, 2), k[2:]])[:, 0] @ q[2, 0]).softmax(0)
    torch.testing.assert_close(
        torch.func.grad(second)(v), weights[[0, 1, 4], None, None].expand(3, 1, 2)
    )


def test_pages_that_cannot_be_written_inside_a_transform_are_named() -> None:
    q = torch.ones(1, 1, 2)
    pages = torch.zeros(2, 1, 4, 1, 2)
    rest = (
        torch.tensor([0]),
        torch.tensor([[0]]).int(),
        torch.tensor([0, 1]).int(),
        torch.tensor([1]).int(),
        1,
        1.0,
    )
    with pytest.raises(DerivativeError) as caught:
        torch.func.grad(lambda x: paged_attention(x, x, x, pages, *rest).sum())(q)
    assert str(caught.value).startswith(
        "the derivative of paged_attention(q, k, v, kv_pages, …)\n  saw: pages that cannot be"
        " written in place here: "
    )
    assert (
        caught.value.instead
        == "a clone of the pages, made inside of the function that is transformed"
    )


@pytest.mark.parametrize("name", [*sorted(IN_FP8 - INVARIANT.keys()), "run_experts"])
def test_what_rounds_to_fp8_has_no_derivative_and_says_so(name: str) -> None:
    """Never zeros: by backward, by torch.func, forward and reverse, at any level of nesting."""
    args = CASES[name][-1]
    call, place = CALLS[name], tensors_in(args)[0]

    def function(x: Tensor) -> Any:
        return results(call(*args[:place], x, *args[place + 1 :]))[0].float().sum()

    x = args[place].clone()
    ways = {
        "backward": lambda: function(x.clone().requires_grad_()),
        "grad": lambda: torch.func.grad(function)(x),
        "jvp": lambda: torch.func.jvp(function, (x,), (x,)),
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(function))(torch.stack([x, x])),
        "grad of vmap": lambda: torch.func.grad(
            lambda x: torch.func.vmap(function)(torch.stack([x, x])).sum()
        )(x),
    }
    for way in ways.values():
        with pytest.raises(DerivativeError) as caught:
            way()
        assert (
            str(caught.value)
            == f"the derivative of {name.replace('.', '_')}(…)\n  saw: values that are rounded to"
            " FP8, and change in steps\n  instead: a model in float32, bfloat16 or float16; or"
            " torch.no_grad(), and detach(), where none is needed"
        )
    with torch.no_grad():
        function(x.clone().requires_grad_())
    expected = function(x)
    torch.testing.assert_close(
        torch.func.grad(lambda y: y * function(x))(torch.tensor(2.0)), expected
    )


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("name", "index"), SMOOTH, ids=ids_of(SMOOTH))
def test_a_graph_of_the_derivative_reads_nothing_on_the_host(name: str, index: int) -> None:
    """Captured once, replayed on other values."""
    args = CASES[name][index]
    if not (places := tensors_in(args)):
        return

    @graphify
    def backward(x: Tensor) -> Tensor:
        def total(x: Tensor) -> Tensor:
            call_args = (*fresh(args[: places[0]]), x.clone(), *fresh(args[places[0] + 1 :]))
            return sum(
                y.sin().sum() for y in results(CALLS[name](*call_args)) if y.is_floating_point()
            )

        return torch.func.grad(total)(x)

    for scale in (1.0, 0.5, 2.0):
        x = scale * args[places[0]]
        assert torch.equal(backward(x), backward.__wrapped__(x))
    assert backward.cache_info().replays == 3


def test_an_operator_itself_knows_torch_func() -> None:
    """A call of `torch.ops.weft` inside a transform has derivatives too, not zeros."""
    x, weight = torch.randn(3, 6), torch.randn(6)
    grad = torch.func.grad(lambda w: torch.ops.weft.rms_norm(x, w, 1e-3).sum())(weight)
    torch.testing.assert_close(grad, torch.nn.functional.rms_norm(x, (6,), None, 1e-3).sum(0))
    with pytest.raises(DerivativeError):
        torch.func.grad(lambda x: torch.ops.weft.quantize(x)[1].sum())(x)
