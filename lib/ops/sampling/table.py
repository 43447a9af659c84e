"""`SamplingTable`: the sampling parameters of a state's requests on the device."""

from typing import Self

import attrs
import torch
from torch import Tensor

from weft.display.summary import Summarized
from weft.ops.sampling.logits import FLOATS, INTS, Rules
from weft.values.trees import pytree


@pytree
@attrs.frozen(eq=False, repr=False)
class SamplingTable(Summarized):
    """One row for each request, and a last scratch row.

    Only a stage that samples has tables as wide as the vocabulary; on others the width is 0. The
    parts that a row's features do not use may hold anything.

    Args:
        floats: [rows, len(FLOATS)] float32; `weft.ops.sampling.logits` names the columns.
        ints: [rows, len(INTS)] int64, likewise.
        allowed: [rows, ceil(vocab_size / 32)] int32, a bit for each token that may be drawn.
        stops: the same for tokens that end the request.
        bias_ids: [rows, max_biased] int32; -1: no token.
        bias: [rows, max_biased] float32.
        counts: [rows, vocab_size] int16, the number of times that a token was generated, plus
            `IN_PROMPT`.
    """

    floats: Tensor
    ints: Tensor
    allowed: Tensor
    stops: Tensor
    bias_ids: Tensor
    bias: Tensor
    counts: Tensor

    @classmethod
    def zeros(
        cls, num_rows: int, vocab_size: int, max_biased: int, device: torch.device | str
    ) -> Self:
        """A table whose rows are greedy and use no feature."""
        words = -(-vocab_size // 32)
        if vocab_size:
            biased = max_biased
        else:
            biased = 0

        def zeros(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        return cls(
            zeros(len(FLOATS), torch.float32),
            zeros(len(INTS), torch.int64),
            zeros(words, torch.int32),
            zeros(words, torch.int32),
            zeros(biased, torch.int32),
            zeros(biased, torch.float32),
            zeros(vocab_size, torch.int16),
        )

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary on the stage that samples; 0 on others."""
        return self.counts.shape[1]

    def rules(self, rows: Tensor) -> Rules:
        """The rules in some rows [num_reqs] int64."""
        return Rules(*(getattr(self, field.name)[rows] for field in attrs.fields(type(self))))
