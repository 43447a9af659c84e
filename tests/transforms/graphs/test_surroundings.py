"""Settings that a result depends on besides the arguments: a replay needs a capture under the same
ones."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from weft.errors import CacheMissError, CaptureError
from weft.proofs import assert_equal
from weft.stages.custom.module import from_module
from weft.transforms.graphs.calls.key import CacheInfo
from weft.transforms.graphs.graphify import graphify

LAW = "graphify changes nothing"
X = torch.arange(4.0)


def either(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


def test_the_grad_mode_is_part_of_the_key() -> None:
    g = graphify(either)
    for _ in range(3):
        assert_equal(LAW, g(X), X * 2)
        with torch.no_grad():
            assert_equal(LAW, g(X), X * 3)
            assert str(g.explain(X)).startswith("replays: ")
    assert g.cache_info().captures == 2


def test_a_miss_names_the_grad_mode() -> None:
    g = graphify(either)
    g(X)
    with torch.no_grad():
        assert "grad mode: False, captured True" in str(g.explain(X))


def test_a_compiled_graph_in_the_other_grad_mode_has_its_own() -> None:
    compiled = graphify(either).lower(X).compile()
    for _ in range(2):
        assert_equal(LAW, compiled(X), X * 2)
        with torch.no_grad():
            assert_equal(LAW, compiled(X), X * 3)


def test_arguments_that_require_grad_do_so_inside() -> None:
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad((x**2).sum(), x)[0]

    g = graphify(slope)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            assert_equal(LAW, g(x), slope(x))
    assert g.cache_info().replays == 2


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "float32 precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
        ),
    ),
    "kernels of attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_the_function_changes_is_refused_and_put_back(name: str) -> None:
    change, read = SETTINGS[name]
    before = read()

    def changing(x: Tensor) -> Tensor:
        change()
        return x * 2

    for _ in range(2):
        with pytest.raises(
            CaptureError,
            match=rf"it changes a setting of torch \({name}\) for the code after it",
        ):
            graphify(changing)(X)
        assert read() == before


# Every setting of a back end that torch has, and a value of it that is not its default. It is set
# by its setter: torch's own tests, of which others here import a part, forbid to set the property.
PROPERTIES = {
    f"{module_name}.{key}": (prop, other)
    for module_name, module in sorted(sys.modules.items())
    if module_name.partition(".backends")[0] == "torch" and module_name != "torch"
    for key, prop in vars(type(module)).items()
    if isinstance(prop, torch.backends.ContextProp)
    for other in [{True: False, False: True, "none": "ieee", 10: 11}.get(prop.getter())]
    if other is not None
}


def all_properties() -> dict[str, Any]:
    return {name: prop.getter() for name, (prop, _) in PROPERTIES.items()}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_setting_of_a_back_end_is_refused_and_put_back(name: str) -> None:
    prop, other = PROPERTIES[name]
    before = all_properties()

    def changing(x: Tensor) -> Tensor:
        prop.setter(other)
        return x * 2

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"it changes a setting of torch \("):
            graphify(changing)(X)
        assert all_properties() == before


def test_a_setting_that_the_function_puts_back_itself_is_not_refused() -> None:
    def changing(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        y = torch.ones(4)
        torch.set_default_dtype(torch.float32)
        return x + y

    g = graphify(changing)
    for x in (X, X + 1):
        assert_equal(LAW, g(x), changing(x))


def test_a_gradient_that_comes_to_be_there_is_seen() -> None:
    w = torch.ones(4, requires_grad=True)
    g = graphify(lambda x: x * 2 if w.grad is None else x * 3)
    for _ in range(2):
        assert_equal(LAW, g(X), X * 2)
    assert g.cache_info().captures == 1
    w.grad = torch.ones(4)
    with pytest.raises(CaptureError, match=r"\.grad of a tensor from outside is not an argument"):
        g(X)
    w.grad = None
    assert_equal(LAW, g(X), X * 2)


def test_a_tensor_from_outside_may_come_to_require_grad() -> None:
    w = torch.ones(4)
    g = graphify(lambda x: x * w)
    for requires in (False, True, False, True):
        w.requires_grad_(requires)
        for _ in range(2):
            assert g(X).requires_grad == requires
    assert (g.cache_info().captures, g.cache_info().replays, g.cache_info().eager) == (1, 4, 4)


def test_weights_under_autocast_are_cast_at_each_replay() -> None:
    linear = nn.Linear(4, 4)
    g = graphify(lambda x: linear(x))
    with torch.no_grad():
        for value in (0.25, 0.5, 0.0):
            linear.weight.fill_(value)
            for x in (X, torch.ones(2, 4)):
                with torch.autocast("cpu", torch.bfloat16):
                    assert_equal(LAW, g(x), linear(x))
                    assert_equal(LAW, g(x), linear(x))
    assert g.cache_info().captures == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_cache_enabled()


KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


def test_the_kernel_of_attention_is_part_of_the_key() -> None:
    q = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))

    def attend(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q)

    g = graphify(attend)
    for kernel in KERNELS:
        with sdpa_kernel(kernel):
            for _ in range(2):
                assert torch.equal(g(q), attend(q))
    assert g.cache_info().captures == 2
    assert "kernels of attention: " in str(g.explain(q))


def test_switches_that_are_not_consulted_are_asked_for_only_at_a_miss() -> None:
    g = graphify(lambda x: x * 2)
    g(X)
    with torch.backends.cudnn.flags(benchmark=not torch.backends.cudnn.benchmark):
        assert_equal(LAW, g(X), X * 2)
    assert g.cache_info().captures == 1


def attention() -> Callable[[Tensor], Tensor]:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)
    return lambda x: module(x, x, x, need_weights=False)[0]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval().requires_grad_(False)


WITH_A_FAST_PATH: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "attention": attention,
    "a layer": lambda: encoder().layers[0],  # type: ignore[union-attr,return-value]
    "an encoder": encoder,
}


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", WITH_A_FAST_PATH)
@pytest.mark.parametrize("verify", [None, 1])
def test_a_graph_takes_no_fast_path_of_attention_by_itself(
    name: str, verify: int | None, device: str
) -> None:
    """Its bits are those without the fast path; and so are those of the function itself, with which
    it is compared."""
    with torch.device(device):
        module = WITH_A_FAST_PATH[name]()
        inputs = [torch.randn(2, 3, 8) for _ in range(3)]
    g = graphify(lambda x: module(x), verify=verify)
    plain = [module(x) for x in inputs]
    results = [g(x) for x in inputs]
    with no_fast_path():
        expected = [module(x) for x in inputs]
        captures = g.cache_info().captures
        assert_equal(LAW, g(inputs[0]), expected[0])
    assert_equal(LAW, results, expected)
    torch.testing.assert_close(results, plain, rtol=1e-4, atol=1e-5)
    assert_equal("the fast path is there again", [module(x) for x in inputs], plain)
    assert (captures, g.cache_info().captures) == (1, 1)  # torch's switch makes no other graph


def test_the_fast_path_is_off_in_the_thread_of_the_call_alone() -> None:
    flags: list[bool] = []

    def asks(x: Tensor) -> Tensor:
        thread = threading.Thread(
            target=lambda: flags.append(torch.backends.mha.get_fastpath_enabled())
        )
        thread.start()
        thread.join()
        flags.append(torch.backends.mha.get_fastpath_enabled())
        return x * 2

    graphify(asks)(X)
    assert flags == [True, False] * 2  # a rehearsal, and the capture
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow
def test_attention_is_scripted_and_compiled_as_before_once_a_graph_has_asked() -> None:
    module, x = encoder(), torch.randn(2, 3, 8)
    graphify(lambda x: module(x))(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal("scripted", torch.jit.script(module)(x), module(x))
    compiled = torch.compile(module, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, module(x), rtol=1e-4, atol=1e-5)


def test_an_encoder_that_takes_padding_out_is_refused_by_name() -> None:
    padding = torch.tensor([[False] * 3, [False, True, True]])
    x = torch.randn(2, 3, 8)
    module = encoder()
    with pytest.raises(CaptureError) as caught:
        graphify(lambda x: module(x, src_key_padding_mask=padding))(x)
    said = str(caught.value)
    assert (
        "saw: nn.TransformerEncoder takes the padding out, and returns zeros there, which a capture"
        " cannot do" in said
    )
    assert (
        "instead: nn.TransformerEncoder(..., enable_nested_tensor=False), or"
        " torch.backends.mha.set_fast" in said
    )
    module = encoder(enable_nested_tensor=False)
    result = graphify(lambda x: module(x, src_key_padding_mask=padding))(x)
    with no_fast_path():
        assert_equal(LAW, result, module(x, src_key_padding_mask=padding))


class Scale(TorchFunctionMode):
    """Multiplies every sine; all instances have the same repr."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __repr__(self) -> str:
        return "Scale"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.by if func is torch.sin else result


def test_a_function_mode_is_the_same_only_as_itself() -> None:
    g = graphify(lambda x: torch.sin(x))
    for by in range(1, 6):
        with Scale(by):
            assert_equal(LAW, g(X), torch.sin(X))
    kept = Scale(7.0)
    for _ in range(2):
        with kept:
            assert_equal(LAW, g(X), torch.sin(X))
    assert g.cache_info().captures == 6


def test_a_default_device_is_a_mode_by_name() -> None:
    g = graphify(lambda x: x + torch.ones(4))
    for _ in range(3):
        with torch.device("cpu"):
            assert_equal(LAW, g(X), X + 1)
    assert g.cache_info().captures == 1


def test_a_graph_runs_inside_what_is_compiled() -> None:
    g = graphify(lambda x: x * 2 + 1)
    for fn in (g, lambda x: g(x * 3) * 2):
        compiled = torch.compile(fn, backend="eager")
        for x in (X, X + 1):
            assert_equal("compile of graphify", compiled(x), fn(x))
    assert g.cache_info().captures == 1


MODULES: dict[str, Callable[[nn.Module], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "itself": lambda module: (module, (X,)),
    "its method": lambda module: (module.forward, (X,)),
    "its stage": lambda module: (from_module(module).stage, ({}, {}, X, None)),
}


@pytest.mark.parametrize("way", MODULES)
def test_whether_a_module_is_training_is_part_of_the_key(way: str) -> None:
    module = nn.Dropout(1.0)
    fn, arguments = MODULES[way](module)
    g = graphify(fn)
    for _ in range(3):
        for training in (True, False):
            module.train(training)
            assert_equal(LAW, g(*arguments), fn(*arguments))
    assert g.cache_info() == CacheInfo(captures=2, replays=6, currsize=2)


def test_a_miss_names_the_mode_of_the_module() -> None:
    module = nn.Dropout(0.5)
    g = graphify(module)
    compiled = g.lower(X).compile()
    g.freeze()
    g(X)
    module.eval()
    for one in (g, compiled):
        with pytest.raises(CacheMissError, match=r"module\.training: False, captured True"):
            one(X)


def test_a_call_that_runs_the_function_itself_takes_no_fast_path_either() -> None:
    """Also where replays are compared with the function itself."""
    module, x = encoder(), torch.randn(2, 3, 8)
    outer = torch.randn(2, 3, 8, requires_grad=True)
    for verify in (None, 1):
        g = graphify(lambda x, y: module(x.detach()) + y, verify=verify)
        result = g(x, outer)  # autograd records, so there is no graph
        with no_fast_path():
            assert_equal(LAW, result.detach(), (module(x) + outer).detach())
        assert g.cache_info().captures == 0
