"""The outputs of stages: `IntermediateTensors` between two stages, and `Output` of the last one;
also `PerToken` and `PerRequest`, which hold one value for each token or request of a batch."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
from torch import Tensor

from weft.display.summary import Summarized
from weft.errors import ProgramError
from weft.values.trees import axes, pytree

_INSTEAD = (
    "batch.per_token(...) of it, [num_tokens, ...]; its own tensor, [num_reqs, ...], is `.values`"
)


@pytree
@attrs.frozen(eq=False, repr=False)
class PerToken(Summarized):
    """A value for each token of a batch: `values` [num_tokens, ...]."""

    values: Tensor = attrs.field(metadata=axes("num_tokens"))


@pytree
@attrs.frozen(eq=False, repr=False)
class PerRequest(Summarized):
    """A value for each request of a batch: `values` [num_reqs, ...].

    It is not a tensor, because torch would silently add it to per-token values whenever a padded
    batch has as many requests as tokens. `batch.per_token(...)` turns it into a tensor with the
    value of each token's request.
    """

    values: Tensor = attrs.field(metadata=axes("num_reqs"))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> NoReturn:
        _refuse(getattr(func, "__name__", str(func)), *args)

    def __getattr__(self, name: str) -> NoReturn:
        problem = (
            "a PerRequest, whose values are of requests and not of tokens, has no attribute"
            f" {name!r}"
        )
        # Not a ProgramError: `hasattr`, `copy` and `pickle` expect this one for a name that is
        # missing.
        raise AttributeError(f"{problem}: {_INSTEAD}" if hasattr(Tensor, name) else problem)

    __hash__ = object.__hash__


def _refuse(name: str, *args: Any) -> NoReturn:
    """Refuse an operation that takes tensors."""
    arguments = ", ".join(
        f"{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in args
    )
    problem = "a PerRequest, whose values are of requests and not of tokens"
    raise ProgramError(f"{name}({arguments})", problem, _INSTEAD)


def _refused(name: str) -> Callable[..., NoReturn]:
    return lambda *args: _refuse(name, *args)


for _name in (
    *(
        "__bool__",
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__getitem__",
        "__iter__",
        "__len__",
    ),
    *("__neg__", "__abs__", "__invert__", "__float__", "__int__", "__index__", "__contains__"),
):  # methods that Python would answer by itself, or refuse with a less helpful error
    # In the class, where Python looks up special methods: it does not ask `__getattr__` for them.
    type.__setattr__(PerRequest, _name, _refused(_name))


@pytree
@attrs.frozen(eq=False, repr=False)
class IntermediateTensors(Summarized):
    """The tensors that one stage sends to the next.

    Args:
        hidden_states: [num_tokens, hidden_size], the residual stream; the model's dtype.
        input_ids: [num_tokens] int64, the batch's with the drafts filled in; None unless the step
            verifies drafts.
        positions: [num_tokens, 3] int64, each token's position in time, height and width; None
            unless the model has mRoPE. Tokens come first, as in every tensor between stages
            (`Batch.positions` is [3, num_tokens]).
        captured: by name, the values that the stages so far have captured; 0 where none has yet.
    """

    hidden_states: Tensor = attrs.field(metadata=axes("num_tokens"))
    input_ids: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    positions: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    captured: dict[str, PerToken] = attrs.field(factory=dict)


@pytree
@attrs.frozen(eq=False, repr=False)
class Output(Summarized):
    """The last stage's output.

    A step that verifies drafts samples several tokens for each request. Its first six fields are
    [num_reqs, n, ...]: n is the query length of a uniform class, otherwise 1 + the most drafts that
    the step was built for.

    Args:
        token_ids: [num_reqs] int64, the sampled token (meaningless if the batch does not sample).
        logprobs: [num_reqs] float32, the natural logarithm of the model's probability of that
            token, before temperature; -inf if no token could be drawn, and NaN if the logits were
            NaN.
        logits: [num_reqs, vocab_size] float32 at each request's last token; None unless the step
            was built to keep them.
        top_ids, top_logprobs: [num_reqs, n] int64 and float32, the n tokens that the model finds
            likeliest (before temperature); None unless the step was built to find them.
        ranks: [num_reqs] int64, 1 + the number of tokens that are likelier than the sampled one;
            None unless the step was built to find them.
        prompt_logprobs: [num_tokens] float32, the logprobs of the batch's `targets`; None unless
            the batch has targets.
        prompt_top_ids, prompt_top_logprobs: [num_tokens, n], the likeliest tokens at the places of
            the `targets`.
        prompt_ranks: [num_tokens] int64, the ranks of the batch's `targets`.
        num_tokens: [num_reqs] int64, how many of the first `token_ids` the request keeps; 0 if it
            already has all its tokens. None unless the step verifies drafts.
        num_drafts: [num_reqs] int64, the number of drafts; `num_tokens - 1` of them were accepted.
        captured: by name, the values that custom functions in the stages captured for each token
            (`weft.stages.sow`).
    """

    token_ids: Tensor = attrs.field(metadata=axes("num_reqs"))
    logprobs: Tensor = attrs.field(metadata=axes("num_reqs"))
    logits: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    top_ids: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    top_logprobs: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    ranks: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    prompt_logprobs: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    prompt_top_ids: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    prompt_top_logprobs: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    prompt_ranks: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens"))
    num_tokens: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    num_drafts: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs"))
    captured: dict[str, PerToken] = attrs.field(factory=dict)
