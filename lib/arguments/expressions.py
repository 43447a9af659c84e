"""`Expression`: a regular expression from a checkpoint's files, matched in bounded time.

Python's `re` backtracks: on a name of 40 letters `(\\w|\\w\\w)+!` keeps the whole interpreter busy
for years. Here, each part of an expression maps the set of places in a name where a match may begin
to the set where it may end, so that nothing is tried twice; and the match gives up after a fixed
number of steps. `re` is used only for single characters and anchors.
"""

import re
from collections.abc import Callable, Iterable
from typing import NoReturn

import attrs

from weft.arguments.json_text import Fields
from weft.errors import ConfigError

# Why not a library: `regex` (2026.5), with a time-out of 1 s, was busy for 27 s and took 8 GB with
# one of the expressions in this module's tests. `google-re2` has no look-ahead, which the
# expressions of released adapters use.

# The most characters of an expression.
MOST_CHARACTERS = 10_000
# The most parts of an expression tried on one name, which take some hundredths of a second.
# Expressions of released adapters take a few hundred.
MOST_STEPS = 20_000

# A function from the places where a match may begin to those where it may end.
Ends = Callable[["_Name", frozenset[int]], frozenset[int]]

_PLAIN = re.compile(r"[\w.|-]{0,1000000}")
_REPEAT = re.compile(r"\*|\+|\?|\{(?P<least>\d*)(?P<open>,(?P<most>\d*))?\}")
_LOOK = {"(?=": (True, True), "(?!": (True, False), "(?<=": (False, True), "(?<!": (False, False)}
_GROUP = re.compile(r"\((?:\?(?:P<\w+>|:|=|!|<=|<!))?")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_SINGLE = re.compile(r"\\[AbBdDsSwWZ]|\\[^0-9a-zA-Z]|\\[nrtfav]|[^\\]", re.DOTALL)


@attrs.frozen
class Expression:
    """A regular expression in Python's syntax, without back references, flags, atomic groups and
    possessive quantifiers.

    Args:
        text: the expression as written.
        before, after: expressions that must match before and after it.

    Raises:
        ConfigError: it is malformed, too long, or uses syntax that is not supported.

    >>> Expression("(q|k)_proj", before=".*[.]").matches("model.layers.0.self_attn.k_proj")
    True
    """

    text: str
    before: str = ""
    after: str = ""
    _ends: Ends = attrs.field(init=False, repr=False, eq=False)

    @_ends.default
    def _parsed(self) -> Ends:
        whole = f"{self.before}(?:{self.text}){self.after}"
        plain = is_plain(self.text)
        if len(self.text) > MOST_CHARACTERS and not plain:
            self._refuse(f"{len(self.text)} characters, and {MOST_CHARACTERS} are the most")
        try:
            # Also compiled by itself, so that it cannot close the group that it is put into.
            re.compile(self.text)
            pattern = re.compile(whole)
            if plain:
                return _of_plain(pattern)
            return _Parser(whole).branches()
        except (re.error, OverflowError, RecursionError) as error:
            self._refuse(
                "groups are nested too deeply" if isinstance(error, RecursionError) else str(error)
            )

    def matches(self, name: str) -> bool:
        """Whether the expression matches a whole name.

        Raises:
            ConfigError: the match takes more than `MOST_STEPS` steps.
        """
        return len(name) in self._ends(_Name(name, self._refuse), frozenset([0]))

    def _refuse(self, problem: str) -> NoReturn:
        call = f"the regular expression {self.text!r:.60}"
        instead = "a list of names, or a simpler expression"
        raise ConfigError(call, problem, instead) from None


def read_expression(
    fields: Fields, name: str, text: str, *, before: str = "", after: str = ""
) -> Expression:
    """The expression that a field holds.

    Raises:
        ConfigError: `Expression` refuses it; the error names the field.
    """
    try:
        return Expression(text, before, after)
    except ConfigError as error:
        fields.check(False, name, f"a regular expression in place of {text!r:.60}: {error.problem}")
        raise


def is_plain(text: str) -> bool:
    """Whether an expression is a name or alternative names, so that nothing in it can match in more
    than one way and `re` is fast."""
    return _PLAIN.fullmatch(text) is not None


@attrs.define
class _Name:
    """A name that is being matched, the number of steps so far, and the function that raises when
    there are too many."""

    text: str
    refuse: Callable[[str], NoReturn]
    steps: int = 0

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MOST_STEPS:
            self.refuse(f"more than {MOST_STEPS} steps to match {self.text!r}")


def _of_plain(pattern: re.Pattern[str]) -> Ends:
    return lambda name, starts: frozenset([len(name.text)] if pattern.fullmatch(name.text) else [])


def _single(text: str) -> Ends:
    """The match of a character, a class of characters, or an anchor."""
    match = re.compile(text).match

    def ends(name: _Name, starts: frozenset[int]) -> frozenset[int]:
        name.count(len(starts))
        return frozenset(matched.end() for start in starts if (matched := match(name.text, start)))

    return ends


def _sequence(parts: Iterable[Ends]) -> Ends:
    parts = tuple(parts)

    def ends(name: _Name, starts: frozenset[int]) -> frozenset[int]:
        for part in parts:
            name.count(1)
            starts = part(name, starts)
        return starts

    return ends


def _any_of(branches: tuple[Ends, ...]) -> Ends:
    def ends(name: _Name, starts: frozenset[int]) -> frozenset[int]:
        name.count(len(branches))
        return frozenset().union(*(branch(name, starts) for branch in branches))

    return ends


def _repeated(part: Ends, least: int, most: int | None) -> Ends:
    def ends(name: _Name, starts: frozenset[int]) -> frozenset[int]:
        # More rounds than there are places change nothing: one of them has then matched the empty
        # text, which it could do any number of times, or no place is left.
        rounds = len(name.text) + 1
        for _ in range(min(least, rounds)):
            name.count(1)
            starts = part(name, starts)
        reached = new = starts
        for _ in range(rounds if most is None else min(most - least, rounds)):
            name.count(1)
            # Continue only from places that are new: the others have been tried.
            new = part(name, new) - reached
            if not new:
                break
            reached |= new
        return reached

    return ends


def _looked(part: Ends, ahead: bool, positive: bool) -> Ends:
    def holds(name: _Name, place: int) -> bool:
        # Looking back tries all earlier places as the start.
        name.count(1 if ahead else place + 1)
        if ahead:
            return bool(part(name, frozenset([place])))
        return any(place in part(name, frozenset([start])) for start in range(place + 1))

    return lambda name, starts: frozenset(
        place for place in starts if holds(name, place) == positive
    )


@attrs.define
class _Parser:
    """A parser for expressions that `re` has compiled, which are therefore well formed."""

    text: str
    at: int = 0

    def branches(self) -> Ends:
        branches = [self._parts()]
        while self._takes("|"):
            branches.append(self._parts())
        if len(branches) == 1:
            return branches[0]
        return _any_of(tuple(branches))

    def _parts(self) -> Ends:
        parts: list[Ends] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeat(self._atom()))
        if len(parts) == 1:
            return parts[0]
        return _sequence(parts)

    def _atom(self) -> Ends:
        if self.text[self.at] == "(":
            return self._group()
        match = (_CLASS if self.text[self.at] == "[" else _SINGLE).match(self.text, self.at)
        if match is None:
            self._refuse(self.text[self.at : self.at + 2])
        self.at = match.end()
        return _single(re.escape(match[0]) if match[0] in "{}" else match[0])

    def _group(self) -> Ends:
        match = _GROUP.match(self.text, self.at)
        if match:
            opened = match[0]
        else:
            opened = ""
        if opened == "(" and self.text[self.at + 1] == "?":
            self._refuse(self.text[self.at : self.at + 4])
        self.at += len(opened)
        inner = self.branches()
        self.at += 1
        if opened in _LOOK:
            return _looked(inner, *_LOOK[opened])
        return inner

    def _repeat(self, part: Ends) -> Ends:
        match = _REPEAT.match(self.text, self.at)
        if match is None or match[0] == "{}":
            return part
        self.at = match.end()
        if self._takes("+"):
            self._refuse(f"{match[0]}+")
        self._takes("?")  # lazy or greedy: the possible ends are the same
        if match[0] in "*+?":
            return _repeated(part, int(match[0] == "+"), 1 if match[0] == "?" else None)
        least = int(match["least"] or 0)
        if match["open"] is None:
            most = least
        elif match["most"]:
            most = int(match["most"])
        else:
            most = None
        return _repeated(part, least, most)

    def _refuse(self, syntax: str) -> NoReturn:
        raise re.error(f"{syntax!r} is not supported")

    def _takes(self, character: str) -> bool:
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        return True
