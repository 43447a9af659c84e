"""`Matcher`: which tokens a grammar allows next, by llguidance
(https://github.com/guidance-ai/llguidance). It imports no torch, since the process that compiles
grammars does not need it."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from weft.errors import RequestError
from weft.transforms.engine.detokenizing import special_ids
from weft.transforms.server.vocabulary import Vocabulary

Bits = npt.NDArray[np.int32]
"""One bit for each token, lowest bit first: [ceil(vocab_size / 32)] int32."""
# What llguidance says of a schema, without the lines of the grammar that weft has put around it.
_OF_SCHEMA = re.compile(
    r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(\n +\d+ \| |\Z)", re.DOTALL
)
# A state of the lexer takes 1 to 2 kB.
_MOST_STATES = 50_000


@attrs.frozen(eq=False)
class Tokens:
    """A model's tokens, with the attributes that `llguidance.TokenizerWrapper` reads.

    Args:
        tokens: the bytes of each token.
        special_token_ids: the tokens that are no part of a text.
        stop_token_ids: the tokens that end an answer.
    """

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    bos_token_id: None = None

    @classmethod
    def of(cls, vocabulary: Vocabulary, stop_token_ids: Sequence[int]) -> Self:
        """The tokens of a vocabulary."""
        tokens = [bytes(vocabulary.bytes_of(token)) for token in range(vocabulary.size)]
        special = {*special_ids(vocabulary.tokenizer), *stop_token_ids}
        return cls(tokens, sorted(special), [*stop_token_ids])

    @property
    def eos_token_id(self) -> int:
        """The token that llguidance allows where an answer may end."""
        return self.stop_token_ids[0]


class Matchers:
    """Makes the matchers of a model's tokens.

    Args:
        tokens: the model's tokens.
    """

    def __init__(self, tokens: Tokens) -> None:
        import llguidance
        from llguidance.numpy import fill_next_token_bitmask

        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens))
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=_MOST_STATES, verbose_errors=False
        )
        self._new: Any = llguidance.LLMatcher
        self._fill: Callable[..., None] = fill_next_token_bitmask
        stops = np.zeros(-(-len(tokens.tokens) // 32) * 32, np.uint8)
        stops[[*tokens.stop_token_ids]] = 1
        self._stops: Bits = np.packbits(stops, bitorder="little").view(np.int32)

    def matcher(self, grammar: str) -> "Matcher":
        """A matcher at the start of a grammar in llguidance's dialect of Lark.

        Raises:
            RequestError: llguidance refuses the grammar.
        """
        matcher = self._new(self._tokenizer, grammar, log_level=0, limits=self._limits)
        return Matcher(matcher, self._fill, self._stops)


class Matcher:
    """Follows a text through a grammar.

    Args:
        matcher: llguidance's matcher.
        fill: llguidance's function that writes the bits of a matcher's tokens to an array.
        stops: the bits of the tokens that end an answer.
    """

    def __init__(self, matcher: Any, fill: Callable[..., None], stops: Bits) -> None:
        self._matcher = matcher
        self._fill = fill
        self._stops = stops
        self._check()

    def fork(self) -> "Matcher":
        """A matcher of the same text, which goes on by itself."""
        return Matcher(self._matcher.deep_copy(), self._fill, self._stops)

    def accept(self, token: int) -> None:
        """Append a token to the text.

        Raises:
            RequestError: the grammar does not allow it, or llguidance gives up.
        """
        self._matcher.consume_token(token)
        self._check()

    def allowed(self) -> Bits:
        """The tokens that may be next.

        Raises:
            RequestError: none may, or llguidance gives up.
        """
        # Not `compute_bitmask`, whose array is longer where the size is a multiple of 32.
        bits = np.empty_like(self._stops)
        self._fill(self._matcher, bits[None])
        self._check()
        # llguidance knows one token that ends a text. A model may have several, and each is as
        # good.
        if (bits & self._stops).any():
            return bits | self._stops
        return bits

    def _check(self) -> None:
        # llguidance's matcher raises nothing: after an error, it allows the end of the text alone.
        if self._matcher.is_error():
            error, *_ = self._matcher.get_error().partition("<non-verbose/>")
            if "NoExtension" in error:
                error = "a grammar that no text fits"
            elif (of_schema := _OF_SCHEMA.match(error)) is not None:
                error = of_schema[1].replace("Unimplemented keys:", "unsupported keywords")
            problem = f"{' '.join(error.split()):.500}"
            raise RequestError("response_format", problem, "a grammar that llguidance enforces")
