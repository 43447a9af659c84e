"""Speculative decoding: the user's choice of a drafter (`Speculation`), and stages and states that draft."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weft.arguments.checks import is_int
from weft.errors import RequestError
from weft.stages.config import ModelConfig
from weft.stages.drafting import Drafter, drafted, model_drafter, ngram_drafter
from weft.stages.layout import StageLayout
from weft.stages.model import Model
from weft.state import Drafting, State
from weft.transforms.engine.faults import Rule, check_values


@attrs.frozen
class Speculation:
    """Draft tokens, and verify them with the model in one step. The tokens stay the same, greedy or sampled; only the
    number of steps changes.

    Requests with penalties (repetition, presence, frequency) have no drafts, because each of their tokens changes the
    distribution of the next. Neither have requests in a step that also computes prompts.

    Args:
        num_tokens: the most drafts per request and step; steps with half as many, and with none, have graphs of their
            own.
        ngram: draft by prompt lookup: propose what followed the last n tokens where they occurred before, for n from
            the second number down to the first. None: (1, 3), or, with a model, no lookup.
        model: draft with a smaller model from `weft.load`, with the same vocabulary, on the device of the first stage;
            on a rank without that stage its configuration is enough.

    Raises:
        RequestError: an invalid number of tokens, an invalid range of n, or two ways to draft.

    >>> Speculation(num_tokens=4).query_lens
    (1, 3, 5)
    """

    num_tokens: int
    ngram: tuple[int, int] | None = None
    model: Model | ModelConfig | None = None

    def __attrs_post_init__(self) -> None:
        call = f"weft.Speculation(num_tokens={self.num_tokens!r}, ngram={self.ngram!r}, model={self.model!r})"
        check_values(call, _RULES, attrs.asdict(self, recurse=False))
        if self.ngram is not None and self.model is not None:
            raise RequestError(call, "two ways to draft", "ngram=..., or model=...")

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Tokens per request in a step: the last one, with no drafts, half of them, or all."""
        return tuple(sorted({1, 1 + self.num_tokens // 2, 1 + self.num_tokens}))

    @property
    def drafter(self) -> Drafter:
        """The function that makes the drafts."""
        if self.config is not None:
            return model_drafter(self.num_tokens, self.config)
        return ngram_drafter(self.num_tokens, *(self.ngram or _NGRAM))

    @property
    def params(self) -> Any:
        """The drafter's parameters."""
        return self.model.params if isinstance(self.model, Model) else None

    @property
    def config(self) -> ModelConfig | None:
        """The draft model's configuration."""
        return self.model.config if isinstance(self.model, Model) else self.model

    def check(self, call: str, model: Model, first: bool) -> None:
        """Check the draft model against the engine's.

        Args:
            call: the user's call, for the error.
            model: the engine's.
            first: whether the first stage, and so the draft model, runs here.

        Raises:
            RequestError: another vocabulary; or, where the first stage runs, another device or only a part of a model.
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
        """The same stages with a first one that drafts."""
        return [drafted(stages[0], self.drafter), *stages[1:]]

    def states(self, states: Sequence[State], layouts: Sequence[StageLayout]) -> tuple[State, ...]:
        """The same empty states with room for drafts; their block tables must have `spare_pages`."""
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
        """Columns of the block table that no request has pages for: drafts after a request's last token go there."""
        return -(-self.num_tokens // page_size)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of the draft model's cache, over all its layers."""
        if not isinstance(self.model, Model):
            return 0
        config = self.model.config
        width = config.num_kv_heads * config.head_dim * self.model.dtype.itemsize
        return 2 * len(self.model.params.layers) * page_size * width


_NGRAM = (1, 3)
_MAX_NUM_TOKENS = 1024
"""Limit of `num_tokens`: the classes and buffers of a step have room for the drafts of all requests."""


def _is_range(value: Any) -> bool:
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(is_int(each, 1) for each in value) and value[0] <= value[1]


_RULES: dict[str, Rule] = {
    "num_tokens": (lambda value: is_int(value, 1, _MAX_NUM_TOKENS), f"a whole number from 1 to {_MAX_NUM_TOKENS}"),
    "ngram": (lambda value: value is None or _is_range(value), "the fewest tokens and the most, as in ngram=(1, 3)"),
    "model": (Model | ModelConfig | None, "model = weft.load(folder)"),
}
