"""The memo of graphify: keys that name their parts, so that a miss can say which field differed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from weft.errors import CaptureError


@attrs.frozen
class LeafKey:
    """What a captured graph assumes of one tensor argument."""

    shape: tuple[int, ...]
    dtype: Any
    stride: tuple[int, ...]
    device: Any
    address: int | None
    """Where the storage must be, for arguments captured by reference; None for those that are copied in."""


@attrs.frozen
class Key:
    """All that a capture depends on: equal keys may share a graph, and unequal ones may not."""

    structure: Any
    statics: tuple[tuple[str, Any], ...]
    descriptor: Any
    leaves: tuple[Any, ...]
    """One `LeafKey` a tensor; for any other leaf its type and value."""


def leaf_key(leaf: Any, shape: tuple[int, ...] | None, by_reference: bool) -> Any:
    """The key of one leaf; `shape` is the padded one of a sized leaf, whose buffer is contiguous."""
    if not isinstance(leaf, Tensor):
        return (type(leaf), leaf)
    if by_reference:
        return LeafKey(tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.device, leaf.data_ptr())
    if shape is not None:
        return LeafKey(shape, leaf.dtype, (), leaf.device, None)
    return LeafKey(tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.device, None)


def differences(new: Key, old: Key, names: Iterable[str]) -> Iterator[str]:
    """Each field in which two keys differ, in words: the new value, then the captured one."""
    if new.descriptor != old.descriptor:
        yield f"descriptor: '{new.descriptor}', captured '{old.descriptor}'"
    for (name, value), (_, captured) in zip(new.statics, old.statics, strict=False):
        if value != captured:
            yield f"static argument {name}: {value!r}, captured {captured!r}"
    if new.structure != old.structure:
        yield f"tree structure: {new.structure}, captured {old.structure}"
        return
    for name, a, b in zip(names, new.leaves, old.leaves, strict=True):
        if a == b:
            continue
        if isinstance(a, LeafKey) and isinstance(b, LeafKey):
            for field in ("shape", "dtype", "stride", "device", "address"):
                value, captured = getattr(a, field), getattr(b, field)
                if value != captured and field != "address":
                    yield f"{name}: {field} {value}, captured {captured}"
                elif value != captured:
                    yield f"{name}: another tensor than the captured one (captured by reference)"
        else:
            yield f"{name}: {_brief(a)}, captured {_brief(b)}"


def _brief(key: Any) -> str:
    return "a tensor" if isinstance(key, LeafKey) else f"{key[1]!r}"


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
