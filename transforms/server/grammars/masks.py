"""`response_format` as token masks for the engine.

`Grammars` compiles in the process that answers clients; the compiled texts are sent to every rank,
where `Masks` reads them.
"""

import functools
import hashlib
import importlib
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.requests.mask_budget import MaskBudget
from weft.transforms.engine.requests.masks import Mask
from weft.transforms.server.commands import MakeMask
from weft.transforms.server.grammars.compiling import (
    SHORT_USE,
    Compiler,
    GrammarLimits,
    GrammarUse,
    source_of,
)
from weft.transforms.server.grammars.matching import Matcher, Matchers, Tokens
from weft.transforms.server.vocabulary import Vocabulary
from weft.values.bounded import BoundedDict

# The most bytes of cached grammars.
_KEPT = 16 * 2**20
# The most matchers that a rank keeps for the next request of the same grammar.
_MOST_STARTS = 32


class CompileGrammar(Protocol):
    """Compiles a `response_format` to a text for `Masks`."""

    def find(self, form: Mapping[str, Any], use: GrammarUse) -> str | None:
        """The compiled text if it is cached, else None. It does not wait for a compilation."""

    def __call__(self, form: Mapping[str, Any], use: GrammarUse = SHORT_USE, /) -> str:
        """The compiled text, from the cache if it is there."""


@attrs.frozen
class _Compiled:
    """A compiled grammar, and the use for which it was tried."""

    text: str
    use: GrammarUse


def _size_of_texts(cached: Mapping[str, _Compiled]) -> int:
    return sum(len(key) + len(compiled.text) for key, compiled in cached.items())


class Grammars:
    """Compiles grammars for a model's tokens within limits, and caches those used last.

    Args:
        tokens: the model's tokens.
        limits: the limits of each grammar.
    """

    def __init__(self, tokens: Tokens, limits: GrammarLimits) -> None:
        self._compiler = Compiler(tokens, limits)
        self._lock = threading.Lock()
        self._last = BoundedDict[str, _Compiled](_KEPT, _size_of_texts)

    def find(self, form: Mapping[str, Any], use: GrammarUse) -> str | None:
        """The compiled text if it is cached and was tried out for such a use, else None.

        It does not wait for a compilation.
        """
        key = json.dumps(form)
        with self._lock:
            kept = self._last.get(key)
            if kept is None or not kept.use.covers(use):
                return None
            self._last.move_to_end(key)
            return kept.text

    def compile(self, form: Mapping[str, Any], use: GrammarUse = SHORT_USE) -> str:
        """Compile a `response_format`, unless it is cached.

        Raises:
            RequestError: the schema or grammar cannot be compiled, or exceeds the limits.
        """
        cached = self.find(form, use)
        if cached is not None:
            return cached
        call = f"response_format of type {form['type']!r}"
        # Outside the lock: `find`, which the event loop calls, must not wait for it.
        text = self._compiler.compile(call, *source_of(call, form), use)
        key = json.dumps(form)
        with self._lock:
            before = self._last.pop(key, None)
            if before is None:
                self._last[key] = _Compiled(text, use)
            else:
                self._last[key] = _Compiled(before.text, before.use.joined(use))
        return text

    def close(self) -> None:
        """End the process that compiles."""
        self._compiler.close()


class Masks:
    """Makes masks from the texts of `Grammars`, and caches the grammars that it has read.

    Args:
        tokens: the model's tokens.
        budget: the time for the masks of one request; the engine ends a request that exceeds it.
    """

    def __init__(self, tokens: Tokens, budget: MaskBudget) -> None:
        self._matchers = Matchers(tokens)
        self._budget = budget
        self._lock = threading.Lock()
        # Matchers at the start of grammars: those used last, in `_last`, and all that any request
        # still uses, in `_in_use`.
        self._last = BoundedDict[bytes, Matcher](_MOST_STARTS)
        self._in_use = weakref.WeakValueDictionary[bytes, Matcher]()

    def mask(self, compiled: str) -> Mask:
        """The mask of a compiled grammar."""
        return _GrammarMask(self._start(compiled), self._budget)

    def _start(self, compiled: str) -> Matcher:
        key = hashlib.blake2b(compiled.encode(), digest_size=16).digest()
        with self._lock:
            if (start := self._in_use.get(key)) is not None:
                return start
        # Outside the lock, because it may take long; at worst, two threads read the same grammar.
        start = self._matchers.matcher(compiled)
        with self._lock:
            self._in_use[key] = self._last[key] = start
        return start


@attrs.define(eq=False)
class _State:
    """What the grammar allows after some tokens.

    Args:
        matcher: it has accepted these tokens.
        bits: the tokens that may be next, one bit for each token of the model.
        num_completions: the completions that consist of these tokens now.
    """

    matcher: Matcher
    bits: Tensor
    num_completions: int = 0


class _GrammarMask:
    """The mask of one request. Completions with the same tokens so far share a matcher, which is
    copied where they diverge."""

    def __init__(self, start: Matcher, budget: MaskBudget) -> None:
        self.budget = budget
        self._start = start
        self._states: dict[tuple[int, ...], _State] = {}

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        tokens = tuple(token_ids)
        if tokens:
            before = self._leave(tokens[:-1])
        else:
            before = None
        state = self._states.get(tokens)
        if state is None:
            state = self._states[tokens] = self._read(tokens, before)
        state.num_completions += 1
        return state.bits

    def _leave(self, tokens: tuple[int, ...]) -> _State | None:
        """Count a completion out of the state before its last token, and return that state."""
        state = self._states.get(tokens)
        if state is not None:
            state.num_completions -= 1
            if not state.num_completions:
                del self._states[tokens]
        return state

    def _read(self, tokens: tuple[int, ...], before: _State | None) -> _State:
        rest = tokens[-1:]
        if before is None:
            matcher = self._start.fork()
            rest = tokens
        elif before.num_completions:  # others still need the matcher as it is
            matcher = before.matcher.fork()
        else:
            matcher = before.matcher
        for token in rest:
            matcher.accept(token)
        return _State(matcher, torch.from_numpy(matcher.allowed()))


def _tokens_of(model: Model) -> Tokens:
    if model.tokenizer is None:
        raise RequestError(
            "response_format", "a checkpoint without a tokenizer", "one with tokenizer.json"
        )
    return Tokens.of(
        Vocabulary(model.tokenizer, model.config.vocab_size), model.config.eos_token_ids
    )


class ModelGrammars:
    """Compiles `response_format`s for a model; llguidance reads the vocabulary for the first one.

    Args:
        model: from `weft.load`; the weights are not read.
        limits: the limits of each grammar.

    A call raises RequestError for a model without an end-of-sequence token, since no token could
    follow a complete answer.
    """

    def __init__(self, model: Model, limits: GrammarLimits | None = None) -> None:
        self._model = model
        self._limits = limits or GrammarLimits()
        self._lock = threading.Lock()
        self._compiled_grammars: Grammars | None = None

    def find(self, form: Mapping[str, Any], use: GrammarUse) -> str | None:
        """The compiled text if it is cached and was tried out for such a use, else None."""
        if self._compiled_grammars is None:
            return None
        return self._compiled_grammars.find(form, use)

    def __call__(self, form: Mapping[str, Any], use: GrammarUse = SHORT_USE) -> str:
        model = self._model
        if not model.config.eos_token_ids:
            problem = (
                f"the model {model.path.name!r}, which has no end-of-sequence token that could"
                " follow a complete answer"
            )
            instead = (
                "a checkpoint with eos_token_id in generation_config.json or config.json; or no"
                " response_format"
            )
            raise RequestError(f"response_format of type {form['type']!r}", problem, instead)
        return self._grammars().compile(form, use)

    def _grammars(self) -> Grammars:
        # If the package is missing, the error is raised here and not in the compiling process.
        importlib.import_module("llguidance")

        with self._lock:
            if self._compiled_grammars is None:
                self._compiled_grammars = Grammars(_tokens_of(self._model), self._limits)
            return self._compiled_grammars


def grammar_compiler(model: Model, limits: GrammarLimits | None = None) -> CompileGrammar:
    """Make the function that compiles `response_format`s for a model (`ModelGrammars`)."""
    return ModelGrammars(model, limits)


def mask_maker(model: Model) -> MakeMask:
    """Make the function that turns compiled grammars into masks, on one of the model's ranks."""

    # Created by the first grammar: llguidance reads the vocabulary, and need not be installed before.
    @functools.cache
    def masks() -> Masks:
        return Masks(_tokens_of(model), GrammarLimits().budget)

    return lambda compiled: masks().mask(compiled)
