"""`logprobs`: differentiable logprobs of given tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int, kind_of
from weft.batches.batch import Batch
from weft.errors import RequestError
from weft.stages.adapters.adapter import Adapter
from weft.stages.adapters.slots import stage_params
from weft.stages.layout import is_whole
from weft.stages.model import Model
from weft.torchapi.private import to_device
from weft.transforms.engine.requests.inputs import each_rule, one_each
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits


def logprobs(
    model: Model,
    sequences: Sequence[str | Sequence[int]],
    *,
    adapter: Adapter | Sequence[Adapter | None] | None = None,
) -> list[Tensor]:
    """The differentiable logprobs of each sequence's tokens except the first, from one pass over
    each.

    Gradients flow to the model's parameters: to those that require grad, or to those that a
    torch.func transform tracks, if you pass `attrs.evolve(model, params=...)` inside the
    transformed function. A sampler's logprobs of the same tokens differ from these by rounding,
    unless the model is batch invariant: then they are bitwise equal, also under autograd,
    `torch.func.grad` and `vjp`. `torch.func.jvp` and `vmap` use the reference implementation, which
    differs by rounding.

    Steps are eager. Short sequences share a step, and a long one has a step to itself. Autograd
    keeps what backward() needs for all of them; to save memory, pass fewer sequences at a time.
    Custom stages see the default values of their extras.

    Args:
        model: a whole model from `weft.load`.
        sequences: each a prompt with its completion, as token ids or as text: at least two tokens,
            and at most the model's limit.
        adapter: a LoRA from `weft.load_adapter`: one for all sequences, or one per sequence; None:
            the model alone. Its matrices get gradients, too, if they require grad.

    Returns:
        For each sequence [number of its tokens - 1] float32, natural logarithms: entry i is the
        logprob of token i + 1.

    Raises:
        RequestError: `sequences` is not a list of sequences; the number of adapters differs; a
            sequence is too short or too long, or holds an id that is not a token; or the model is a
            stage or a share of a model.
        DerivativeError: the model is in FP8 and gradients are asked for.

    >>> import weft
    >>> model = weft.load("demo", "cpu")
    >>> _ = model.params.norm.requires_grad_()
    >>> [result] = weft.logprobs(model, ["A list"])
    >>> (-result.mean()).backward()
    >>> result.shape, model.params.norm.grad.shape
    (torch.Size([5]), torch.Size([128]))
    """
    call = "weft.logprobs(model, sequences)"
    check_values(call, _RULES, {"model": model, "sequences": sequences})
    every = [
        model.encode(sequence) if isinstance(sequence, str) else sequence for sequence in sequences
    ]
    for index, ids in enumerate(every):
        _check_sequence(call, model, f"sequences[{index}]", ids)
    rule = each_rule(
        Adapter | None,
        len(every),
        "weft.load_adapter(model, folder), or a list of {} of them and None",
    )
    check_values(call, {"adapter": rule}, {"adapter": adapter})
    sequence_adapters: list[Adapter | None] = one_each(adapter, len(every))
    # One slot per adapter object, however many sequences use it.
    once = {id(each): each for each in sequence_adapters if each is not None}
    slots = [[*once].index(id(each)) if each is not None else -1 for each in sequence_adapters]

    lengths = [len(ids) - 1 for ids in every]
    # Eager, since the replay of a graph records nothing for autograd.
    runner = make_runner(model, Limits(len(every), sum(lengths)), mode="none")
    params = stage_params(model, runner.layouts, [*once.values()])
    token_logprobs: list[Tensor] = []
    for group in _groups(every):
        here = slice(len(token_logprobs), len(token_logprobs) + len(group))
        counts = lengths[here]
        adapters = slots[here]
        active = len({*adapters} - {-1})
        # Token i predicts token i + 1, so the last one is only a target.
        inputs = [ids[:-1] for ids in group]
        batch = Batch.ragged(
            range(len(group)), inputs, num_active_loras=active, device=model.device
        )
        targets = to_device(
            torch.tensor([token for ids in group for token in ids[1:]]), model.device
        )
        state = make_state(model, runner.layouts, counts, adapters=adapters)
        _, out = runner.step(params, state, attrs.evolve(batch, targets=targets))
        assert out.prompt_logprobs is not None, "the batch has targets"
        token_logprobs += out.prompt_logprobs.split(counts)
    return token_logprobs


_MOST_QUERIES = 4096


def _groups(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """The sequences in groups, one step each. Differentiable attention pads each sequence's row of
    queries to the length of the batch, so short sequences share a step and long ones get separate
    steps."""
    group: list[Sequence[int]] = []
    for ids in sequences:
        if group and (len(group) + 1) * (sum(map(len, group)) + len(ids)) > _MOST_QUERIES:
            yield group
            group = []
        group.append(ids)
    yield group


_RULES: dict[str, Rule] = {
    "model": (
        lambda value: isinstance(value, Model) and is_whole(value.layout, value.shard),
        "a whole model: weft.load(path)",
    ),
    "sequences": (
        lambda sequence_list: (
            isinstance(sequence_list, list | tuple)
            and sequence_list
            and not all(isinstance(item, int) for item in sequence_list)
        ),
        "a list of sequences, each a string or a list of token ids",
    ),
}


def _check_sequence(call: str, model: Model, name: str, ids: Any) -> None:
    """Raise RequestError unless these are tokens of the model, neither too few nor too many."""
    most = model.config.max_position_embeddings
    vocab = model.config.vocab_size
    if not isinstance(ids, list | tuple):
        problem = f"{name} is {kind_of(ids)}"
        instead = "a string or a list of token ids; of a tensor, its .tolist()"
    elif not 2 <= len(ids) <= most:
        problem = (
            f"{name} has {len(ids)} token{'s' * (len(ids) != 1)}; the first one has no logprob"
        )
        instead = f"2 to {most} tokens, the model's limit"
    elif wrong := [token for token in ids if not is_int(token, 0, vocab - 1)]:
        problem = f"{name} holds {wrong[0]!r:.200}"
        instead = f"token ids are ints from 0 to {vocab - 1}"
    else:
        return
    raise RequestError(call, problem, instead)
