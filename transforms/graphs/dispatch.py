"""`dispatch` chooses the captured class for a batch, as a pure function; `dispatch_table` shows its
decisions."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import attrs

from weft.arguments.checks import is_int
from weft.batches.descriptor import Descriptor, arguments_of
from weft.display.plots import axes_for, legend, rows
from weft.display.tables import COLOURS, Table, Tabled
from weft.errors import DescriptorError
from weft.transforms.graphs.ladder import Ladder, Limits, as_ladder, make_ladder

D = TypeVar("D", bound=Descriptor)
EXACT = "exactly"
LEAST = "the least of the ladder that covers it"
NONE = "no captured class covers it"


@attrs.frozen
class Decision(Generic[D]):
    """Where a batch is dispatched: to a whole graph (`full`) or to pieces (`piecewise`) of class
    `descriptor`, or unpadded to the function itself (`none`).

    Args:
        mode: `full`, `piecewise` or `none`.
        descriptor: the class that the batch runs under.
        reason: the reason in words.
        padding: (name, number) for each size that is padded, as in `(("num_tokens", 3),)`; empty if
            the class is the batch's own.

    >>> from weft.batches.descriptor import BatchDescriptor as B
    >>> print(dispatch(B(2, 2), [B(4, 4)]))  # doctest: +ELLIPSIS
    'ragged 2 tokens, 2 reqs' runs under 'ragged 4 tokens, 4 reqs', the least ...; padded by 2 tokens, 2 reqs
    """

    mode: str
    descriptor: D
    reason: str
    padding: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        padded = padding_text(self.padding)
        if padded:
            return f"{self.reason}; padded by {padded}"
        return self.reason


def dispatch(descriptor: D, ladder: Ladder[D] | Sequence[D]) -> Decision[D]:
    """The least class of the ladder that covers `descriptor`, by mode and then by padding.

    The function is total and deterministic. Whole graphs come before pieces. Within a mode, the
    least class in the partial order `covers` is chosen. Among several incomparable ones the class
    with the least padding wins, compared by the first size (tokens, for a `BatchDescriptor`), then
    by the next; among equals, the one later in the ladder.
    `weft.proofs.evidence.solver.dispatch_proof` proves this about this code.

    Raises:
        DescriptorError: two classes cover each other and are not equal, so `covers` is not a
            partial order; or an argument is not a descriptor, or not a ladder.

    >>> from weft.batches.descriptor import BatchDescriptor as B
    >>> dispatch(B.uniform(3), [B.uniform(8), B.uniform(4), B.uniform(2)]).descriptor
    BatchDescriptor(num_tokens=4, num_reqs=4, query_len=1, num_active_loras=0)
    """
    if not hasattr(descriptor, "covers") or not isinstance(ladder, Iterable):
        raise _wrong_arguments(descriptor, ladder)
    # Modes in the order of preference: a whole graph costs one launch, pieces cost several.
    ladder = as_ladder(ladder)
    for mode, classes in (("full", ladder.full), ("piecewise", ladder.piecewise)):
        covering = [d for d in classes if d.covers(descriptor)]
        least = [
            # Quadratic in the classes that cover, of which there are a few dozen; a plan is kept
            # for each signature, so a batch is dispatched once.
            d
            for d in covering
            if not any(d != other and d.covers(other) for other in covering)
        ]
        if covering and not least:
            raise _not_an_order(descriptor, covering)
        if least:
            # `min` takes the first of equals: reversed, so that it is the later one in the ladder.
            chosen = min(reversed(least), key=lambda d: tuple(excess(d, descriptor).values()))
            if mode == "full":
                in_pieces = ""
            else:
                in_pieces = ", in pieces"
            if chosen == descriptor:
                why = EXACT
            else:
                why = LEAST
            padding = tuple(
                (name, more) for name, more in excess(chosen, descriptor).items() if more
            )
            return Decision(
                mode, chosen, f"'{descriptor}' runs under '{chosen}'{in_pieces}, {why}", padding
            )
    return Decision("none", descriptor, f"no captured class covers '{descriptor}'")


def _wrong_arguments(descriptor: Any, ladder: Any) -> DescriptorError:
    """The error for arguments that are not a descriptor and a ladder."""
    # The two arguments in the other order is the mistake that is made most.
    if hasattr(ladder, "covers"):
        return DescriptorError(
            f"dispatch(..., '{ladder}')",
            "a descriptor where the ladder should be",
            "dispatch(descriptor, ladder)",
        )
    call = f"dispatch({type(descriptor).__name__}, {type(ladder).__name__})"
    if hasattr(descriptor, "descriptor"):
        return DescriptorError(
            call, "a batch where its class should be", "dispatch(batch.descriptor, ladder)"
        )
    return DescriptorError(
        call,
        "not a descriptor, or not a ladder",
        "dispatch(batch.descriptor, make_ladder(mode, limits))",
    )


def excess(larger: Any, smaller: Any) -> dict[str, int]:
    """The difference in each size between class `larger` and class `smaller`, which it covers.

    The sizes are the int arguments of `smaller`, in order (attrs, dataclasses and named tuples list
    their arguments; for other classes the attributes are used). A size that the larger class leaves
    open (None) is not padded. A class with other sizes defines a method `excess(self, smaller)`
    that returns such a dict: `{"pixels": ...}` for an image's resolution.

    >>> from weft.batches.descriptor import BatchDescriptor as B
    >>> excess(B(8, 4), B.uniform(3))
    {'num_tokens': 5, 'num_reqs': 1, 'query_len': 0, 'num_active_loras': 0}
    """
    # Not part of the protocol `Descriptor`: most classes have sizes that are plain arguments.
    if (method := getattr(larger, "excess", None)) is not None:
        return dict(method(smaller))
    pairs = [(name, getattr(larger, name), size) for name, size in arguments_of(smaller).items()]
    return {name: a - b if is_int(a) else 0 for name, a, b in pairs if is_int(b)}


def padding_text(padding: Sequence[tuple[str, int]]) -> str:
    """The padding in words, as `3 tokens, 1 req`; empty if there is none."""
    # `num_tokens` reads as "3 tokens".
    names = [(name.removeprefix("num_").replace("_", " "), more) for name, more in padding]
    return ", ".join(
        f"{more} {name.removesuffix('s') if more == 1 else name}" for name, more in names
    )


def _not_an_order(descriptor: Any, covering: Sequence[Any]) -> DescriptorError:
    a, b = next(
        (a, b) for a in covering for b in covering if a != b and a.covers(b) and b.covers(a)
    )
    return DescriptorError(
        f"dispatch('{descriptor}', <ladder>)",
        f"'{a}' and '{b}' cover each other and are not equal",
        "make covers a partial order, in which two classes that cover each other are equal",
    )


_OWN = COLOURS[0]
_PADDING = COLOURS[7]
_EAGER = COLOURS[9]
_MOST_NAMED = 32
HEADER = ("batch", "mode", "class", "padding", "reason")


@attrs.frozen
class Row:
    """A class of batches, and its dispatch decision."""

    batch: Any
    decision: Decision[Any]

    def cells(self) -> tuple[str, ...]:
        """The cells of the row as text, one per column of `HEADER`."""
        mode = self.decision.mode
        chosen = self.decision.descriptor
        if mode == "none":
            return str(self.batch), mode, "", "", NONE
        why = EXACT if chosen == self.batch else LEAST
        return str(self.batch), mode, str(chosen), padding_text(self.decision.padding), why


@attrs.frozen(repr=False)
class DispatchTable(Tabled):
    """The decisions for several classes, as `dispatch_table` returns them; prints aligned, and is a
    table in notebooks.

    Args:
        rows: one class and its decision per row.
    """

    rows: tuple[Row, ...]

    def _table(self) -> Table:
        """The rows as text."""
        return Table(HEADER, tuple(row.cells() for row in self.rows))

    def plot(self, size: str | None = None, *, ax: Any = None) -> Any:
        """Draw each batch as a bar of its own size and its padding (matplotlib).

        Args:
            size: the size to draw, an int attribute of the classes. None: the first size that any
                batch pads, which is `num_tokens` for a `BatchDescriptor`.
            ax: the axes to draw in; None: new ones.

        Returns:
            The axes.

        Raises:
            MissingPackageError: matplotlib is not installed.
            DescriptorError: no class has this size.
        """
        if size is not None:
            self._check_size(size)
        ax = axes_for(
            "dispatch_table(...).plot()", ax, 8.0, 1.2 + 0.24 * min(len(self.rows), _MOST_NAMED)
        )
        if size is None:
            name = self._padded_size()
        else:
            name = size
        sizes = [getattr(row.batch, name, 0) for row in self.rows]
        more = [dict(row.decision.padding).get(name, 0) for row in self.rows]
        colours = [_EAGER if row.decision.mode == "none" else _OWN for row in self.rows]
        if len(self.rows) <= _MOST_NAMED:
            names = [str(row.batch) for row in self.rows]
        else:
            names = None
        rows(ax, (sizes, colours, ""), (more, _PADDING, ""), names=names)
        # With more bars than fit, their names would overlap.
        if names is None:
            ax.set_ylabel("batches, in their order")
        wasted = sum(more) / max(sum(sizes) + sum(more), 1)
        # `rows` chooses the scale by the range of the bars; a reader must be told which.
        scale = " (logarithmic)" * (ax.get_xscale() == "log")
        ax.set(
            xlabel=name.removeprefix("num_") + scale,
            title=f"{wasted:.0%} of what is computed is padding",
        )
        legend(ax, {"the batch's own": _OWN, "padding": _PADDING, "no class covers it": _EAGER})
        return ax

    def _check_size(self, size: str) -> None:
        if not any(isinstance(getattr(row.batch, size, None), int) for row in self.rows):
            size_names = {name: None for row in self.rows for name in excess(row.batch, row.batch)}
            instead = f"one of {', '.join(size_names)}, or None: the first that is padded"
            raise DescriptorError(
                f"dispatch_table(...).plot({size!r})",
                "a size that these classes do not have",
                instead,
            )

    def _padded_size(self) -> str:
        names = (name for row in self.rows for name, _ in row.decision.padding)
        return next(names, "num_tokens")


def dispatch_table(
    ladder: Ladder[Any] | Sequence[Any] | Limits,
    descriptors: Iterable[Any],
    *,
    mode: str = "full_and_piecewise",
) -> DispatchTable:
    """The decisions of `dispatch` for each of `descriptors`, as a table.

    Args:
        ladder: a ladder, or limits, which become a ladder by `make_ladder(mode, limits)`.
        descriptors: classes of batches, in the order of the rows.
        mode: the mode of a ladder made from limits; not used with a ladder.

    >>> from weft.batches.descriptor import BatchDescriptor as B
    >>> dispatch_table([B.uniform(4), B.uniform(2)], [B.uniform(2), B.uniform(3), B(3, 3)])
    batch                    mode  class               padding         reason
    uniform x1, 2 reqs       full  uniform x1, 2 reqs                  exactly
    uniform x1, 3 reqs       full  uniform x1, 4 reqs  1 token, 1 req  the least of the ladder that covers it
    ragged 3 tokens, 3 reqs  none                                      no captured class covers it
    """
    if hasattr(descriptors, "covers") or isinstance(descriptors, Limits | Ladder):
        kinds = f"{type(ladder).__name__}, {type(descriptors).__name__}"
        problem = (
            "one class"
            if hasattr(descriptors, "covers")
            else "a ladder where the classes of batches should be"
        )
        raise DescriptorError(
            f"dispatch_table({kinds})", problem, "dispatch_table(ladder, [descriptor, ...])"
        )
    rungs = make_ladder(mode, ladder) if isinstance(ladder, Limits) else ladder
    return DispatchTable(
        tuple(Row(descriptor, dispatch(descriptor, rungs)) for descriptor in descriptors)
    )
