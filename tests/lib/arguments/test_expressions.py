"""`Expression` matches like Python's `re`, and gives up where `re` would run forever."""

import itertools
import re
import time

import pytest
from hypothesis import assume, given, settings, strategies as st

from weft.arguments.expressions import MOST_CHARACTERS, MOST_STEPS, Expression
from weft.errors import ConfigError

NAME = "model.layers.12.self_attn.q_proj"

atoms = st.sampled_from(
    [
        *"abq._",
        r"\.",
        r"\w",
        r"\d",
        ".",
        "[ab]",
        "[^a.]",
        r"[\w.]",
        "[]a]",
        "[^]]",
        r"\b",
        "^",
        "$",
        "{",
        "}",
        "{}",
        "{a}",
        r"\A",
        r"\Z",
        r"\-",
        "(?<=a)",
        r"(?<!\.)",
        "(?<=a.)",
        r"(?<=\b)",
    ]
)
REPEATS = ["*", "+", "?", "{2}", "{,2}", "{1,}", "{1,2}", "*?", "+?", "??", "{0,3}?", "{,}"]


def larger(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(part, part)
    return st.one_of(
        st.lists(part, max_size=3).map("".join),
        st.tuples(part, st.sampled_from(REPEATS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        pairs.map(lambda pair: f"({pair[0]}|{pair[1]})"),
        pairs.map(lambda pair: f"{pair[0]}|{pair[1]}"),
        part.map(lambda one: f"(?={one})"),
        part.map(lambda one: f"(?!{one})"),
    )


# Short names, of which many expressions match some.
WORDS = ["".join(letters) for size in range(4) for letters in itertools.product("ab", repeat=size)]


@given(text=st.recursive(atoms, larger, max_leaves=12), name=st.text("abq._1{}", max_size=7))
@settings(max_examples=400, deadline=None)
def test_it_matches_what_re_matches(text: str, name: str) -> None:
    try:
        pattern = re.compile(text)
    except re.error:
        assume(False)
    expression = Expression(text)
    literal = re.sub(r"[^abq._1{}]", "", text)
    for word in (name, literal, *WORDS):
        assert expression.matches(word) == (pattern.fullmatch(word) is not None)
    inside = re.compile(f"a.*(?:{text})b?").fullmatch(f"a{name}") is not None
    assert Expression(text, before="a.*", after="b?").matches(f"a{name}") == inside


@pytest.mark.parametrize("repeat", [*REPEATS, "{}"])
@pytest.mark.parametrize("part", ["a", "[ab]", "(?:a|bb)", "(?:ab?)"])
@pytest.mark.parametrize("rest", ["", "a", "b{}"])
def test_each_repeat_matches_what_re_matches(part: str, repeat: str, rest: str) -> None:
    text = part + repeat + rest
    words = [word + end for word in WORDS for end in ("", "{}", "{}b{}", "b{}")]
    matching = [word for word in words if Expression(text).matches(word)]
    assert matching == [word for word in words if re.fullmatch(text, word)]


def test_expressions_of_one_text_are_equal_and_print_as_written() -> None:
    one = Expression("a|b", before="c")
    assert one == Expression("a|b", before="c") != Expression("a|b")
    assert hash(one) == hash(Expression("a|b", before="c"))
    assert repr(one) == "Expression(text='a|b', before='c', after='')"


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("q_proj", False),
        ("model.layers.12.self_attn.q_proj|lm_head", True),
        (r".*\.(q|k|v)_proj", True),
        (r"^(?!.*visual).*(?:q_proj|lm_head).*", True),
        (
            r"(?:.*?(?:language|text).*?(?:q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:q_proj))",
            True,
        ),
        (r"(?P<layer>.*\d+).*", True),
    ],
)
def test_expressions_of_released_adapters(text: str, matches: bool) -> None:
    assert Expression(text).matches(NAME) == matches


ENDLESS = [
    r"(\w|\w\w|\.)+!",
    "(.*)*(.*)*(.*)*x!",
    ".*" * 30 + "!",
    "((((((((.*)*)*)*)*)*)*)*)*!",
    "(a{0,60000}){0,60000}b",
    "(a|a)" * 40 + "!",
    "(?:" * 20 + ".?" + "){9}" * 20 + "!",
    "(?:" + "|" * 5000 + "){60000}!",
    "(?:.*?(.)*?)*" * 200 + "!",
    "(?=.*" * 100 + ")" * 100 + "!",
    ".*" + "(?<=" * 6 + ")" * 6 + "!",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_what_re_would_be_busy_with_for_ever(text: str) -> None:
    """The expression does not match, or is refused."""
    begun = time.monotonic()
    answer = ""
    try:
        answer = str(Expression(text).matches(NAME))
    except ConfigError as error:
        answer = error.problem
    assert answer in ("False", f"more than {MOST_STEPS} steps to match {NAME!r}")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(q", "missing ), unterminated subpattern at position 0"),
        ("a)(b", "unbalanced parenthesis at position 1"),
        ("a{99999999999}", "the repetition number is too large"),
        ("(" * 50_000 + ")" * 50_000, f"100000 characters, and {MOST_CHARACTERS} are the most"),
        ("(" * 4000 + ")" * 4000, "groups are nested too deeply"),
        ("(?i)q_proj", "global flags not at the start of the expression at position 3"),
        ("(?i:q)_proj", "'(?i:' is not supported"),
        (r"(.)\1", r"'\\1' is not supported"),
        ("a*+", "'*+' is not supported"),
        ("(?>a)", "'(?>a' is not supported"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Expression(text)
    assert caught.value.call == f"the regular expression {text!r:.60}"
    assert caught.value.problem == problem
    assert caught.value.instead == "a list of names, or a simpler expression"
