"""Ladders: which classes may be captured, a mode each, as a pure function of the limits."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import attrs

from weft.arguments import is_int, kind_of
from weft.descriptor import BatchDescriptor, Descriptor
from weft.display import Table, Tabled
from weft.errors import DescriptorError

D = TypeVar("D", bound=Descriptor)

MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
CAPABILITIES = ("never", "uniform_single_token", "uniform", "always")
"""What an attention back end can do inside a whole graph: nothing, decode of one token a request, uniform decode, any
batch. Each can do what those before it can."""


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen
class Limits:
    """What a batch can be at most.

    Args:
        max_num_reqs: requests in a batch.
        max_num_tokens: tokens in a batch, prefill included.
        query_lens: the query lengths of uniform decode batches, each with graphs of its own.
        active_loras: the numbers of active LoRAs that have graphs of their own (`lora_rungs`).

    Raises:
        DescriptorError: not even a batch of one token is within them.
    """

    max_num_reqs: int
    max_num_tokens: int
    query_lens: tuple[int, ...] = attrs.field(default=(1,), converter=_as_tuple)
    active_loras: tuple[int, ...] = attrs.field(default=(0,), converter=_as_tuple)

    def __attrs_post_init__(self) -> None:
        for name in ("max_num_reqs", "max_num_tokens"):
            value = getattr(self, name)
            if not is_int(value, 1):
                call = f"weft.Limits({self.max_num_reqs!r}, {self.max_num_tokens!r})"
                raise DescriptorError(call, f"{name}={value!r}", "whole numbers of requests and tokens, at least 1")
        for name in ("query_lens", "active_loras"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(number, int) for number in value):
                call = f"weft.Limits({self.max_num_reqs!r}, {self.max_num_tokens!r}, {name}={value!r:.60})"
                raise DescriptorError(call, kind_of(value), f"a tuple of whole numbers: {name}=(1,)")


@attrs.frozen
class Ladder(Tabled, Generic[D]):
    """The classes that may be captured, largest first: as whole graphs, and as pieces. Cutting one never cuts the
    other. Iterated, it gives all of them.

    Args:
        full: classes of whole graphs.
        piecewise: classes of graphs in pieces.
    """

    full: tuple[D, ...] = attrs.field(default=(), converter=tuple)
    piecewise: tuple[D, ...] = attrs.field(default=(), converter=tuple)

    def __iter__(self) -> Iterator[D]:
        return iter((*self.full, *self.piecewise))

    def __len__(self) -> int:
        return len(self.full) + len(self.piecewise)

    def table(self) -> Table:
        """A row for the classes of one kind."""
        rows = [*_kinds("full", self.full), *_kinds("piecewise", self.piecewise)]
        return Table(("mode", "classes", "of"), tuple(rows), f"a ladder of {len(self)} classes")


def _kinds(mode: str, classes: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """For the classes of each kind: the mode, the kind, and their sizes in order; of a user's own, as they print."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for one in reversed(classes):
        groups.setdefault(_kind(one), []).append(one)
    for (kind, unit), found in groups.items():
        sizes = [str(getattr(one, unit)) for one in found] if unit else [*map(str, found)]
        yield mode, kind, (f"{', '.join(sizes)} {unit.removeprefix('num_')}" if unit else "; ".join(sizes))


def _kind(one: Any) -> tuple[str, str]:
    """The kind of a class, and what its size is counted in."""
    if not isinstance(one, BatchDescriptor):
        return type(one).__name__, ""
    loras = f", {one.num_active_loras} LoRAs" if one.num_active_loras else ""
    return (f"uniform x{one.query_len}{loras}", "num_reqs") if one.is_uniform else (f"ragged{loras}", "num_tokens")


def as_ladder(given: Ladder[D] | Sequence[D]) -> Ladder[D]:
    """A ladder as it is; a sequence of descriptors as one of whole graphs."""
    return given if isinstance(given, Ladder) else Ladder(full=tuple(given))


def rungs(limit: int) -> tuple[int, ...]:
    """The numbers of requests of uniform classes: 1, 2, 4, 8, then in steps of 8 up to 128, then eight to each
    doubling, up to and including `limit`. Beyond 8, none is padded by more than 8, or an eighth of itself.

    >>> rungs(20), rungs(300)[-4:]
    ((1, 2, 4, 8, 16, 20), (240, 256, 288, 300))
    """
    sizes, size = [1, 2, 4], 8
    while size < limit:
        sizes.append(size)
        size += max(8, 1 << size.bit_length() - 4)
    return (*(s for s in sizes if s < limit), limit) if limit > 0 else ()


def token_rungs(limit: int) -> tuple[int, ...]:
    """The numbers of tokens of ragged classes: powers of two up to 128, where a step is bound by the weights that it
    reads and padding costs little; then four to each doubling, so that none is padded by more than a quarter of itself.

    >>> token_rungs(20), token_rungs(300)[-5:]
    ((1, 2, 4, 8, 16, 20), (160, 192, 224, 256, 300))
    """
    sizes, size = list[int](), 1
    while size < limit:
        sizes.append(size)
        size += size if size < 128 else 1 << size.bit_length() - 3
    return (*sizes, limit) if limit > 0 else ()


def lora_rungs(max_loras: int, *, specialised: bool = True) -> tuple[int, ...]:
    """Numbers of active LoRAs to capture for: none, and powers of two up to the maximum (or, not specialised, it
    alone).

    Args:
        max_loras: adapters that a batch may use at once.
        specialised: whether each such number has graphs of its own.

    >>> lora_rungs(5), lora_rungs(5, specialised=False), lora_rungs(0)
    ((0, 1, 2, 4, 5), (0, 5), (0,))
    """
    if not specialised:
        return (0, max_loras) if max_loras else (0,)
    powers = [2**i for i in range(max_loras.bit_length()) if 2**i < max_loras]
    return (0, *powers, max_loras) if max_loras else (0,)


def make_ladder(
    mode: str, limits: Limits, sizes: Sequence[int] | None = None, *, capability: str = "always"
) -> Ladder[BatchDescriptor]:
    """The classes that `mode` may capture under `limits`.

    Whole graphs: uniform classes `R x q` for every query length, up to `max_num_reqs` requests; in mode `full` also
    ragged classes of up to `max_num_reqs * max(query_lens)` tokens, for decode mixed with the end of a prefill.
    Pieces: ragged classes of up to `max_num_tokens` tokens, each with as many requests as can be in it, so that there
    is one a number of tokens; and, where there are no whole graphs for them, uniform classes as above, whose attention
    is launched as in a whole graph, and sums in the same order. What no class covers runs eagerly.

    Args:
        mode: one of `MODES`; `full_and_piecewise` has whole graphs of uniform decode, and pieces for all else.
        limits: what a batch can be.
        sizes: numbers of requests (uniform) and of tokens (ragged), instead of `rungs` and `token_rungs`.
        capability: what the attention back end can do inside a whole graph, one of `CAPABILITIES`.

    Raises:
        DescriptorError: an unknown mode or capability, limits that no batch meets, sizes that are all beyond the
            limits, or a mode whose whole graphs the attention back end cannot be in.

    >>> [str(d) for d in make_ladder("full", Limits(max_num_reqs=2, max_num_tokens=64))]
    ['ragged 2 tokens, 2 reqs', 'uniform x1, 2 reqs', 'ragged 1 tokens, 1 reqs', 'uniform x1, 1 reqs']
    """
    _check(mode, limits, sizes, capability)
    uniform = [] if mode == "none" else _uniform(limits, sizes)
    most = min(limits.max_num_reqs * max(limits.query_lens), limits.max_num_tokens)
    mixed = _ragged(limits, most, sizes) if mode == "full" else []
    pieces = _ragged(limits, limits.max_num_tokens, sizes) if "piecewise" in mode else []
    if mode == "piecewise":
        uniform, pieces = [], [*uniform, *pieces]
    if sizes and mode != "none" and not (uniform or mixed or pieces):
        call, instead = f"make_ladder({mode!r}, {limits}, sizes={sizes})", "sizes within the limits, or sizes=None"
        raise DescriptorError(call, "no size that a batch within the limits can have", instead)
    return Ladder(_largest_first([*uniform, *mixed]), _largest_first(pieces))


def _uniform(limits: Limits, sizes: Sequence[int] | None) -> list[BatchDescriptor]:
    most = {q: min(limits.max_num_reqs, limits.max_num_tokens // q) for q in limits.query_lens}
    return [
        BatchDescriptor.uniform(n, q, loras)
        for q in limits.query_lens
        for n in (rungs(most[q]) if sizes is None else sizes)
        for loras in limits.active_loras
        if n <= most[q]
    ]


def _ragged(limits: Limits, most: int, sizes: Sequence[int] | None) -> list[BatchDescriptor]:
    return [
        BatchDescriptor(t, min(t, limits.max_num_reqs), None, loras)
        for t in (token_rungs(most) if sizes is None else sizes)
        for loras in limits.active_loras
        if t <= most
    ]


def _largest_first(found: Sequence[BatchDescriptor]) -> tuple[BatchDescriptor, ...]:
    return tuple(sorted(set(found), key=lambda d: (-d.num_tokens, -d.num_reqs, -d.num_active_loras, d.is_uniform)))


def _check(mode: str, limits: Any, sizes: Sequence[int] | None, capability: str) -> None:
    call = f"make_ladder({mode!r}, {limits}, sizes={sizes}, capability={capability!r})"
    if mode not in MODES:
        raise DescriptorError(call, "an unknown mode", f"one of {', '.join(MODES)}")
    if capability not in CAPABILITIES:
        raise DescriptorError(call, "an unknown capability", f"one of {', '.join(CAPABILITIES)}")
    if not isinstance(limits, Limits):
        raise DescriptorError(call, "limits that are no weft.Limits", "weft.Limits(max_num_reqs, max_num_tokens)")
    if isinstance(sizes, int | str) or (sizes is not None and not all(isinstance(size, int) for size in sizes)):
        raise DescriptorError(call, "sizes that are no list of ints", "sizes=[1, 2, 4], or None for the usual rungs")
    if not limits.query_lens or min(limits.query_lens) < 1 or (sizes is not None and min(sizes, default=1) < 1):
        few = sizes is not None and min(sizes, default=1) < 1
        seen = f"sizes={list(sizes or ())}" if few else f"query_lens={limits.query_lens}"
        instead = "sizes of at least 1, or None for the usual rungs" if few else "query_lens=(1,) for plain decode"
        raise DescriptorError(call, seen, instead)
    if not limits.active_loras or min(limits.active_loras) < 0:
        raise DescriptorError(
            call, "no number of active LoRAs, or a negative one", "active_loras=lora_rungs(max_loras)"
        )
    single = limits.query_lens == (1,)
    needs = {"full": "always", "none": "never", "piecewise": "never"}.get(
        mode, "uniform_single_token" if single else "uniform"
    )
    if CAPABILITIES.index(capability) < CAPABILITIES.index(needs):
        able = [m for m in MODES if m in ("none", "piecewise") or (m != "full" and capability != "never")]
        raise DescriptorError(
            call,
            f"an attention back end that can be in a whole graph {capability}; this mode needs {needs}",
            f"one of {', '.join(able)}" + ("" if single or capability == "uniform" else ", with query_lens=(1,)"),
        )
