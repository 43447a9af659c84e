"""`rewrite_schema`: a JSON Schema of which XGrammar keeps every keyword, or an error that names the
one it would not.

XGrammar 0.2 ignores most keywords that stand beside others: `minimum` beside `$ref`, `minLength`
beside `pattern`, a `required` name that is not in `properties`. An answer would then break its
schema. What it does with each keyword was found by drawing schemas and answers;
`tests/transforms/server/test_structured.py` goes on with that.
"""

import math
from collections.abc import Mapping
from typing import Any

from weft.errors import RequestError
from weft.transforms.server.grammars.patterns import rewrite

# Keywords that no answer can break.
_NOTES = {
    *(
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
    ),
    "discriminator",
}
_DEFS = "$defs", "definitions"
_GROUPS = {
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
# Values with which keywords ask for nothing that is not so anyway.
_NO_OPS: dict[str, Any] = {"uniqueItems": False, "unevaluatedProperties": False, "nullable": False}
_COMBINED = "anyOf", "oneOf", "allOf"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DATE = r"([1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
# Formats of which XGrammar also writes what is none, such as February 30th. A 29th of February is
# not written.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_ITS_FORMATS = "duration", "email", "hostname", "ipv6", "uri", "uri-reference"
_LARGEST = 2**53


def rewrite_schema(call: str, schema: Any) -> Any:
    """The schema for XGrammar. An answer under the result is one under the schema; not each one of
    the schema's is.

    Args:
        call: of an error.

    Raises:
        RequestError: a keyword that would be ignored, alone or beside another one; a `$ref` that
            leaves the schema, or finds nothing in it.
    """
    return _Rewriter(call, schema).result()


class _Rewriter:
    """Walks over one schema."""

    def __init__(self, call: str, schema: Any) -> None:
        self._call = call
        self._root = schema
        self._places = set[str]()
        self._refs: list[tuple[str, str]] = []

    def result(self) -> Any:
        """The whole schema, with every `$ref` in it found."""
        found = self._schema(self._root, "#")
        for place, ref in self._refs:
            if ref not in self._places:
                self._refuse(
                    place,
                    f"$ref {ref!r:.100}, which finds no schema",
                    "the place of a schema in it, as in #/$defs/name",
                )
        return found

    def _refuse(self, place: str, seen: str, instead: str) -> Any:
        raise RequestError(f"{self._call} at {place:.200}", seen, instead)

    def _schema(self, given: Any, place: str) -> Any:
        self._places.add(place)
        if given is True:
            return True
        if not isinstance(given, Mapping):
            self._refuse(place, f"{given!r:.60} as a schema", "an object")
        known = {k: v for k, v in given.items() if k not in _NOTES and not k.startswith("x-")}
        if place == "#":
            known.pop("$id", None)
        defs = {
            name: self._schemas(known.pop(name), f"{place}/{name}")
            for name in _DEFS
            if name in known
        }
        for name, value in _NO_OPS.items():
            if name in known and known[name] is value:
                del known[name]
        return {**defs, **self._body(known, place)}

    def _schemas(self, given: Any, place: str) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            self._refuse(place, f"{given!r:.60}", "an object of schemas")
        return {name: self._schema(own, f"{place}/{name}") for name, own in given.items()}

    def _body(self, known: dict[str, Any], place: str) -> dict[str, Any]:
        for name in ("$ref", *_COMBINED):
            if name in known:
                self._alone(known, name, place)
                if name == "$ref":
                    return self._ref(known[name], place)
                return self._combined(name, known[name], place)
        if "const" in known or "enum" in known:
            return self._values(known, place)
        return self._typed(known, place)

    def _alone(self, known: Mapping[str, Any], name: str, place: str, *others: str) -> None:
        for other in known:
            if other not in (name, *others):
                self._refuse(
                    place,
                    f"the keyword {other!r:.60} beside {name!r}, which would be ignored",
                    f"{name!r} alone",
                )

    def _ref(self, ref: Any, place: str) -> dict[str, Any]:
        if (
            not isinstance(ref, str)
            or not (ref == "#" or ref.startswith("#/"))
            or "~" in ref
            or "%" in ref
        ):
            self._refuse(
                place, f"$ref {ref!r:.100}", "a place in the schema itself, as in #/$defs/name"
            )
        self._refs.append((place, ref))
        return {"$ref": ref}

    def _combined(self, name: str, options: Any, place: str) -> dict[str, Any]:
        if not isinstance(options, list) or not options:
            self._refuse(place, f"{name!r} of {options!r:.60}", "a list of schemas")
        found = [self._schema(own, f"{place}/{name}/{index}") for index, own in enumerate(options)]
        if name == "allOf" and len(options) > 1:
            self._refuse(
                place,
                "the keyword 'allOf' of several schemas, which would be ignored",
                "one schema with their keywords",
            )
        if name == "oneOf":
            for index, own in enumerate(options):
                for other in options[:index]:
                    if not self._are_disjoint(own, other):
                        seen = (
                            "the keyword 'oneOf' of schemas that one value may fit, which would be"
                            " taken as 'anyOf'"
                        )
                        self._refuse(
                            place, seen, "'anyOf', or objects that differ in a required constant"
                        )
        return {"allOf" if name == "allOf" else "anyOf": found}

    def _are_disjoint(self, left: Any, right: Any) -> bool:
        left = self._resolved(left)
        right = self._resolved(right)
        if left is None or right is None:
            return False
        kinds = [_kinds_of(own) for own in (left, right)]
        if (
            all(kinds)
            and not kinds[0] & kinds[1]
            and not all(own & {"integer", "number"} for own in kinds)
        ):
            return True
        values = [_values_of(own) for own in (left, right)]
        if values[0] is not None and values[1] is not None:
            return not any(_same(a, b) for a in values[0] for b in values[1])
        if kinds != [{"object"}, {"object"}]:
            return False
        parts = [own.get("properties") or {} for own in (left, right)]
        names = [name for name in parts[0] if name in parts[1]]
        needed = [
            name
            for name in names
            if all(name in (own.get("required") or ()) for own in (left, right))
        ]
        pairs = [[_values_of(self._resolved(own[name])) for own in parts] for name in needed]
        return any(
            a is not None and b is not None and not any(_same(x, y) for x in a for y in b)
            for a, b in pairs
        )

    def _resolved(self, schema: Any) -> Mapping[str, Any] | None:
        """The schema that a chain of `$ref`s ends at; None if it does not."""
        for _ in range(10):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            found: Any = self._root
            for part in str(schema["$ref"]).split("/")[1:]:
                if isinstance(found, Mapping):
                    found = found.get(part)
                else:
                    found = None
            schema = found
        if isinstance(schema, Mapping) and "$ref" not in schema:
            return schema
        return None

    def _values(self, known: Mapping[str, Any], place: str) -> dict[str, Any]:
        name = "const" if "const" in known else "enum"
        self._alone(known, name, place, "type")
        if name == "const":
            values = [known["const"]]
        else:
            values = known["enum"]
        if not isinstance(values, list) or not values:
            self._refuse(place, f"'enum' of {values!r:.60}", "a list of values")
        if "type" in known:
            kinds = _kinds_of(known)
            for value in values:
                if not kinds or not _kinds_of_value(value) & kinds:
                    self._refuse(
                        place,
                        f"{value!r:.60} in {name!r} beside 'type' {known['type']!r:.60}",
                        "values of that type",
                    )
        for value in values:
            if not _is_exact(value):
                self._refuse(
                    place,
                    f"{value!r:.60} in {name!r}",
                    f"whole numbers up to {_LARGEST}, and finite ones",
                )
        return {name: known[name]}

    def _typed(self, known: dict[str, Any], place: str) -> dict[str, Any]:
        if "type" in known:
            kinds = _kinds_of(known)
            if not kinds:
                self._refuse(
                    place,
                    f"'type' {known['type']!r:.60}",
                    f"one of {', '.join(sorted(_TYPES))}, or a list of them",
                )
        else:
            groups = [kind for kind, words in _GROUPS.items() if words & known.keys()]
            if len(groups) > 1:
                self._refuse(
                    place,
                    f"keywords of {' and '.join(groups)} without 'type'",
                    f'"type": "{groups[0]}"',
                )
            kinds = {*groups}
        allowed = {"type"}.union(
            *(
                _GROUPS["number" if kind == "integer" else kind]
                for kind in kinds
                if kind not in ("boolean", "null")
            )
        )
        for name in known:
            if name not in allowed:
                self._refuse(
                    place,
                    f"the keyword {name!r:.60}, which would be ignored",
                    "a schema without it",
                )
        if not kinds:
            return {}
        options = [self._of_type(kind, known, place) for kind in sorted(kinds)]
        if len(options) == 1:
            return options[0]
        return {"anyOf": options}

    def _of_type(self, kind: str, known: Mapping[str, Any], place: str) -> dict[str, Any]:
        words = _GROUPS.get("number" if kind == "integer" else kind, set())
        own = {name: value for name, value in known.items() if name in words}
        if kind in ("integer", "number"):
            return {"type": kind, **self._number(own, place, kind)}
        made = {"object": self._object, "array": self._array, "string": self._string}.get(kind)
        return {
            "type": kind,
            **(made(own, place) if made is not None and (own or kind != "string") else {}),
        }

    def _object(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        properties = self._schemas(own.get("properties", {}), f"{place}/properties")
        required = own.get("required", [])
        more = own.get("additionalProperties", not properties)
        patterns = own.get("patternProperties")
        if not isinstance(required, list) or [
            name for name in required if not isinstance(name, str) or name not in properties
        ]:
            self._refuse(
                place,
                f"'required' {required!r:.100}, not all of them in 'properties'",
                "a property for each",
            )
        if patterns is not None:
            self._alone(
                own,
                "patternProperties",
                place,
                *(("additionalProperties",) if own.get("additionalProperties") is False else ()),
            )
            if not isinstance(patterns, Mapping) or len(patterns) != 1:
                self._refuse(place, "'patternProperties' of several patterns", "one pattern")
            [(pattern, value)] = patterns.items()
            self._counts(own, place)
            value = self._schema(value, f"{place}/patternProperties/{pattern}")
            pattern = rewrite(f"{self._call} at {place:.200}", pattern, in_json=True)
            return {"patternProperties": {f"^{pattern}$": value}, "additionalProperties": False}
        if more is not False and properties:
            seen = (
                "'additionalProperties' beside 'properties', whose names it would allow with other"
                " values"
            )
            self._refuse(place, seen, '"additionalProperties": false, or no properties')
        counts = self._counts(own, place, "minProperties", "maxProperties")
        if counts and more is not False:
            self._refuse(
                place,
                f"the keyword {next(iter(counts))!r} of names that may repeat",
                '"additionalProperties": false',
            )
        if isinstance(more, bool):
            more = more
        else:
            more = self._schema(more, f"{place}/additionalProperties")
        return {
            "properties": properties,
            "required": [*dict.fromkeys(required)],
            "additionalProperties": more,
            **counts,
        }

    def _array(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        prefix = own.get("prefixItems", [])
        if not isinstance(prefix, list):
            self._refuse(place, f"'prefixItems' {prefix!r:.60}", "a list of schemas")
        found: dict[str, Any] = {**self._counts(own, place, "minItems", "maxItems")}
        if prefix:
            found["prefixItems"] = [
                self._schema(each, f"{place}/prefixItems/{i}") for i, each in enumerate(prefix)
            ]
        items = own.get("items", not prefix)
        return found | {"items": items if items is False else self._schema(items, f"{place}/items")}

    def _string(self, own: dict[str, Any], place: str) -> dict[str, Any]:
        call = f"{self._call} at {place:.200}"
        if "format" in own:
            self._alone(own, "format", place)
            if own["format"] in _ITS_FORMATS:
                return own
            if not isinstance(own["format"], str) or own["format"] not in _FORMATS:
                self._refuse(
                    place,
                    f"'format' {own['format']!r:.60}, which would be ignored",
                    f"one of {', '.join(sorted((*_FORMATS, *_ITS_FORMATS)))}",
                )
            return {"pattern": f"^{rewrite(call, _FORMATS[own['format']], in_json=True)}$"}
        if "pattern" in own:
            self._alone(own, "pattern", place)
            if not isinstance(own["pattern"], str):
                self._refuse(place, f"'pattern' {own['pattern']!r:.60}", "a text")
            return {"pattern": f"^{rewrite(call, own['pattern'], in_json=True)}$"}
        counts = self._counts(own, place, "minLength", "maxLength")
        least = counts.get("minLength", 0)
        most = counts.get("maxLength")
        if most is not None and least > most:
            seen = f"'minLength' {least} and 'maxLength' {most}"
            self._refuse(place, seen, "a length that a text can have")
        bounds = f"{least}," if most is None else f"{least},{most}"
        pattern = rewrite(call, f"[\\s\\S]{{{bounds}}}", in_json=True)
        return {"pattern": f"^{pattern}$"}

    def _counts(self, own: Mapping[str, Any], place: str, *names: str) -> dict[str, int]:
        found = {name: own[name] for name in names if name in own}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**6:
                self._refuse(place, f"{name!r} {value!r:.60}", "a whole number from 0 to 1000000")
        return found

    def _number(self, own: dict[str, Any], place: str, kind: str) -> dict[str, Any]:
        for name, value in own.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not abs(value) <= _LARGEST
            ):
                self._refuse(place, f"{name!r} {value!r:.60}", f"a number of at most {_LARGEST}")
            if round(value, 6) != value:
                self._refuse(
                    place,
                    f"{name!r} {value!r:.60}, which would be rounded",
                    "a number of at most 6 decimals",
                )
        factor = own.get("multipleOf", 1)
        bounds = own.keys() - {"multipleOf"}
        if kind == "number" and "multipleOf" in own:
            self._refuse(
                place,
                "the keyword 'multipleOf' of 'number', which would be ignored",
                '"type": "integer"',
            )
        if (
            not isinstance(factor, int)
            or factor < 1
            or (factor > 1 and bounds not in (set(), {"minimum", "maximum"}))
        ):
            seen = f"'multipleOf' {factor!r:.60} beside {sorted(bounds)}"
            self._refuse(
                place, seen, "a whole number >= 1, alone or beside both 'minimum' and 'maximum'"
            )
        return own


def _kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The names in `type`; empty if they are none."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    if all(isinstance(name, str) and name in _TYPES for name in names):
        return {*names}
    return set()


def _kinds_of_value(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    for kind, name in ((float, "number"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return {name}
    return {"null"}


def _values_of(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return found if isinstance(found, list) else None


def _same(left: Any, right: Any) -> bool:
    """Whether the values may be equal as JSON; `True` and 1 are not."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _is_exact(value: Any) -> bool:
    """Whether XGrammar, which reads numbers as doubles, writes the value as it is."""
    if isinstance(value, Mapping):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= _LARGEST
