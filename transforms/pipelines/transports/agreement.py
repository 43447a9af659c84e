"""Agreement: ranks compare their sources, programs, requests and weights with every message.

Each rank keeps a journal of what it was asked to do. A message carries the state of its sender's
journal at the time its batch was submitted, and the entries added since the last message. The
receiver compares them with its journal before it computes, and names the first entry that differs.
`source_digest` makes the text that stands for a stage's source.
"""

import functools
import hashlib
import inspect
import json
import linecache
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch

from weft.errors import ProgramError
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.values.bounded import BoundedDict
from weft.values.trees import OF_THIS_PROCESS

SAME = (
    "the same code, configuration and batches on every rank: batches by a pure function of what all"
    " know"
)
_SAME_CALLS = "the same calls with the same arguments, in the same order, on every rank"
# How many entries of a journal are kept, to say which one differs.
_MAX_ENTRIES = 4096
# The most characters of an entry; the rest of a longer one is replaced by a digest.
_LONGEST = 500
# How many programs are kept, to say which line differs.
_MAX_PROGRAMS = 64


@attrs.frozen
class JournalState:
    """The state of a journal when a micro-batch was submitted.

    Args:
        step: the rank's step.
        count: the number of entries so far.
        chain: a digest of all entries, in order.
        digest: the digest of the step's programs.
    """

    step: int
    count: int
    chain: str
    digest: str


@attrs.frozen
class Expected:
    """What a message must be: its micro-batch, whether it is an output that returns, and the state
    that its sender's journal must have had."""

    state: JournalState
    microbatch: int
    returns: bool


@attrs.frozen
class Meeting:
    """A collective, its number among the collectives that a rank took part in, and the state of the
    rank's journal at that point."""

    state: JournalState
    effect: str
    number: int


class Agreement:
    """One rank's journal, and what the other ranks already know of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._chain = ""
        self._count = 0
        # Of the step under way
        self._step = 0
        self._digest = ""
        self._entries: deque[tuple[str, str]] = deque(maxlen=_MAX_ENTRIES)
        self._states: dict[int, JournalState] = {}
        self._programs = BoundedDict[str, CheckedPrograms](_MAX_PROGRAMS)
        # By peer: how many entries it knows
        self._known_counts: dict[int, int] = {}
        # By peer: the digests of the programs whose text it knows
        self._known_texts: dict[int, deque[str]] = {}

    def add(self, subject: str, value: str) -> None:
        """Note a value that every rank must note at the same place among its notes and steps."""
        if len(value) > _LONGEST:
            digest = hashlib.blake2b(value.encode(), digest_size=6).hexdigest()
            value = f"{value[: _LONGEST - 20]}… ({digest})"
        self._count += 1
        self._chain = hashlib.blake2b(
            f"{self._chain}\n{subject}\n{value}".encode(), digest_size=12
        ).hexdigest()
        self._entries.append((subject, value))

    def begin(self, checked: CheckedPrograms, first: int, step: int) -> None:
        """Begin a step. Its micro-batches are numbered from `first`, and earlier ones are over."""
        self._programs[checked.digest] = checked
        self._programs.move_to_end(checked.digest)
        self._step = step
        self._digest = checked.digest
        state = self._now
        self._states = {
            mb: journal_state for mb, journal_state in self._states.items() if mb >= first
        }
        # `setdefault`: a micro-batch from an earlier step keeps the state at its submission, since
        # its messages may be sent and received in different steps on different ranks.
        for mb in range(first, first + checked.num_microbatches):
            self._states.setdefault(mb, state)

    @property
    def _now(self) -> JournalState:
        return JournalState(self._step, self._count, self._chain, self._digest)

    def end(self) -> None:
        """Note that no message is under way: the next step numbers its micro-batches anew."""
        self._states.clear()

    def header(self, peer: int, microbatch: int, returns: bool) -> dict[str, Any]:
        """The part of a message's header that describes this rank's journal.

        Args:
            peer: the receiver.
            microbatch: the micro-batch of the message.
            returns: whether the message is an output that returns to all ranks.
        """
        state = self._states[microbatch]
        return {"mb": microbatch, "returns": returns} | self._state_header(peer, state)

    def _state_header(self, peer: int, state: JournalState) -> dict[str, Any]:
        """The part of a header that tells a peer the state of this rank's journal, with everything
        that the peer does not know yet: new entries, and the text of the programs."""
        header: dict[str, Any] = {
            "count": state.count,
            "chain": state.chain,
            "programs": state.digest,
        }
        num_shared = self._known_counts.get(peer, 0)
        kept = self._count - len(self._entries)
        if num_shared < state.count:
            first = max(num_shared, kept)
            self._known_counts[peer] = state.count
            header["new"] = [first, [self._entries[i - kept] for i in range(first, state.count)]]
        # Half of `_MAX_PROGRAMS`, so that a text is sent again before the receiver might drop it
        texts = self._known_texts.setdefault(peer, deque(maxlen=_MAX_PROGRAMS // 2))
        if state.digest in self._programs and state.digest not in texts:
            header["text"] = self._programs[state.digest].text
            texts.append(state.digest)
        return header

    def meet(self, effect: str, number: int) -> Meeting:
        """A collective in which this rank takes part, with the present state of its journal."""
        return Meeting(self._now, effect, number)

    def meeting_header(self, peer: int, met: Meeting) -> dict[str, Any]:
        """The header of this rank's tensor for a collective."""
        header = {"collective": met.effect, "number": met.number, "step": met.state.step}
        return header | self._state_header(peer, met.state)

    def expect(self, microbatch: int, returns: bool) -> Expected:
        """What the header of the next message to this rank must say."""
        return Expected(self._states[microbatch], microbatch, returns)

    def compare(self, peer: int, expected: "Expected | Meeting", header: dict[str, Any]) -> None:
        """Raise ProgramError unless the sender of a message was in the same state as this rank when
        its batch was submitted, or came to the same collective."""
        state = expected.state
        if isinstance(expected, Meeting) or "collective" in header:
            self._compare_meeting(peer, expected, header)
            return
        call = f"step {state.step} of rank {self.rank}"
        instead = SAME
        microbatch = expected.microbatch
        if (header["count"], header["chain"]) != (state.count, state.chain):
            problem = self._entries_seen(state, peer, header)
            instead = _SAME_CALLS
        elif header["programs"] != state.digest:
            problem = self._programs_seen(state, peer, header)
        elif (header["mb"], header["returns"]) != (microbatch, expected.returns):
            call += f": a message of micro-batch {microbatch} from rank {peer}"
            problem = f"one of micro-batch {header['mb']}: rank {peer} is in another step"
        else:
            return
        raise ProgramError(call, problem, instead)

    def _compare_meeting(
        self, peer: int, expected: "Expected | Meeting", header: dict[str, Any]
    ) -> None:
        state = expected.state
        here = getattr(expected, "effect", "a message of a stage")
        there = header.get("collective", "a message of a stage")
        instead = _SAME_CALLS
        if (header["count"], header["chain"]) != (state.count, state.chain):
            problem = self._entries_seen(state, peer, header)
        elif (
            isinstance(expected, Meeting)
            and "collective" in header
            and header["programs"] != state.digest
        ):
            problem = self._programs_seen(state, peer, header)
            instead = SAME
        elif self._place_of(expected) != (there, header.get("number"), header.get("step")):
            problem = f"rank {peer} is at '{there}'"
            if here == there:
                theirs, (_, number, step) = (
                    (header["number"], header["step"]),
                    self._place_of(expected) or ("", 0, 0),
                )
                problem += (
                    f", number {theirs[0]} in its step {theirs[1]}, and this is number {number} in"
                    f" step {step}"
                )
            instead = (
                "the same collectives in the same order on all ranks of a group, with one shape and"
                " dtype"
            )
        else:
            return
        raise ProgramError(f"rank {self.rank}: '{here}'", problem, instead)

    @staticmethod
    def _place_of(expected: "Expected | Meeting") -> tuple[str, int, int] | None:
        """A collective, its number and its step."""
        if isinstance(expected, Meeting):
            return (expected.effect, expected.number, expected.state.step)
        return None

    def _entries_seen(self, state: JournalState, peer: int, header: dict[str, Any]) -> str:
        """Text for an error: the first entry that differs, on this rank and on the peer."""
        start, theirs = header.get("new", (header["count"], []))
        kept = self._count - len(self._entries)
        mine = [self._entries[i - kept] for i in range(max(start, kept), state.count)]
        pairs = zip_longest(mine, map(tuple, theirs[max(start, kept) - start :]))
        ours, other = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        return (
            f"{_entry_text(ours, state.count)}, where rank {peer} has"
            f" {_entry_text(other, header['count'])}"
        )

    def _programs_seen(self, state: JournalState, peer: int, header: dict[str, Any]) -> str:
        """Text for an error: the first line that differs, on this rank and on the peer."""
        mine = self._programs[state.digest].text
        checked_programs = self._programs.get(header["programs"])
        theirs = header.get("text", None if checked_programs is None else checked_programs.text)
        if theirs is None:
            return f"another program than rank {peer} runs"
        lines = zip(mine.splitlines(), theirs.splitlines(), strict=False)
        a, b = next(
            (pair for pair in lines if pair[0] != pair[1]), ("(all its lines)", "(more lines)")
        )
        return f"'{a.strip()}', where rank {peer} has '{b.strip()}'"


def _entry_text(entry: tuple[str, ...] | None, count: int) -> str:
    if entry is None:
        return f"nothing after its {count} earlier calls"
    return f"'{entry[0]}: {entry[1]}'"


def header_bytes(header: dict[str, Any]) -> bytes:
    """A header as the bytes that are sent."""
    return json.dumps(header, separators=(",", ":")).encode()


_VALUES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size)
# Packages whose source is not digested, because ranks compare their versions
_VERSIONED = {*sys.stdlib_module_names, "torch"}


def source_digest(role: str, fn: Callable[..., Any]) -> str:
    """A line about a function of a pipeline: its role, its name, and a digest of its source.

    The digest covers the text of the file that defines the function, and of the files of the
    functions, classes and modules that it uses by name; the numbers, texts and functions that it
    closes over or has as defaults; and the constants (UPPER_CASE names) of its module. Tensors,
    devices and other variables may differ from rank to rank, so they are left out. A process reads
    each file once. It runs the code that it has imported, so later changes on disk do not count.
    """
    digest = hashlib.blake2b(digest_size=6)
    for part in _parts(fn, set()):
        digest.update(f"{part};".encode())
    return f"{role}: {getattr(fn, '__name__', type(fn).__name__)} {digest.hexdigest()}"


def _parts(value: Any, visited: set[int | str]) -> Iterator[str]:
    """The texts that the digest of a value covers. Each object is visited once, since functions may
    call each other."""
    if isinstance(value, _VALUES):
        yield repr(value)
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    yield type(value).__qualname__
    if isinstance(value, frozenset | set):
        # The order of a set differs from process to process.
        yield repr(sorted(map(repr, value)))
    elif isinstance(value, CodeType):
        yield from _source(value, visited)
    elif isinstance(value, type | ModuleType):
        yield value.__name__
        yield from _file(_source_file(value), visited)
    else:
        for part in _inside(value):
            yield from _parts(part, visited)


def _source(code: CodeType, visited: set[int | str]) -> Iterator[str]:
    """Digests of a function's code and of its file. The code is covered too, because two lambdas
    may share a line, and code from `exec` has no file."""
    yield _digest_code(code)
    yield from _file(code.co_filename, visited)


@functools.lru_cache(maxsize=2**13)
def _digest_code(code: CodeType) -> str:
    """A digest of a function's name, line, bytecode and constants. It can be cached, because code
    is immutable, and two code objects are equal only if all of these are equal."""
    parts = (
        code.co_qualname,
        code.co_firstlineno,
        code.co_code,
        code.co_names,
        [*map(_constant, code.co_consts)],
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _constant(value: Any) -> Any:
    """A constant of code, in a form whose `repr` is the same in every process."""
    if isinstance(value, CodeType):
        return _digest_code(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        return ("frozenset", *sorted(map(repr, value)))
    return value


def _file(name: str | None, visited: set[int | str]) -> Iterator[str]:
    if name is not None and name not in visited:
        visited.add(name)
        # A name that is not a file, such as a notebook's cell, may get a new text later, so it must
        # not be cached.
        yield _digest_file(name) if os.path.isabs(name) else "".join(linecache.getlines(name))


@functools.lru_cache(maxsize=2**13)
def _digest_file(name: str) -> str:
    return hashlib.blake2b("".join(linecache.getlines(name)).encode(), digest_size=12).hexdigest()


def _source_file(value: type | ModuleType) -> str | None:
    """The source file of a class or a module; None if it is built in, or covered by the version of
    its package."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    has_own = getattr(module, "__file__", None) is not None and _package(value) not in _VERSIONED
    return inspect.getsourcefile(value) if has_own else None


def _package(value: Any) -> str:
    if isinstance(value, ModuleType):
        name = value.__name__
    else:
        name = str(value.__module__)
    return name.partition(".")[0]


def _inside(value: Any) -> Iterator[Any]:
    """The sources and values that a value is made of."""
    if hasattr(value, "__wrapped__"):
        yield value.__wrapped__
        # The other attributes of an object made by graphify are not source.
        if not isinstance(value, FunctionType):
            return
    if isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from _closure(value)
        yield from _used(value.__code__, value.__globals__)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, Mapping):
        yield from (part for item in value.items() for part in item)
    elif attrs.has(type(value)):
        fields = (
            field
            for field in attrs.fields(type(value))
            if not field.metadata.keys() & OF_THIS_PROCESS.keys()
        )
        yield from (getattr(value, field.name, None) for field in fields)
    if isinstance(call := inspect.getattr_static(type(value), "__call__", None), FunctionType):
        yield call


def _closure(function: FunctionType) -> Iterator[Any]:
    """The values that a function closes over."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # The variable is not assigned yet.
            continue


def _used(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The functions, classes, modules and constants of its module that code uses by name."""
    for name in _names_of(code):
        value = names.get(name)
        if isinstance(value, FunctionType | type | ModuleType):
            if _package(value) not in _VERSIONED:
                yield value
        elif value is not None and name.isupper():
            yield value


@functools.lru_cache(maxsize=2**13)
def _names_of(code: CodeType) -> tuple[str, ...]:
    """The names used by code and by the functions inside it. Only identifiers count: pytest puts
    the name "@pytest_ar" into code with asserts."""
    inner = (
        name for const in code.co_consts if isinstance(const, CodeType) for name in _names_of(const)
    )
    return tuple(dict.fromkeys([*filter(str.isidentifier, code.co_names), *inner]))
