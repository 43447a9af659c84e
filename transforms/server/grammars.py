"""`response_format` as masks of the engine, through XGrammar (Dong et al., 2024, arXiv 2411.15100)."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import RequestError
from weft.transforms.engine.masks import Mask
from weft.transforms.server.vocabulary import Vocabulary


class Grammars:
    """Compiles grammars for a model's tokens, and keeps those that were used last.

    Args:
        vocabulary: of the model.
        stop_token_ids: the tokens that end an answer.

    Raises:
        ImportError: XGrammar is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, stop_token_ids: Sequence[int]) -> None:
        import xgrammar

        kinds = {
            "byte_level": xgrammar.VocabType.BYTE_LEVEL,
            "byte_fallback": xgrammar.VocabType.BYTE_FALLBACK,
            "raw": xgrammar.VocabType.RAW,
        }
        written = [vocabulary.written(token) for token in range(vocabulary.size)]
        info = xgrammar.TokenizerInfo(
            written, kinds[vocabulary.kind], vocab_size=vocabulary.size, stop_token_ids=[*stop_token_ids]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=64 * 2**20)
        self._new_matcher: Callable[..., Any] = xgrammar.GrammarMatcher
        self._num_words = -(-vocabulary.size // 32)

    def mask(self, form: Mapping[str, Any]) -> Mask:
        """The mask of a `response_format`.

        Raises:
            RequestError: a schema or a grammar that cannot be compiled.
        """
        call = f"response_format of type {form['type']!r}"
        try:
            compiled = self._compiled(call, form)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(call, f"{type(error).__name__}: {error!s:.300}", "one that XGrammar compiles") from error
        return _GrammarMask(lambda: self._new_matcher(compiled), self._num_words)

    def _compiled(self, call: str, form: Mapping[str, Any]) -> Any:
        kind = form["type"]
        if kind == "json_object":
            return self._compiler.compile_json_schema(json.dumps({"type": "object"}), strict_mode=False)
        if kind == "json_schema":
            schema = form.get("json_schema", {}).get("schema")
            if schema is None:
                raise RequestError(call, "no schema", '{"json_schema": {"name": ..., "schema": {...}}}')
            return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=True)
        if not form.get(kind):
            raise RequestError(call, f"no {kind}", f'{{"type": "{kind}", "{kind}": "..."}}')
        compiled_by = self._compiler.compile_grammar if kind == "grammar" else self._compiler.compile_regex
        return compiled_by(form[kind])


class _GrammarMask:
    """The mask of one request. Each of its completions has a matcher, found by the tokens that it has read."""

    def __init__(self, new_matcher: Callable[[], Any], num_words: int) -> None:
        self._new_matcher, self._num_words = new_matcher, num_words
        self._matchers: dict[tuple[int, ...], Any] = {}

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        tokens = tuple(token_ids)
        matcher, rest = self._matchers.pop(tokens[:-1], None) if tokens else None, tokens[-1:]
        if matcher is None:
            matcher, rest = self._new_matcher(), tokens
        for token in rest:
            matcher.accept_token(token)
        self._matchers[tokens] = matcher
        bits = torch.full((self._num_words,), -1, dtype=torch.int32)
        matcher.fill_next_token_bitmask(bits.numpy()[None])
        return bits
