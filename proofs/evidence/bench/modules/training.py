"""Training steps: transformers' GPT-2 by AdamW, and what every such step shares.

For torch.compile it is the usual loop: the forward and the backward pass are compiled, and a fused
optimizer runs after them. For weft all of it is one function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from weft.proofs.evidence.bench.modules.variants import Call, Setting

_RATE = 1e-4
_DECAY = 0.01
_BETA1 = 0.9
_BETA2 = 0.999
_EPSILON = 1e-8

Tensors = dict[str, Tensor]


def plain_adamw(
    params: Tensors, gradients: Tensors, means: Tensors, squares: Tensors, steps: Tensors
) -> None:
    """AdamW by operators on each parameter."""
    for name, gradient in gradients.items():
        step = steps[name].add_(1)
        mean = means[name].lerp_(gradient, 1 - _BETA1)
        square = squares[name].mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        deviation = (square / (1 - _BETA2**step)).sqrt() + _EPSILON
        params[name].mul_(1 - _RATE * _DECAY)
        params[name].sub_(_RATE / (1 - _BETA1**step) * mean / deviation)


def fused_adamw(
    params: Tensors, gradients: Tensors, means: Tensors, squares: Tensors, steps: Tensors
) -> None:
    """AdamW by torch's operators on lists of parameters."""
    adamw(
        [*params.values()],
        [gradients[name] for name in params],
        [means[name] for name in params],
        [squares[name] for name in params],
        [],
        [steps[name] for name in params],
        fused=True,
        amsgrad=False,
        beta1=_BETA1,
        beta2=_BETA2,
        lr=_RATE,
        weight_decay=_DECAY,
        eps=_EPSILON,
        maximize=False,
    )


UPDATES = {"plain": plain_adamw, "fused": fused_adamw}


def trained(
    setting: Setting, module: nn.Module, loss: Callable[..., Any], ids: Tensor, update: str
) -> Call:
    """Training steps of the parameters that require grad; each returns its loss.

    Args:
        setting: the variant, and where it runs.
        module: the module.
        loss: takes a module and the tokens.
        ids: the tokens of all steps.
        update: how the function for weft writes AdamW, one of `UPDATES`.
    """
    if setting.is_weft:
        return _one_function(setting, module, loss, ids, update)
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=_RATE, weight_decay=_DECAY, fused=True)
    forward = setting.compiled(lambda ids: loss(module, ids))

    def call() -> Tensor:
        value: Tensor = forward(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return call


def _one_function(
    setting: Setting, module: nn.Module, loss: Callable[..., Any], ids: Tensor, update: str
) -> Call:
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    module.requires_grad_(False)

    class Loss(nn.Module):
        """The loss as a module, so that a call of it can have other parameters."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: Tensor) -> Any:
            return loss(self.module, ids)

    whole = Loss()

    def step(params: Tensors, means: Tensors, squares: Tensors, steps: Tensors, ids: Tensor) -> Any:
        def value_of(candidates: Any) -> Any:
            named = {f"module.{name}": x for name, x in candidates.items()}
            return torch.func.functional_call(whole, named, (ids,))

        gradients, value = torch.func.grad_and_value(value_of)(params)
        UPDATES[update](params, gradients, means, squares, steps)
        return params, means, squares, steps, value

    graph = setting.graphified(step, donate_argnames=("params", "means", "squares", "steps"))
    carry: list[Any] = [params]
    carry += [{name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2)]
    carry.append({name: torch.zeros((), device=p.device) for name, p in params.items()})

    def call() -> Any:
        *carry[:], value = graph(*carry, ids)
        return value

    return call


def gpt2(setting: Setting, update: str) -> Call:
    """A training step of GPT-2 in bfloat16 by autocast, 8 x 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    length = setting.size(512, 16)
    config = GPT2Config(
        vocab_size=setting.size(50257, 64),
        n_positions=length,
        n_embd=setting.size(768, 32),
        n_layer=setting.size(12, 1),
        n_head=setting.size(12, 4),
        bos_token_id=0,
        eos_token_id=0,
    )
    # In eval mode, so that no dropout makes the losses of two variants differ.
    module = setting.built(lambda: GPT2LMHeadModel(config))
    ids = setting.tokens(setting.size(8, 2), length, vocab_size=config.vocab_size)

    def loss(module: nn.Module, ids: Tensor) -> Any:
        with torch.autocast(setting.device, torch.bfloat16):
            return module(input_ids=ids, labels=ids, use_cache=False).loss

    return trained(setting, module, loss, ids, update)
