"""`Progress`: a completion in the process that answers the client, built from the engine loop's
deltas."""

from collections.abc import Sequence
from typing import Any

import attrs
from tokenizers import Tokenizer
from torch import Tensor

from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.requests.masks import blame
from weft.transforms.server.commands import Add
from weft.transforms.server.loop import PER_PROMPT, PER_TOKEN, Delta


@attrs.frozen(eq=False)
class Output:
    """What is new in a completion.

    Args:
        place: the index of its prompt in the client's request.
        index: the completion's index among those of its prompt.
        token_ids: the new tokens.
        text: the new text; None if there is no tokenizer.
        finish_reason: why it ended; None: it has not.
        progress: the whole completion so far.
    """

    place: int
    index: int
    token_ids: Sequence[int]
    text: str | None
    finish_reason: str | None
    progress: "Progress"


class Progress:
    """A completion while it grows, with its text.

    The engine makes text only if it has to look for stop texts; otherwise it is made here.

    Args:
        request: the request as it was sent to the engine.
        place, index: as in the outputs.
        tokenizer, special_ids: as in `CompletionState`.

    Attributes:
        state: the tokens, logprobs and text.
        captured: what the stages captured, once the completion has ended.
    """

    def __init__(
        self,
        request: Add,
        place: int,
        index: int,
        tokenizer: Tokenizer | None,
        special_ids: frozenset[int],
    ) -> None:
        sampling = request.sampling
        # The engine makes the text of such a request, and its deltas bring it: to decode here would
        # append it twice.
        if request.sampling.detokenize:
            tokenizer = None
        if tokenizer is not None:
            sampling = attrs.evolve(sampling, detokenize=True)
        # `Request` refuses an empty prompt. Put in a token: the engine is to report the error.
        engine_request = Request(
            request.name, tuple(request.prompt) or (0,), request.max_tokens, sampling
        )
        self.state = CompletionState(engine_request, tokenizer, special_ids)
        self.captured: dict[str, Tensor] = {}
        self._place = place
        self._index = index

    def add(self, deltas: Sequence[Delta]) -> Output:
        """Add one or more deltas of the engine's loop.

        Raises:
            WeftError: the completion ended with this error, or its tokens cannot be decoded.
        """
        state = self.state
        new = list[int]()
        reason = deltas[-1][4]
        texts = list[str]()
        for _, _, tokens, text, _, more in deltas:
            new += tokens
            if text is not None:
                texts.append(text)
            if more:
                self._add_more(more)
        if state.tokenizer is None:
            state.token_ids += new
            text = "".join(texts) if texts else None
        else:
            text = self._decode(new, reason)
        state.stop_reason = deltas[-1][5].get("stop_reason")
        return Output(self._place, self._index, new, text, reason, self)

    def _add_more(self, more: dict[str, Any]) -> None:
        if "error" in more:
            raise more["error"]
        for name in (*PER_TOKEN, *PER_PROMPT):
            if name in more:
                getattr(self.state, name).extend(more[name])
        self.captured = more.get("captured", self.captured)

    def _decode(self, new: Sequence[int], reason: str | None) -> str:
        state = self.state
        try:
            for place, token in enumerate(new, 1):
                state.token_ids.append(token)
                state.append_text(token, is_stop=reason == "stop" and place == len(new))
            if reason is not None:
                state.end(reason)
        except BaseException as error:  # a panic in tokenizers, which is Rust, is no Exception
            call = f"the text of {state.request.id}, of {len(state.token_ids)} tokens"
            decode_error = blame(
                error,
                call,
                "a tokenizer that decodes every token of the model, or a model without one",
            )
            raise decode_error from error
        return state.take_text()
