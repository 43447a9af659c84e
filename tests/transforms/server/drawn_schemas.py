"""JSON Schemas, drawn: those that are enforced, and those with keywords that may be refused."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
names = st.sampled_from(["a", "size", "is_new", "list of", "x-y", "é", 'q"', "b\n"])
# Without control characters that need an escape \uNNNN, which are refused in a `const`.
_UNWRITTEN = [chr(code) for code in (*range(0x20), 0x7F) if chr(code) not in "\b\t\n\f\r"]
texts = st.text(st.characters(codec="utf-8", exclude_characters=_UNWRITTEN), max_size=4)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e9, 1e9).map(lambda x: round(x, 3))
    | texts
)
long_numbers = st.floats(1e8, 1e9).map(lambda value: {"const": value})
values = st.recursive(
    scalars,
    lambda value: st.lists(value, max_size=2) | st.dictionaries(names, value, max_size=2),
    max_leaves=3,
)
patterns = st.sampled_from(
    [
        *(
            "^[a-z]{2,5}$",
            r"^\d+$",
            "^[^a]{1,3}$",
            r'^["\\]{1,3}$',
            r"^\s\S?\w\W$",
            "^(ab|c)*d?$",
            "^.{0,4}$",
            "",
        ),
        *(
            r"^\n\t$",
            "^a|b$",
            "x+y",
            r"^[\s\S]{2}$",
            r"^\u00e9[^\x00-\x1f]?$",
            r"^(?:a{2}){1,3}$",
            r"^\.\-\/$",
        ),
    ]
)


@st.composite
def _bounds(draw: st.DrawFn, least: str, most: str, largest: int) -> Schema:
    low = draw(st.integers(0, largest))
    high = draw(st.integers(low, largest + 2))
    return draw(st.sampled_from([{}, {least: low}, {most: high}, {least: low, most: high}]))


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["integer", "number"]))
    ends = (
        st.integers(-1000, 1000)
        if kind == "integer"
        else st.integers(-(10**6), 10**6).map(lambda x: x / 1000)
    )
    low = draw(ends)
    high = round(low + draw(st.integers(3, 500)), 3)
    schema: Schema = {"type": kind}
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = high
    return schema


@st.composite
def _objects(draw: st.DrawFn, parts: st.SearchStrategy[Schema]) -> Schema:
    if draw(st.integers(0, 4)) == 0:
        more = draw(st.sampled_from(["additionalProperties", "patternProperties"]))
        part = draw(parts)
        return {
            "type": "object",
            more: part if more == "additionalProperties" else {"^[a-c]{1,3}$": part},
        }
    properties = draw(st.dictionaries(names, parts, min_size=1, max_size=3))
    schema: Schema = {"type": "object", "properties": properties}
    schema["required"] = draw(st.lists(st.sampled_from([*properties]), unique=True))
    if draw(st.booleans()):
        schema["additionalProperties"] = False
    return schema


@st.composite
def _arrays(draw: st.DrawFn, parts: st.SearchStrategy[Schema]) -> Schema:
    schema: Schema = {"type": "array", **draw(_bounds("minItems", "maxItems", 3))}
    if draw(st.integers(0, 3)) == 0:
        schema["prefixItems"] = draw(st.lists(parts, min_size=1, max_size=2))
        schema.pop("maxItems", None)
    if "prefixItems" not in schema or draw(st.booleans()) or "minItems" in schema:
        schema["items"] = draw(parts)
    return schema


@st.composite
def _unions(draw: st.DrawFn, parts: st.SearchStrategy[Schema]) -> Schema:
    kind = draw(st.sampled_from(["anyOf", "oneOf", "allOf", "type"]))
    if kind == "anyOf":
        return {"anyOf": draw(st.lists(parts, min_size=1, max_size=3))}
    if kind == "allOf":
        return {"allOf": [draw(parts)]}
    if kind == "type":
        return {
            "type": draw(
                st.lists(
                    st.sampled_from(["integer", "null", "boolean", "string"]),
                    min_size=1,
                    unique=True,
                )
            )
        }
    tags = draw(st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=3, unique=True))
    options = [
        {"properties": {"tag": {"const": tag}, "own": draw(parts)}, "required": ["tag"]}
        for tag in tags
    ]
    return {"oneOf": [{"type": "object", **option} for option in options]}


# Characters: more than the 255 of many columns of databases.
LONG = 300
dates = st.sampled_from(["date", "time", "date-time"]).map(
    lambda value: {"type": "string", "format": value}
)
strings = st.one_of(
    st.sampled_from((5, 5, LONG)).flatmap(
        lambda largest: _bounds("minLength", "maxLength", largest).map(
            lambda bounds: {"type": "string", **bounds}
        )
    ),
    patterns.map(lambda value: {"type": "string", "pattern": value}),
    dates,
    st.sampled_from(["ipv4", "ipv6", "uuid", "email", "hostname", "duration", "uri"]).map(
        lambda value: {"type": "string", "format": value}
    ),
)
leaves = st.one_of(
    _numbers(),
    strings,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}]),
    st.lists(values, min_size=1, max_size=3).map(lambda value: {"enum": value}),
    values.map(lambda value: {"const": value}),
)
_inner = st.recursive(
    leaves, lambda value: _objects(value) | _arrays(value) | _unions(value), max_leaves=4
)
_NOTES = st.sampled_from([{}, {}, {"title": "A", "description": "b", "default": None}])


@st.composite
def enforced_schemas(draw: st.DrawFn) -> Schema:
    """A schema, perhaps with definitions and references, of keywords that are enforced."""
    schema = {**draw(_inner), **draw(_NOTES)}
    if draw(st.integers(0, 3)):
        return schema
    ends = {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "v": schema,
        },
    }
    return {
        "$defs": {"node": ends},
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "maxItems": 2,
    }


# Keywords beside others. llguidance enforces some, and refuses the others.
ODD: list[Schema] = [
    *(
        {"uniqueItems": True},
        {"contains": {"const": 1}},
        {"minContains": 1},
        {"not": {"type": "integer"}},
        {"minLength": 3},
    ),
    *(
        {"if": {"type": "integer"}, "then": {"minimum": 5}},
        {"dependentRequired": {"a": ["size"]}},
        {"multipleOf": 0.5},
    ),
    *(
        {"propertyNames": {"maxLength": 1}},
        {"minProperties": 2},
        {"maxProperties": 1},
        {"required": ["zz"]},
        {"maxLength": 2},
    ),
    *(
        {"additionalProperties": {"type": "integer"}},
        {"additionalProperties": True},
        {"unevaluatedProperties": False},
    ),
    *(
        {"pattern": "^a$"},
        {"format": "regex"},
        {"format": "ipv4"},
        {"minimum": 5},
        {"maximum": 1e-7},
        {"enum": [1, "b"]},
    ),
    *(
        {"const": "b"},
        {"anyOf": [{"minimum": 5}]},
        {"allOf": [{"type": "object"}, {"required": ["a"]}]},
        {"multipleOf": 7},
    ),
    *(
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"$ref": "#/$defs/none"},
        {"$ref": "http://127.0.0.1:9/a"},
    ),
    *(
        {"type": "integer"},
        {"type": "string"},
        {"items": {"type": "null"}},
        {"maxItems": 0},
        {"contentEncoding": "base64"},
    ),
]


@st.composite
def odd_schemas(draw: st.DrawFn) -> Schema:
    """A schema with keywords added, to itself or to a part of it."""
    schema = draw(_inner)
    more = draw(st.sampled_from(ODD))
    place = draw(st.sampled_from(["itself", "items", "a property", "alone"]))
    if place == "alone":
        return dict(more)
    added = {**schema, **more}
    if place == "itself":
        return added
    if place == "items":
        return {"type": "array", "items": added, "minItems": 1}
    return {"type": "object", "properties": {"a": added, "b": {"type": "null"}}, "required": ["a"]}


def keywords(schema: Any) -> set[str]:
    """All names within a schema, and its texts."""
    if isinstance(schema, dict):
        return {*schema}.union(*map(keywords, schema.values()))
    if isinstance(schema, list):
        return set[str]().union(*map(keywords, schema))
    return {schema} if isinstance(schema, str) else set()
