"""Reads JSON from outside, with errors that name the field and its value; and writes JSON."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import attrs

from weft.arguments.checks import is_int, is_number, kind_of
from weft.errors import ConfigError, RequestError

_MOST_LEVELS = 100
_MOST_BYTES = 2**26
_MOST_INTEGER = 2**31 - 1
# The least and the greatest normal numbers of float32, the widest dtype in which weft computes.
_FLOAT32 = 1.1754944e-38, 3.4028234e38
_MISSING = object()
_NAME = re.compile(r"[\w.-]*")


def parse_json(text: str) -> Any:
    """The value that a JSON text holds.

    Raises:
        ValueError: it is not JSON, an object gives a field two values, or it is nested too deeply.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
        ...
    ValueError: an object gives 'a' two values
    """
    # Python's parser raises RecursionError only at a depth that depends on its version and on the
    # caller's stack. So the levels are also counted, without recursion.
    with contextlib.suppress(RecursionError):
        level = [value := json.loads(text, object_pairs_hook=_object)]
        for _ in range(_MOST_LEVELS):
            level = [inner for one in level for inner in _inside(one)]
            if not level:
                return value
    raise ValueError("it is nested too deeply")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list):
        return value
    return ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        # JSON permits a repeated name, of which Python's parser silently keeps the last value.
        if fields.setdefault(name, value) is not value and fields[name] != value:
            raise ValueError(f"an object gives {name!r:.60} two values")
    return fields


def read_object(path: Path, call: str) -> Mapping[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        ConfigError: the file holds something else or cannot be read. The error names `call`.
    """
    try:
        size = path.stat().st_size
        if size <= _MOST_BYTES:
            raw = parse_json(path.read_text(encoding="utf-8"))
        else:
            raw = None
        if isinstance(raw, dict):
            return raw
        fault = f"holds {kind_of(raw)}, not an object"
        if size > _MOST_BYTES:
            fault = f"holds {size} bytes, and {_MOST_BYTES} are the most"
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except ValueError as error:
        fault = f"is not JSON: {error}"
    raise ConfigError(
        call, f"{path.name} {fault}", f"copy {path.name} again from where the checkpoint came from"
    )


def read_json_lines(file: Path, call: str, what: str, forms: str) -> list[tuple[str, Any]]:
    """The values in a file with one JSON text per line, each with the name of its line (`line 1`).
    Empty lines are skipped.

    Args:
        what, forms: for errors, what a line should hold, and what to write instead.

    Raises:
        RequestError: the file cannot be read, a line is not JSON, or all lines are empty. The error
            names `call`.
    """
    text = ""
    fault = (f"no {what} in it", forms)
    try:
        with file.open(encoding="utf-8") as opened:
            # One character more than allowed, to see that the file is too long without reading it.
            text = opened.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        fault = f"there is no file {str(file)!r:.300}", "the path of a file of UTF-8 text"
    except (OSError, ValueError) as error:
        fault = f"it cannot be read: {getattr(error, 'strerror', error)}", "a file of UTF-8 text"
    if len(text) > _MOST_BYTES:
        text = ""
        fault = (f"more than {_MOST_BYTES} characters", "a part of it")
    named_values = list[tuple[str, Any]]()
    # Not `splitlines`, which also cuts at U+2028 and others that may stand inside a JSON text.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                named_values.append((f"line {number}", parse_json(line)))
            except ValueError as error:
                raise RequestError(call, f"line {number} is not JSON: {error}", forms) from error
    if not named_values:
        raise RequestError(call, *fault)
    return named_values


# Not cattrs: version 26.1 structures {"vocab_size": 64.5, "rms_norm_eps": "1e-6",
# "tie_word_embeddings": 1} without an error, as 64, 1e-06 and True. It would need a custom hook for
# each type, and its errors do not name the value.
@attrs.frozen
class Fields:
    """A JSON object that is being read, and how errors name it.

    Args:
        raw: the object.
        call: the call that the user wrote, for errors.
        source: the file, or whatever else the object came from.
        prefix: the text before a field's name if the object is nested, such as `rope_scaling.`.
    """

    raw: Mapping[str, Any]
    call: str
    source: str
    prefix: str = ""

    def refuse(self, problem: str, instead: str) -> NoReturn:
        """Raise ConfigError that says `{source} has {problem}`."""
        raise ConfigError(self.call, f"{self.source} has {problem}", instead) from None

    def check(self, holds: object, which: str | Mapping[str, Any], instead: str) -> None:
        """Unless `holds`, refuse a field by its name, or several fields that contradict each other
        by their names and values."""
        if holds:
            return
        values = {which: self.raw.get(which, _MISSING)} if isinstance(which, str) else which
        pairs = (
            f"no {self.prefix}{name:.60}"
            if value is _MISSING
            else f"{self.prefix}{name:.60}={value!r:.200}"
            for name, value in values.items()
        )
        self.refuse(" and ".join(pairs), instead)

    def value(self, name: str, default: Any, fits: Callable[[Any], object], what: str) -> Any:
        """A field's value, or the default if the field is missing.

        Args:
            fits: whether the value can be used.
            what: what the field is, for the error.
        """
        value = self.raw.get(name, default)
        self.check(fits(value), name, f"{name:.60} is {what}")
        return value

    def integer(self, name: str, default: int | None) -> int:
        """An integer from 1 to 2**31 - 1."""
        what = f"a whole number, 1 or more, and {_MOST_INTEGER} at most"
        return int(self.value(name, default, lambda one: is_int(one, 1, _MOST_INTEGER), what))

    def number(self, name: str, default: float) -> float:
        """A number greater than 0 that is a normal number in float32."""
        least, most = _FLOAT32
        what = f"a finite number greater than 0, from {least:g} to {most:g}"
        return float(self.value(name, default, lambda one: is_number(one, least, most), what))

    def optional_number(self, name: str) -> float | None:
        """As `number`; None if the field is null or missing."""
        if self.raw.get(name) is None:
            return None
        return self.number(name, 1.0)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        return bool(self.value(name, default, lambda one: isinstance(one, bool), "true or false"))

    def items(self, name: str, kind: type, what: str) -> list[Any]:
        """A list whose entries all have one type; empty if the field is null or missing.

        Args:
            kind: the type: `str`, or `int` for integers that are 0 or more.
            what: what the field is, for the error.
        """

        def fits(value: Any) -> bool:
            entries = isinstance(value, list) and all(type(one) is kind for one in value)
            return value is None or (entries and (kind is str or all(one >= 0 for one in value)))

        return list(self.value(name, None, fits, what) or ())

    def nested(self, name: str, what: str = "an object, or null") -> Self | None:
        """The object in a field; None if the field is null or missing."""
        raw = self.value(name, None, lambda one: one is None or isinstance(one, Mapping), what)
        if raw is None:
            return None
        return attrs.evolve(self, raw=raw, prefix=f"{self.prefix}{name}.")


def is_plain_name(text: str) -> bool:
    """Whether a text is a module's name, or a part of one. Other texts are regular expressions,
    which could keep Python's `re` busy for years, and are refused.

    >>> is_plain_name("layers.0.self_attn.q_proj"), is_plain_name(".*_proj")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


def write_json(value: Any, indent: int | None = None) -> str:
    """The JSON text of a value: a tensor becomes lists, a number that is not finite null, and
    anything else that JSON cannot express its `str`.

    >>> write_json({"logprobs": [-0.5, float("nan")], "error": ValueError("no")})
    '{"logprobs": [-0.5, null], "error": "no"}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
