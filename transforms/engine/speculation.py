"""`Speculation`: how an engine drafts tokens that its steps verify; and what stages and states are with it."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weft.arguments import is_int, kind_of
from weft.errors import RequestError
from weft.stages.config import ModelConfig
from weft.stages.drafting import Drafter, drafted, model_drafter, ngram_drafter
from weft.stages.layout import StageLayout
from weft.stages.model import Model
from weft.state import Drafting, State


@attrs.frozen
class Speculation:
    """Draft tokens, and verify them with the model in one step. No token changes, greedy or drawn: only how many steps
    they take.

    Requests with penalties (repetition, presence, frequency) have no drafts, for each of their tokens changes what the
    next is drawn from; neither have requests in a step that reads prompts too.

    Args:
        num_tokens: drafts of a step at most; steps of half as many, and of none, have graphs of their own.
        ngram: draft by prompt lookup: what followed the last n tokens where they stood before, for n from the second
            number down to the first. None, with a model: by that alone.
        model: draft with a smaller model, from `weft.load`, of the same vocabulary, on the device of the first stage;
            on a rank without that stage its configuration is enough.

    Raises:
        RequestError: no number of tokens, n-grams that are none, or two ways to draft.

    >>> Speculation(num_tokens=4).query_lens
    (1, 3, 5)
    """

    num_tokens: int
    ngram: tuple[int, int] | None = None
    model: Model | ModelConfig | None = None

    def __attrs_post_init__(self) -> None:
        call = f"weft.Speculation(num_tokens={self.num_tokens!r}, ngram={self.ngram!r}, model={self.model!r})"
        if not _is_count(self.num_tokens) or self.num_tokens > _MOST_TOKENS:
            raise RequestError(call, f"num_tokens={self.num_tokens!r}", f"a whole number from 1 to {_MOST_TOKENS}")
        if self.ngram is not None and self.model is not None:
            raise RequestError(call, "two ways to draft", "ngram=..., or model=...")
        if self.model is not None and not isinstance(self.model, Model | ModelConfig):
            raise RequestError(call, f"model is {kind_of(self.model)}", "model = weft.load(folder)")
        if self.model is None and not _is_range(_NGRAM if self.ngram is None else self.ngram):
            raise RequestError(call, f"ngram={self.ngram!r}", "the fewest tokens and the most, as in ngram=(1, 3)")

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens of a request in a step: the last one, and none of the drafts, half of them, or all."""
        return tuple(sorted({1, 1 + self.num_tokens // 2, 1 + self.num_tokens}))

    @property
    def drafter(self) -> Drafter:
        """What finds the drafts."""
        if self.config is not None:
            return model_drafter(self.num_tokens, self.config)
        return ngram_drafter(self.num_tokens, *(self.ngram or _NGRAM))

    @property
    def params(self) -> Any:
        """The drafter's."""
        return self.model.params if isinstance(self.model, Model) else None

    @property
    def config(self) -> ModelConfig | None:
        """Of the draft model."""
        return self.model.config if isinstance(self.model, Model) else self.model

    def check(self, call: str, model: Model, first: bool) -> None:
        """Refuse a draft model that cannot draft for another.

        Args:
            call: for the error.
            model: of the engine.
            first: whether the first stage runs here, and so the draft model.

        Raises:
            RequestError: another vocabulary, or, of the first stage, another device or a part of a model.
        """
        if self.config is None:
            return
        own, sizes = self.model, (self.config.vocab_size, model.config.vocab_size)
        if sizes[0] != sizes[1]:
            raise RequestError(call, f"a draft model of {sizes[0]} tokens for one of {sizes[1]}", "one of as many")
        here = isinstance(own, Model) and (own.device, own.layout.num_stages) == (model.device, 1)
        if first and not here:
            instead = f"weft.load(folder, {str(model.device)!r})"
            raise RequestError(call, f"the draft model {own!r} beside {model!r}", instead)

    def stages(self, stages: Sequence[Any]) -> list[Any]:
        """The stages, of which the first one drafts."""
        return [drafted(stages[0], self.drafter), *stages[1:]]

    def states(self, states: Sequence[State], layouts: Sequence[StageLayout]) -> tuple[State, ...]:
        """Empty states of these stages that can draft, if their block tables have `spare_pages`."""
        return tuple(self._state(state, layout.first) for state, layout in zip(states, layouts, strict=True))

    def _state(self, state: State, first: bool) -> State:
        (num_rows, max_pages), device = state.block_table.shape, state.block_table.device
        num_pages, page_size = state.kv_pages.shape[2:4]
        pages, tokens = None, 0
        if first and isinstance(self.model, Model):
            layers = len(self.model.params.layers)
            heads, dim = self.model.config.num_kv_heads, self.model.config.head_dim
            pages = torch.zeros(layers, 2, num_pages, page_size, heads, dim, dtype=self.model.dtype, device=device)
        elif first:
            tokens = max_pages * page_size + 1
        drafting = Drafting.zeros(num_rows, max_tokens=tokens, kv_pages=pages, device=device)
        return attrs.evolve(state, drafting=drafting)

    def spare_pages(self, page_size: int) -> int:
        """Pages of a block table that no request has: drafts behind a request's last token would be in them."""
        return -(-self.num_tokens // page_size)

    def page_bytes(self, page_size: int) -> int:
        """Of a page of the draft model's cache, in all its layers."""
        if not isinstance(self.model, Model):
            return 0
        config = self.model.config
        width = config.num_kv_heads * config.head_dim * self.model.dtype.itemsize
        return 2 * len(self.model.params.layers) * page_size * width


_NGRAM = (1, 3)
_MOST_TOKENS = 1024
"""Of a step's drafts: its classes and buffers have room for them, one request's beside the other's."""


def _is_count(value: Any) -> bool:
    return is_int(value, 1)


def _is_range(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(map(_is_count, value)) and value[0] <= value[1]
