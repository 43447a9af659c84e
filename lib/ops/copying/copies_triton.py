"""Many copies in one launch, in Triton: the kernel moves bytes, so it takes any mix of dtypes and
sizes.

One side of each copy is fixed (a graph's buffer); the other is the caller's tensor, which is new in
every call. A table on the device, written once, holds the fixed sides and the sizes; the addresses
of the callers' tensors are arguments of the launch. Each program chooses the widest words that both
addresses allow, so the host need not check alignment.

The driver's own call launches the kernel, with arguments that are packed in place: Triton's
launcher takes some ten times as long. Import this module only where triton is installed. If
TRITON_INTERPRET=1 was set before, it runs on CPU tensors.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.errors import DeviceError
from weft.ops.copying.byte_copies import Copies
from weft.ops.kernel_triton import kernel
from weft.torchapi.private import current_stream_id, to_device

# The numbers of tensors for which a kernel is compiled. The largest stays within the 4 KiB of a
# kernel's arguments.
ARITIES = (8, 64, 448)

_WARPS = 4
_BLOCK = 1024
# The least bytes of a program's share of a large copy, and the most programs of a launch.
_LEAST_SHARE = 2**14
_MOST_PROGRAMS = 4096
# Room for pointers to scratch memory, which some versions of Triton append to the parameters.
_SCRATCH = 4


@triton.jit
def _move(source, target, size, TYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `size` bytes in words of `WIDTH` bytes, which must divide both addresses, and the rest
    byte by byte."""
    reads = source.to(tl.pointer_type(TYPE))
    writes = target.to(tl.pointer_type(TYPE))
    span = tl.arange(0, BLOCK)
    words = size // WIDTH
    whole = words // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tl.store(writes + start + span, tl.load(reads + start + span))
    rest = whole + span
    tl.store(writes + rest, tl.load(reads + rest, mask=rest < words), mask=rest < words)
    if WIDTH > 1:
        last = words * WIDTH + tl.arange(0, WIDTH)
        value = tl.load(source.to(tl.pointer_type(tl.int8)) + last, mask=last < size)
        tl.store(target.to(tl.pointer_type(tl.int8)) + last, value, mask=last < size)


@triton.jit
def _repeat(source, target, size, period, BLOCK: tl.constexpr):
    """Fill `size` bytes with repetitions of the `period` bytes at `source`."""
    reads = source.to(tl.pointer_type(tl.int8))
    writes = target.to(tl.pointer_type(tl.int8))
    for start in range(0, size, BLOCK):
        span = start + tl.arange(0, BLOCK)
        tl.store(writes + span, tl.load(reads + span % period, mask=span < size), mask=span < size)


@kernel(do_not_specialize=["counterparts"])
def _copy_kernel(counterparts, table, BLOCK: tl.constexpr):
    """Each program executes one row of the table (`_Row`)."""
    row = table + tl.program_id(0) * 6
    index = tl.load(row)
    fixed = tl.load(row + 1)
    other = tl.load(row + 2)
    size = tl.load(row + 3)
    into = tl.load(row + 4) != 0
    period = tl.load(row + 5)
    base = tl.zeros_like(other)
    for i in tl.static_range(len(counterparts)):
        base = tl.where(index == i, counterparts[i], base)
    other += base
    source = tl.where(into, other, fixed)
    target = tl.where(into, fixed, other)
    either = source | target
    if period != 0:
        _repeat(source, target, size, period, BLOCK)
    elif either % 8 == 0:
        _move(source, target, size, tl.int64, 8, BLOCK)
    elif either % 4 == 0:
        _move(source, target, size, tl.int32, 4, BLOCK)
    else:
        _move(source, target, size, tl.int8, 1, BLOCK)


# A function that copies to or from the tensors that it is passed.
Launch = Callable[[Sequence[Tensor]], None]

# The index of the caller's tensor, or -1; the address of the fixed side; the offset in the caller's
# tensor, or for the index -1 the address that is read; the number of bytes; whether the fixed side
# is written; and the number of bytes that repeat, or 0.
_Row = tuple[int, int, int, int, int, int]


def plan_launch(copies: Copies) -> Launch:
    """Plan one launch for at most `ARITIES[-1]` tensors.

    Returns:
        A function that copies between the fixed tensors and the tensors that it is passed, on the
        current stream of their device, which must be the current one. Two threads must not call it
        at the same time, since calls share the packed arguments.
    """
    device = copies.device
    rows = table_rows(copies)
    if not rows:
        return _nothing
    arity = next(n for n in ARITIES if n >= len(copies.fixed))
    # In stream order: the first batch of a new size would otherwise wait for the device.
    table = to_device(torch.tensor(rows, dtype=torch.int64), device)
    if device.type != "cuda" or (handle := kernel_handle(device, arity)) is None:
        return functools.partial(_launch_by_triton, table, arity, copies)
    return launch_by_driver(handle, arity, table, copies)


def _nothing(counterparts: Sequence[Tensor]) -> None:
    """The launch for tensors without elements."""


def table_rows(copies: Copies) -> list[_Row]:
    """The rows of a launch's table, one for each program; large copies are split evenly."""
    into = int(copies.into_fixed)
    plain = [(i, x.data_ptr(), 0, x.nbytes, into) for i, x in enumerate(copies.fixed)]
    plain += [
        (-1, target.data_ptr(), source.data_ptr(), target.nbytes, 1)
        for target, source in copies.constants
    ]
    total = sum(row[3] for row in plain)
    share = max(_LEAST_SHARE, -(-total // (_MOST_PROGRAMS * _LEAST_SHARE)) * _LEAST_SHARE)
    rows = [
        (index, address + start, other + start, min(share, size - start), into, 0)
        for index, address, other, size, into in plain
        for start in range(0, size, share)
    ]
    for tail, index, period in copies.repeats:
        last = copies.fixed[index].nbytes - period
        rows.append((index, tail.data_ptr(), last, tail.nbytes, 1, period))
    return rows


def _launch_by_triton(
    table: Tensor, arity: int, copies: Copies, counterparts: Sequence[Tensor]
) -> None:
    """Launch by Triton's own launcher; the argument `copies` keeps the tensors alive whose
    addresses are in the table."""
    # Tensors that no row of the table names may have any address.
    addresses = [x.data_ptr() for x in counterparts] + [table.data_ptr()] * (
        arity - len(counterparts)
    )
    _copy_kernel.jit[(len(table),)](tuple(addresses), table, BLOCK=_BLOCK, num_warps=_WARPS)


def ask_for_kernels(device: torch.device, count: int) -> None:
    """Request the kernels that copy up to `count` tensors, inside
    `weft.ops.kernel_triton.compiling()`."""
    for before, arity in zip((0, *ARITIES), ARITIES, strict=False):
        if before < max(count, 1):
            _copy_nothing(_copy_kernel, device, arity)


def _copy_nothing(launched: Any, device: torch.device, arity: int) -> Any:
    no_bytes = torch.zeros(1, 6, dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        # An odd address, so that Triton does not specialise the kernel for multiples of 16.
        return launched[(1,)]((2**40 + 1,) * arity, no_bytes, BLOCK=_BLOCK, num_warps=_WARPS)


@functools.cache
def kernel_handle(device: torch.device, arity: int) -> int | None:
    """The driver's handle of the kernel for `arity` tensors, or None if this version of triton or
    of the driver gives none.

    This relies on two things beyond Triton's public launch: the launch returns the compiled kernel,
    with the driver's handle as `function`, and the kernel's parameters are the arguments in order.
    """
    compiled = _copy_nothing(_copy_kernel.jit, device, arity)
    handle = getattr(compiled, "function", None)
    plain = getattr(getattr(compiled, "metadata", None), "shared", None) == 0
    return handle if isinstance(handle, int) and plain and driver() is not None else None


@functools.cache
def driver() -> ctypes.CDLL | None:
    """The CUDA driver's library, or None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class _Config(ctypes.Structure):
    """`CUlaunchConfig` of the driver."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


def launch_by_driver(handle: int, arity: int, table: Tensor, copies: Copies) -> Launch:
    """A launch by `cuLaunchKernelEx`, with all arguments prepared except the addresses and the
    stream."""
    # The arguments in order: addresses, the table, and the pointers to scratch memory that Triton
    # may add, which this kernel does not use.
    values = (ctypes.c_uint64 * (arity + 1 + _SCRATCH))()
    values[arity] = table.data_ptr()
    places = range(ctypes.addressof(values), ctypes.addressof(values) + ctypes.sizeof(values), 8)
    pointers = (ctypes.c_void_p * len(places))(*places)
    config = _Config((len(table), 1, 1), (32 * _WARPS, 1, 1))
    library = driver()
    stream = current_stream_id(table.device.index)
    assert library is not None
    arguments = ctypes.byref(config), ctypes.c_void_p(handle), ctypes.byref(pointers), None
    run = functools.partial(library.cuLaunchKernelEx, *arguments)
    pack = struct.Struct(f"={len(copies.fixed)}Q").pack_into
    address = Tensor.data_ptr

    # The default of `_keep_alive` holds the tensors whose addresses are in the arguments.
    def launch(counterparts: Sequence[Tensor], _keep_alive: Any = (table, copies)) -> None:
        pack(values, 0, *map(address, counterparts))
        # At each call: a capture, for example, has a stream of its own.
        config.stream = stream()
        if run():
            # A thread that has not used CUDA yet has no context: torch makes it current, and the
            # second launch works.
            torch.cuda.synchronize(table.device)
            if error := run():
                problem = f"error {error} of cuLaunchKernelEx"
                raise DeviceError(
                    "a copy between a graph and its caller",
                    problem,
                    "look for an earlier error of CUDA",
                )

    return launch
