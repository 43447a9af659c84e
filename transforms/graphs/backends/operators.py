"""The reads, writes and data dependence of operators, taken from their schemas and from a list of
special cases that schemas do not state."""

import functools
import math
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor

PINS = {"aten::pin_memory", "aten::_pin_memory"}
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
# Transfers between ranks. They count as collective, and a replay repeats them although they compute
# nothing.
TRANSFERS = {"weft::send", "weft::recv"}
_aten = torch.ops.aten
# Operators that only allocate or resize memory, which a replay need not repeat.
ONLY_MEMORY = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.resize_}
_CONSULT_SWITCHES = (
    "convolution",
    "cudnn",
    "scaled_dot_product",
    "batch_norm",
    "native_multi_head",
    "encoder",
    "rnn",
)
_STRIDED = {_aten.as_strided, _aten.as_strided_copy, _aten.as_strided_scatter}
# Operators whose results have sizes that depend on data, although no tag of torch says so.
_SPARSE_OF_DATA = {
    *(
        _aten._to_sparse,
        _aten._to_sparse_csr,
        _aten._to_sparse_csc,
        _aten._to_sparse_bsr,
        _aten._to_sparse_bsc,
    ),
    *(_aten._coalesce, _aten._sparse_sparse_matmul),
}
# Operators that read the scale of a quantized result from a tensor, and keep it on the host.
_SCALED_BY_DATA = {
    _aten.quantize_per_tensor.tensor_qparams,
    _aten.quantize_per_tensor.tensors,
    _aten.quantize_per_tensor_dynamic.default,
}
_BATCH_NORMS = {
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
}


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among operator arguments or results, which nest only in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def is_sparse(x: Tensor) -> bool:
    """Whether a tensor has a sparse layout."""
    return x.layout is torch.sparse_coo or x.layout in _COMPRESSED


def sparse_parts(x: Tensor) -> tuple[Tensor, ...]:
    """The tensors of indices and values that a sparse tensor consists of, at their own addresses."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    return tuple(part(x) for part in _COMPRESSED[x.layout])


def flat_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """`tensors_in` as a list; faster if most arguments are tensors and numbers."""
    tensors: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += tensors_in(*value)
    return tensors


def storages_among(args: tuple[Any, ...]) -> Set[int]:
    """The storages among operator arguments, as `storage_id` gives them."""
    return {int(value._cdata) for value in args if isinstance(value, torch.UntypedStorage)}


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Change the tensors among operator arguments, which nest only in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)([map_tensors(change, x) for x in value])
    if isinstance(value, dict):
        return {name: map_tensors(change, x) for name, x in value.items()}
    return value


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """(index, name) of the arguments that an operator writes, by its schema."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write
    )


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes."""
    for index, name in _written_arguments(func):
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name))
    # Batch normalisation in training updates its running statistics, but its schema does not
    # declare that.
    if func.overloadpacket in _BATCH_NORMS:
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if named.get("training") or named.get("train"):
            yield from tensors_in(named.get("running_mean"), named.get("running_var"))


@functools.cache
def is_harmless(func: Any) -> bool:
    """Whether an operator is safe in a capture for any arguments: it writes nothing, does not
    depend on data, is not collective, and does not allocate pinned memory."""
    aten = torch.ops.aten
    indexing = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
    watched = (*indexing, aten._local_scalar_dense, *_STRIDED, *_SPARSE_OF_DATA)
    copies = (aten._to_copy.default, aten.copy_.default)
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    suspect = (
        func.overloadpacket in (*watched, *_BATCH_NORMS)
        or func in copies
        or func in _SCALED_BY_DATA
        or any(t in func.tags for t in tags)
    )
    suspect = suspect or func._schema.name in PINS or is_collective(func)
    return not suspect and not _written_arguments(func)


@functools.cache
def reads_shapes(func: Any) -> bool:
    """Whether an operator reads only the shape and the dtype of its tensor, and not its values."""
    name = func._schema.name.removeprefix("aten::")
    return func is _aten.bernoulli.p or name.endswith("_like") or name.startswith("new_")


def unread(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors of which an operator reads only the shape. Where a convolution's derivative does
    not need the input or the weight, functorch passes memory that nothing has written."""
    if func is not _aten.convolution_backward.default:
        return ()
    _, input, weight, *_, needed = args
    return tuple(x for x, is_read in ((weight, needed[0]), (input, needed[1])) if not is_read)


@functools.cache
def consults_switches(operator: str) -> bool:
    """Whether an operator of this name chooses its kernel by
    `weft.torchapi.private.backend_switches`."""
    return any(part in operator for part in _CONSULT_SWITCHES)


def storage_reach(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, float] | None:
    """The storage that an operator addresses beyond its tensor, as `storage_id` gives it, and the
    number of bytes up to the last one addressed. None for operators other than `as_strided` and
    `set_`. The number is infinite for `as_strided` with an offset, because the offset counts from
    the beginning of the storage, where a buffer may begin elsewhere than the caller's tensor."""
    if func.overloadpacket not in (*_STRIDED, _aten.set_):
        return None
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    x = named["self"]
    source = named.get("source")
    first = named.get("storage_offset")
    if func.overloadpacket in _STRIDED:
        source = x.untyped_storage()
        if first is not None:
            return int(source._cdata), math.inf
    elif source is None or isinstance(source, Tensor):
        return None
    if (size := named.get("size")) is None:
        return int(source._cdata), source.nbytes()
    strides = named.get("stride")  # no stride means dense
    if strides:
        last = sum((n - 1) * step for n, step in zip(size, strides, strict=True))
    else:
        last = math.prod(size) - 1
    last += x.storage_offset() if first is None else first
    return int(source._cdata), (last + 1) * x.element_size() if all(size) else 0


def is_collective(func: Any) -> bool:
    """Whether an operator waits for other ranks."""
    return func.namespace in _COLLECTIVES or func._schema.name in TRANSFERS


def data_dependence(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The reason why a replay cannot repeat the operator, or None."""
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default or func in _SCALED_BY_DATA:
        return "a tensor's value is read on the host"
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        if len(args) > 1:
            indices = args[1]
        else:
            indices = kwargs["indices"]
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return "indexing with a boolean mask, whose shape or work depends on data"
        return None
    if func in (aten._to_copy.default, aten.copy_.default):
        return _device_crossing(func, args, kwargs)
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    tagged = (
        torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    )
    if tagged or func.overloadpacket in _SPARSE_OF_DATA:
        return f"{func} has a result whose shape, or value on the host, depends on data"
    return None


# The first words of a fault that is a copy between devices.
COPY = "a copy from"


def _device_crossing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The fault of a copy between host and device, or None. A replay would copy the values that the
    host had at the capture."""
    copied = args[func is torch.ops.aten.copy_.default]
    if not isinstance(copied, Tensor):  # a number that vmap passes, which is a constant
        return None
    source = copied.device
    if copied is not args[0]:
        target = args[0].device
    else:
        target = kwargs.get("device")
    if target is None:
        target = source
    else:
        target = torch.device(target)
    if source.type == target.type:
        return None
    return f"{COPY} {source.type} to {target.type} inside the function"
