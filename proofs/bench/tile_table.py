"""The text of the table of tiles that the package ships."""

import json

import attrs

from weft.ops.tiles import Tile

_STORED = 7
"""The fields of a tile that are measured; `segments`, the last, is not."""


def format_table(table: dict[str, dict[int, Tile | None]]) -> str:
    """The text of `tiles.json`, one line per tile."""
    lists = []
    for key, rows in sorted(table.items()):
        entries = [{"tokens": n, "tile": tile and attrs.astuple(tile)[:_STORED]} for n, tile in sorted(rows.items())]
        lists.append(f'  "{key}": [\n    ' + ",\n    ".join(map(json.dumps, entries)) + "\n  ]")
    return "{\n" + ",\n".join(lists) + "\n}\n"
