"""JSON that somebody else wrote: parsed, or refused in one way, whatever is wrong with it."""

import json
from typing import Any


def parse_json(text: str) -> Any:
    """The value that a JSON text holds.

    Raises:
        ValueError: it is not JSON, an object gives a field two values, or it is nested too deeply to be read.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
        ...
    ValueError: an object gives 'a' two values
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise ValueError(f"an object gives {name!r:.60} two values")
    return found
