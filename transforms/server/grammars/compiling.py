"""`Compiler`: runs llguidance in a separate process, with limits of time and memory.

A grammar of a few lines can take seconds and gigabytes to compile. The separate process compiles
the grammar and tries it out on tokens that it allows, before the engine does.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import attrs
import numpy as np

from weft.errors import RequestError
from weft.transforms.engine.requests.mask_budget import MaskBudget
from weft.transforms.server.grammars.matching import Matcher, Matchers, Tokens
from weft.transforms.server.grammars.schemas import OPTIONS, prepare_schema

_START_SECONDS = 60.0
# CPU seconds. Each rank of the engine builds the matcher again, while its requests wait.
_MOST_BUILDING = 0.25
# llguidance recurses, and a deep grammar crashes it. The engine's threads have at least 4 times as
# much, so that no grammar that is compiled here crashes the engine.
_STACK_BYTES = 2 * 2**20
_TRIED_SEEDS = 2
# The lowest priority: once started, the process gets only the CPU time that the engine and the
# server leave.
_NICE = 19
# The limit is in CPU time, which the process may have to wait for: after this many times the limit
# in elapsed time, it is killed in any case.
_MOST_WAITING = 3
_LOOK_SECONDS = 0.1
# An escape in GBNF; the last kind is there so that an escaped backslash does not begin another.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_BUDGET = MaskBudget(step_seconds=0.05, burst_seconds=0.2)


@attrs.frozen(kw_only=True)
class GrammarLimits:
    """The limits of a grammar.

    Args:
        seconds: CPU seconds to compile it and try it out.
        memory: bytes that this may take, in addition to what llguidance takes at its start.
        budget: the time for the masks of one request, both in the trial and in use.
        trial_seconds: CPU seconds after which each trial text ends.
    """

    seconds: float = 10.0
    memory: int = 2**30
    budget: MaskBudget = _BUDGET
    trial_seconds: float = 1.0


@attrs.frozen(kw_only=True)
class GrammarUse:
    """The request for which a grammar is compiled.

    Args:
        num_tokens: the most tokens that a completion generates.
        n: the number of completions, each of which needs a mask in each step.
    """

    num_tokens: int
    n: int

    def covers(self, other: "GrammarUse") -> bool:
        """Whether a trial for this use is also one for the other."""
        return self.num_tokens >= other.num_tokens and self.n >= other.n

    def joined(self, other: "GrammarUse") -> "GrammarUse":
        """This use if it covers the other, else the other."""
        if self.covers(other):
            return self
        return other


SHORT_USE = GrammarUse(num_tokens=64, n=1)


class Compiler:
    """Compiles grammars one at a time, in a process that is started for the first grammar, and
    again after a grammar that broke it.

    Args:
        tokens: the model's tokens.
        limits: the limits of each grammar.
    """

    def __init__(self, tokens: Tokens, limits: GrammarLimits) -> None:
        self._tokens = tokens
        self._limits = limits
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def compile(self, call: str, kind: str, source: str, use: GrammarUse = SHORT_USE) -> str:
        """Compile a grammar, and return it in llguidance's dialect of Lark.

        Args:
            call: the call that errors show.
            kind: `json_schema`, `json_object`, `regex` or `grammar`.
            source: the text of that kind.
            use: the use for which to try it out.

        Raises:
            RequestError: llguidance refuses it, or it exceeds the limits.
        """
        # One process, and one question at a time: the pipe has no other way to match an answer.
        with self._lock:
            pipe = self._started()
            try:
                pipe.send((kind, source, use))
                if not self._has_answer(pipe, self._limits.seconds):
                    self._end()
                    problem = f"a grammar that is not compiled within {self._limits.seconds:g} s"
                    raise RequestError(call, problem, "a smaller one")
                error, compiled = pipe.recv()
            except (EOFError, OSError):
                self._end()
                raise RequestError(
                    call, "a grammar that ends llguidance's process", "a smaller one"
                ) from None
        if error is not None:
            raise RequestError(call, error, "a schema or grammar that llguidance enforces in full")
        return str(compiled)

    def _started(self) -> Connection:
        if self._process is not None and self._pipe is not None and self._process.is_alive():
            return self._pipe
        self._end()
        # Not fork: this process has threads, whose locks a copy would inherit as they are.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, attrs.astuple(self._tokens), self._limits
        process = context.Process(target=_serve, args=arguments, name="weft grammars", daemon=True)
        process.start()
        self._process = process  # set after the start: `_end` cannot kill one that did not start
        # With this end open here, a read would not fail when the process ends.
        theirs.close()
        with contextlib.suppress(EOFError, OSError):
            if self._has_answer(self._pipe, _START_SECONDS) and self._pipe.recv() == "ready":
                return self._pipe
        self._end()
        raise RequestError(
            "response_format", "llguidance's process did not start", "the same request later"
        )

    def _has_answer(self, pipe: Connection, seconds: float) -> bool:
        """Wait for an answer until the process has used `seconds` of CPU time; return False if
        there was none."""
        assert self._process is not None
        pid = self._process.pid
        before = _processor_seconds(pid)
        end = time.monotonic() + (seconds if before is None else _MOST_WAITING * seconds)
        while not pipe.poll(min(_LOOK_SECONDS, seconds)):
            now = _processor_seconds(pid)
            has_spent = before is not None and now is not None and now - before >= seconds
            if has_spent or time.monotonic() >= end:
                return False
        return True

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._pipe = self._process = None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()


def _serve(pipe: Connection, tokens: tuple[Any, ...], limits: GrammarLimits) -> None:
    """Compile what comes through the pipe, until it is closed."""
    # Ctrl-C is for the server, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (1, 2):
        # llguidance's warnings contain what clients sent, which does not belong in the log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    model_tokens = Tokens(*tokens)
    matchers = Matchers(model_tokens)
    # After the vocabulary is read: the limit counts from the memory that is in use now.
    _limit_memory(limits.memory)
    if hasattr(os, "nice"):  # not on Windows
        os.nice(_NICE)
    threading.stack_size(_STACK_BYTES)
    arguments = (pipe, model_tokens, matchers, limits)
    thread = threading.Thread(target=_compile_all, args=arguments)
    thread.start()
    thread.join()


def _compile_all(
    pipe: Connection, tokens: Tokens, matchers: Matchers, limits: GrammarLimits
) -> None:
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, source, use = pipe.recv()
            try:
                compiled = grammar_of(kind, source)
                begin = time.thread_time()
                matcher = matchers.matcher(compiled)
                seconds = time.thread_time() - begin
                if seconds > _MOST_BUILDING:
                    problem = f"a grammar that takes {seconds:.2g} s to build; at most"
                    raise _TooLarge(f"{problem} {_MOST_BUILDING:g} s")
                try_out(matcher, tokens, kind, limits, use)
            except _TooLarge as error:
                pipe.send((str(error), None))
            except RequestError as error:
                pipe.send((error.problem, None))
            except Exception as error:
                pipe.send((f"{type(error).__name__}: {error!s:.300}", None))
            else:
                pipe.send((None, compiled))


class _TooLarge(Exception):
    """A grammar exceeds a limit, or allows no text at all."""


def grammar_of(kind: str, source: str) -> str:
    """A grammar of one of the kinds in llguidance's dialect of Lark."""
    import llguidance

    if kind in ("json_schema", "json_object"):
        rules = f"start: %json {source}"
    elif kind == "regex":
        rules = f"start: /{llguidance.regex_to_lark(source, 'dw')}/"
    else:
        rules = llguidance.grammar_from("grammar", _with_short_escapes(source))
    # Otherwise, where the grammar leaves no choice, only one spelling in tokens would be allowed.
    return f'{rules}\n%llguidance {{"no_forcing": true}}'


def _with_short_escapes(source: str) -> str:
    """A grammar in GBNF whose escapes are at most \\xNN; one in Lark as it is.

    llguidance's conversion of GBNF to Lark drops the leading zeros of longer escapes: of the text
    "\\u00e9ab" it makes the character U+E9AB.
    """
    from llguidance.gbnf_to_lark import is_lark_syntax

    if is_lark_syntax(source):
        return source
    return _ESCAPE.sub(_short_escape, source)


def _short_escape(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if 0xD800 <= code < 0xE000 or code > sys.maxunicode:  # no character: llguidance refuses it
        return escape[0]
    return chr(code)


def try_out(
    start: Matcher, tokens: Tokens, kind: str, limits: GrammarLimits, use: GrammarUse
) -> None:
    """Generate trial texts as long as the request's, and measure the time of each mask.

    A grammar may compile fast and still take seconds per token, or more and more with the length
    of the text.

    Raises:
        _TooLarge: the masks exceed the budget, or the grammar allows no text.
        RequestError: llguidance gives up.
    """
    size = len(tokens.tokens)
    for seed in range(_TRIED_SEEDS):
        matcher = start.fork()
        draw = random.Random(seed)
        # CPU time: this process has a low priority, and may have to wait at any point.
        end = time.thread_time() + limits.trial_seconds
        debt = 0.0
        accepting = 0.0
        for count in range(use.num_tokens):
            begin = time.thread_time()
            bits = matcher.allowed()
            seconds = accepting + time.thread_time() - begin
            if limits.budget.is_exceeded(debt, use.n * seconds):
                times = f" for each of {use.n} completions" * (use.n > 1)
                problem = (
                    f"a grammar that takes {seconds:.2g} s for a token{times} after {count} tokens;"
                    " a step may take"
                )
                raise _TooLarge(f"{problem} {limits.budget.step_seconds:g} s for all of them")
            debt = limits.budget.owed(debt, use.n * seconds)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:size])
            going = allowed[~np.isin(allowed, tokens.stop_token_ids)]
            if not count and kind.startswith("json") and len(going) < len(allowed):
                raise _TooLarge("a grammar that no text fits")
            if not len(going) or time.thread_time() > end:
                break
            # The slowest texts for a grammar repeat a token, as the first of the two texts does.
            token = int(going[0] if seed == 0 else going[draw.randrange(len(going))])
            begin = time.thread_time()
            matcher.accept(token)
            accepting = time.thread_time() - begin


def _processor_seconds(pid: int | None) -> float | None:
    """The CPU seconds that a process has used; None: it has ended, or the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            # The second field is the name in parentheses, which may contain spaces.
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None


def _limit_memory(more: int) -> None:
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
    except (ImportError, OSError, ValueError):  # no such limit here; the time limit still applies
        return


def source_of(call: str, form: Mapping[str, Any]) -> tuple[str, str]:
    """The kind of a `response_format`, and its source.

    Raises:
        RequestError: the source is missing, or has a number that would be rounded.
    """
    kind = str(form["type"])
    if kind == "json_object":
        return kind, json.dumps({"type": "object", "x-guidance": OPTIONS})
    if kind == "json_schema":
        schema = form.get("json_schema", {}).get("schema")
        if not isinstance(schema, Mapping):
            raise RequestError(call, "no schema", '{"json_schema": {"name": ..., "schema": {...}}}')
        return kind, json.dumps(prepare_schema(call, schema))
    if not form.get(kind):
        raise RequestError(call, f"no {kind}", f'{{"type": "{kind}", "{kind}": "..."}}')
    return kind, str(form[kind])
