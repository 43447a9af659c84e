"""`response_format` as masks of the engine, through XGrammar (Dong et al., 2024, arXiv 2411.15100)."""

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
from weft.transforms.engine.inputs import Mask
from weft.transforms.server.compiling import Compiler, GrammarLimits, Tokens, compile_with, source_of
from weft.transforms.server.vocabulary import Vocabulary

_KEPT = 32 * 2**20
"""Bytes of the grammars that are kept although no request has them."""


class Grammars:
    """Compiles grammars for a model's tokens, and keeps those that were used last.

    Args:
        vocabulary: of the model.
        stop_token_ids: the tokens that end an answer.
        limits: of a grammar. None: none, on a rank that is sent what the first rank has compiled within its limits;
            a rank that is slower than others must not decide otherwise.

    Raises:
        ImportError: XGrammar is not installed.
    """

    def __init__(
        self, vocabulary: Vocabulary, stop_token_ids: Sequence[int], limits: GrammarLimits | None = None
    ) -> None:
        import xgrammar

        tokens = Tokens.of(vocabulary, stop_token_ids)
        self._info, self._limits = tokens.info(), limits
        self._new_matcher: Callable[..., Any] = xgrammar.GrammarMatcher
        self._read: Callable[[str, Any], Any] = xgrammar.CompiledGrammar.deserialize_json
        self._here = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._apart = None if limits is None else Compiler(tokens, limits)
        self._num_words = -(-vocabulary.size // 32)
        self._lock = threading.Lock()
        self._last = OrderedDict[str, Any]()
        self._in_use = weakref.WeakValueDictionary[str, Any]()

    def mask(self, form: Mapping[str, Any]) -> Mask:
        """The mask of a `response_format`. While it lives, a second one of the same form takes no time.

        Raises:
            RequestError: a schema or a grammar that cannot be compiled, or that is beyond the limits.
        """
        call = f"response_format of type {form['type']!r}"
        try:
            compiled = self._compiled(call, form)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(call, f"{type(error).__name__}: {error!s:.300}", "one that XGrammar compiles") from error
        seconds = None if self._limits is None else self._limits.token_seconds
        return _GrammarMask(lambda: self._new_matcher(compiled), self._num_words, seconds)

    def _compiled(self, call: str, form: Mapping[str, Any]) -> Any:
        key = json.dumps(form, sort_keys=False)
        with self._lock:
            if (found := self._in_use.get(key)) is not None:
                return found
        kind, source = source_of(call, form)
        if self._apart is None:
            found = compile_with(self._here, kind, source)
        else:
            found = self._read(self._apart.compile(call, kind, source), self._info)
        with self._lock:
            self._in_use[key] = self._last[key] = found
            while sum(own.memory_size_bytes for own in self._last.values()) > _KEPT:
                self._last.popitem(last=False)
        return found

    def close(self) -> None:
        """End the process that compiles."""
        if self._apart is not None:
            self._apart.close()


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
