"""`response_format` as masks of the engine, through XGrammar (Dong et al., 2024, arXiv 2411.15100).

`Grammars` compiles where clients are answered; its texts travel to every rank, where `Masks` reads them.
"""

import functools
import hashlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.requests.masks import Mask
from weft.transforms.server.commands import MakeMask
from weft.transforms.server.grammars.compiling import Compiler, GrammarLimits, Tokens, source_of
from weft.transforms.server.vocabulary import Vocabulary

_KEPT = 16 * 2**20
"""Bytes of the grammars that are kept although no request has them."""
CompileGrammar = Callable[[Mapping[str, Any]], str]
"""Compiles a `response_format`, as a text for `Masks`."""


class Grammars:
    """Compiles grammars for a model's tokens within limits, and keeps those that were used last.

    Args:
        tokens: of the model.
        limits: of a grammar.
    """

    def __init__(self, tokens: Tokens, limits: GrammarLimits) -> None:
        self._compiler, self._lock = Compiler(tokens, limits), threading.Lock()
        self._last, self._size = OrderedDict[str, str](), 0

    def compile(self, form: Mapping[str, Any]) -> str:
        """A `response_format`, compiled.

        Raises:
            RequestError: a schema or a grammar that cannot be compiled, or that is beyond the limits.
        """
        call, key = f"response_format of type {form['type']!r}", json.dumps(form)
        with self._lock:
            if (found := self._last.get(key)) is not None:
                self._last.move_to_end(key)
                return found
        found = self._compiler.compile(call, *source_of(call, form))
        with self._lock:
            if key not in self._last:
                self._last[key] = found
                self._size += len(key) + len(found)
            while self._size > _KEPT:
                self._size -= sum(map(len, self._last.popitem(last=False)))
        return found

    def close(self) -> None:
        """End the process that compiles."""
        self._compiler.close()


class Masks:
    """Makes masks of what `Grammars` has compiled. A second mask of the same grammar takes no time while it is kept.

    Args:
        tokens: of the model.
        token_seconds: seconds of the processor for the mask of one token, after which its request ends with an error.
            None: no limit, where several ranks have the mask, since one that is slower must not decide otherwise.
    """

    def __init__(self, tokens: Tokens, token_seconds: float | None) -> None:
        import xgrammar

        self._info, self._num_words = tokens.info(), -(-len(tokens.written) // 32)
        self._token_seconds = token_seconds
        self._new_matcher: Callable[..., Any] = xgrammar.GrammarMatcher
        self._read: Callable[[str, Any], Any] = xgrammar.CompiledGrammar.deserialize_json
        self._lock = threading.Lock()
        self._last = OrderedDict[bytes, Any]()
        self._in_use = weakref.WeakValueDictionary[bytes, Any]()

    def mask(self, compiled: str) -> Mask:
        """The mask of a compiled grammar."""
        grammar = self._grammar(compiled)
        return _GrammarMask(lambda: self._new_matcher(grammar), self._num_words, self._token_seconds)

    def _grammar(self, compiled: str) -> Any:
        key = hashlib.blake2b(compiled.encode(), digest_size=16).digest()
        with self._lock:
            if (found := self._in_use.get(key)) is not None:
                return found
        found = self._read(compiled, self._info)
        with self._lock:
            self._in_use[key] = self._last[key] = found
            while sum(own.memory_size_bytes for own in self._last.values()) > _KEPT:
                self._last.popitem(last=False)
        return found


class _GrammarMask:
    """The mask of one request. Each of its completions has a matcher, found by the tokens that it has read."""

    def __init__(self, new_matcher: Callable[[], Any], num_words: int, seconds: float | None) -> None:
        self._new_matcher, self._num_words, self._seconds = new_matcher, num_words, seconds
        self._matchers: dict[tuple[int, ...], Any] = {}

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        begin, tokens = time.thread_time(), tuple(token_ids)
        matcher, rest = self._matchers.pop(tokens[:-1], None) if tokens else None, tokens[-1:]
        if matcher is None:
            matcher, rest = self._new_matcher(), tokens
        for token in rest:
            matcher.accept_token(token)
        self._matchers[tokens] = matcher
        bits = torch.full((self._num_words,), -1, dtype=torch.int32)
        matcher.fill_next_token_bitmask(bits.numpy()[None])
        if self._seconds is not None and time.thread_time() - begin > self._seconds:
            seen = f"a grammar that takes more than {self._seconds:g} s for a token, which keeps all others waiting"
            raise RequestError("response_format", seen, "one with fewer repetitions within repetitions")
        return bits


def _tokens_of(model: Model) -> Tokens:
    if model.tokenizer is None:
        raise RequestError("response_format", "a checkpoint without a tokenizer", "one with tokenizer.json")
    return Tokens.of(Vocabulary(model.tokenizer, model.config.vocab_size), model.config.eos_token_ids)


def grammar_compiler(model: Model, limits: GrammarLimits | None = None) -> CompileGrammar:
    """Compiles `response_format`s for a model; XGrammar reads the vocabulary at the first one.

    The function that it returns raises RequestError for a model without an end-of-sequence token, since nothing could
    follow a complete answer.
    """

    @functools.cache
    def grammars() -> Grammars:
        import xgrammar  # noqa: F401, whose absence is found here, not in its process

        return Grammars(_tokens_of(model), limits or GrammarLimits())

    def compile_grammar(form: Mapping[str, Any]) -> str:
        if not model.config.eos_token_ids:
            seen = (
                f"the model {model.path.name!r}, which has no end-of-sequence token that could follow a complete answer"
            )
            instead = "a checkpoint with eos_token_id in generation_config.json or config.json; or no response_format"
            raise RequestError(f"response_format of type {form['type']!r}", seen, instead)
        return grammars().compile(form)

    return compile_grammar


def mask_maker(model: Model, num_ranks: int = 1) -> MakeMask:
    """Makes the masks of a model on one of so many ranks."""

    @functools.cache
    def masks() -> Masks:
        return Masks(_tokens_of(model), GrammarLimits().token_seconds if num_ranks == 1 else None)

    return lambda compiled: masks().mask(compiled)
