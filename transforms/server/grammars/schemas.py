"""`rewrite_schema`: rewrites a JSON Schema so that XGrammar enforces all of it, or refuses it.

A refusal names the keyword that XGrammar would not enforce. XGrammar 0.2 ignores most keywords in
combination with others: `minimum` beside `$ref`, `minLength` beside `pattern`, or a `required` name
that is not in `properties`. An answer could then violate its schema. What it does with each keyword
was found by drawing random schemas and answers, which
`tests/transforms/server/test_structured.py` continues to do.
"""

import math
from collections.abc import Mapping
from typing import Any

from weft.errors import RequestError
from weft.transforms.server.grammars.patterns import rewrite

# Keywords that constrain no answer.
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
# Keywords that have no effect with these values, and are dropped.
_NO_OPS: dict[str, Any] = {"uniqueItems": False, "unevaluatedProperties": False, "nullable": False}
_COMBINED = "anyOf", "oneOf", "allOf"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_DATE = r"([1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8])))"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
# Formats for which XGrammar also allows invalid texts, such as February 30th. These patterns are
# used instead; they do not allow February 29th in any year.
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
    """The schema for XGrammar: every answer that fits the result fits `schema`, but not vice versa.

    Args:
        call: the call that errors show.

    Raises:
        RequestError: a keyword would be ignored, alone or beside another one; or a `$ref` points
            outside the schema, or to nothing in it.
    """
    return _Rewriter(call, schema).result()


class _Rewriter:
    """Rewrites one schema."""

    def __init__(self, call: str, schema: Any) -> None:
        self._call = call
        self._root = schema
        self._places = set[str]()
        self._refs: list[tuple[str, str]] = []

    def result(self) -> Any:
        """The whole rewritten schema; refuses it if a `$ref` points to nothing."""
        rewritten = self._schema(self._root, "#")
        # Last, because a `$ref` may point to a schema that comes after it.
        for place, ref in self._refs:
            if ref not in self._places:
                self._refuse(
                    place,
                    f"$ref {ref!r:.100}, which finds no schema",
                    "the place of a schema in it, as in #/$defs/name",
                )
        return rewritten

    def _refuse(self, place: str, problem: str, instead: str) -> Any:
        raise RequestError(f"{self._call} at {place:.200}", problem, instead)

    def _schema(self, schema: Any, place: str) -> Any:
        self._places.add(place)
        if schema is True:
            return True
        if not isinstance(schema, Mapping):
            self._refuse(place, f"{schema!r:.60} as a schema", "an object")
        keywords = {k: v for k, v in schema.items() if k not in _NOTES and not k.startswith("x-")}
        if place == "#":
            keywords.pop("$id", None)
        defs = {
            name: self._schemas(keywords.pop(name), f"{place}/{name}")
            for name in _DEFS
            if name in keywords
        }
        for name, value in _NO_OPS.items():
            if name in keywords and keywords[name] is value:
                del keywords[name]
        return {**defs, **self._body(keywords, place)}

    def _schemas(self, schemas: Any, place: str) -> dict[str, Any]:
        if not isinstance(schemas, Mapping):
            self._refuse(place, f"{schemas!r:.60}", "an object of schemas")
        return {name: self._schema(schema, f"{place}/{name}") for name, schema in schemas.items()}

    def _body(self, keywords: dict[str, Any], place: str) -> dict[str, Any]:
        for name in ("$ref", *_COMBINED):
            if name in keywords:
                self._alone(keywords, name, place)
                if name == "$ref":
                    return self._ref(keywords[name], place)
                return self._combined(name, keywords[name], place)
        if "const" in keywords or "enum" in keywords:
            return self._values(keywords, place)
        return self._typed(keywords, place)

    def _alone(self, keywords: Mapping[str, Any], name: str, place: str, *allowed: str) -> None:
        for other in keywords:
            if other not in (name, *allowed):
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
        rewritten = [
            self._schema(option, f"{place}/{name}/{index}") for index, option in enumerate(options)
        ]
        if name == "allOf" and len(options) > 1:
            self._refuse(
                place,
                "the keyword 'allOf' of several schemas, which would be ignored",
                "one schema with their keywords",
            )
        if name == "oneOf":
            for index, option in enumerate(options):
                for other in options[:index]:
                    if not self._are_disjoint(option, other):
                        problem = (
                            "the keyword 'oneOf' of schemas that one value may fit, which would be"
                            " taken as 'anyOf'"
                        )
                        self._refuse(
                            place, problem, "'anyOf', or objects that differ in a required constant"
                        )
        return {"allOf" if name == "allOf" else "anyOf": rewritten}

    def _are_disjoint(self, left: Any, right: Any) -> bool:
        left = self._resolved(left)
        right = self._resolved(right)
        if left is None or right is None:
            return False
        kinds = [_kinds_of(side) for side in (left, right)]
        if (
            all(kinds)
            and not kinds[0] & kinds[1]
            and not all(side & {"integer", "number"} for side in kinds)
        ):
            return True
        values = [_values_of(side) for side in (left, right)]
        if values[0] is not None and values[1] is not None:
            return not any(_same(a, b) for a in values[0] for b in values[1])
        if kinds != [{"object"}, {"object"}]:
            return False
        parts = [side.get("properties") or {} for side in (left, right)]
        names = [name for name in parts[0] if name in parts[1]]
        needed = [
            name
            for name in names
            if all(name in (side.get("required") or ()) for side in (left, right))
        ]
        pairs = [[_values_of(self._resolved(side[name])) for side in parts] for name in needed]
        return any(
            a is not None and b is not None and not any(_same(x, y) for x in a for y in b)
            for a, b in pairs
        )

    def _resolved(self, schema: Any) -> Mapping[str, Any] | None:
        """The schema at the end of a chain of `$ref`s; None if the chain does not end."""
        for _ in range(10):  # a chain may be a circle
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            target: Any = self._root
            for part in str(schema["$ref"]).split("/")[1:]:
                if isinstance(target, Mapping):
                    target = target.get(part)
                else:
                    target = None
            schema = target
        if isinstance(schema, Mapping) and "$ref" not in schema:
            return schema
        return None

    def _values(self, keywords: Mapping[str, Any], place: str) -> dict[str, Any]:
        if "const" in keywords:
            name = "const"
        else:
            name = "enum"
        self._alone(keywords, name, place, "type")
        if name == "const":
            values = [keywords["const"]]
        else:
            values = keywords["enum"]
        if not isinstance(values, list) or not values:
            self._refuse(place, f"'enum' of {values!r:.60}", "a list of values")
        if "type" in keywords:
            kinds = _kinds_of(keywords)
            for value in values:
                if not kinds or not _kinds_of_value(value) & kinds:
                    self._refuse(
                        place,
                        f"{value!r:.60} in {name!r} beside 'type' {keywords['type']!r:.60}",
                        "values of that type",
                    )
        for value in values:
            if not _is_exact(value):
                self._refuse(
                    place,
                    f"{value!r:.60} in {name!r}",
                    f"whole numbers up to {_LARGEST}, and finite ones",
                )
        return {name: keywords[name]}

    def _typed(self, keywords: dict[str, Any], place: str) -> dict[str, Any]:
        if "type" in keywords:
            kinds = _kinds_of(keywords)
            if not kinds:
                self._refuse(
                    place,
                    f"'type' {keywords['type']!r:.60}",
                    f"one of {', '.join(sorted(_TYPES))}, or a list of them",
                )
        else:
            groups = [kind for kind, words in _GROUPS.items() if words & keywords.keys()]
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
        for name in keywords:
            if name not in allowed:
                self._refuse(
                    place,
                    f"the keyword {name!r:.60}, which would be ignored",
                    "a schema without it",
                )
        if not kinds:
            return {}
        options = [self._of_type(kind, keywords, place) for kind in sorted(kinds)]
        if len(options) == 1:
            return options[0]
        return {"anyOf": options}

    def _of_type(self, kind: str, keywords: Mapping[str, Any], place: str) -> dict[str, Any]:
        words = _GROUPS.get("number" if kind == "integer" else kind, set())
        type_keywords = {name: value for name, value in keywords.items() if name in words}
        if kind in ("integer", "number"):
            return {"type": kind, **self._number(type_keywords, place, kind)}
        rewrite_keywords = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
        }.get(kind)
        return {
            "type": kind,
            **(
                rewrite_keywords(type_keywords, place)
                if rewrite_keywords is not None and (type_keywords or kind != "string")
                else {}
            ),
        }

    def _object(self, keywords: dict[str, Any], place: str) -> dict[str, Any]:
        properties = self._schemas(keywords.get("properties", {}), f"{place}/properties")
        required = keywords.get("required", [])
        more = keywords.get("additionalProperties", not properties)
        patterns = keywords.get("patternProperties")
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
                keywords,
                "patternProperties",
                place,
                *(
                    ("additionalProperties",)
                    if keywords.get("additionalProperties") is False
                    else ()
                ),
            )
            if not isinstance(patterns, Mapping) or len(patterns) != 1:
                self._refuse(place, "'patternProperties' of several patterns", "one pattern")
            [(pattern, value)] = patterns.items()
            self._counts(keywords, place)
            value = self._schema(value, f"{place}/patternProperties/{pattern}")
            pattern = rewrite(f"{self._call} at {place:.200}", pattern, in_json=True)
            return {"patternProperties": {f"^{pattern}$": value}, "additionalProperties": False}
        if more is not False and properties:
            problem = (
                "'additionalProperties' beside 'properties', whose names it would allow with other"
                " values"
            )
            self._refuse(place, problem, '"additionalProperties": false, or no properties')
        counts = self._counts(keywords, place, "minProperties", "maxProperties")
        if counts and more is not False:
            self._refuse(
                place,
                f"the keyword {next(iter(counts))!r} of names that may repeat",
                '"additionalProperties": false',
            )
        if not isinstance(more, bool):
            more = self._schema(more, f"{place}/additionalProperties")
        return {
            "properties": properties,
            "required": [*dict.fromkeys(required)],
            "additionalProperties": more,
            **counts,
        }

    def _array(self, keywords: dict[str, Any], place: str) -> dict[str, Any]:
        prefix = keywords.get("prefixItems", [])
        if not isinstance(prefix, list):
            self._refuse(place, f"'prefixItems' {prefix!r:.60}", "a list of schemas")
        rewritten: dict[str, Any] = {**self._counts(keywords, place, "minItems", "maxItems")}
        if prefix:
            rewritten["prefixItems"] = [
                self._schema(each, f"{place}/prefixItems/{i}") for i, each in enumerate(prefix)
            ]
        items = keywords.get("items", not prefix)
        return rewritten | {
            "items": items if items is False else self._schema(items, f"{place}/items")
        }

    def _string(self, keywords: dict[str, Any], place: str) -> dict[str, Any]:
        call = f"{self._call} at {place:.200}"
        if "format" in keywords:
            self._alone(keywords, "format", place)
            if keywords["format"] in _ITS_FORMATS:
                return keywords
            if not isinstance(keywords["format"], str) or keywords["format"] not in _FORMATS:
                self._refuse(
                    place,
                    f"'format' {keywords['format']!r:.60}, which would be ignored",
                    f"one of {', '.join(sorted((*_FORMATS, *_ITS_FORMATS)))}",
                )
            return {"pattern": f"^{rewrite(call, _FORMATS[keywords['format']], in_json=True)}$"}
        if "pattern" in keywords:
            self._alone(keywords, "pattern", place)
            if not isinstance(keywords["pattern"], str):
                self._refuse(place, f"'pattern' {keywords['pattern']!r:.60}", "a text")
            return {"pattern": f"^{rewrite(call, keywords['pattern'], in_json=True)}$"}
        counts = self._counts(keywords, place, "minLength", "maxLength")
        least = counts.get("minLength", 0)
        most = counts.get("maxLength")
        if most is not None and least > most:
            problem = f"'minLength' {least} and 'maxLength' {most}"
            self._refuse(place, problem, "a length that a text can have")
        if most is None:
            bounds = f"{least},"
        else:
            bounds = f"{least},{most}"
        pattern = rewrite(call, f"[\\s\\S]{{{bounds}}}", in_json=True)
        return {"pattern": f"^{pattern}$"}

    def _counts(self, keywords: Mapping[str, Any], place: str, *names: str) -> dict[str, int]:
        counts = {name: keywords[name] for name in names if name in keywords}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**6:
                self._refuse(place, f"{name!r} {value!r:.60}", "a whole number from 0 to 1000000")
        return counts

    def _number(self, keywords: dict[str, Any], place: str, kind: str) -> dict[str, Any]:
        for name, value in keywords.items():
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
        factor = keywords.get("multipleOf", 1)
        bounds = keywords.keys() - {"multipleOf"}
        if kind == "number" and "multipleOf" in keywords:
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
            problem = f"'multipleOf' {factor!r:.60} beside {sorted(bounds)}"
            self._refuse(
                place, problem, "a whole number >= 1, alone or beside both 'minimum' and 'maximum'"
            )
        return keywords


def _kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The names in `type`; empty if they are none."""
    value = schema.get("type")
    if isinstance(value, list):
        names = value
    else:
        names = [value]
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
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _same(left: Any, right: Any) -> bool:
    """Whether the values are equal as JSON; `True` and 1 are not, though Python says so."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _is_exact(value: Any) -> bool:
    """Whether XGrammar, which reads numbers as doubles, reproduces the value exactly."""
    if isinstance(value, Mapping):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= _LARGEST
