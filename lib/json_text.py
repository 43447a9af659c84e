"""JSON: what somebody else wrote, parsed or refused in one way, whatever is wrong with it; and what is written."""

import json
import math
from collections.abc import Iterable
from typing import Any

_MOST_LEVELS = 100


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
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [found]
    for _ in range(_MOST_LEVELS):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) is not value and found[name] != value:
            raise ValueError(f"an object gives {name!r:.60} two values")
    return found


def write_json(value: Any, indent: int | None = None) -> str:
    """The JSON text of a value; null for a number that is not finite, which JSON has no word for, and the text of what
    JSON does not know.

    >>> write_json({"logprobs": [-0.5, float("nan")], "error": ValueError("no")})
    '{"logprobs": [-0.5, null], "error": "no"}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
