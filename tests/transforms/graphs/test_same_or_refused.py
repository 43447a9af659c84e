"""Functions that a capture once got wrong: a graph gives their results now, or weft refuses them
and says why.

Each case returns the results of the function itself, and those of its graph. A case with a reason
is refused for it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import weft
from weft.proofs import find_difference

V = torch.tensor([1.0, 2.0, 3.0])
CASES: list[tuple[Callable[[], tuple[Any, Any]], str]] = []
LEAKED = (
    "an argument, or a view of one, is kept and not returned (float32[3]): in a cache, a global or"
    " an attribute"
)


def case(refused: str = "") -> Callable[[Callable[[], tuple[Any, Any]]], None]:
    """Note a case; `refused` is what weft must say that it saw."""
    return lambda fn: CASES.append((fn, refused))


def both(
    fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any
) -> tuple[list[Any], list[Any]]:
    """The results of calls of a function, and of its graph."""
    graph = weft.graphify(fn, **options)
    return [fn(*call) for call in calls], [graph(*call) for call in calls]


@case("Tensor.__float__ reads a tensor on the host")
def a_swallowed_read() -> tuple[Any, Any]:
    def f(x: Any) -> Any:
        try:
            largest = float(x.max())
        except Exception:
            largest = 1.0
        return x / largest

    return both(f, (V,))


@case("a branch on a tensor's value")
def a_swallowed_branch() -> tuple[Any, Any]:
    def f(x: Any) -> Any:
        with contextlib.suppress(Exception):
            if x.sum() > 0:
                return x * 2
        return x

    return both(f, (V,), (-V,))


@case()
def a_generator_argument() -> tuple[Any, Any]:
    def f(x: Any, generator: Any) -> Any:
        return torch.rand(2, generator=generator)

    graph = weft.graphify(f)
    graph(V, torch.Generator().manual_seed(0))
    return f(V, torch.Generator().manual_seed(1)), graph(V, torch.Generator().manual_seed(1))


@case()
def autocast_that_is_off_inside() -> tuple[Any, Any]:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def f(x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return x @ weight

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return both(f, (weight,))


@case()
def a_function_mode() -> tuple[Any, Any]:
    class Half(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            return result / 2 if "mul" in getattr(func, "__name__", "") else result

    with Half():
        return both(lambda x: x.mul(4), (V,))


@case()
def another_default_in_a_decorator() -> tuple[Any, Any]:
    def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(x: Any, scale: float = 3.0) -> Any:
            return fn(x, scale)

        return wrapper

    @decorated
    def f(x: Any, scale: float = 2.0) -> Any:
        return x * scale

    return both(f, (V,))


@case()
def a_parameter_is_a_parameter() -> tuple[Any, Any]:
    parameter = nn.Parameter(V.clone())
    with torch.no_grad():
        return both(
            lambda params: [p * (0.5 if isinstance(p, nn.Parameter) else 1) for p in params],
            ([parameter],),
        )


@case()
def one_tensor_twice() -> tuple[Any, Any]:
    return both(lambda xs: len(set(xs)) * xs[0], ([V, V],))


@case()
def contexts_of_a_pytree() -> tuple[Any, Any]:
    class Scaled:
        def __init__(self, x: Any, by: Any) -> None:
            self.x = x
            self.by = by

    pytree.register_pytree_node(
        Scaled, lambda s: ([s.x], s.by), lambda children, by: Scaled(children[0], by)
    )
    x = torch.tensor([1, 2])
    return both(lambda s: s.x * s.by, (Scaled(x, 1),), (Scaled(x, 1.0),))


@case(
    "the function changed the container state in place; that is a copy, so the caller would not see"
    " the change"
)
def a_donated_dict_that_is_changed() -> tuple[Any, Any]:
    def f(state: Any, x: Any) -> None:
        state["w"] = state["w"] + x

    eager_state = {"w": torch.zeros(3)}
    graph_state = {"w": torch.zeros(3)}
    f(eager_state, V)
    weft.graphify(f, donate_argnames="state")(graph_state, V)
    return eager_state["w"], graph_state["w"]


@case("x is a view of state, which the same call donates")
def a_view_of_a_donated_tensor() -> tuple[Any, Any]:
    def f(state: Any, x: Any) -> Any:
        return state.add_(1), x * 2

    eager_state = torch.zeros(3)
    graph_state = torch.zeros(3)
    return (
        weft.donates("state")(f)(eager_state, eager_state[:2])[1],
        weft.graphify(f, donate_argnames="state")(graph_state, graph_state[:2])[1],
    )


@case("b shares memory with a, and both are donated")
def two_donated_tensors_of_one_array() -> tuple[Any, Any]:
    def on_one_array(f: Callable[..., Any]) -> Any:
        array = np.zeros(2, dtype=np.float32)
        return f(torch.from_numpy(array), torch.from_numpy(array))

    def f(a: Any, b: Any) -> Any:
        return a + 1, b + 2

    return on_one_array(f), on_one_array(weft.graphify(f, donate_argnames=["a", "b"]))


@case()
def parameters_with_new_storage() -> tuple[Any, Any]:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    graph = weft.graphify(module)
    with torch.no_grad():
        graph(x)
        nn.utils.vector_to_parameters(torch.zeros(6), module.parameters())
        return module(x), graph(x)


@case(LEAKED)
def a_tensor_that_the_first_run_keeps() -> tuple[Any, Any]:
    def make() -> Callable[..., Any]:
        kept: dict[str, Any] = {}

        def f(x: Any) -> Any:
            kept.setdefault("first", x.detach())
            return x - kept["first"]

        return f

    f, graph = make(), weft.graphify(make())
    return [f(V), f(V * 5)], [graph(V), graph(V * 5)]


@case("a tensor's value is read on the host")
def the_derivative_of_max() -> tuple[Any, Any]:
    def f(x: Any) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((1000 * x.max()).exp(), x)[0]

    return both(f, (V,))


@case(
    "it goes on after an error of an operator, which depends on data: _LinAlgError of"
    " aten._linalg_check_errors.default"
)
def a_branch_on_an_error_of_an_operator() -> tuple[Any, Any]:
    def f(a: Any) -> Any:
        try:
            return torch.linalg.cholesky(a)
        except torch.linalg.LinAlgError:
            return a * 0

    return both(f, (torch.tensor([[1.0, 2.0], [2.0, 1.0]]),), (torch.eye(2),))


@case()
def a_size_is_a_size() -> tuple[Any, Any]:
    eager, graphs = both(lambda x: x.shape, (V,))
    return type(eager[0]).__name__, type(graphs[0]).__name__


@case("a TorchScript function reads a tensor on the host (prim::tolist)")
def a_read_in_torchscript() -> tuple[Any, Any]:
    unit = torch.jit.CompilationUnit(
        "def f(x: Tensor) -> Tensor:\n    l: List[float] = x.tolist()\n    return x * l[0]\n"
    )
    return both(lambda x: unit.f(x), (V,), (V * 2,))


@case()
def a_static_module_that_ends_its_training() -> tuple[Any, Any]:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        @weft.graphify(static_argnames="self")
        def forward(self, x: Any) -> Any:
            return self.dropout(x)

    module = Dropping()
    x = torch.ones(64)
    module(x)
    module.eval()
    return x, module(x)


@case()
def a_global_bound_anew() -> tuple[Any, Any]:
    names: dict[str, Any] = {"torch": torch}
    exec("w = torch.ones(2)\ndef f(x): return x * w\n", names)
    graph = weft.graphify(names["f"])
    x = torch.ones(2)
    graph(x)
    names["w"] = torch.full((2,), 5.0)
    return names["f"](x), graph(x)


@case()
def vmap_of_a_scalar() -> tuple[Any, Any]:
    return both(lambda x: torch.vmap(lambda a: a * 2)(x), (V,))


@case()
def gradients_of_each_sample() -> tuple[Any, Any]:
    def loss(w: Any, x: Any) -> Any:
        return 0.5 * (w @ x) ** 2

    return both(
        lambda w, x: torch.vmap(torch.func.grad(loss), (None, 0))(w, x), (V, torch.ones(2, 3))
    )


@case()
def a_function_in_inference_mode() -> tuple[Any, Any]:
    return both(torch.inference_mode()(lambda x: x * 2), (V,))


@case()
def a_sparse_tensor_from_outside() -> tuple[Any, Any]:
    sparse = torch.eye(3).to_sparse()
    return both(lambda x: torch.sparse.mm(sparse, x), (torch.ones(3, 1),))


@case()
def an_lstm_in_grad_mode() -> tuple[Any, Any]:
    lstm = nn.LSTM(4, 4).requires_grad_(False)
    return both(lambda x: lstm(x)[0], (torch.ones(3, 4),))


@case()
def random_numbers_of_another_thread() -> tuple[Any, Any]:
    stop, drawn = threading.Event(), list[Any]()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    graph = weft.graphify(lambda x: x + torch.rand(1))
    for count in range(1, 100):
        graph(torch.ones(count))
    stop.set()
    thread.join()
    return len(drawn), len(set(drawn))


@case()
def a_decoder_of_transformers() -> tuple[Any, Any]:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        return both(
            lambda ids: model(input_ids=ids, use_cache=False).logits, (ids,), (ids.flip(1),)
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("run", "reason"), CASES, ids=[run.__name__ for run, _ in CASES])
def test_a_graph_is_its_function_or_says_why_not(
    run: Callable[[], tuple[Any, Any]], reason: str
) -> None:
    if not reason:
        expected, result = run()
        assert find_difference(result, expected) is None
        return
    with pytest.raises(weft.WeftError) as refused:
        run()
    assert refused.value.problem.splitlines()[0] == reason
