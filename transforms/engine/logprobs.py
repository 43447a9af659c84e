"""`logprobs`: the logprobs of given tokens, which can be differentiated."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int, kind_of
from weft.batch import Batch
from weft.errors import RequestError
from weft.stages.adapters.adapter import Adapter
from weft.stages.adapters.slots import stage_params
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
    """The logprobs of each sequence's tokens but the first, with gradients, from one pass over
    each.

    Gradients go to the model's parameters: to those that require grad, or to those that a transform
    of torch.func follows, as `attrs.evolve(model, params=...)` inside the function that it
    transforms. A sampler's logprobs of the same tokens differ from these by rounding, unless the
    model is batch invariant: then they are the same bits, also under autograd and `torch.func.grad`
    and `vjp`. `torch.func.jvp` and `vmap` compute the reference's values, which differ by rounding.

    Steps are eager. Short sequences share one, and a long one has its own. Autograd keeps what
    backward() needs of all: to save memory, pass a part of the sequences at a time. Stages of one's
    own find their extras at their defaults.

    Args:
        model: from `weft.load`, all of it.
        sequences: a prompt and its completion each, as token ids or as a text: of at least two
            tokens, and at most the model's limit.
        adapter: a LoRA from `weft.load_adapter`, for all sequences or one per sequence; None: the
            model alone. Matrices that require grad get gradients, too.

    Returns:
        For each sequence [number of its tokens - 1] float32, natural logarithms: entry i is the
        logprob of token i + 1.

    Raises:
        RequestError: not a list of sequences, another number of adapters, a sequence that is too
            short or too long, or one with an id that is not a token; or the model is a stage or a
            share of a whole.
        DerivativeError: gradients of a model in FP8.

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
    once = {id(each): each for each in sequence_adapters if each is not None}
    slots = [[*once].index(id(each)) if each is not None else -1 for each in sequence_adapters]

    lengths = [len(ids) - 1 for ids in every]
    runner = make_runner(model, Limits(len(every), sum(lengths)), mode="none")
    params = stage_params(model, runner.layouts, [*once.values()])
    token_logprobs: list[Tensor] = []
    for group in _groups(every):
        here = slice(len(token_logprobs), len(token_logprobs) + len(group))
        counts = lengths[here]
        adapters = slots[here]
        active = len({*adapters} - {-1})
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
    """The sequences in groups, one step each. Attention that is differentiated has a row of queries
    for each sequence, as long as the batch: many short sequences share a step, and long ones have a
    step of their own."""
    group: list[Sequence[int]] = []
    for ids in sequences:
        if group and (len(group) + 1) * (sum(map(len, group)) + len(ids)) > _MOST_QUERIES:
            yield group
            group = []
        group.append(ids)
    yield group


_RULES: dict[str, Rule] = {
    "model": (
        lambda value: isinstance(value, Model) and value.is_whole,
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
    """Raise RequestError unless these are tokens of the model, as many as it can give logprobs of."""
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
