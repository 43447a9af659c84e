"""The cases of the benchmark, by name."""

from collections.abc import Callable

import attrs

from weft.proofs.evidence.bench.modules import images, llama, networks, training
from weft.proofs.evidence.bench.modules.variants import (
    GRAPHIFY,
    GRAPHIFY_INDUCTOR,
    JAX,
    VARIANTS,
    Call,
    Setting,
)

_TORCH = tuple(variant for variant in VARIANTS if variant != JAX)


@attrs.frozen
class Case:
    """A function, and the variants in which it is written.

    Args:
        build: makes the call that is timed.
        variants: those of `VARIANTS` that there are.
        peers: the case whose other variants it is compared to, if it has only those of weft.
    """

    build: Callable[[Setting], Call]
    variants: tuple[str, ...] = _TORCH
    peers: str | None = None


CASES = {
    "decode": Case(lambda setting: llama.decode(setting, 1)),
    "decode-16": Case(lambda setting: llama.decode(setting, 16)),
    "train": Case(lambda setting: training.gpt2(setting, "plain")),
    "train-fused": Case(
        lambda setting: training.gpt2(setting, "fused"), (GRAPHIFY, GRAPHIFY_INDUCTOR), "train"
    ),
    "convnext": Case(images.convnext),
    "vit": Case(images.vit),
    "unet": Case(images.unet),
    "gnn": Case(networks.gnn, VARIANTS),
    "lora": Case(llama.lora),
    "mlp": Case(networks.mlp, VARIANTS),
    "sampler": Case(images.sampler),
}
