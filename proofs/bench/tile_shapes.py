"""The shapes for which tiles are timed: the linear layers of published models, as ranks share them.

The model of `weft.ops.linear_tiles` is fitted to `TRAINING`, and judged by `HELD_OUT`.
"""

from collections.abc import Iterator, Sequence

import attrs

from weft.ops.tiles import cdiv

COUNTS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
"""The numbers of tokens for the training shapes."""
HELD_COUNTS = (1, 6, 24, 64, 96, 256, 700, 2048)
"""The numbers of tokens for the held-out shapes; most are in no training set."""


@attrs.frozen
class Published:
    """The sizes of a model's `config.json`, and the numbers of ranks that share it.

    Args:
        vocab: the rows of the head; 0: it is not timed.
        experts: the rows of a router; 0: it has none, and the feed-forward block has linear layers.
    """

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int = 128
    vocab: int = 0
    experts: int = 0
    ranks: tuple[int, ...] = (1,)


TRAINING = (
    Published("Llama-3.2-1B", 2048, 8192, 32, 8, 64, vocab=128256),
    Published("Llama-3.1-8B", 4096, 14336, 32, 8, vocab=128256, ranks=(1, 2, 4)),
    Published("Llama-3.1-70B", 8192, 28672, 64, 8, ranks=(4,)),
    Published("Qwen2.5-7B", 3584, 18944, 28, 4),
    Published("Qwen3-0.6B", 1024, 3072, 16, 8, vocab=151936),
    Published("Qwen3-4B", 2560, 9728, 32, 8),
    Published("Qwen3-14B", 5120, 17408, 40, 8),
    Published("Gemma-2-2b", 2304, 9216, 8, 4, 256),
    Published("Qwen3-30B-A3B", 2048, 768, 32, 4, experts=128),
)

HELD_OUT = (
    Published("Llama-3.2-3B", 3072, 8192, 24, 8),
    Published("Llama-3.1-70B", 8192, 28672, 64, 8, ranks=(8,)),
    Published("Qwen2.5-3B", 2048, 11008, 16, 2),
    Published("Qwen3-8B", 4096, 12288, 32, 8),
    Published("Qwen3-32B", 5120, 25600, 64, 8, ranks=(1, 2)),
    Published("Mistral-Small-24B", 5120, 32768, 32, 8),
    Published("Phi-4", 5120, 17920, 40, 10),
    Published("Gemma-2-9b", 3584, 14336, 16, 8, 256),
    Published("Qwen3-235B-A22B", 4096, 1536, 64, 4, experts=128, ranks=(4,)),
)


def shapes(models: Sequence[Published]) -> list[tuple[int, int]]:
    """`[N, K]` of all linear layers, each once."""
    return list(dict.fromkeys(shape for model in models for shape in _shapes(model)))


def _shapes(model: Published) -> Iterator[tuple[int, int]]:
    for ranks in model.ranks:
        heads = (model.heads + 2 * max(model.kv_heads, ranks)) * model.dim
        yield cdiv(heads, ranks), model.hidden
        yield model.hidden, model.heads * model.dim // ranks
        if model.experts:
            yield model.experts, model.hidden
        else:
            yield 2 * model.inner // ranks, model.hidden
            yield model.hidden, model.inner // ranks
        if model.vocab:
            yield model.vocab // ranks, model.hidden
