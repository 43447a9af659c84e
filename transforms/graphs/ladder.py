"""`Ladder`: the finite set of classes that may be captured, one per mode, as a pure function of the
limits."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from weft.arguments.checks import is_int, kind_of
from weft.batches.descriptor import BatchDescriptor, Descriptor, argument_names
from weft.display.tables import Table, Tabled
from weft.errors import DescriptorError, LoweredModeWarning
from weft.ops.attention.capabilities import CAPABILITIES

D = TypeVar("D", bound=Descriptor)

# From the least that attention must be able to do to the best default.
MODES = ("none", "piecewise", "full_decode_only", "full", "full_and_piecewise")
# The next lower mode of each; a mode that is missing here is lowered to `none`.
_LOWER = {
    "full": "full_and_piecewise",
    "full_decode_only": "piecewise",
    "full_and_piecewise": "piecewise",
}


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value


@attrs.frozen
class Limits:
    """The limits of a batch's size.

    Args:
        max_num_reqs: the most requests in a batch.
        max_num_tokens: the most tokens in a batch, prefill included.
        query_lens: the query lengths of uniform decode batches; each has its own graphs.
        active_loras: the numbers of active LoRAs that have their own graphs (`lora_rungs`).

    Raises:
        DescriptorError: a limit is not a positive int, or `query_lens` or `active_loras` is not a
            tuple of ints.
    """

    max_num_reqs: int
    max_num_tokens: int
    query_lens: tuple[int, ...] = attrs.field(default=(1,), converter=_as_tuple)
    active_loras: tuple[int, ...] = attrs.field(default=(0,), converter=_as_tuple)

    def __attrs_post_init__(self) -> None:
        for name in ("max_num_reqs", "max_num_tokens"):
            value = getattr(self, name)
            # `is_int` refuses a bool, which Python takes for a number.
            if not is_int(value, 1):
                call = f"weft.Limits({self.max_num_reqs!r}, {self.max_num_tokens!r})"
                raise DescriptorError(
                    call, f"{name}={value!r}", "whole numbers of requests and tokens, at least 1"
                )
        for name in ("query_lens", "active_loras"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(number, int) for number in value):
                call = (
                    f"weft.Limits({self.max_num_reqs!r}, {self.max_num_tokens!r},"
                    f" {name}={value!r:.60})"
                )
                raise DescriptorError(
                    call, kind_of(value), f"a tuple of whole numbers: {name}=(1,)"
                )


@attrs.frozen
class Ladder(Tabled, Generic[D]):
    """The classes that may be captured, largest first, as whole graphs and as pieces. The two parts
    are independent: shortening one does not shorten the other. Iteration yields the classes of
    both.

    Args:
        full: classes of whole graphs.
        piecewise: classes of graphs in pieces.
    """

    full: tuple[D, ...] = attrs.field(default=(), converter=tuple)
    piecewise: tuple[D, ...] = attrs.field(default=(), converter=tuple)

    @classmethod
    def product(cls, kind: Callable[..., D], /, **sizes: Iterable[int] | int) -> "Ladder[D]":
        """The ladder of whole graphs with a class for each combination of sizes.

        Args:
            kind: the class of descriptors. If it inherits from `weft.Descriptor`, descriptors are
                ordered size by size: a batch runs under the least value of each size that holds it.
            sizes: for each argument of `kind`, its values, or one value for all classes.

        Raises:
            DescriptorError: `kind` is not a class of descriptors, an argument has no values or
                values that are not ints, or `kind` refuses a combination.

        To leave out combinations, filter them: `[d for d in Ladder.product(...) if d.height >=
        d.width]` is a ladder.

        >>> @attrs.frozen
        ... class Resolution(Descriptor):
        ...     height: int
        ...     width: int
        >>> [(d.height, d.width) for d in Ladder.product(Resolution, height=(64, 128), width=range(64, 193, 64))]
        [(128, 192), (128, 128), (64, 192), (128, 64), (64, 128), (64, 64)]
        """
        values = _check_product(kind, sizes)
        descriptors = [
            _make(kind, dict(zip(values, row, strict=True)))
            for row in itertools.product(*values.values())
        ]
        return Ladder(
            sorted(dict.fromkeys(descriptors), key=lambda d: _volume(d, values), reverse=True)
        )

    def __iter__(self) -> Iterator[D]:
        return iter((*self.full, *self.piecewise))

    def __len__(self) -> int:
        return len(self.full) + len(self.piecewise)

    def _table(self) -> Table:
        """A table with one row per kind of classes."""
        rows = [*_kinds("full", self.full), *_kinds("piecewise", self.piecewise)]
        return Table(("mode", "classes", "of"), tuple(rows), f"a ladder of {len(self)} classes")


def _volume(descriptor: Any, names: Iterable[str]) -> tuple[int, ...]:
    """The sort key of a product's classes: their volume, then their sizes in order."""
    sizes = [getattr(descriptor, name) for name in names]
    # The sizes too, so that the order is the same in each process, whatever the order of the
    # arguments.
    return (math.prod(sizes), *sizes)


def _product_text(kind: Any, sizes: Mapping[str, Any]) -> str:
    return f"Ladder.product({', '.join([_name(kind), *(f'{name}={size!r:.40}' for name, size in sizes.items())])})"


def _name(kind: Any) -> str:
    if isinstance(kind, type):
        return kind.__name__
    return f"{kind!r:.60}"


def _values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def _make(kind: Callable[..., D], sizes: Mapping[str, int]) -> D:
    try:
        return kind(**sizes)
    # A class of the user may refuse a combination by any error.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        instead = "sizes that all go together, or a list of the descriptors"
        raise DescriptorError(_product_text(kind, sizes), problem, instead) from error


def _check_product(kind: Any, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The values of each argument of a product. Raises DescriptorError if no descriptors can be
    made of them."""
    call = _product_text(kind, sizes)
    if isinstance(kind, type):
        arguments = argument_names(kind)
    else:
        arguments = ()
    values = {name: (value,) if is_int(value) else value for name, value in sizes.items()}
    values = {
        name: tuple(size_values)
        for name, size_values in values.items()
        if isinstance(size_values, Iterable) and not isinstance(size_values, str)
    }
    wrong = [
        name
        for name in sizes
        if not values.get(name) or not all(is_int(size, 0) for size in values[name])
    ]
    unknown = [name for name in sizes if arguments and name not in arguments]
    if not isinstance(kind, type) or not hasattr(kind, "covers"):
        if isinstance(kind, type):
            name = kind.__name__
        else:
            name = "Resolution"
        problem = f"{_name(kind)}, not a class of descriptors"
        instead = f"class {name}(weft.Descriptor), which has covers"
    elif wrong:
        problem = f"{wrong[0]}={sizes[wrong[0]]!r:.60}"
        instead = f"one or more ints: {wrong[0]}=(64, 128)"
    elif unknown or not sizes:
        if unknown:
            problem = f"{kind.__name__} has no {unknown[0]}"
        else:
            problem = "no sizes"
        instead = f"the sizes of {', '.join(arguments) or 'its arguments'}"
    else:
        return values
    raise DescriptorError(call, problem, instead)


def _kinds(mode: str, classes: Sequence[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (mode, kind, sizes in increasing order) for each kind of classes; classes that are not
    `BatchDescriptor` appear as they print."""
    groups: dict[tuple[str, str], list[Any]] = {}
    # The ladder has the largest first; a reader counts upwards.
    for descriptor in reversed(classes):
        groups.setdefault(_kind(descriptor), []).append(descriptor)
    for (kind, unit), group in groups.items():
        if unit:
            sizes = [str(getattr(descriptor, unit)) for descriptor in group]
        else:
            sizes = [*map(str, group)]
        yield (
            mode,
            kind,
            (f"{', '.join(sizes)} {unit.removeprefix('num_')}" if unit else "; ".join(sizes)),
        )


def _kind(descriptor: Any) -> tuple[str, str]:
    """The kind of a class, and the name of the attribute that holds its size."""
    if not isinstance(descriptor, BatchDescriptor):
        return type(descriptor).__name__, ""
    if descriptor.num_active_loras:
        loras = f", {descriptor.num_active_loras} LoRAs"
    else:
        loras = ""
    if descriptor.is_uniform:
        return f"uniform x{descriptor.query_len}{loras}", "num_reqs"
    return f"ragged{loras}", "num_tokens"


def as_ladder(ladder: Ladder[D] | Sequence[D]) -> Ladder[D]:
    """Return a ladder as it is, and a sequence of descriptors as a ladder of whole graphs."""
    if isinstance(ladder, Ladder):
        return ladder
    return Ladder(full=tuple(ladder))


def rungs(limit: int) -> tuple[int, ...]:
    """The numbers of requests of uniform classes: 1, 2, 4, 8, then steps of 8 up to 128, then eight
    steps per doubling, up to and including `limit`. Above 8, padding is at most 8 requests or an
    eighth of the batch, whichever is more.

    >>> rungs(20), rungs(300)[-4:]
    ((1, 2, 4, 8, 16, 20), (240, 256, 288, 300))
    """
    sizes = [1, 2, 4]
    size = 8
    while size < limit:
        sizes.append(size)
        # An eighth of the largest power of two that is not greater.
        size += max(8, 1 << size.bit_length() - 4)
    if limit > 0:
        return (*(s for s in sizes if s < limit), limit)
    return ()


def token_rungs(limit: int) -> tuple[int, ...]:
    """The numbers of tokens of ragged classes: powers of two up to 128, where reading the weights
    bounds a step and padding costs little; then four steps per doubling, so that padding is at most
    a quarter of the batch.

    >>> token_rungs(20), token_rungs(300)[-5:]
    ((1, 2, 4, 8, 16, 20), (160, 192, 224, 256, 300))
    """
    sizes = list[int]()
    size = 1
    while size < limit:
        sizes.append(size)
        # A fourth of the largest power of two that is not greater.
        size += size if size < 128 else 1 << size.bit_length() - 3
    if limit > 0:
        return (*sizes, limit)
    return ()


def lora_rungs(max_loras: int, *, specialised: bool = True) -> tuple[int, ...]:
    """The numbers of active LoRAs to capture for: 0, the powers of two below the maximum, and the
    maximum (if not specialised, only 0 and the maximum).

    Args:
        max_loras: the most adapters that a batch may use at once.
        specialised: whether each of these numbers has its own graphs.

    >>> lora_rungs(5), lora_rungs(5, specialised=False), lora_rungs(0)
    ((0, 1, 2, 4, 5), (0, 5), (0,))
    """
    if not specialised:
        if max_loras:
            return (0, max_loras)
        return (0,)
    powers = [2**i for i in range(max_loras.bit_length()) if 2**i < max_loras]
    if max_loras:
        return (0, *powers, max_loras)
    return (0,)


def make_ladder(
    mode: str,
    limits: Limits,
    sizes: Sequence[int] | None = None,
    *,
    capability: str = "full",
    strict: bool = True,
) -> Ladder[BatchDescriptor]:
    """The classes that `mode` may capture under `limits`.

    Whole graphs have uniform classes `R x q` for every query length q, up to R = `max_num_reqs`
    requests. Mode `full` adds ragged classes for up to `max_num_reqs * max(query_lens)` tokens, for
    decode mixed with the end of a prefill.

    Pieces have ragged classes of up to `max_num_tokens` tokens, each with as many requests as it
    can hold, so that there is one class per number of tokens. Uniform classes that have no whole
    graph are captured as pieces too; in them attention is launched as in a whole graph and sums in
    the same order.

    A batch that no class covers runs eagerly.

    Making a ladder captures nothing. On a CPU, its graphs save no time unless they are compiled
    (`graphify(..., compiler="inductor")`): they pad, and keep intermediate tensors, to find
    mistakes that a GPU would show. To serve on a CPU, use mode `none`
    (`graph="none"`). There, capturing the classes of the demo takes about 1 s and 8 MiB in mode
    `full`, 2 s and 240 MiB in `full_and_piecewise`.

    Args:
        mode: one of `MODES`; `full_and_piecewise` has whole graphs for uniform decode, and pieces
            for all other batches.
        limits: the limits of a batch.
        sizes: numbers of requests (uniform) and of tokens (ragged), instead of `rungs` and
            `token_rungs`.
        capability: the graphs in which the attention can run, one of
            `weft.ops.attention.capabilities.CAPABILITIES`.
        strict: True: a mode in which the attention cannot run is an error. False: it is lowered to
            the next mode in which attention can run, with a `LoweredModeWarning`.

    Raises:
        DescriptorError: the mode or capability is unknown, no batch is within the limits, all sizes
            are beyond the limits, or the attention cannot run in the graphs of this mode.

    >>> [str(d) for d in make_ladder("full", Limits(max_num_reqs=2, max_num_tokens=64))]
    ['ragged 2 tokens, 2 reqs', 'uniform x1, 2 reqs', 'ragged 1 tokens, 1 reqs', 'uniform x1, 1 reqs']
    """
    _check(mode, limits, sizes, capability)
    call = f"make_ladder({mode!r}, {limits}, capability={capability!r})"
    mode = mode_within(call, mode, limits.query_lens, capability, strict)
    if mode == "none":
        uniform = []
    else:
        uniform = _uniform(limits, sizes)
    # More tokens than a full decode batch has are a prefill, which is long enough to hide its
    # launches.
    most = min(limits.max_num_reqs * max(limits.query_lens), limits.max_num_tokens)
    if mode == "full":
        mixed = _ragged(limits, most, sizes)
    else:
        mixed = []
    if "piecewise" in mode:
        pieces = _ragged(limits, limits.max_num_tokens, sizes)
    else:
        pieces = []
    # Attention of capability uniform_single_token runs in whole graphs only for one token a
    # request.
    whole = [
        d
        for d in uniform
        if mode != "piecewise" and (d.query_len == 1 or _includes(capability, "uniform"))
    ]
    # A ragged class covers uniform batches too, but a uniform class keeps attention's launch.
    if "piecewise" in mode:
        pieces = [*pieces, *(d for d in uniform if d not in whole)]
    if sizes and mode != "none" and not (whole or mixed or pieces):
        call = f"make_ladder({mode!r}, {limits}, sizes={sizes})"
        instead = "sizes within the limits, or sizes=None"
        raise DescriptorError(call, "only sizes that no batch within the limits can have", instead)
    return Ladder(_largest_first([*whole, *mixed]), _largest_first(pieces))


def _includes(capability: str, needed: str) -> bool:
    return CAPABILITIES.index(capability) >= CAPABILITIES.index(needed)


def mode_within(
    call: str, mode: str, query_lens: Sequence[int], capability: str, strict: bool = False
) -> str:
    """The mode itself, or with a `LoweredModeWarning` the next lower mode in which attention of
    this capability can run.

    Args:
        query_lens: the query lengths of uniform batches, as in `Limits`.
        strict: raise DescriptorError instead of lowering the mode.
    """
    if tuple(query_lens) == (1,):
        single = "uniform_single_token"
    else:
        single = "uniform"
    needs = {
        "none": "none",
        "piecewise": "piecewise",
        "full_and_piecewise": (
            "uniform_single_token"
        ),  # uniform batches of more tokens run in pieces
        "full_decode_only": single,
        "full": "full",
    }
    able = [one for one in MODES if _includes(capability, needs[one])]
    lowered = mode
    # Ends, because `none` needs nothing and every chain of `_LOWER` ends there.
    while lowered not in able:
        lowered = _LOWER.get(lowered, "none")
    if lowered == mode:
        return mode
    problem = f"attention of capability {capability!r}; this mode needs {needs[mode]!r}"
    if strict:
        raise DescriptorError(call, problem, f"one of {', '.join(able)}")
    warnings.warn(
        f"graph mode {mode!r} is lowered to {lowered!r}: {problem}",
        LoweredModeWarning,
        stacklevel=2,
    )
    return lowered


def with_whole(
    ladder: Ladder[BatchDescriptor], inside: Callable[[int | None], bool]
) -> Ladder[BatchDescriptor]:
    """The same classes, but with whole graphs for those whose attention can run inside one.

    Args:
        inside: whether attention of a query length (None: ragged) can run inside a graph.
    """
    whole = [d for d in ladder if d in ladder.full or inside(d.query_len)]
    return Ladder(_largest_first(whole), tuple(d for d in ladder.piecewise if d not in whole))


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
    """The ragged classes for batches of up to `most` tokens.

    The usual rungs are those of `max_num_tokens`, up to the first one that holds `most`: so modes
    with different `most` share their classes."""
    rungs = token_rungs(limits.max_num_tokens) if sizes is None else sizes
    most = next(t for t in rungs if t >= most) if sizes is None else most
    return [
        # A batch of t tokens has at most t requests; one class for all numbers of requests up to
        # that.
        BatchDescriptor(t, min(t, limits.max_num_reqs), None, loras)
        for t in rungs
        for loras in limits.active_loras
        if t <= most
    ]


def _largest_first(descriptors: Sequence[BatchDescriptor]) -> tuple[BatchDescriptor, ...]:
    # Captures follow this order: the input buffers of smaller classes then lie inside the
    # largest's.
    return tuple(
        sorted(
            set(descriptors),
            key=lambda d: (-d.num_tokens, -d.num_reqs, -d.num_active_loras, d.is_uniform),
        )
    )


def _check(mode: str, limits: Any, sizes: Sequence[int] | None, capability: str) -> None:
    call = f"make_ladder({mode!r}, {limits}, sizes={sizes}, capability={capability!r})"
    if mode not in MODES:
        raise DescriptorError(call, "an unknown mode", f"one of {', '.join(MODES)}")
    if capability not in CAPABILITIES:
        raise DescriptorError(call, "an unknown capability", f"one of {', '.join(CAPABILITIES)}")
    if not isinstance(limits, Limits):
        raise DescriptorError(
            call, "limits that are not a weft.Limits", "weft.Limits(max_num_reqs, max_num_tokens)"
        )
    if isinstance(sizes, int | str) or (
        sizes is not None and not all(isinstance(size, int) for size in sizes)
    ):
        raise DescriptorError(
            call,
            "sizes that are not a list of ints",
            "sizes=[1, 2, 4], or None for the usual rungs",
        )
    if (
        not limits.query_lens
        or min(limits.query_lens) < 1
        or (sizes is not None and min(sizes, default=1) < 1)
    ):
        by_sizes = sizes is not None and min(sizes, default=1) < 1
        if by_sizes:
            problem = f"sizes={list(sizes or ())}"
        else:
            problem = f"query_lens={limits.query_lens}"
        if by_sizes:
            instead = "sizes of at least 1, or None for the usual rungs"
        else:
            instead = "query_lens=(1,) for plain decode"
        raise DescriptorError(call, problem, instead)
    if not limits.active_loras or min(limits.active_loras) < 0:
        raise DescriptorError(
            call,
            "active_loras that is empty, or holds a negative number",
            "active_loras=lora_rungs(max_loras)",
        )
