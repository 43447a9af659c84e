"""Launches of kernels reuse a compiled kernel for arguments of the same kinds, and for no others."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

pytest.importorskip("triton")

from triton import language as tl
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from weft.ops.kernel_triton import Kernel

PARAMS = ("x", "y", "size", "BLOCK", "EVEN")


def kinds(args: Sequence[Any]) -> tuple[Any, ...]:
    """Triton's own key of the compilation for these arguments: x, y and size are specialised, the
    others constant."""
    specialized = [native_specialize_impl(CUDABackend, arg, False, True, True) for arg in args[:3]]
    return *specialized, *((type(arg), arg) for arg in args[3:])


@attrs.define(eq=False)
class Compiled:
    """A kernel compiled for arguments of some kinds; launched with others, it would be wrong."""

    of: tuple[Any, ...]
    launched: list[Any]

    def run(self) -> None:
        raise AssertionError("launched by its grid")

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            assert kinds(args) == self.of
            self.launched.append((grid, args))

        return launch


@attrs.define(eq=False)
class Jit:
    """Stands for `triton.jit(kernel)`: compiles for each kind of arguments, and launches."""

    arg_names: tuple[str, ...] = PARAMS
    launched: list[Any] = attrs.field(factory=list)
    slow: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            self.slow += 1
            all_args = (*args, *(options[name] for name in PARAMS[len(args) :]))
            compiled = Compiled(kinds(all_args), self.launched)
            compiled[*grid, *(1,) * (3 - len(grid))](*all_args)
            return compiled

        return launch


STORAGE = torch.zeros(64)
TENSORS = (
    STORAGE,
    STORAGE[1:],
    STORAGE[4:],
    STORAGE.int(),
    STORAGE[::2],
    torch.zeros(3, dtype=torch.float16),
)
SIZES = (
    0,
    1,
    2,
    15,
    16,
    17,
    32,
    -16,
    2**31 - 1,
    2**31,
    2**40,
    2**63,
    -(2**31),
    -(2**63),
    True,
    False,
    1.0,
    16.0,
    None,
)
CALLS = st.tuples(
    st.tuples(st.sampled_from(TENSORS), st.sampled_from(TENSORS), st.sampled_from(SIZES)),
    st.fixed_dictionaries(
        {
            "EVEN": st.sampled_from((True, False, 1, 0)),
            "BLOCK": st.sampled_from((1, True, 16, None)),
        }
    ),
    st.sampled_from(((1,), (2, 3), (4, 5, 6))),
)


@given(st.lists(CALLS, max_size=20))
def test_what_is_launched_was_compiled_for_such_arguments(calls: Sequence[Any]) -> None:
    jit = Jit()
    kernel = Kernel(jit)
    for args, options, grid in [*calls, *calls]:
        kernel[grid](*args, **options, num_warps=4)
        launched_grid, launched_args = jit.launched[-1]
        assert launched_grid == (*grid, 1, 1)[:3]
        assert [id(x) for x in launched_args[:3]] == [id(x) for x in args]
        assert launched_args[3:] == (options["BLOCK"], options["EVEN"])
    assert len(jit.launched) == 2 * len(calls)
    assert jit.slow <= len(calls), "the second time all are known"


@pytest.mark.parametrize("named", [False, True])
def test_no_integer_is_launched_with_the_kernel_of_another_kind(named: bool) -> None:
    for first, second in itertools.product(SIZES, repeat=2):
        jit = Jit()
        kernel = Kernel(jit)
        for size in (first, second, first):
            args = (*TENSORS[:2], size)
            kernel[(1,)](
                *args[: 3 - named], **({"size": size} if named else {}), BLOCK=16, EVEN=True
            )
            assert jit.launched[-1][1][2] is size


def test_steps_of_other_sizes_share_a_kernel() -> None:
    jit = Jit()
    kernel = Kernel(jit)
    for size in (*range(100), *range(2**40, 2**40 + 100)):
        kernel[(1,)](*TENSORS[:2], size, BLOCK=16, EVEN=True)
    assert jit.slow == 5, "1; and 16 divides it or not, in 32 bits and in 64"


def test_a_constant_by_position_is_refused() -> None:
    def of_constants(x: Tensor, size: int, BLOCK: tl.constexpr) -> None:
        pass

    class Checked(Jit):
        fn = staticmethod(of_constants)
        arg_names = ("x", "size", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            return lambda *args, **options: self.launched.append((args, options))

    jit = Checked()
    Kernel(jit)[(1,)](TENSORS[0], 16, BLOCK=16)
    with pytest.raises(TypeError, match="by position: give it by name"):
        Kernel(jit)[(1,)](TENSORS[0], 16, 16)
    assert len(jit.launched) == 1


def test_a_tensor_that_is_named_is_not_kept() -> None:
    jit = Jit()
    kernel = Kernel(jit)
    for x in (TENSORS[0], TENSORS[0].clone()):
        kernel[(1,)](x, size=3, y=x, BLOCK=1, EVEN=True)
        assert jit.launched[-1][1][1] is x
    assert jit.slow == 2


class Promised:
    """Like triton's `FutureKernel`: it has all attributes of a compiled kernel, and cannot be
    launched."""

    def __init__(self, compiled: Compiled) -> None:
        self.future = None
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def result(self) -> Compiled:
        return self._compiled


def test_what_another_thread_compiles_is_waited_for() -> None:
    class Early(Jit):
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            launch = super().__getitem__(grid)
            return lambda *args, **options: Promised(launch(*args, **options))

    jit = Early()
    kernel = Kernel(jit)
    for _ in range(3):
        kernel[(2,)](*TENSORS[:2], 5, BLOCK=16, EVEN=True)
    assert (len(jit.launched), jit.slow) == (3, 1)


def test_a_number_of_another_sign_is_not_taken_for_its_equal() -> None:
    jit = Jit()
    kernel = Kernel(jit)
    for size in (0.0, -0.0):
        kernel[(1,)](*TENSORS[:2], size=size, BLOCK=1, EVEN=True)
        assert str(jit.launched[-1][1][2]) == str(size)


def test_what_gives_nothing_back_is_launched_each_time() -> None:
    """Returns None, as triton's interpreter does."""
    launched: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launched.append((grid, args, options))

    for _ in range(3):
        Kernel(Interpreted())[(2,)](1, BLOCK=4)
    assert launched == [((2,), (1,), {"BLOCK": 4})] * 3
