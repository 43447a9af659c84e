"""The memo of graphify: keys that name their parts, so that a miss can say which field differed."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.trees import alike


@attrs.frozen
class LeafKey:
    """What a captured graph assumes of one tensor argument."""

    shape: tuple[int, ...]
    dtype: Any
    stride: tuple[int, ...]
    device: Any
    flags: tuple[bool, bool]
    """Whether it is a lazy conjugate, or negative, of what is stored."""
    address: int | None
    """Where the storage must be, for arguments captured by reference; None for those that are copied in."""


@attrs.frozen
class Key:
    """All that a capture depends on: equal keys may share a graph, and unequal ones may not."""

    ambient: tuple[Any, ...]
    """What holds around the call: inference mode, autocast, default dtype, modes."""
    mode: str
    """A whole graph, or pieces."""
    structure: Any
    statics: tuple[tuple[str, Any], ...]
    descriptor: Any
    leaves: tuple[Any, ...]
    """One `LeafKey` a tensor; for any other leaf what `alike` makes of it."""


def leaf_key(leaf: Any, shape: tuple[int, ...] | None, by_reference: bool) -> Any:
    """The key of one leaf; `shape` is the padded one of a sized leaf, whose buffer is contiguous."""
    if not isinstance(leaf, Tensor):
        return alike(leaf)
    flags = (leaf.is_conj(), leaf.is_neg())
    if by_reference:
        return LeafKey(tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.device, flags, leaf.data_ptr())
    if shape is not None:
        return LeafKey(shape, leaf.dtype, (), leaf.device, flags, None)
    return LeafKey(tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.device, flags, None)


def differences(new: Key, old: Key, names: Iterable[str]) -> Iterator[str]:
    """Each field in which two keys differ, in words: the new value, then the captured one."""
    if new.descriptor != old.descriptor:
        yield f"descriptor: '{new.descriptor}', captured '{old.descriptor}'"
    for (name, value), (_, captured) in zip(new.statics, old.statics, strict=False):
        if value != captured:
            yield f"static argument {name}: {_brief(value)}, captured {_brief(captured)}"
    if new.ambient != old.ambient:
        yield f"inference mode, autocast, default dtype, modes: {new.ambient}, captured {old.ambient}"
    if new.structure != old.structure:
        yield f"tree structure: {new.structure}, captured {old.structure}"
        return
    for name, a, b in zip(names, new.leaves, old.leaves, strict=True):
        if a == b:
            continue
        if isinstance(a, LeafKey) and isinstance(b, LeafKey):
            for field in ("shape", "dtype", "stride", "device", "flags", "address"):
                value, captured = getattr(a, field), getattr(b, field)
                if value != captured and field != "address":
                    yield f"{name}: {field} {value}, captured {captured}"
                elif value != captured:
                    yield f"{name}: another tensor than the captured one (captured by reference)"
        else:
            yield f"{name}: {_brief(a)}, captured {_brief(b)}"


def _brief(key: Any) -> str:
    """A key of one leaf as the value that it stands for."""
    if isinstance(key, LeafKey):
        return "a tensor"
    kind, value = key
    if issubclass(kind, float):
        return repr(kind.fromhex(value))
    return "(" + ", ".join(_brief(v) for v in value) + ")" if issubclass(kind, tuple) else repr(value)


def nearest_difference(key: Key, memo: Mapping[Key, Any], names: Iterable[str]) -> str:
    """In what `key` differs from the captured key that is most like it."""
    names = list(names)
    if not memo:
        return "nothing is captured yet"
    found: list[list[str]] = [list(differences(key, old, names)) for old in memo]
    _, fewest = min((len(texts), texts) for texts in found)
    return "; ".join(fewest)


def check_hashable(key: Key, call: str, names: Callable[[], Iterable[str]]) -> None:
    """Raise an error that names the part of `key` that cannot be hashed, if one cannot."""
    try:
        hash(key)
    except TypeError:
        for name, value in [*key.statics, *zip(names(), key.leaves, strict=True), ("tree structure", key.structure)]:
            try:
                hash(value)
            except TypeError as error:
                raise CaptureError(
                    call,
                    f"{name} is no tensor and cannot be hashed ({error})",
                    "pass a tensor, or a hashable value (a tuple for a list)",
                ) from None
        raise


_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), enum.Enum, range, type, torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def check_plain(leaves: Iterable[Any], call: str, names: Callable[[], Iterable[str]]) -> None:
    """Raise an error for a leaf that may change under its holder: an object that is no value, and no pytree."""
    leaves = list(leaves)
    if all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return
    name, leaf = next(p for p in zip(names(), leaves, strict=True) if not isinstance(p[1], (Tensor, *_PLAIN)))
    raise CaptureError(
        call,
        f"{name} is a {type(leaf).__name__}, which is neither a tensor, a plain value nor a pytree",
        "register its class (weft.pytree), pass its tensors, or name it in static_argnames if it never changes",
    )


@attrs.frozen
class CacheInfo:
    """Counts since the function was graphified, or since `cache_clear()`.

    Args:
        captures: graphs recorded.
        replays: calls answered by a graph (the call that captures replays too).
        eager: calls that ran the function itself.
        currsize: graphs held now.
    """

    captures: int = 0
    replays: int = 0
    eager: int = 0
    currsize: int = 0
