"""A loss computed by weft and by transformers, and its gradients by the fields of weft's
parameters."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
from theirs import CLASSES
from torch import Tensor

import weft
from weft.batches.batch import Batch
from weft.stages.model import Model
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits
from weft.values.trees import leaves_with_names, tree_map

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"head_dim": 8, **EXPERTS}),
}
LENGTHS = (19, 3, 33, 1)


def build(architecture: str, fields: dict[str, Any]) -> Any:
    """A transformers model with random values in all weights, so that no gradient is near 0."""
    config_class, model_class = CLASSES[architecture]
    model = model_class(config_class(**fields)).eval()
    if architecture == "Qwen3MoeForCausalLM":  # its grouped product asks for multiples of 16 bytes
        model.set_experts_implementation("eager")
    return scrambled(model)


def scrambled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def saved(model: Any, folder: Path) -> Model:
    model.save_pretrained(folder)
    return weft.load(folder, "cpu")


def prompts_of(lengths: Sequence[int], vocab_size: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def next_token_loss(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """The sum of -log p over all tokens but the first, from the logits of one prompt."""
    return -logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum()


def their_gradients(model: Any, prompts: Sequence[Sequence[int]], folder: Path) -> Any:
    """The gradients that backward leaves in a transformers model, by the fields of weft's
    parameters."""
    for ids in prompts:
        next_token_loss(
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], ids
        ).backward()
    return gradients_as_params(model, folder)


def gradients_as_params(model: Any, folder: Path) -> Any:
    """The gradients of a transformers model, read like a checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    return saved(model, folder).params


def chunked(prompts: Sequence[Sequence[int]], sizes: Sequence[int], **more: Any) -> list[Batch]:
    """The prompts as batches with a limit of tokens per request; the target of each token is the
    next one."""
    batches = []
    for start, end in pairwise((0, *(sum(sizes[: i + 1]) for i in range(len(sizes))))):
        rows = [row for row, ids in enumerate(prompts) if len(ids) > start]
        targets = [
            token
            for row in rows
            for token in (*prompts[row], 0)[start + 1 : min(end, len(prompts[row])) + 1]
        ]
        batch = Batch.ragged(rows, [prompts[row][start:end] for row in rows], **more)
        batches.append(attrs.evolve(batch, targets=torch.tensor(targets).to(batch.rows.device)))
    return batches


def loss_of(
    out: Any, batch: Batch, prompts: Sequence[Sequence[int]], done: dict[int, int]
) -> Tensor:
    """`next_token_loss` of the prompt tokens that a batch read, which are added to `done`."""
    kept: list[float] = []
    for row, count in zip(batch.rows.tolist(), batch.query_start_loc.diff().tolist(), strict=True):
        done[row] = done.get(row, 0) + count
        kept += [1.0] * (count - 1) + [float(done[row] < len(prompts[row]))]
    loss: Tensor = -(out.prompt_logprobs * torch.tensor(kept).to(out.prompt_logprobs)).sum()
    return loss


def loss_by(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int] = (64,),
    num_stages: int = 1,
    mode: str = "none",
) -> tuple[tuple[Any, ...], Callable[[Any], Tensor]]:
    """The stages' parameters, and the prompts' loss as a function of them: in chunks of these
    sizes, one step each, over pages that start empty."""
    runner = make_runner(model, Limits(4, 64), num_stages=num_stages, mode=mode)

    def loss(params: Any) -> Tensor:
        state = make_state(model, runner.layouts, [48] * len(prompts))
        losses = list[Tensor]()
        done = dict[int, int]()
        for batch in chunked(prompts, sizes, device=model.device):
            state, out = runner.step(params, state, batch)
            losses.append(loss_of(out, batch, prompts, done))
        return torch.stack(losses).sum()

    return runner.params, loss


def recorded(params: Any) -> Any:
    """Leaves that require grad; a tensor that occurs twice, as tied weights do, still occurs twice."""
    leaves: dict[int, Tensor] = {}
    return tree_map(lambda x: leaves.setdefault(id(x), x.detach().clone().requires_grad_()), params)


def gradients_of(params: Any) -> Any:
    return tree_map(lambda x: x.grad, params)


def joined(stages: Sequence[Any], is_tied: bool) -> Any:
    """The gradients of all stages as those of the whole model. Two stages that share a tied
    embedding have a part of its gradient each, or one tensor that holds their sum, as `recorded`
    leaves do."""
    first = stages[0]
    last = stages[-1]
    layers = tuple(layer for stage in stages for layer in stage.layers)
    gradients = attrs.evolve(first, layers=layers, norm=last.norm, lm_head=last.lm_head)
    if not is_tied or len(stages) == 1:
        return gradients
    embedding = first.embed_tokens
    if last.lm_head is not embedding:
        embedding = embedding + last.lm_head
    return attrs.evolve(gradients, embed_tokens=embedding, lm_head=None)


def worst(result: Any, expected: Any) -> tuple[float, str]:
    """The leaf with the greatest error relative to its greatest element."""
    pairs = zip(leaves_with_names(result), leaves_with_names(expected), strict=True)
    return max((relative(a, b), path) for (path, a), (_, b) in pairs)


def relative(result: Tensor, expected: Tensor) -> float:
    assert expected.abs().max() > 0
    return float((result - expected).abs().max() / expected.abs().max())
