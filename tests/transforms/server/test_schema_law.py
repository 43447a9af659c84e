"""A structured answer parses under its schema, or the schema is refused by a keyword's name,
whatever is drawn.

The answers are walks of random tokens that the mask allows, so that they say what no model would.
jsonschema decides.
"""

import contextlib
import datetime
import itertools
import json
import os
import random
import re
import signal
import sys
import threading
from typing import Any

import attrs
import pytest
import torch
from drawn_schemas import enforced_schemas, keywords, long_numbers, odd_schemas
from hypothesis import Phase, event, given, settings, strategies as st

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.server.grammars import compiling, masks as masks_module, schemas
from weft.transforms.server.grammars.compiling import GrammarLimits, GrammarUse
from weft.transforms.server.grammars.masks import Grammars, Masks
from weft.transforms.server.grammars.matching import Tokens
from weft.transforms.server.vocabulary import Vocabulary

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


class Walker:
    """Walks through the grammars of a model's tokens."""

    def __init__(self, model: Model) -> None:
        size = model.config.vocab_size
        self.model = model
        self.stops = {*model.config.eos_token_ids}
        tokens = Tokens.of(Vocabulary(model.tokenizer, size), model.config.eos_token_ids)
        self.masks = Masks(tokens, None)
        self.closing = [token for token in range(size) if model.decode([token]) in ('"', "}", "]")]

    def walk(self, schema: Any, seed: int, most: int = 300) -> str | None:
        """The text of a walk; None: it did not end."""
        source = compiling.source_of(
            "call", {"type": "json_schema", "json_schema": {"schema": schema}}
        )
        mask = self.masks.mask(compiling.grammar_of(*source))
        drawn = random.Random(seed)
        tokens = list[int]()
        for _ in range(most):
            bits = mask(tokens).numpy()
            allowed = [
                token
                for token in range(self.model.config.vocab_size)
                if bits[token // 32] >> (token % 32) & 1
            ]
            assert allowed, "the mask allows nothing"
            if self.stops & {*allowed} and (drawn.random() < 0.4 or {*allowed} <= self.stops):
                return self.model.decode(tokens)
            going = [token for token in allowed if token not in self.stops]
            closing = [token for token in self.closing if token in going]
            tokens.append(
                drawn.choice(
                    closing if closing and drawn.random() < 0.2 + len(tokens) / 200 else going
                )
            )
        return None

    def allows(self, schema: Any, value: Any) -> bool:
        """Whether the grammar of a schema allows this value."""
        return self.allows_text(schema_form(schema), json.dumps(value, ensure_ascii=False))

    def allows_text(self, form: dict[str, Any], text: str) -> bool:
        """Whether a grammar allows this answer."""
        mask = self.masks.mask(compiling.grammar_of(*compiling.source_of("call", form)))
        assert self.model.tokenizer is not None
        tokens = self.model.tokenizer.encode(text).ids
        stop = min(self.stops)
        return all(
            mask(tokens[:count]).numpy()[token // 32] >> token % 32 & 1
            for count, token in enumerate([*tokens, stop])
        )


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(load(DEMO, "cpu", "float32"))


def parses(walker: Walker, schema: Any, seed: int) -> str:
    """The law, for one schema; says how the walk ended."""
    try:
        text = walker.walk(schema, seed)
    except RequestError as error:
        said = str(error)
        names = [name.removeprefix("#") for name in keywords(schema)]
        assert "nsatisfiable" in said or any(name and name in said for name in names), said
        return "refused"
    if text is None:
        return "cut"
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))
    return "ended"


@given(enforced_schemas(), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_an_answer_parses_under_its_schema(walker: Walker, schema: Any, seed: int) -> None:
    outcome = parses(walker, schema, seed)
    event(outcome)
    assert outcome != "refused"


@given(odd_schemas(), st.integers(0, 10**6))
@settings(max_examples=250, deadline=None)
def test_what_is_not_kept_to_is_refused_by_name(walker: Walker, schema: Any, seed: int) -> None:
    event(parses(walker, schema, seed))


def breaks(walker: Walker, drawn: Any) -> None:
    """The law is broken by a schema of the strategy."""

    @settings(
        max_examples=400, deadline=None, database=None, phases=[Phase.generate], derandomize=True
    )
    @given(drawn, st.integers(0, 10**6))
    def law(schema: Any, seed: int) -> None:
        parses(walker, schema, seed)

    with pytest.raises((AssertionError, jsonschema.ValidationError, ValueError)):
        law()


@pytest.mark.slow
def test_the_law_catches_keywords_that_are_ignored(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "OPTIONS", {"lenient": True})
    breaks(walker, odd_schemas())


DAYS = list(itertools.product((1900, 2000, 2023, 2024), range(1, 13), range(27, 33)))


def wrong_days(walker: Walker) -> list[str]:
    """The days near the end of a month of which the grammar says something else than Python."""
    wrong = []
    for year, month, day in DAYS:
        text = f"{year}-{month:02}-{day:02}"
        try:
            is_day = bool(datetime.date(year, month, day))
        except ValueError:
            is_day = False
        if walker.allows({"type": "string", "format": "date"}, text) != is_day:
            wrong.append(text)
    return wrong


def test_days_are_those_of_the_calendar(walker: Walker) -> None:
    assert wrong_days(walker) == []


def test_days_that_no_calendar_has_are_found(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_PATTERNS", {})
    assert wrong_days(walker) == ["1900-02-29", "2023-02-29"]


def test_the_law_catches_numbers_that_are_rounded(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_is_exact", lambda _: True)
    breaks(walker, long_numbers)


def test_the_law_catches_a_mask_that_is_one_token_late(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = masks_module._GrammarMask.__call__
    monkeypatch.setattr(
        masks_module._GrammarMask, "__call__", lambda self, tokens: call(self, tokens[:-1])
    )
    breaks(walker, enforced_schemas())


def schema_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            schema_form({"type": "array", "uniqueItems": True}),
            'unsupported keywords ["uniqueItems"]',
        ),
        (
            schema_form({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
            'unsupported keywords ["uniqueItems"]',
        ),
        (
            schema_form({"oneOf": [{"type": "integer"}, {"minimum": 3}]}),
            "oneOf constraints are not",
        ),
        (schema_form({"$ref": "file:///etc/passwd"}), "file:///etc/passwd"),
        (schema_form({"$ref": "#/$defs/a"}), "Pointer '/$defs/a' does not exist"),
        (schema_form({"type": "string", "format": "regex"}), "Unknown format: regex"),
        (schema_form({"type": "string", "minLength": 3, "maxLength": 2}), "nsatisfiable"),
        (schema_form({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema_form({"const": 920740491.6281915}), "920740491.6281915 in 'const', which would be"),
        (schema_form({"type": "object", "minProperties": 2}), "minProperties=2 with 0 required"),
        (schema_form({"pattern": "^[[:alpha:]]$"}), "'[' in '[[:alpha:]'"),
        (schema_form({"pattern": r"^[\]a-z--m]$"}), "'--' in"),
        (schema_form({"patternProperties": {"[a&&b]": {}}}), "'&&' in '[a&&b]'"),
        (schema_form({"const": {"a": ["\x01"]}}), r"control character '\x01' in 'const'"),
        (schema_form({"properties": {"\x7f": {}}}), r"control character '\x7f' in 'properties'"),
        (schema_form({"format": "date", "allOf": 3}), "allOf must be an array"),
        (schema_form({"propertyNames": {"maxLength": 1}}), 'keywords ["propertyNames"]'),
        ({"type": "regex", "regex": r"(a)\1"}, "backreferences are not supported"),
        ({"type": "regex", "regex": "(("}, "unclosed group"),
        ({"type": "regex", "regex": r"a\b"}, ""),
        ({"type": "regex", "regex": "a^b"}, ""),
        ({"type": "regex", "regex": "(" * 3000 + ")" * 3000}, ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_enforced_is_refused(bounded: "Bounded", form: Any, words: str) -> None:
    with pytest.raises(RequestError) as error:
        bounded.grammars.compile(form)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "fits", "misfits"),
    [
        ("^[^a]$", 'b"\n', "a"),
        (r"^\d{2,3}$", ["12", "123"], ["1", "1234", "١٢"]),
        ("^(a|bc)*$", ["", "abca"], ["b"]),
        (r"^\w+$", ["a_9"], [" é"]),
        (r"^[\[\]&\-~-]{2}&&--$", ["[]&&--", "&~&&--", "--&&--"], ["aa&&--"]),
        ("^.$", "xé\t", "\n"),
        ("b", ["b", "abc"], ["", "a"]),
    ],
)
def test_a_pattern_matches_as_in_python(
    walker: Walker, pattern: str, fits: Any, misfits: Any
) -> None:
    for texts, matches in ((fits, True), (misfits, False)):
        for text in texts:
            assert walker.allows({"type": "string", "pattern": pattern}, text) is matches, text


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"patternProperties": {"^a": {"type": "integer"}}},
    ],
    ids=str,
)
def test_no_other_spelling_of_a_name_escapes_its_schema(walker: Walker, schema: Any) -> None:
    form = schema_form({"type": "object", **schema})
    assert walker.allows_text(form, '{"a": 1, "b\\n\\"é": "x"}')
    for name in ("a", r"\u0061"):
        assert not walker.allows_text(form, f'{{"{name}": "x"}}')
        assert not walker.allows_text(form, f'{{"a": 1, "{name}": "x"}}')


def test_a_record_of_zod_has_names_of_any_text(walker: Walker) -> None:
    """Zod 4 writes `propertyNames` into each record."""
    schema = {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    assert walker.allows({"type": "object", **schema}, {"a": 1, "b": 2})
    assert not walker.allows({"type": "object", **schema}, {"a": "x"})


@pytest.mark.parametrize(
    ("grammar", "text", "misfit"),
    [
        (r'root ::= "\u00e9ab"', "éab", "\ue9ab"),
        (r'root ::= "caf\u00e9e"', "cafée", "caf"),
        (r"root ::= [\u00e0-\u00ff]", "é", "e"),
        (r"root ::= [\u005d\u002d\u0061]", "]", "^"),
        (r'root ::= "\U0001F600\u0022"', '😀"', "😀"),
        (r'root ::= "\\u00e9"', r"\u00e9", "é"),
        (r'start: "\u00e9ab"', "éab", "\ue9ab"),
    ],
)
def test_escapes_in_grammars(walker: Walker, grammar: str, text: str, misfit: str) -> None:
    form = {"type": "grammar", "grammar": grammar}
    assert walker.allows_text(form, text)
    assert not walker.allows_text(form, misfit)


@pytest.mark.parametrize(
    ("kind", "text", "is_real"),
    [
        ("date", "2024-02-29", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2000-02-29", True),
        ("date", "2023-12-31", True),
        ("date", "2023-02-30", False),
        ("date-time", "2024-02-29T10:20:59.5Z", True),
        ("date-time", "2023-02-29T10:20:59Z", False),
        ("date-time", "2023-11-30T10:20:60Z", False),
        ("time", "10:20:59+01:00", True),
        ("time", "10:20:60Z", False),
    ],
)
def test_dates_and_times_are_real(walker: Walker, kind: str, text: str, is_real: bool) -> None:
    assert walker.allows({"type": "string", "format": kind}, text) is is_real


@attrs.frozen
class Bounded:
    """Grammars within limits, and masks of them."""

    grammars: Grammars
    masks: Masks

    def mask(self, form: dict[str, Any]) -> Any:
        return self.masks.mask(self.grammars.compile(form))


@pytest.fixture(scope="module")
def bounded() -> Any:
    model = load(DEMO, "cpu", "float32")
    limits = GrammarLimits(seconds=3.0, memory=2**29)
    tokens = Tokens.of(
        Vocabulary(model.tokenizer, model.config.vocab_size), model.config.eos_token_ids
    )
    bounded_grammars = Bounded(Grammars(tokens, limits), Masks(tokens, limits.budget))
    yield bounded_grammars
    bounded_grammars.grammars.close()


# llguidance builds it in the stack of an engine's thread, but not in a quarter of that.
DEEP = "start: r0\n" + "".join(f'r{i}: r{i + 1} | "{i}"\n' for i in range(1000)) + 'r1000: "a"'


@pytest.mark.parametrize(
    ("form", "words"),
    [
        pytest.param(
            {
                "type": "grammar",
                "grammar": "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(9000))
                + "\nroot ::= r0\nr9000 ::= []",
            },
            "",
            marks=pytest.mark.slow,
        ),
        ({"type": "grammar", "grammar": "root ::= root"}, "a grammar that no text fits"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
            "a grammar that no text fits",
        ),
        (
            schema_form(
                {
                    "type": "object",
                    "properties": {
                        f"p{i}": {"type": "string", "minLength": i} for i in range(3000)
                    },
                    "additionalProperties": False,
                }
            ),
            r"a grammar that takes [\d.e+]+ s to build; at most 0.25 s",
        ),
        ({"type": "grammar", "grammar": DEEP}, "a grammar that ends llguidance's process"),
    ],
    ids=["a chain", "a loop", "a reference to itself", "many properties", "deep rules"],
)
def test_grammars_beyond_the_limits_are_refused_and_the_next_is_compiled(
    bounded: Bounded, form: Any, words: str
) -> None:
    with pytest.raises(RequestError) as error:
        bounded.mask(form)
    assert re.search(words, str(error.value))
    assert bounded.mask({"type": "regex", "regex": "[ab]c"})([]) is not None


def test_a_grammar_that_is_not_compiled_in_time(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded.mask({"type": "regex", "regex": "ba"})  # the process has started
    monkeypatch.setattr(bounded.grammars._compiler, "_limits", GrammarLimits(seconds=0))
    with pytest.raises(RequestError) as error:
        bounded.mask({"type": "grammar", "grammar": 'root ::= ("a" | root "b" root){40}'})
    assert "a grammar that is not compiled within 0 s" in str(error.value)


_NUMBERS = itertools.count()


def new_form() -> dict[str, Any]:
    """One that was not compiled before."""
    return {"type": "regex", "regex": f"a{{{next(_NUMBERS)}}}new"}


def go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_grammar_has_its_time_though_others_have_the_processor(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped for longer than that spends nothing."""
    bounded.mask(new_form())
    compiler = bounded.grammars._compiler
    assert compiler._process is not None
    pid = compiler._process.pid
    assert pid is not None
    monkeypatch.setattr(compiler, "_limits", GrammarLimits(seconds=1.0))
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(1.5, go_on, (pid,))
    goes_on.start()
    try:
        assert bounded.mask(new_form())([]) is not None
    finally:
        goes_on.join()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"a grammar that is not compiled within 1 s"):
        bounded.mask(new_form())


@pytest.mark.slow
def test_a_planted_clock_on_the_wall_is_found(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_processor_seconds", lambda _: None)
    with pytest.raises(RequestError, match=r"a grammar that is not compiled within 1 s"):
        test_a_grammar_has_its_time_though_others_have_the_processor(bounded, monkeypatch)


def test_a_process_that_ends_is_replaced(bounded: Bounded) -> None:
    bounded.mask({"type": "regex", "regex": "ab"})
    compiler = bounded.grammars._compiler
    assert compiler._process is not None
    compiler._process.kill()
    compiler._process.join()
    assert bounded.mask({"type": "regex", "regex": "abc"})([]) is not None


# Each token costs more than the one before, since there are more ways to read the text.
AMBIGUOUS = [
    {"type": "grammar", "grammar": grammar}
    for grammar in ('root ::= root root | "a" | "ab" | "b"', "start: start start | /a|ab|b/ | /a/")
]


@pytest.mark.parametrize("form", AMBIGUOUS, ids=["GBNF", "Lark"])
def test_a_grammar_that_is_slow_only_later_is_refused_for_a_request_that_gets_there(
    bounded: Bounded, form: Any
) -> None:
    """What 16 tokens take says nothing of 256 of 100 completions."""
    short = bounded.grammars.compile(form, GrammarUse(num_tokens=16, n=1))
    with pytest.raises(
        RequestError,
        match=r"s for a token for each of 100 completions after \d+ tokens; a step may",
    ):
        bounded.grammars.compile(form, GrammarUse(num_tokens=256, n=100))
    assert bounded.grammars.find(form, GrammarUse(num_tokens=8, n=1)) == short
    assert bounded.grammars.find(form, GrammarUse(num_tokens=256, n=100)) is None


def test_planted_a_trial_of_64_tokens_for_one_completion_finds_nothing(bounded: Bounded) -> None:
    """What was done before; the tests above would fail."""
    assert bounded.grammars.compile(AMBIGUOUS[0], GrammarUse(num_tokens=64, n=1))


@pytest.mark.parametrize(
    "use", [GrammarUse(num_tokens=8, n=2), GrammarUse(num_tokens=9, n=1)], ids=str
)
def test_a_grammar_is_tried_anew_for_a_longer_use_alone(bounded: Bounded, use: GrammarUse) -> None:
    form = {"type": "regex", "regex": f"[ab]{{{use.num_tokens}}}c{{{use.n}}}"}
    text = bounded.grammars.compile(form, GrammarUse(num_tokens=8, n=1))
    assert bounded.grammars.find(form, GrammarUse(num_tokens=8, n=1)) == text
    assert bounded.grammars.find(form, use) is None
    assert bounded.grammars.compile(form, use) == text
    assert bounded.grammars.find(form, use) == text


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_completions_that_share_matchers_have_the_masks_of_matchers_of_their_own(
    bounded: Bounded, seed: int, n: int
) -> None:
    """They begin alike and part; some end before others, in any order within a step."""
    draw = random.Random(seed)
    form = {"type": "regex", "regex": "(a|b|ab)*c"}
    text = bounded.grammars.compile(form)
    shared = bounded.masks.mask(text)
    said: list[list[int]] = [[] for _ in range(n)]
    for _ in range(6):
        draw.shuffle(said)
        for tokens in said:
            bits = shared(tokens)
            assert torch.equal(bits, bounded.masks.mask(text)(tokens))
            allowed = [token for token in range(257) if bits[token // 32] >> token % 32 & 1]
            tokens.append(draw.choice(allowed[:2]))
        if len(said) > 1 and draw.random() < 0.3:
            said.pop()
    assert len(shared._states) <= n + n
