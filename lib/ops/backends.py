"""Which implementation each operator uses on a device, and why; `weft doctor` prints this table."""

from collections.abc import Iterator

import attrs
import torch

from weft.errors import DeviceError
from weft.ops.attention.backends import BACKENDS, OWN, AttentionBackend
from weft.ops.copying.copies import how_launched, no_kernel
from weft.ops.register import no_triton, triton_version
from weft.ops.tiles.experts import measured
from weft.ops.tiles.gpus import device
from weft.ops.tiles.linear import linear_tile
from weft.ops.tiles.model import record
from weft.torchapi.scaled_mm import scaled_mm_lacks


@attrs.frozen
class OpBackend:
    """One row of the table: an operator and its implementation on a device."""

    op: str
    implementation: str
    reason: str


_CPU_SAMPLE = tuple(
    OpBackend(op, "reference", "plain torch; the CPU has no other")
    for op in ("sample", "sample_rows", "count_tokens")
)

_SAMPLERS = {
    "sample": "reads the logits once and keeps nothing of their size",
    "sample_rows": (
        "the same for a request that uses no feature; for others a threshold search, and never a"
        " sort"
    ),
    "count_tokens": "one launch, which writes only for requests that have penalties",
}

# The operators besides attention and sampling, and a description of each CUDA implementation.
_LAYER = {
    "resolve_tokens": "ids, places, slots, contexts and pages of a batch in one kernel",
    "move_on": "positions and last tokens in one kernel",
    "turn_tables": "cosines and sines in one kernel",
    "norms": "residual addition, norm and quantisation in one kernel",
    "silu_mul": "the gate, and the quantisation of its result, in one kernel",
    "rotate_and_keep": "QK norm, rotation and the KV cache in one kernel",
    "quantize": "128 columns of a token at a time",
    "route": "softmax, top-k and division in one kernel",
    "linear": "split over its columns for few tokens; the next kernel adds the parts",
    "swiglu": (
        "the gate as the product's end, for many tokens and where that has one part; else a kernel"
        " of its own"
    ),
    "fp8_linear": "the same, with the scales of tokens and blocks",
    "add_lora": (
        "two launches a layer, for any tokens of any adapters; none where the batch has no adapter"
    ),
    "sum_leaves": "the parts of what ranks share, before they add them up, in one kernel",
    "run_experts": (
        "a launch a product; pairs are found by each program, or sorted where there are many"
    ),
}

_CPU_COPIES = OpBackend(
    "copies", "torch", "one tensor at a time, or one dtype; the CPU has no launch to save"
)


def backends(device: str | torch.device) -> tuple[OpBackend, ...]:
    """The table for a CPU or CUDA device, which this machine need not have.

    Raises:
        DeviceError: weft has no kernels for this type of device.

    >>> [row.op for row in backends("cpu") if row.implementation == "torch"]
    ['copies']
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return (_attention("cpu"), *_CPU_SAMPLE, *_cpu_layer(), _CPU_COPIES)
    if kind == "cuda":
        copies = _cuda_copies(torch.device(device))
        return (_attention("cuda"), *_cuda_samplers(), *_cuda_layer(), copies)
    raise DeviceError(
        f"backends({str(device)!r})", f"weft has no kernels for {kind!r}", "use 'cpu' or 'cuda'"
    )


def _attention(kind: str) -> OpBackend:
    """The back end that `attention="auto"` chooses, and the alternatives."""
    default = OWN[kind]
    version = triton_version()
    if kind == "cuda" and version is None:
        # The text of the error that a call raises: there is no silent fallback to another kernel.
        error = no_triton("paged_attention on cuda")
        return OpBackend("paged_attention", "missing", f"{error.problem}; {error.instead}")
    alternatives = (
        f"{one.name} ({_facts(one)})"
        for one in BACKENDS.values()
        if one is not default and kind in one.devices
    )
    reason = f"{_facts(default)}; attention=... takes also {', '.join(alternatives)}"
    if default.name != "triton":
        return OpBackend("paged_attention", default.name, reason)
    lacks = BACKENDS["flashinfer"].missing(torch.device(kind))
    if lacks:
        lacking = f"; flashinfer lacks {lacks}"
    else:
        lacking = ""
    return OpBackend("paged_attention", f"triton {version}", f"{reason}; auto is this one{lacking}")


def _facts(backend: AttentionBackend) -> str:
    if backend.capability == "none":
        graphs = "no graphs"
    else:
        graphs = f"{backend.capability} graphs"
    return f"{graphs}{', batch invariant' if backend.batch_invariant else ''}"


def _cuda_samplers() -> tuple[OpBackend, ...]:
    version = triton_version()
    if version is None:
        error = no_triton("sample on cuda")
        return tuple(
            OpBackend(op, "missing", f"{error.problem}; {error.instead}") for op in _SAMPLERS
        )
    return tuple(OpBackend(op, f"triton {version}", reason) for op, reason in _SAMPLERS.items())


def _cpu_layer() -> Iterator[OpBackend]:
    for op in _LAYER:
        yield OpBackend(op, "reference", "plain torch; the CPU has no other")


def _cuda_layer() -> Iterator[OpBackend]:
    version = triton_version()
    for op, what in _LAYER.items():
        if version is None:
            error = no_triton(f"{op} on cuda")
            yield OpBackend(op, "missing", f"{error.problem}; {error.instead}")
        else:
            yield OpBackend(op, f"triton {version}", what + _measured(op))


def _measured(op: str) -> str:
    """How an operator's tiles are chosen, as a clause; empty for an operator without tiles."""
    if op == "run_experts":
        shapes = [key.removeprefix("experts ") for key in measured()]
        return f"; tiles measured for {', '.join(shapes) or 'no shapes'}, else by rule"
    if op in ("linear", "fp8_linear"):
        return f"; {_chosen(op)}"
    return ""


def _chosen(op: str) -> str:
    """How a linear layer's tile is chosen, and for which shapes torch's own product is used
    instead."""
    fp8 = op == "fp8_linear"
    lacks = scaled_mm_lacks()
    if device() is None:
        if fp8:
            return "tiles by rule, since none were measured on this GPU"
        return "torch's F.linear, on this GPU"
    losses = record()["losses"]["fp8" if fp8 else "bf16"]["held out"]
    gpu = record()["environment"]["gpu"]
    how = (
        f"tiles by a model measured on {gpu}: for {losses['shapes']} shapes that it had not seen"
        f" {losses['median']:g} %"
    )
    how += (
        f" slower than the best of all (median), and at most {losses['p90']:g} % in nine of ten"
        " cases; "
    )
    if fp8 and lacks:
        return f"{how}torch's scaled_mm for no shape: {lacks}"
    if fp8:
        name = "scaled_mm (cuBLASLt)"
    else:
        name = "F.linear (cuBLAS)"
    return (
        f"{how}torch's {name} where the model has it faster, for 6144x4096 from {_first(fp8)}"
        " tokens on"
    )


def _first(fp8: bool) -> int:
    """The smallest power of two of tokens for which torch's own product is used, with weights of
    6144 by 4096."""
    counts = (2**i for i in range(15))
    return next((count for count in counts if linear_tile(count, 6144, 4096, fp8) is None), 2**15)


def _cuda_copies(device: torch.device) -> OpBackend:
    """The copies to and from graphs' buffers; the kernel is tried if the device is present."""
    there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    device = torch.device("cuda", device.index or 0)
    if reason := no_kernel(device, trial=there):
        return OpBackend("copies", "torch._foreach_copy_", f"one launch for each dtype: {reason}")
    if there:
        launched = how_launched(device)
    else:
        launched = "launched by the driver"
    return OpBackend(
        "copies",
        f"triton {triton_version()}, {launched}",
        "one launch for all tensors, of any dtypes",
    )
