"""The sizes of published models, and of tiny ones."""

import attrs


@attrs.frozen
class Sizes:
    """A decoder's sizes, as its `config.json` has them.

    Args:
        inner: of the feed-forward block, or of an expert.
        dim: of a head of attention.
        vocab: the rows of the model's head; 0: it is not timed.
        num_experts: the rows of a router; 0: it has none, and the feed-forward block has linear
            layers.
        top_k: the experts of a token.
    """

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int = 128
    vocab: int = 0
    num_experts: int = 0
    top_k: int = 0

    @property
    def qkv(self) -> int:
        """The rows of the query-key-value weights."""
        return (self.heads + 2 * self.kv_heads) * self.dim


QWEN3_0_6B = Sizes("Qwen3-0.6B", 1024, 3072, 16, 8, vocab=151936)
QWEN3_30B_A3B = Sizes("Qwen3-30B-A3B", 2048, 768, 32, 4, num_experts=128, top_k=8)
TINY = Sizes("tiny", 64, 96, 4, 2, 8)
TINY_EXPERTS = Sizes("tiny, experts", 128, 128, 4, 2, 8, num_experts=4, top_k=2)
