"""`prepare_schema`: a JSON Schema with what llguidance 1.9 would not enforce written out, or refused.

llguidance enforces a keyword in full or refuses it by its name. Exceptions were found by drawing
random schemas and answers, which `tests/transforms/server/test_schema_law.py` continues to do.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from weft.errors import RequestError

# How llguidance reads a schema. A client's own options, which could switch keywords off, are lost.
# Without the escape \uNNNN: it could spell the name of a property in a second way, and llguidance
# would take that for another property, whose value may be anything.
OPTIONS = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": r"nrbtf\""}
# Characters that JSON writes by that escape alone; and U+007F, which llguidance does so too.
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# Keywords whose values are no schemas, and those that map names to schemas.
_VALUES = {"const", "enum", "default", "examples"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# Texts of these formats match patterns as well, since llguidance's formats also allow February 29th
# in each year, and a leap second in each minute.
_LEAP_YEAR = r"([1-9]\d(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = rf"^([1-9]\d{{3}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_PATTERNS = {
    "date": _DATE,
    "time": r"^\d\d:\d\d:[0-5]",
    "date-time": rf"{_DATE}[-\d]*[Tt]\d\d:\d\d:[0-5]",
}
# An escape, or a class of characters with its body, as JSON Schema reads them; and what is an
# operation on sets to llguidance, but only characters of the class in JSON Schema.
_CLASS = re.compile(r"\\.|\[\^?((?:\\.|[^\\\]])*)\]", re.DOTALL)
_SET_OPERATION = re.compile(r"\\.|(\[|&&|--|~~)", re.DOTALL)
# A number of more digits, or of a larger exponent, is read as one of its neighbours.
_MOST_DIGITS = 2**53
_MOST_EXPONENT = 22


def prepare_schema(call: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for llguidance, which allows only what fits `schema`.

    Args:
        call: the call that errors show.

    Raises:
        RequestError: a number that llguidance would round, a text that it does not write, a
            pattern that it reads otherwise, or a `minProperties` that two properties of one name
            could meet.
    """
    return {**_prepared(call, schema, "schema"), "x-guidance": OPTIONS}


def _prepared(call: str, schema: Any, name: str) -> Any:
    """The schema in the keyword `name`."""
    if isinstance(schema, list):
        return [_prepared(call, each, name) for each in schema]
    if not isinstance(schema, Mapping):
        _check_numbers(call, schema, name)
        return schema
    _check_least_properties(call, schema)
    prepared = dict(schema)
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):  # true of each object
        del prepared["propertyNames"]
    for key, value in schema.items():
        if key not in prepared:
            continue
        if key == "properties":
            _check_texts(call, list(value) if isinstance(value, Mapping) else value, key)
        elif key in ("const", "enum"):
            _check_texts(call, value, key)
        elif key == "pattern":
            _check_pattern(call, value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(call, pattern)
        if key in _MAPS and isinstance(value, Mapping):
            prepared[key] = {each: _prepared(call, part, each) for each, part in value.items()}
        elif key in _VALUES:
            _check_numbers(call, value, key)
        else:
            prepared[key] = _prepared(call, value, key)
    kind = schema.get("format")
    parts = prepared.get("allOf", [])
    if isinstance(kind, str) and kind in _PATTERNS and isinstance(parts, list):
        prepared["allOf"] = [*parts, {"pattern": _PATTERNS[kind]}]
    return prepared


def _check_least_properties(call: str, schema: Mapping[str, Any]) -> None:
    """Refuse a `minProperties` that needs two properties that are not `required`: llguidance would
    allow the same name for both, and a reader of the answer keeps one of them."""
    least = schema.get("minProperties", 0)
    required = schema.get("required", [])
    if not isinstance(least, int | float) or not isinstance(required, list):
        return  # llguidance refuses it
    num_required = len({*map(str, required)})
    if least > num_required + 1:
        problem = f"minProperties={least} with {num_required} required properties"
        instead = "at most one more than are required, since others may have the same name"
        raise RequestError(call, problem, instead)


def _check_pattern(call: str, pattern: Any) -> None:
    if not isinstance(pattern, str):
        return  # llguidance refuses it
    for characters in _CLASS.finditer(pattern):
        for part in _SET_OPERATION.finditer(characters[1] or ""):
            if part[1] is not None:
                problem = f"{part[1]!r} in {characters[0]!r:.80} of the pattern {pattern!r:.80}"
                instead = "a backslash before each of these characters"
                raise RequestError(call, problem, instead)


def _check_texts(call: str, value: Any, name: str) -> None:
    if isinstance(value, str):
        if (character := _UNWRITTEN.search(value)) is not None:
            problem = f"the control character {character[0]!a} in {name!r}"
            raise RequestError(call, problem, "a text without it")
    elif isinstance(value, Mapping):
        _check_texts(call, [*value, *value.values()], name)
    elif isinstance(value, list):
        for each in value:
            _check_texts(call, each, name)


def _check_numbers(call: str, value: Any, name: str) -> None:
    if isinstance(value, Mapping):
        for each in value.values():
            _check_numbers(call, each, name)
    elif isinstance(value, list):
        for each in value:
            _check_numbers(call, each, name)
    elif isinstance(value, float) and not _is_exact(value):
        problem = f"{value!r} in {name!r}, which would be rounded"
        raise RequestError(call, problem, "a finite number of at most 15 digits")


def _is_exact(value: float) -> bool:
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    if not isinstance(exponent, int):  # not finite
        return False
    number = int("".join(map(str, digits)))
    return number <= _MOST_DIGITS and abs(exponent) <= _MOST_EXPONENT
