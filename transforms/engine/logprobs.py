"""`logprobs`: the logprobs of given tokens, in one step that can be differentiated."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int, kind_of
from weft.batch import Batch
from weft.errors import RequestError
from weft.stages.model import Model
from weft.torchapi.private import to_device
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits


def logprobs(model: Model, sequences: Sequence[str | Sequence[int]]) -> list[Tensor]:
    """The logprobs of each sequence's tokens but the first, read in one step, with gradients.

    Gradients go to the model's parameters: to those that require grad, or to those that a transform of torch.func
    follows, as `attrs.evolve(model, params=...)` inside the function that it transforms. A sampler's logprobs of the
    same tokens differ from these by rounding, unless the model is batch invariant: then they are the same bits, with
    autograd and without gradients. A transform of torch.func computes the reference's values, which differ by rounding.

    The step is eager and reads all sequences as one batch: memory grows with the number of all tokens. To save it, pass
    a part of the sequences at a time. Stages of one's own find their extras at their defaults.

    Args:
        model: from `weft.load`, all of it.
        sequences: a prompt and its completion each, as token ids or as a text: of at least two tokens, and at most the
            model's limit.

    Returns:
        For each sequence [number of its tokens - 1] float32, natural logarithms: entry i is the logprob of token i + 1.

    Raises:
        RequestError: not a list of sequences, a sequence that is too short or too long, or one with an id that is not a
            token; or the model is one stage of a whole.
        DerivativeError: gradients of a model in FP8.

    >>> import weft
    >>> model = weft.load("demo", "cpu")
    >>> _ = model.params.norm.requires_grad_()
    >>> [found] = weft.logprobs(model, ["A list"])
    >>> (-found.mean()).backward()
    >>> found.shape, model.params.norm.grad.shape
    (torch.Size([5]), torch.Size([128]))
    """
    call = "weft.logprobs(model, sequences)"
    check_values(call, _RULES, {"model": model, "sequences": sequences})
    every = [model.encode(own) if isinstance(own, str) else own for own in sequences]
    for index, ids in enumerate(every):
        _check_sequence(call, model, f"sequences[{index}]", ids)

    lengths = [len(own) - 1 for own in every]
    runner = make_runner(model, Limits(len(every), sum(lengths)), mode="none")
    state = make_state(model, runner.layouts, lengths)
    batch = Batch.ragged(range(len(every)), [own[:-1] for own in every], device=model.device)
    targets = torch.tensor([token for own in every for token in own[1:]])
    _, out = runner.step(runner.params, state, attrs.evolve(batch, targets=to_device(targets, model.device)))
    assert out.prompt_logprobs is not None, "the batch has targets"
    return list(out.prompt_logprobs.split(lengths))


_RULES: dict[str, Rule] = {
    "model": (lambda own: isinstance(own, Model) and own.layout.num_stages == 1, "a whole model: weft.load(path)"),
    "sequences": (
        lambda given: isinstance(given, list | tuple) and given and not all(isinstance(own, int) for own in given),
        "a list of sequences, each a string or a list of token ids",
    ),
}


def _check_sequence(call: str, model: Model, name: str, ids: Any) -> None:
    """Raise RequestError unless these are tokens of the model, as many as it can give logprobs of."""
    most, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if not isinstance(ids, list | tuple):
        seen, instead = f"{name} is {kind_of(ids)}", "a string or a list of token ids; of a tensor, its .tolist()"
    elif not 2 <= len(ids) <= most:
        seen = f"{name} has {len(ids)} token{'s' * (len(ids) != 1)}; the first one has no logprob"
        instead = f"2 to {most} tokens, the model's limit"
    elif wrong := [token for token in ids if not is_int(token, 0, vocab - 1)]:
        seen, instead = f"{name} holds {wrong[0]!r:.200}", f"token ids are ints from 0 to {vocab - 1}"
    else:
        return
    raise RequestError(call, seen, instead)
