"""`dispatch_table` shows the decisions of `dispatch` for many classes, as a table and a plot for notebooks."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from weft.display.plots import axes_for, legend, rows
from weft.display.tables import COLOURS, Table, Tabled
from weft.errors import DescriptorError
from weft.transforms.graphs.dispatch import EXACT, LEAST, NONE, Decision, dispatch, excess, padding_text
from weft.transforms.graphs.ladder import Ladder, Limits, make_ladder

_OWN, _PADDING, _EAGER = COLOURS[0], COLOURS[7], COLOURS[9]
_MOST_NAMED = 32
HEADER = ("batch", "mode", "class", "padding", "reason")


@attrs.frozen
class Row:
    """A class of batches, and its dispatch decision."""

    batch: Any
    decision: Decision[Any]

    def cells(self) -> tuple[str, ...]:
        """The cells of the row as text, one per column of `HEADER`."""
        mode, chosen = self.decision.mode, self.decision.descriptor
        if mode == "none":
            return str(self.batch), mode, "", "", NONE
        why = EXACT if chosen == self.batch else LEAST
        return str(self.batch), mode, str(chosen), padding_text(self.decision.padding), why


@attrs.frozen(repr=False)
class DispatchTable(Tabled):
    """The decisions for several classes, as `dispatch_table` returns them; prints aligned, and is a table in notebooks.

    Args:
        rows: one class and its decision per row.
    """

    rows: tuple[Row, ...]

    def table(self) -> Table:
        """The rows as text."""
        return Table(HEADER, tuple(row.cells() for row in self.rows))

    def plot(self, size: str | None = None, *, ax: Any = None) -> Any:
        """Draw each batch as a bar of its own size and its padding (matplotlib).

        Args:
            size: the size to draw, an int attribute of the classes. None: the first size that any batch pads, which is
                `num_tokens` for a `BatchDescriptor`.
            ax: the axes to draw in; None: new ones.

        Returns:
            The axes.

        Raises:
            MissingPackageError: matplotlib is not installed.
            DescriptorError: no class has this size.
        """
        if size is not None:
            self._check_size(size)
        ax = axes_for("dispatch_table(...).plot()", ax, 8.0, 1.2 + 0.24 * min(len(self.rows), _MOST_NAMED))
        name = self._padded_size() if size is None else size
        own = [getattr(row.batch, name, 0) for row in self.rows]
        more = [dict(row.decision.padding).get(name, 0) for row in self.rows]
        colours = [_EAGER if row.decision.mode == "none" else _OWN for row in self.rows]
        names = [str(row.batch) for row in self.rows] if len(self.rows) <= _MOST_NAMED else None
        rows(ax, (own, colours, ""), (more, _PADDING, ""), names=names)
        if names is None:
            ax.set_ylabel("batches, in their order")
        wasted = sum(more) / max(sum(own) + sum(more), 1)
        scale = " (logarithmic)" * (ax.get_xscale() == "log")
        ax.set(xlabel=name.removeprefix("num_") + scale, title=f"{wasted:.0%} of what is computed is padding")
        legend(ax, {"the batch's own": _OWN, "padding": _PADDING, "no class covers it": _EAGER})
        return ax

    def _check_size(self, size: str) -> None:
        if not any(isinstance(getattr(row.batch, size, None), int) for row in self.rows):
            own = {name: None for row in self.rows for name in excess(row.batch, row.batch)}
            instead = f"one of {', '.join(own)}, or None: the first that is padded"
            raise DescriptorError(
                f"dispatch_table(...).plot({size!r})", "a size that these classes do not have", instead
            )

    def _padded_size(self) -> str:
        names = (name for row in self.rows for name, _ in row.decision.padding)
        return next(names, "num_tokens")


def dispatch_table(
    ladder: Ladder[Any] | Sequence[Any] | Limits, descriptors: Iterable[Any], *, mode: str = "full_and_piecewise"
) -> DispatchTable:
    """The decisions of `dispatch` for each of `descriptors`, as a table.

    Args:
        ladder: a ladder, or limits, which become a ladder by `make_ladder(mode, limits)`.
        descriptors: classes of batches, in the order of the rows.
        mode: the mode of a ladder made from limits; not used with a ladder.

    >>> from weft.descriptor import BatchDescriptor as B
    >>> dispatch_table([B.uniform(4), B.uniform(2)], [B.uniform(2), B.uniform(3), B(3, 3)])
    batch                    mode  class               padding         reason
    uniform x1, 2 reqs       full  uniform x1, 2 reqs                  exactly
    uniform x1, 3 reqs       full  uniform x1, 4 reqs  1 token, 1 req  the least of the ladder that covers it
    ragged 3 tokens, 3 reqs  none                                      no captured class covers it
    """
    if hasattr(descriptors, "covers") or isinstance(descriptors, Limits | Ladder):
        kinds = f"{type(ladder).__name__}, {type(descriptors).__name__}"
        seen = "one class" if hasattr(descriptors, "covers") else "a ladder where the classes of batches should be"
        raise DescriptorError(f"dispatch_table({kinds})", seen, "dispatch_table(ladder, [descriptor, ...])")
    rungs = make_ladder(mode, ladder) if isinstance(ladder, Limits) else ladder
    return DispatchTable(tuple(Row(own, dispatch(own, rungs)) for own in descriptors))
