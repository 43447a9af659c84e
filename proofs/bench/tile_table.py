"""The best of the tiles that were timed, and the table of them that the package ships."""

import json
from collections.abc import Sequence
from pathlib import Path

import attrs

from weft.ops import tiles
from weft.ops.tiles import MEASURED, Tile, expert_key, linear_key
from weft.proofs.bench.kernel_cases import Sizes


@attrs.frozen
class Product:
    """The kind of product that a tile is searched for.

    Args:
        kind: `linear`, `fp8_linear`, `gate_up` or `down`.
        plain: for `down`, whether its input is still to be quantised.
    """

    kind: str
    tokens: int
    rows: int
    columns: int
    sizes: Sizes
    plain: bool = False

    @property
    def key(self) -> str:
        """Its name in `tiles.json`."""
        if self.kind.endswith("linear"):
            return linear_key(self.rows, self.columns, self.kind == "fp8_linear")
        return expert_key(self.rows, self.columns, self.sizes.num_experts, True)


@attrs.frozen
class Timed:
    """A tile and its seconds, including work that it leaves to other kernels. With tile None, torch's own product."""

    product: Product
    tile: Tile | None
    seconds: float


def best(seen: Sequence[Timed], align_seconds: float) -> dict[str, Tile | None]:
    """The best tiles for one number of tokens, by key. Both products with experts are chosen together."""
    chosen: dict[str, Tile | None] = {}
    for product in dict.fromkeys(one.product for one in seen if one.product.kind.endswith("linear")):
        chosen[product.key] = min((one for one in seen if one.product == product), key=lambda one: one.seconds).tile
    first = [one for one in seen if one.product.kind == "gate_up"]
    second = [one for one in seen if one.product.kind == "down"]
    pairs = [(a, b) for a in first for b in second if _fit(a.tile, b)]
    if pairs:
        a, b = min(pairs, key=lambda pair: pair[0].seconds + pair[1].seconds + align_seconds * _sorts(*pair))
        chosen |= {a.product.key: a.tile, b.product.key: b.tile}
    return chosen


def _fit(first: Tile | None, second: Timed) -> bool:
    """Whether the second product takes the first one's output as it is, quantised or not."""
    return first is not None and second.product.plain == (first.rows != 256)


def _sorts(first: Timed, second: Timed) -> int:
    tiles = [one.tile for one in (first, second) if one.tile is not None and one.tile.sort]
    return len({tile.tokens for tile in tiles})


def update(tokens: int, found: dict[str, Tile | None], out: Path | None) -> None:
    """Put the tiles for one number of tokens into the table, and write the table to the package and to the folder."""
    table = {key: dict(rows) for key, rows in tiles.measured().items()}
    for key, tile in found.items():
        table.setdefault(key, {})[tokens] = tile
    text = format_table(table)
    MEASURED.write_text(text, encoding="utf-8")
    for one in (tiles.measured, tiles.linear_tile, tiles.expert_tile):
        one.cache_clear()
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "tiles.json").write_text(text)


_STORED = 7
"""The fields of a tile that are measured; `segments`, the last, is not."""


def format_table(table: dict[str, dict[int, Tile | None]]) -> str:
    """The text of `tiles.json`, one line per tile."""
    lists = []
    for key, rows in sorted(table.items()):
        entries = [{"tokens": n, "tile": tile and attrs.astuple(tile)[:_STORED]} for n, tile in sorted(rows.items())]
        lists.append(f'  "{key}": [\n    ' + ",\n    ".join(map(json.dumps, entries)) + "\n  ]")
    return "{\n" + ",\n".join(lists) + "\n}\n"
