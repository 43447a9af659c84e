"""`rewrite`: rewrites a regular expression so that XGrammar enforces it, also inside JSON strings.

XGrammar 0.2 puts what a `pattern` matches between quotes without escaping it. A quotation mark, a
backslash or a newline in the match then ends or breaks the JSON. A negated set also matches
surrogates, which no text contains, and an anchor in the middle is ignored. Here Python's parser
reads the expression, sets lose the characters that no text contains, characters that JSON escapes
are written escaped, and what XGrammar cannot enforce is refused.
"""

import re
from collections.abc import Sequence
from re import _constants as op, _parser as parser  # type: ignore[attr-defined]
from typing import Any

from weft.errors import RequestError

# A set of characters, as ranges of code points; both ends belong to a range.
Ranges = list[tuple[int, int]]
# The most characters that nested repetitions may stand for, since each costs time at each token.
MOST_NESTED = 5000
# The most characters of a pattern.
_LONGEST = 10_000
# The characters that a text may contain.
_TEXT: Ranges = [(9, 10), (13, 13), (0x20, 0xD7FF), (0xE000, 0x10FFFF)]
# For each character that JSON writes with a backslash: what follows the backslash, as it is written
# in a set of a regular expression.
_ESCAPES = {0x22: '"', 0x5C: "\\\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_CATEGORIES: dict[Any, Ranges] = {
    op.CATEGORY_DIGIT: [(0x30, 0x39)],
    op.CATEGORY_SPACE: [(9, 10), (13, 13), (0x20, 0x20)],
    op.CATEGORY_WORD: [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
# Engines disagree on which characters beyond ASCII match \d, \s and \w, so here they match neither
# these nor \D, \S and \W.
_BEYOND: Ranges = [(0x80, 0x10FFFF)]
_NEGATED = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}


# Up to this many repetitions, the time of XGrammar's masks does not grow with their number.
_BLOCK = 128


def rewrite(call: str, pattern: str, *, in_json: bool) -> str:
    """The expression, for XGrammar, of the texts that the whole pattern matches.

    Args:
        call: the call that errors show.
        in_json: whether the text stands between the quotation marks of a JSON string.

    Raises:
        RequestError: the pattern is not a regular expression, describes no regular language, or has
            too large repetitions.
    """
    if len(pattern) > _LONGEST:
        raise RequestError(
            call, f"a pattern of {len(pattern)} characters", f"one of at most {_LONGEST}"
        )
    try:
        # Named groups are `(?<name>...)` in JSON Schema, and `(?P<name>...)` in Python.
        parsed = parser.parse(
            pattern.replace("(?<", "(?P<")
            if "(?<=" not in pattern and "(?<!" not in pattern
            else pattern
        )
        if parsed.state.flags & ~re.UNICODE.value:
            raise _Refused("flags, as in (?i)")
        return _Writer(in_json).concatenation(parsed, True, True)
    except (re.error, OverflowError) as error:
        raise RequestError(
            call, f"the pattern {pattern!r:.100}: {error}", "a regular expression"
        ) from error
    except RecursionError:
        raise RequestError(call, "a pattern that is nested too deeply", "a shorter one") from None
    except _Refused as error:
        instead = "groups, alternatives, sets of characters and repetitions alone"
        raise RequestError(call, f"the pattern {pattern!r:.100} has {error}", instead) from None


class _Refused(Exception):
    """A part of an expression that XGrammar would not enforce."""


class _Writer:
    """Writes the parts of a parsed expression."""

    def __init__(self, in_json: bool) -> None:
        self._in_json = in_json
        self._nested = 1

    def concatenation(self, parts: Sequence[Any], at_start: bool, at_end: bool) -> str:
        """Write parts in sequence; an anchor is allowed only at the start or the end of the text,
        and is left out, since the whole text must match."""
        parts = list(parts)
        written = []
        for place, (kind, value) in enumerate(parts):
            first = at_start and place == 0
            last = at_end and place == len(parts) - 1
            if kind is op.AT:
                begins = value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING) and first
                ends = value in (op.AT_END, op.AT_END_STRING) and last
                if not begins and not ends:
                    raise _Refused("an anchor or a boundary in the middle")
                continue
            written.append(self._part(kind, value, first, last))
        return "".join(written)

    def _part(self, kind: Any, value: Any, first: bool, last: bool) -> str:
        if kind is op.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise _Refused("flags, as in (?i)")
            return f"(?:{self.concatenation(inner, first, last)})"
        if kind is op.BRANCH:
            return f"(?:{'|'.join(self.concatenation(branch, first, last) for branch in value[1])})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(*value)
        return self._characters(_characters_of(kind, value))

    def _repeat(self, least: int, most: Any, inner: Sequence[Any]) -> str:
        if most is op.MAXREPEAT:
            bound = least
        else:
            bound = int(most)
        before = self._nested
        self._nested *= max(bound, 1)
        if before > 1 and self._nested > MOST_NESTED:
            raise _Refused(f"repetitions in repetitions of more than {MOST_NESTED} characters")
        written = f"(?:{self.concatenation(inner, False, False)})"
        self._nested = before
        if bound <= _BLOCK:
            bounds = f"{{{least},{'' if most is op.MAXREPEAT else most}}}"
            return written + ("*" if not least and most is op.MAXREPEAT else bounds)
        if most is op.MAXREPEAT:
            rest = f"{written}*"
        else:
            rest = _at_most(written, bound - least)
        return _exactly(written, least) + rest

    def _characters(self, ranges: Ranges) -> str:
        if not self._in_json:
            return _set_of(_intersected(ranges, _TEXT))
        escaped = "".join(
            letter for code, letter in _ESCAPES.items() if any(a <= code <= b for a, b in ranges)
        )
        plain = _intersected(
            ranges, [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)]
        )
        if not escaped:
            return _set_of(plain)
        if plain:
            return f"(?:{_set_of(plain)}|\\\\[{escaped}])"
        return f"(?:\\\\[{escaped}])"


def _exactly(written: str, count: int) -> str:
    """The pattern repeated `count` times, in blocks: in one long repetition, each of XGrammar's
    masks would take more time than the one before."""
    if count <= _BLOCK:
        if count:
            return f"{written}{{{count}}}"
        return ""
    blocks, rest = divmod(count, _BLOCK)
    return _exactly(f"(?:{written}{{{_BLOCK}}})", blocks) + _exactly(written, rest)


def _at_most(written: str, count: int) -> str:
    """The pattern repeated at most `count` times, in blocks: either fewer whole blocks and part of
    one, or all whole blocks and at most the rest."""
    if count <= _BLOCK:
        if count:
            return f"{written}{{0,{count}}}"
        return ""
    blocks, rest = divmod(count, _BLOCK)
    block = f"(?:{written}{{{_BLOCK}}})"
    fewer = _at_most(block, blocks - 1) + _at_most(written, _BLOCK - 1)
    return f"(?:{fewer}|{_exactly(block, blocks)}{_at_most(written, rest)})"


def _characters_of(kind: Any, value: Any) -> Ranges:
    if kind is op.LITERAL:
        return [(value, value)]
    if kind is op.NOT_LITERAL:
        return _complement([(value, value)])
    if kind is op.ANY:  # all but the line terminators of ECMA-262, as JSON Schema has them
        return _complement([(10, 10), (13, 13), (0x2028, 0x2029)])
    if kind is not op.IN:
        raise _Refused("an assertion, a reference or an atomic group")
    negated = False
    ranges = Ranges()
    for opcode, what in value:
        if opcode is op.NEGATE:
            negated = True
        elif opcode is op.RANGE:
            ranges.append(what)
        elif opcode is op.LITERAL:
            ranges.append((what, what))
        elif what in _CATEGORIES:
            ranges += [*_CATEGORIES[what], *(_BEYOND if negated else ())]
        else:
            ranges += _complement([*_CATEGORIES[_NEGATED[what]], *([] if negated else _BEYOND)])
    if negated:
        return _complement(ranges)
    return _merged(ranges)


def _merged(ranges: Ranges) -> Ranges:
    merged = Ranges()
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _complement(ranges: Ranges) -> Ranges:
    gaps = Ranges()
    start = 0
    for first, last in _merged(ranges):
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= 0x10FFFF:
        return [*gaps, (start, 0x10FFFF)]
    return gaps


def _intersected(left: Ranges, right: Ranges) -> Ranges:
    return [
        (max(a, c), min(b, d)) for a, b in _merged(left) for c, d in right if max(a, c) <= min(b, d)
    ]


def _set_of(ranges: Ranges) -> str:
    if not ranges:
        raise _Refused("a set without a character that a text may have")
    written = "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in ranges)
    return f"[{written}]"


def _char(code: int) -> str:
    char = chr(code)
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(
        char, f"\\{char}" if char in "\\]^-[" else char
    )
