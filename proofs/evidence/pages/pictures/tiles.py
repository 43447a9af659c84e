"""The picture of tiles: how much longer the chosen one takes than the best one, by shape and number
of tokens, for shapes that the fit had not seen."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from weft.proofs.evidence.pages.pictures.svg import BLUE, ORANGE, RED, document, rect, text
from weft.proofs.evidence.pages.records import Record, read

PICTURE = Path(__file__).parents[3] / "pages" / "tiles.svg"

_CELL = 18
_ROW = 13
_LABEL = 88
_SPACE = 10
# The most of a loss, its colour and opacity, and its name.
_CLASSES = (
    (0.01, BLUE, 0.2, "up to 1 %"),
    (0.05, BLUE, 0.6, "up to 5 %"),
    (0.15, ORANGE, 1.0, "up to 15 %"),
    (float("inf"), RED, 1.0, "more"),
)
_NAMES = {"bf16": "bfloat16", "fp8": "FP8"}


@attrs.frozen
class Loss:
    """A product, `[tokens, columns]` times `[rows, columns]` transposed, and the seconds of its
    chosen tile over those of the best one, less one."""

    tokens: int
    rows: int
    columns: int
    loss: float


def losses(record: Record, model: str) -> list[Loss]:
    """The losses of all folds in `bf16` or `fp8`."""
    folds = record.data["models"][model]
    rows = (row for fold in folds for row in fold["products"])
    return [
        Loss(tokens, height, width, chosen / best - 1)
        for tokens, height, width, chosen, best, *_ in rows
    ]


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that so many percent of all do not exceed.

    >>> [percentile([1.0, 2.0, 3.0, 4.0], percent) for percent in (50, 90, 100)]
    [2.0, 4.0, 4.0]
    """
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def summary(values: Sequence[float]) -> str:
    """Median, 90th percentile and worst, and how many are over the targets."""
    median, most, worst = (f"{100 * percentile(values, percent):.1f}" for percent in (50, 90, 100))
    over = [sum(value > most for value in values) for most in (0.05, 0.15)]
    return (
        f"median {median} %, 90th percentile {most} %, worst {worst} %; {over[0]} of {len(values)}"
        f" over 5 %, {over[1]} over 15 %"
    )


def tile_rows() -> Iterator[tuple[str, ...]]:
    """The losses by kind of product, for the page of measurements."""
    record = read("h100-tile-losses")
    for model, folds in record.data["models"].items():
        products = losses(record, model)
        shapes = len({(one.rows, one.columns) for one in products})
        what = (
            f"chosen tiles, {_NAMES[model]}: {shapes} shapes, each by a fit without it"
            f" ({len(folds)} folds)"
        )
        against = (
            "the best of the whole search; the target is 5 % at the median and 15 % at the worst"
        )
        yield record.row(what, summary([one.loss for one in products]), against, "1 H100")


def picture() -> str:
    """A cell for each product: two blocks of shapes, with the numbers of tokens that were timed for
    them, by kind."""
    record = read("h100-tile-losses")
    losses_by_model = {
        model: {(one.rows, one.columns, one.tokens): one.loss for one in losses(record, model)}
        for model in _NAMES
    }
    counts: dict[tuple[int, int], set[int]] = {}
    for rows, columns, tokens in losses_by_model["bf16"]:
        counts.setdefault((rows, columns), set()).add(tokens)
    # Shapes for the fit and shapes held out have other numbers of tokens, and so columns of their
    # own.
    blocks = sorted(
        {tuple(sorted(token_counts)) for token_counts in counts.values()}, key=len, reverse=True
    )
    parts = [*_head(losses_by_model)]
    width = 0.0
    height = 0.0
    for block in blocks:
        shapes = sorted(
            (shape for shape, token_counts in counts.items() if token_counts == {*block}),
            # By size: where the losses lie is then a part of the picture.
            key=lambda s: (s[0] * s[1], s),
        )
        top = 136.0
        x = width + _LABEL
        for index, (rows, columns) in enumerate(shapes):
            parts.append(
                text(x - 6, top + 10 + index * _ROW, f"{rows}x{columns}", anchor="end", size=10)
            )
        for model, cells in losses_by_model.items():
            parts += _block(cells, shapes, block, x, top, _NAMES[model])
            x += _CELL * len(block) + _SPACE
        width = x
        height = max(height, top + _ROW * len(shapes))
    return document(
        parts, width, height + 6, "loss of the chosen tile by shape and number of tokens"
    )


def _head(losses_by_model: dict[str, dict[tuple[int, int, int], float]]) -> Iterator[str]:
    yield text(
        0, 16, "Chosen against best tiles, of shapes that the fit had not seen (one NVIDIA H100)"
    )
    for index, (model, cells) in enumerate(losses_by_model.items()):
        yield text(0, 38 + 18 * index, f"{_NAMES[model]}: {summary([*cells.values()])}", size=12)
    x = 0.0
    for _, fill, opacity, name in _CLASSES:
        yield rect(x, 68, 14, 11, fill, **{"fill-opacity": opacity})
        yield text(x + 20, 78, name, size=12)
        x += 100 if name != "more" else 60
    yield text(x, 78, "longer than the best of the whole search; empty: not timed", size=12)


def _block(
    cells: dict[tuple[int, int, int], float],
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    left: float,
    top: float,
    name: str,
) -> Iterator[str]:
    middle = left + _CELL * len(tokens) / 2
    yield text(middle, top - 24, f"{name}, tokens", anchor="middle", size=11)
    for column, count in enumerate(tokens):
        x = left + column * _CELL
        yield text(x + _CELL / 2, top - 6, _short(count), anchor="middle", size=8)
        for index, shape in enumerate(shapes):
            # As of heads, which are never in FP8.
            if (loss := cells.get((*shape, count))) is None:
                continue
            _, fill, opacity, _ = next(kind for kind in _CLASSES if loss <= kind[0])
            y = top + index * _ROW
            yield rect(x, y, _CELL - 1, _ROW - 1, fill, **{"fill-opacity": opacity})
            # A number only beyond the target, which leaves the picture readable.
            if loss > 0.05:
                yield text(
                    x + (_CELL - 1) / 2,
                    y + 9.5,
                    f"{100 * loss:.0f}",
                    anchor="middle",
                    size=9,
                    fill="#ffffff",
                )


def _short(count: int) -> str:
    if count >= 1024:
        return f"{count // 1024}k"
    return str(count)
