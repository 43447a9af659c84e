"""`Compiler`: runs XGrammar in a separate process, with limits of time and memory.

A grammar of a few lines can cost XGrammar minutes or gigabytes, or crash it. The separate process
compiles the grammar, tries it out on tokens that it allows, and sends it back as text.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import attrs

from weft.errors import RequestError
from weft.transforms.engine.requests.masks import MaskBudget
from weft.transforms.server.vocabulary import Vocabulary

_START_SECONDS = 60.0
# The time and the place in XGrammar's source that precede its error messages.
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
# The most bytes of a compiled grammar as text: this many, and more for each token of the model.
_LARGEST = 4 * 2**20
_LARGEST_PER_TOKEN = 128
_TRIED_SEEDS = 2
# The lowest priority: once started, the process gets only the CPU time that the engine and the
# server leave.
_NICE = 19
# The limit is in CPU time, which the process may have to wait for: after this many times the limit
# in elapsed time, it is killed in any case.
_MOST_WAITING = 3
_LOOK_SECONDS = 0.1
_BUDGET = MaskBudget(step_seconds=0.05, burst_seconds=0.2)


@attrs.frozen(kw_only=True)
class GrammarLimits:
    """The limits of a grammar.

    Args:
        seconds: CPU seconds to compile it and try it out.
        memory: bytes that this may take, in addition to what XGrammar takes at its start.
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


@attrs.frozen(eq=False)
class Tokens:
    """A model's tokens, as XGrammar reads them.

    Args:
        written: each token as written in the tokenizer's file.
        kind: as in `Vocabulary`.
        stop_token_ids: the tokens that end an answer.
    """

    written: Sequence[str]
    kind: str
    stop_token_ids: Sequence[int]

    @classmethod
    def of(cls, vocabulary: Vocabulary, stop_token_ids: Sequence[int]) -> "Tokens":
        """The tokens of a vocabulary."""
        written = [vocabulary.written(token) for token in range(vocabulary.size)]
        return cls(written, vocabulary.kind, [*stop_token_ids])

    def info(self) -> Any:
        """The tokens as XGrammar's `TokenizerInfo`."""
        import xgrammar

        kinds = {
            "byte_level": xgrammar.VocabType.BYTE_LEVEL,
            "byte_fallback": xgrammar.VocabType.BYTE_FALLBACK,
            "raw": xgrammar.VocabType.RAW,
        }
        size = len(self.written)
        stops = [*self.stop_token_ids]
        return xgrammar.TokenizerInfo(
            [*self.written], kinds[self.kind], vocab_size=size, stop_token_ids=stops
        )


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
        """Compile a grammar, and return it as XGrammar serializes it.

        Args:
            call: the call that errors show.
            kind: `json_schema`, `json_object`, `regex` or `grammar`.
            source: the text of that kind.
            use: the use for which to try it out.

        Raises:
            RequestError: XGrammar refuses it, or it exceeds the limits.
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
                error, serialized = pipe.recv()
            except (EOFError, OSError):
                self._end()
                raise RequestError(
                    call, "a grammar that ends XGrammar's process", "a smaller one"
                ) from None
        if error is not None:
            raise RequestError(call, error, "one that XGrammar compiles")
        return str(serialized)

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
            "response_format", "XGrammar's process did not start", "the same request later"
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
        # XGrammar's warnings contain what clients sent, which does not belong in the log.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    import xgrammar

    info = Tokens(*tokens).info()
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    # After the vocabulary is read: the limit counts from the memory that is in use now.
    _limit_memory(limits.memory)
    if hasattr(os, "nice"):  # not on Windows
        os.nice(_NICE)
    pipe.send("ready")
    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, source, use = pipe.recv()
            try:
                compiled = compile_with(compiler, kind, source)
                try_out(xgrammar.GrammarMatcher(compiled), info, kind, limits, use)
                serialized = compiled.serialize_json()
                most = _LARGEST + _LARGEST_PER_TOKEN * info.vocab_size
                if len(serialized) > most:  # each rank must read it, which takes time there
                    raise _TooLarge(f"a grammar that takes {len(serialized)} bytes; at most {most}")
            except _TooLarge as error:
                pipe.send((str(error), None))
            except Exception as error:
                said = _PLACE.sub("", str(error)).strip()
                pipe.send((f"{type(error).__name__}: {said:.300}", None))
            else:
                pipe.send((None, serialized))


class _TooLarge(Exception):
    """A grammar exceeds a limit, or allows no text at all."""


def compile_with(compiler: Any, kind: str, source: str) -> Any:
    """Compile a grammar of one of the kinds with XGrammar's compiler."""
    if kind in ("json_schema", "json_object"):
        return compiler.compile_json_schema(source, strict_mode=kind == "json_schema")
    if kind == "grammar":
        return compiler.compile_grammar(source)
    return compiler.compile_regex(source)


def try_out(matcher: Any, info: Any, kind: str, limits: GrammarLimits, use: GrammarUse) -> None:
    """Generate trial texts as long as the request's, and measure the time of each mask.

    A grammar may compile fast and still take seconds per token, or more and more with the length
    of the text.

    Raises:
        _TooLarge: the masks exceed the budget, or the grammar allows no text.
    """
    import numpy as np

    bits = np.zeros((1, -(-info.vocab_size // 32)), dtype=np.int32)
    stops = {*info.stop_token_ids}
    for seed in range(_TRIED_SEEDS):
        matcher.reset()
        draw = random.Random(seed)
        # CPU time: this process has a low priority, and may have to wait at any point.
        end = time.thread_time() + limits.trial_seconds
        debt = 0.0
        accepting = 0.0
        for count in range(use.num_tokens):
            seconds = accepting + _fill_seconds(matcher, bits)
            if limits.budget.is_exceeded(debt, use.n * seconds):
                times = f" for each of {use.n} completions" * (use.n > 1)
                problem = (
                    f"a grammar that takes {seconds:.2g} s for a token{times} after {count} tokens;"
                    " a step may take"
                )
                raise _TooLarge(f"{problem} {limits.budget.step_seconds:g} s for all of them")
            debt = limits.budget.owed(debt, use.n * seconds)
            allowed = np.flatnonzero(
                np.unpackbits(bits.view(np.uint8), bitorder="little")[: info.vocab_size]
            )
            going = allowed[~np.isin(allowed, [*stops])]
            if not count and (
                not len(allowed) or (kind.startswith("json") and len(going) < len(allowed))
            ):
                raise _TooLarge("a grammar that no text fits")
            if not len(going) or time.thread_time() > end:
                break
            # The slowest texts for a grammar repeat a token, as the first of the two texts does.
            token = int(going[0] if seed == 0 else going[draw.randrange(len(going))])
            begin = time.thread_time()
            matcher.accept_token(token)
            accepting = time.thread_time() - begin


def _fill_seconds(matcher: Any, bits: Any) -> float:
    """The CPU seconds for one mask, the shorter of two tries, since the first may run with cold
    caches."""
    begin = time.thread_time()
    matcher.fill_next_token_bitmask(bits)
    middle = time.thread_time()
    matcher.fill_next_token_bitmask(bits)
    return min(middle - begin, time.thread_time() - middle)


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
    """The kind of a `response_format`, and its source for XGrammar.

    Raises:
        RequestError: the source is missing, or XGrammar would not enforce all of it.
    """
    from weft.transforms.server.grammars.patterns import rewrite
    from weft.transforms.server.grammars.schemas import rewrite_schema

    kind = str(form["type"])
    if kind == "json_object":
        return kind, json.dumps({"type": "object"})
    if kind == "json_schema":
        schema = form.get("json_schema", {}).get("schema")
        if schema is None:
            raise RequestError(call, "no schema", '{"json_schema": {"name": ..., "schema": {...}}}')
        return kind, json.dumps(rewrite_schema(call, schema))
    if not form.get(kind):
        raise RequestError(call, f"no {kind}", f'{{"type": "{kind}", "{kind}": "..."}}')
    return kind, rewrite(call, form[kind], in_json=False) if kind == "regex" else str(form[kind])
