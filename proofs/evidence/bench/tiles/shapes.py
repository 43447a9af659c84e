"""The shapes for which tiles are timed: the linear layers of published models, as ranks share them.

The model of `weft.ops.tiles.model` is fitted to `TRAINING`, and judged by `HELD_OUT`: models, and
the numbers of ranks that share each.
"""

from collections.abc import Iterator, Mapping, Sequence

from weft.ops.tiles.tile import cdiv
from weft.proofs.evidence.bench.operators.sizes import QWEN3_0_6B, QWEN3_30B_A3B, Sizes

# The numbers of tokens for the training shapes.
COUNTS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
# The numbers of tokens for the held-out shapes; most are in no training set.
HELD_COUNTS = (1, 6, 24, 64, 96, 256, 700, 2048)

_LLAMA_70B = Sizes("Llama-3.1-70B", 8192, 28672, 64, 8)

TRAINING: dict[Sizes, tuple[int, ...]] = {
    Sizes("Llama-3.2-1B", 2048, 8192, 32, 8, 64, vocab=128256): (1,),
    Sizes("Llama-3.1-8B", 4096, 14336, 32, 8, vocab=128256): (1, 2, 4),
    _LLAMA_70B: (4,),
    Sizes("Qwen2.5-7B", 3584, 18944, 28, 4): (1,),
    QWEN3_0_6B: (1,),
    Sizes("Qwen3-4B", 2560, 9728, 32, 8): (1,),
    Sizes("Qwen3-14B", 5120, 17408, 40, 8): (1,),
    Sizes("Gemma-2-2b", 2304, 9216, 8, 4, 256): (1,),
    QWEN3_30B_A3B: (1,),
}

HELD_OUT: dict[Sizes, tuple[int, ...]] = {
    Sizes("Llama-3.2-3B", 3072, 8192, 24, 8): (1,),
    _LLAMA_70B: (8,),
    Sizes("Qwen2.5-3B", 2048, 11008, 16, 2): (1,),
    Sizes("Qwen3-8B", 4096, 12288, 32, 8): (1,),
    Sizes("Qwen3-32B", 5120, 25600, 64, 8): (1, 2),
    Sizes("Mistral-Small-24B", 5120, 32768, 32, 8): (1,),
    Sizes("Phi-4", 5120, 17920, 40, 10): (1,),
    Sizes("Gemma-2-9b", 3584, 14336, 16, 8, 256): (1,),
    Sizes("Qwen3-235B-A22B", 4096, 1536, 64, 4, num_experts=128, top_k=8): (4,),
}


def shapes(models: Mapping[Sizes, Sequence[int]]) -> list[tuple[int, int]]:
    """`[N, K]` of all linear layers, each once."""
    shared = [(model, ranks) for model, numbers in models.items() for ranks in numbers]
    return list(dict.fromkeys(shape for model, ranks in shared for shape in _shapes(model, ranks)))


def _shapes(model: Sizes, ranks: int) -> Iterator[tuple[int, int]]:
    # With more ranks than heads of keys, each still has one.
    heads = (model.heads + 2 * max(model.kv_heads, ranks)) * model.dim
    yield cdiv(heads, ranks), model.hidden
    yield model.hidden, model.heads * model.dim // ranks
    if model.num_experts:
        yield model.num_experts, model.hidden
    else:
        yield 2 * model.inner // ranks, model.hidden
        yield model.hidden, model.inner // ranks
    if model.vocab:
        yield model.vocab // ranks, model.hidden
