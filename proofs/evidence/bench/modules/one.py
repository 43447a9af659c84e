"""One variant of one case, in this process: its times, its memory, its kernels and its error.

    python -m weft.proofs.evidence.bench.modules.one CASE VARIANT DEVICE [small] [check]

The last line that it prints is the row, after `ROW`.
"""

import gc
import json
import statistics
import sys
import time
from typing import Any

import attrs
import numpy
import torch
from torch import Tensor

from weft.proofs.evidence.bench.graphify_overhead import collector_off, synchronize
from weft.proofs.evidence.bench.modules.cases import CASES
from weft.proofs.evidence.bench.modules.variants import EAGER, JAX, Call, Setting, float_leaves
from weft.torchapi.inductor import import_compiler

MARK = "ROW "
# The calls before the timed ones, whose results are checked. `reduce-overhead` compiles in the
# first, and records in the second or the third.
_OPENING = 4
_ROUNDS = 5
_ROUND_SECONDS = 0.3
# A cache of 2,048 tokens has room for all calls.
_MOST_CALLS = 300
# What is no kernel among the events of the device.
_COPIES = ("Memcpy", "Memset")


@attrs.frozen
class Row:
    """The measurements of one process.

    Args:
        opening_s: the seconds of the first calls, one by one.
        ms: the median time of later calls.
        allocated_gb, reserved_gb: the peak of torch's allocator from the first call on, what was
            allocated before it included; None without a GPU.
        kernels: those of a call; None without a GPU.
        copies: the copies of a call by the driver, and its fillings of memory, likewise.
        error: the norm of the difference to the eager results of the first calls, relative to
            theirs; None if unchecked.
    """

    opening_s: list[float]
    ms: float
    allocated_gb: float | None = None
    reserved_gb: float | None = None
    kernels: int | None = None
    copies: int | None = None
    error: float | None = None


def measure(case: str, setting: Setting, check: bool) -> Row:
    """Measure a variant of a case, and compare it to the eager one if `check`."""
    is_cuda = setting.device == "cuda"
    if is_cuda:
        # The products' library starts at its first product, which belongs to no variant.
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    call = CASES[case].build(setting)
    synchronize(setting.device)
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    opening_s = list[float]()
    results = list[Any]()
    for _ in range(_OPENING):
        start = time.perf_counter()
        result = _finished(call(), setting)
        opening_s.append(time.perf_counter() - start)
        results.append(_on_host(result))
        # Not alive at the next call, which would then need other memory.
        del result
    row = Row(opening_s, 1e3 * _seconds(call, setting))
    if is_cuda and setting.variant != JAX:
        kernels, copies = _events(call)
        row = attrs.evolve(
            row,
            allocated_gb=torch.cuda.max_memory_allocated() / 1e9,
            reserved_gb=torch.cuda.max_memory_reserved() / 1e9,
            kernels=kernels,
            copies=copies,
        )
    if not check:
        return row
    del call
    gc.collect()
    reference = CASES[case].build(attrs.evolve(setting, variant=EAGER))
    pairs = [pair for result in results for pair in zip(result, _on_host(reference()), strict=True)]
    return attrs.evolve(row, error=relative_error(pairs))


def relative_error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The greatest relative error among pairs of a result and its reference.

    >>> relative_error([(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))])
    0.1
    """
    differences = [float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs]
    assert differences
    return max(differences)


def _finished(result: Any, setting: Setting) -> Any:
    """The result, once the device has computed it."""
    if setting.variant == JAX:
        arrays = result if isinstance(result, list) else [result]
        return [array.block_until_ready() for array in arrays]
    synchronize(setting.device)
    return result


def _on_host(result: Any) -> list[Tensor]:
    if isinstance(result, list) and result and not isinstance(result[0], Tensor):
        return [torch.from_numpy(numpy.array(array)) for array in result]
    return [x.detach().to("cpu", copy=True) for x in float_leaves(result)]


def _seconds(call: Call, setting: Setting) -> float:
    """The median over rounds of the seconds of a call."""

    def round_of(count: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(count):
            # The last result is dropped first, as a loop that is done with it does.
            result = None
            result = call()
        _finished(result, setting)
        return (time.perf_counter() - start) / count

    once = round_of(2)
    count = int(min(max(_ROUND_SECONDS / once, 2), _MOST_CALLS))
    if setting.small:
        count = 2
    with collector_off():
        return statistics.median(round_of(count) for _ in range(_ROUNDS))


def _events(call: Call) -> tuple[int, int]:
    """The kernels of a call, and its copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    copies = sum(name.startswith(_COPIES) for name in names)
    return len(names) - copies, copies


def main(argv: list[str]) -> None:
    """Measure, and print the row."""
    case, variant, device, *flags = argv
    torch.set_float32_matmul_precision("high")
    if variant not in (EAGER, JAX):
        # Here, since the import of the compiler belongs to no function.
        import_compiler()
    row = measure(case, Setting(variant, device, "small" in flags), "check" in flags)
    print(MARK + json.dumps(attrs.asdict(row)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
