"""A structured answer parses under its schema, or the schema is refused by a keyword's name,
whatever is drawn.

The answers are walks of random tokens that the mask allows, so that they say what no model would.
jsonschema decides.
"""

import contextlib
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
from drawn_schemas import kept_schemas, keywords, odd_schemas, strings
from hypothesis import Phase, event, find, given, settings, strategies as st

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.server.grammars import compiling, masks as masks_module, patterns, schemas
from weft.transforms.server.grammars.compiling import GrammarLimits, GrammarUse, Tokens
from weft.transforms.server.grammars.masks import Grammars, Masks
from weft.transforms.server.grammars.patterns import rewrite
from weft.transforms.server.vocabulary import Vocabulary

jsonschema = pytest.importorskip("jsonschema")
xgrammar = pytest.importorskip("xgrammar")
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


class Walker:
    """Walks through the grammars of a model's tokens."""

    def __init__(self, model: Model) -> None:
        size = model.config.vocab_size
        self.model = model
        self.stops = {*model.config.eos_token_ids}
        tokens = Tokens.of(Vocabulary(model.tokenizer, size), model.config.eos_token_ids)
        self.masks = Masks(tokens, None)
        self.compiler = xgrammar.GrammarCompiler(tokens.info(), max_threads=1, cache_enabled=False)
        self.closing = [token for token in range(size) if model.decode([token]) in ('"', "}", "]")]

    def walk(self, schema: Any, seed: int, most: int = 300) -> str | None:
        """The text of a walk; None: it did not end."""
        source = compiling.source_of(
            "call", {"type": "json_schema", "json_schema": {"schema": schema}}
        )
        try:
            compiled = compiling.compile_with(self.compiler, *source)
        except RuntimeError as error:  # as in the process that compiles
            raise RequestError("call", f"{error}", "one that XGrammar compiles") from error
        mask = self.masks.mask(compiled.serialize_json())
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


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker(load(DEMO, "cpu", "float32"))


def parses(walker: Walker, schema: Any, seed: int) -> str:
    """The law, for one schema; says how the walk ended."""
    try:
        text = walker.walk(schema, seed)
    except RequestError as error:
        said = str(error)
        assert any(repr(word) in said or word in said for word in keywords(schema)), said
        return "refused"
    if text is None:
        return "cut"
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))
    return "ended"


@given(kept_schemas(), st.integers(0, 10**6))
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


def test_the_law_catches_schemas_that_go_to_xgrammar_as_they_are(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "rewrite_schema", lambda call, schema: schema)
    breaks(walker, odd_schemas())
    breaks(walker, kept_schemas())


def test_the_law_catches_patterns_that_are_not_escaped(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        schemas, "rewrite", lambda call, pattern, in_json: rewrite(call, pattern, in_json=False)
    )
    breaks(walker, kept_schemas())


def test_the_law_catches_a_mask_that_is_one_token_late(
    walker: Walker, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = masks_module._GrammarMask.__call__
    monkeypatch.setattr(
        masks_module._GrammarMask, "__call__", lambda self, tokens: call(self, tokens[:-1])
    )
    breaks(walker, kept_schemas())


@pytest.mark.parametrize(
    ("pattern", "fits", "misfits"),
    [
        ("[^a]", 'b\n"', "a"),
        (r"\d{2,3}", ["12", "123"], ["1", "1234", "١٢"]),
        ("^(a|bc)*$", ["", "abca"], ["b"]),
        (r"\w+", "a_9", " é"),
        (".", "xé\t", "\n"),
    ],
)
def test_a_pattern_means_what_it_means_in_python(pattern: str, fits: Any, misfits: Any) -> None:
    written = rewrite("call", pattern, in_json=False)
    quoted = rewrite("call", pattern, in_json=True)
    for texts, matches in ((fits, True), (misfits, False)):
        for text in texts:
            assert bool(re.fullmatch(written, text)) is matches, (written, text)
            assert (
                bool(re.fullmatch(quoted, json.dumps(text, ensure_ascii=False)[1:-1])) is matches
            ), (quoted, text)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)b", "has an assertion, a reference or an atomic group"),
        (r"(a)\1", "has an assertion, a reference or an atomic group"),
        ("a^b", "has an anchor or a boundary in the middle"),
        (r"a\b", "has an anchor or a boundary in the middle"),
        ("(?i)a", "has flags, as in (?i)"),
        ("((a{1,99}){1,99}){1,99}", "has repetitions in repetitions of more than 5000 characters"),
        ("(" * 3000 + ")" * 3000, "nested too deeply"),
        ("a" * 10_001, "a pattern of 10001 characters"),
        ("\0", "has a set without a character that a text may have"),
        ("(", "missing ), unterminated subpattern"),
    ],
    ids=lambda argument: argument[:20],
)
def test_patterns_that_cannot_be_kept(pattern: str, words: str) -> None:
    with pytest.raises(RequestError) as error:
        rewrite("call", pattern, in_json=False)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "integer", "minimum": 1, "$ref": "#"},
            "the keyword 'type' beside '$ref', which would be ignored",
        ),
        ({"$ref": "file:///etc/passwd"}, "$ref 'file:///etc/passwd'"),
        ({"$ref": "#/$defs/a"}, "$ref '#/$defs/a', which finds no schema"),
        (
            {"type": "array", "uniqueItems": True},
            "the keyword 'uniqueItems', which would be ignored",
        ),
        ({"required": ["a"]}, "'required' ['a'], not all of them in 'properties'"),
        (
            {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
            "'oneOf' of schemas that one value may fit",
        ),
        ({"type": "string", "format": "regex"}, "'format' 'regex', which would be ignored"),
        ({"type": "number", "minimum": 1e-9}, "'minimum' 1e-09, which would be rounded"),
        ({"type": "array", "items": {"tpye": "integer"}}, "at #/items\n  saw: the keyword 'tpye'"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength' 3 and 'maxLength' 2"),
    ],
    ids=str,
)
def test_schemas_that_cannot_be_kept_to(schema: Any, words: str) -> None:
    with pytest.raises(RequestError) as error:
        schemas.rewrite_schema("call", schema)
    assert words in str(error.value)


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


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            {
                "type": "grammar",
                "grammar": "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(9000))
                + "\nroot ::= r0\nr9000 ::= []",
            },
            "",
        ),
        ({"type": "grammar", "grammar": "root ::= root"}, "a grammar that no text fits"),
        (  # XGrammar 0.2.9 refuses it itself
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
            r"saw: (a grammar that no text fits|RuntimeError: Circular \$ref chain .*)\n  instead",
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"enum": ["x" * i for i in range(3000)]}},
            },
            "",  # its time or its memory ends first
        ),
    ],
    ids=["a chain", "a loop", "a reference to itself", "a long list"],
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


NESTED = [{"type": "regex", "regex": "(" * depth + "a*" + ")*" * depth} for depth in (2, 3)]
CHAINS = [
    {
        "type": "grammar",
        "grammar": "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1}*" for i in range(length))
        + f'\nr{length} ::= "a"*',
    }
    for length in (4, 8)
]


@pytest.mark.parametrize("form", [*NESTED, *CHAINS], ids=lambda form: form["type"])
def test_a_grammar_that_is_slow_only_later_is_refused_for_a_request_that_gets_there(
    bounded: Bounded, form: Any
) -> None:
    """Each token costs more than the one before: what 16 tokens take says nothing of 256 of 100
    completions."""
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
    assert bounded.grammars.compile(NESTED[-1], GrammarUse(num_tokens=64, n=1))


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


NEAR_BLOCKS = st.one_of(
    *[st.integers(128 * count - 2, 128 * count + 2) for count in range(1, 5)], st.integers(0, 20)
)


@given(NEAR_BLOCKS, st.none() | NEAR_BLOCKS, NEAR_BLOCKS)
@settings(max_examples=200, deadline=None)
def test_repetitions_in_blocks_match_what_the_pattern_matches(
    least: int, more: int | None, length: int
) -> None:
    """XGrammar follows no more than 128 of them in a time that does not grow."""
    most = "" if more is None else least + more
    pattern = f"a{{{least},{most}}}"
    written = rewrite("call", pattern, in_json=False)
    assert all(int(count) <= 128 for count in re.findall(r"\d+", written))
    for count in {length, least, least + (more or 0), max(least - 1, 0), least + (more or 0) + 1}:
        text = "a" * count
        assert bool(re.fullmatch(written, text)) == bool(re.fullmatch(pattern, text))


def test_planted_repetitions_without_the_last_block_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        patterns, "_at_most", lambda written, count: f"{written}{{0,{min(count, 128)}}}"
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        test_repetitions_in_blocks_match_what_the_pattern_matches()


def test_planted_repetitions_in_one_block_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mask within them takes more time than the one before."""
    monkeypatch.setattr(patterns, "_BLOCK", 10**6)
    with pytest.raises((AssertionError, ExceptionGroup)):
        test_repetitions_in_blocks_match_what_the_pattern_matches()


def test_long_strings_are_drawn() -> None:
    find(strings, lambda schema: schema.get("maxLength", 0) > 2 * patterns._BLOCK)
