"""A JSON object that is being read, field by field, with errors that name the field and its value."""

from collections.abc import Mapping
from typing import Any

import attrs

from weft.errors import ConfigError

_MOST = 2**31 - 1
_FLOAT32 = 1.1754944e-38, 3.4028234e38
"""The least and the greatest that are normal numbers: all is computed in float32, or less."""


@attrs.frozen
class Fields:
    """A JSON object that is being read, and how an error names it.

    Args:
        raw: the object.
        call: the call that the user wrote, for errors.
        source: the file, or whatever else the object came from.
        prefix: what stands before a field's name when the object is nested, such as `rope_scaling.`.
    """

    raw: Mapping[str, Any]
    call: str
    source: str
    prefix: str = ""

    def refuse(self, name: str, instead: str) -> ConfigError:
        """The error for a field whose value cannot be used."""
        return self.contradict({name: self.raw[name]}, instead)

    def contradict(self, values: Mapping[str, Any], instead: str) -> ConfigError:
        """The error for fields that do not go together."""
        pairs = " and ".join(f"{self.prefix}{name:.60}={value!r:.200}" for name, value in values.items())
        return ConfigError(self.call, f"{self.source} has {pairs}", instead)

    def integer(self, name: str, default: int) -> int:
        """A whole number, from 1 to 2**31 - 1."""
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, f"{name} is a whole number, 1 or more")
        if value > _MOST:
            raise self.refuse(name, f"{name} is {_MOST} at most")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number greater than 0, as float32 holds it."""
        value, (least, most) = self.raw.get(name, default), _FLOAT32
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.refuse(name, f"{name} is a finite number greater than 0, from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """As `number`; null and missing are None."""
        return None if self.raw.get(name) is None else self.number(name, 1.0)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"{name} is true or false")
        return value
