"""`AttentionBackend`: an implementation of attention over pages, and the devices, dtypes, shapes
and graphs that it supports."""

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, other_signature
from weft.display.quantities import counted
from weft.errors import DeviceError, ProgramError
from weft.ops.attention import flashinfer
from weft.ops.attention.capabilities import CAPABILITIES
from weft.ops.attention.functional import attend
from weft.ops.attention.paged import paged_attention
from weft.ops.register import FLOATS, operator
from weft.torchapi.private import counted_changes, storage_id
from weft.values.trees import OF_THIS_PROCESS


def _are(kind: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(one, kind) for one in value)


_RULES: dict[str, Rule] = {
    "name": (lambda name: isinstance(name, str) and name, "a name"),
    "attend": (callable, "a function (q, kv_pages, slot_mapping, ...), as its docstring says"),
    "plan": (
        lambda plan: plan is None or callable(plan),
        "a function (q, kv_pages, slot_mapping, ...), or None",
    ),
    "capability": (lambda one: one in CAPABILITIES, f"one of {', '.join(CAPABILITIES)}"),
    "devices": (_are(str), "a tuple of device types, such as ('cpu', 'cuda')"),
    "dtypes": (_are(torch.dtype), "a tuple of dtypes, such as (torch.bfloat16,)"),
    "head_dims": (_are(int), "a tuple of sizes, such as (64, 128); (): any"),
    "kv_dtypes": (
        _are(torch.dtype),
        "a tuple of dtypes, such as (torch.float8_e4m3fn,); (): only that of q",
    ),
    "page_sizes": (_are(int), "a tuple of sizes, such as (16, 32); (): any"),
    "windows": (bool, "True or False"),
    "batch_invariant": (bool, "True or False"),
    "missing": (
        callable,
        "a function of a device, which returns what it lacks in words, or an empty text",
    ),
}
# The tensors that `attend` must not write, since later layers read them too.
_READ = "kv_pages", "slot_mapping", "block_table", "query_start_loc", "seq_lens"
_TAKEN = "q", *_READ, "max_query_len", "scale", "window"


def _lacks_nothing(device: torch.device) -> str:
    return ""


# All back ends of this process, kept alive because a graph may outlive other references to its own.
_BY_HANDLE: dict[int, "AttentionBackend"] = {}


@attrs.frozen(eq=False)
class AttentionBackend:
    """An implementation of attention over pages, with the same result as `weft::paged_attention`.

    Args:
        name: for errors, reports and the comparison of ranks.
        attend: `(q, kv_pages, slot_mapping, block_table, query_start_loc, seq_lens, max_query_len,
            scale, window)`, which returns `[T, H, D]`: the arguments of `paged_attention` without
            `k` and `v`, which are already in the pages. Inside a graph it may not read values on
            the host; a back end that does has capability `piecewise`. It may write only to `q`: a
            write to another argument raises in the step, if torch counts it.
        plan: a function of the same arguments. Its result is computed once per step, by the first
            layer, and passed to `attend` as the last argument. It reads no values of `q` and
            `kv_pages`. If `attend` runs inside a graph, so does `plan`; between graphs both may
            read values on the host.
        capability: the graphs in which it can run, one of `CAPABILITIES`.
        devices, dtypes: the types of device and the dtypes of q that it supports.
        head_dims, page_sizes: the sizes for which it has kernels; empty: any.
        kv_dtypes: the dtypes of pages that it reads, besides that of q.
        windows: whether it supports a sliding window; False: `window` is always 0.
        batch_invariant: whether, in `weft.batch_invariant()`, a token's result depends on the token
            and its context alone, bit for bit. Models with `batch_invariant=True` refuse back ends
            for which this is False.
        missing: a function that says what a device lacks to run it, such as a package or a newer
            GPU; an empty text means nothing.

    Raises:
        ProgramError: an argument has the wrong type or value, or a function the wrong parameters.
    """

    name: str
    attend: Callable[..., Tensor]
    plan: Callable[..., Any] | None = None
    capability: str = "full"
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = FLOATS
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()
    kv_dtypes: tuple[torch.dtype, ...] = ()
    windows: bool = True
    batch_invariant: bool = False
    missing: Callable[[torch.device], str] = _lacks_nothing
    # An operator of torch takes tensors, numbers and texts: this number stands for the back end
    # there.
    handle: int = attrs.field(
        init=False, repr=False, factory=count().__next__, metadata=OF_THIS_PROCESS
    )

    def __attrs_post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _RULES}
        check_values(f"AttentionBackend({self.name!r}, ...)", _RULES, values, ProgramError)
        last: tuple[str, ...] = ("plan",)
        if self.plan is None:
            last = ()
        for name, taken in (
            ("attend", (*_TAKEN, *last)),
            ("plan", _TAKEN),
            ("missing", ("device",)),
        ):
            if (problem := other_signature(getattr(self, name), len(taken))) is not None:
                call = f"AttentionBackend({self.name!r}, {name}={problem.partition('(')[0]}, ...)"
                raise ProgramError(
                    call,
                    problem,
                    f"a function of {counted(len(taken), 'argument')}: ({', '.join(taken)})",
                )
        _BY_HANDLE[self.handle] = self

    def __reduce__(self) -> Any:
        """Pickle by name if it is one of weft's own; any other copy gets a new handle."""
        if BACKENDS.get(self.name) is self:
            return _named, (self.name,)
        return AttentionBackend, tuple(
            getattr(self, field.name) for field in attrs.fields(AttentionBackend) if field.init
        )

    def _attended(self, q: Tensor, *rest: Any) -> Tensor:
        """The result of `attend`.

        Raises:
            ProgramError: it wrote to an argument that other layers read.
        """
        if BACKENDS.get(self.name) is self:
            # weft's own back ends write only to their results, and are not watched.
            return self.attend(q, *rest)
        before = counted_changes(read := rest[: len(_READ)])
        out = self.attend(q, *rest)
        after = before and counted_changes(read)
        if before != after:
            written = [name for name, x, y in zip(_READ, before, after, strict=True) if x != y]
            call = f"AttentionBackend({self.name!r}, ...)"
            problem = f"an attend that wrote to {' and '.join(written)}"
            instead = (
                f"writes to a copy, {written[0]}.clone(): the other layers of the step read the"
                " same memory"
            )
            raise ProgramError(call, problem, instead)
        return out

    def __call__(
        self,
        query_len: int | None,
        q: Tensor,
        kv_pages: Tensor,
        *where: Any,
        plans: dict[Any, Any] | None = None,
    ) -> Tensor:
        """Attend directly if it can run in a graph for this query length, and otherwise through
        `weft::attend_outside`, at which piecewise graphs are cut.

        Args:
            where: the arguments of `attend` after the pages.
            plans: the step's plans, to which this call adds its own; None: plan for this call
                alone.
        """
        if plans is None:
            plans = {}
        # Layers that differ in shapes, scale or window need different plans.
        key = self.handle, q.shape, kv_pages.shape, *where[4:]
        if can_run_inside(self, query_len):
            if self.plan is None:
                return self._attended(q, kv_pages, *where)
            if key not in plans:
                plans[key] = self.plan(q, kv_pages, *where)
            return self._attended(q, kv_pages, *where, plans[key])
        slots, table, starts, lengths, longest, scale, window = where
        begins = key not in plans
        plans[key] = None  # the plan itself is made when the operator runs
        return _attend_outside(
            q, kv_pages, slots, table, starts, lengths, longest, scale, window, self.handle, begins
        )


def check_support(
    backend: AttentionBackend,
    call: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    window: int,
    kv_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> None:
    """Raise unless the back end can run a model with these properties.

    Raises:
        DeviceError: it does not support the device, or lacks something there.
        ProgramError: it has no kernels for the dtype, the head size, the window or the dtype of
            the cache, or it is not batch invariant although the model requires it.
    """
    names = (
        name for name, one in BACKENDS.items() if one is not backend and device.type in one.devices
    )
    instead = f"another back end: attention='auto', or one of {', '.join(names)}"
    if device.type not in backend.devices:
        problem = (
            f"attention back end {backend.name!r}, which runs on {' and '.join(backend.devices)},"
            f" not on {device}"
        )
        raise DeviceError(call, problem, instead)
    if missing := backend.missing(device):
        raise DeviceError(
            call,
            f"attention back end {backend.name!r} on {device}, which lacks {missing}",
            instead,
        )
    problem = ""
    if dtype not in backend.dtypes:
        problem = f"which has no kernels in {dtype}"
    elif backend.head_dims and head_dim not in backend.head_dims:
        problem = (
            f"which has no kernels for heads of {head_dim}, but of"
            f" {', '.join(map(str, backend.head_dims))}"
        )
    elif window and not backend.windows:
        problem = f"which has no windows, for a model with a window of {window}"
    elif kv_dtype not in (None, dtype, *backend.kv_dtypes):
        problem = f"which reads no cache in {kv_dtype}"
    elif batch_invariant and not backend.batch_invariant:
        problem = "which is not batch invariant"
        capable = (
            n for n, one in BACKENDS.items() if one.batch_invariant and device.type in one.devices
        )
        instead = (
            f"another back end: attention='auto', or {' or '.join(capable)}; or leave out"
            " batch_invariant=True"
        )
    if problem:
        raise ProgramError(call, f"attention back end {backend.name!r}, {problem}", instead)


def check_kernel_pages(backend: AttentionBackend, call: str, page_size: int) -> None:
    """Raise ProgramError unless the back end has kernels for pages of this size."""
    if backend.page_sizes and page_size not in backend.page_sizes:
        sizes = ", ".join(map(str, backend.page_sizes))
        problem = (
            f"page_size={page_size}, and the attention back end {backend.name!r} has kernels for"
            f" {sizes}"
        )
        raise ProgramError(call, problem, f"EngineLimits(..., page_size={backend.page_sizes[0]})")


def can_run_inside(backend: AttentionBackend, query_len: int | None) -> bool:
    """Whether the back end can run inside a full graph for this query length (None: ragged)."""
    if query_len is None:
        needs = "full"
    elif query_len > 1:
        needs = "uniform"
    else:
        needs = "uniform_single_token"
    return CAPABILITIES.index(backend.capability) >= CAPABILITIES.index(needs)


def is_paged_operator(backend: AttentionBackend) -> bool:
    """Whether the back end is `weft::paged_attention` itself, at which piecewise graphs are cut."""
    return backend.attend is _by_operator


def _functional(q: Tensor, kv_pages: Tensor, *where: Any) -> Tensor:
    return attend(q, None, None, kv_pages, *where[:-2])


@operator(
    kernel="weft.ops.attention.backends:attend_by_handle",
    fake=lambda q: torch.empty_like(q, memory_format=torch.contiguous_format),
    functional=_functional,
)
def _attend_outside(
    q: Tensor,
    kv_pages: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    handle: int,
    begins: bool,
) -> Tensor:
    """The operator of a back end that cannot run inside the current graph; `begins` is true for the
    first call of a step, which makes the plan."""
    where = slot_mapping, block_table, query_start_loc, seq_lens, max_query_len, scale, window
    return attend_by_handle(q, kv_pages, *where, handle, begins)


class _Plans(threading.local):
    """This thread's last plan for each back end and shape, with the addresses of the tensors from
    which it was made."""

    def __init__(self) -> None:
        self.by_key: dict[Any, tuple[Any, Any]] = {}


_PLANS = _Plans()


def attend_by_handle(q: Tensor, kv_pages: Tensor, *rest: Any) -> Tensor:
    """The result of the back end with this handle. If `begins` is false, the last plan is reused if
    its tensors are at the same addresses; otherwise a new plan is made."""
    *where, handle, begins = rest
    backend = _BY_HANDLE[handle]
    plan = list[Any]()
    if backend.plan is not None:
        key = handle, q.device, q.shape[1:], kv_pages.shape[2:], kv_pages.dtype, *where[5:]
        memory = len(q), where[4], *(x.data_ptr() for x in where[:4])
        if begins or key not in _PLANS.by_key or _PLANS.by_key[key][0] != memory:
            _PLANS.by_key[key] = memory, backend.plan(q, kv_pages, *where)
        plan = [_PLANS.by_key[key][1]]
    out = backend._attended(q, kv_pages, *where, *plan)
    # torch requires that an operator's result shares no memory with its arguments.
    if _shares(out, q, kv_pages, *where):
        return out.clone()
    return out


def _named(name: str) -> AttentionBackend:
    return BACKENDS[name]


def _shares(out: Any, *inputs: Any) -> bool:
    """Whether a result shares its storage with an argument."""
    return isinstance(out, Tensor) and storage_id(out) in {
        storage_id(x) for x in inputs if isinstance(x, Tensor)
    }


def _by_operator(q: Tensor, kv_pages: Tensor, *where: Any) -> Tensor:
    return paged_attention(q, None, None, kv_pages, *where)


def _in_torch(q: Tensor, kv_pages: Tensor, *where: Any) -> Tensor:
    return attend(q, None, None, kv_pages, *where)


_FP8 = (torch.float8_e4m3fn,)
REFERENCE = AttentionBackend(
    "reference", _by_operator, devices=("cpu",), kv_dtypes=_FP8, batch_invariant=True
)
TRITON = AttentionBackend(
    "triton", _by_operator, devices=("cuda",), kv_dtypes=_FP8, batch_invariant=True
)
TORCH = AttentionBackend("torch", _in_torch, kv_dtypes=_FP8)
FLASHINFER = AttentionBackend(
    "flashinfer",
    flashinfer.attend,
    flashinfer.plan,
    capability="uniform_single_token",
    devices=("cuda",),
    dtypes=flashinfer.DTYPES,
    head_dims=flashinfer.HEAD_DIMS,
    page_sizes=(16, 32, 64, 128),
    missing=flashinfer.missing,
)

# The default back end of each type of device, whose operator is `weft::paged_attention` itself.
# FlashInfer's FA3 was faster only in steps that an engine hardly makes, by less than its plan
# takes.
OWN = {"cpu": REFERENCE, "cuda": TRITON}
# The back ends by name, for `weft.load(..., attention=name)`.
BACKENDS = {one.name: one for one in (REFERENCE, TRITON, TORCH, FLASHINFER)}
