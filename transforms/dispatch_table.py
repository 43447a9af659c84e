"""Where batches go, as a table: what `dispatch` decides for each of many classes, to look at in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import attrs

from weft.transforms.dispatch import EXACT, LEAST, NONE, Decision, dispatch, in_words
from weft.transforms.ladder import Ladder, Limits, make_ladder

HEADER = ("batch", "mode", "class", "padding", "reason")


@attrs.frozen
class Row:
    """A class of batches, and where they go."""

    batch: Any
    decision: Decision[Any]

    def cells(self) -> tuple[str, ...]:
        """The row in words, as `HEADER` names them."""
        mode, chosen = self.decision.mode, self.decision.descriptor
        if mode == "none":
            return str(self.batch), mode, "", "", NONE
        why = EXACT if chosen == self.batch else LEAST
        return str(self.batch), mode, str(chosen), in_words(self.decision.padding), why


@attrs.frozen(repr=False)
class DispatchTable:
    """What `dispatch_table` returns; it prints aligned, and a notebook shows it as a table.

    Args:
        rows: a class of batches each, and where it goes.
    """

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [HEADER, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells()) + "</tr>" for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def dispatch_table(
    ladder: Ladder[Any] | Sequence[Any] | Limits, descriptors: Iterable[Any], *, mode: str = "full_and_piecewise"
) -> DispatchTable:
    """What `dispatch` decides for each of `descriptors`.

    Args:
        ladder: a ladder; or limits, for which `make_ladder(mode, limits)` makes one.
        descriptors: classes of batches, in the order of the rows.
        mode: of the ladder that is made of limits; without them it has no meaning.

    >>> from weft.descriptor import BatchDescriptor as B
    >>> dispatch_table([B.uniform(4), B.uniform(2)], [B.uniform(2), B.uniform(3), B(3, 3)])
    batch                    mode  class               padding         reason
    uniform x1, 2 reqs       full  uniform x1, 2 reqs                  exactly
    uniform x1, 3 reqs       full  uniform x1, 4 reqs  1 token, 1 req  the least of the ladder that covers it
    ragged 3 tokens, 3 reqs  none                                      no captured class covers it
    """
    rungs = make_ladder(mode, ladder) if isinstance(ladder, Limits) else ladder
    return DispatchTable(tuple(Row(own, dispatch(own, rungs)) for own in descriptors))
