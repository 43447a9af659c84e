"""`Drafting`: what a state holds for steps that draft tokens and verify them."""

from collections.abc import Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from weft.placing import place
from weft.summary import Summarized
from weft.trees import pytree


@pytree
@attrs.frozen(eq=False, repr=False)
class Drafting(Summarized):
    """A row a request, and a last one, scratch.

    Args:
        limits: [rows] int64, the most tokens that a request may have, its prompt included: it drafts and says none
            beyond.
        tokens: [rows, most] int32, the tokens that it has; only on a stage that looks drafts up in them, of others the
            width is 0.
        kv_pages: of the draft model, in the layout of the state's own, and with the same pages; only on the stage that
            drafts with it.
    """

    limits: Tensor
    tokens: Tensor
    kv_pages: Tensor | None = None

    @classmethod
    def zeros(
        cls, num_rows: int, *, max_tokens: int = 0, kv_pages: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Of no request.

        Args:
            num_rows: of the state, the scratch row included.
            max_tokens: what a request may have, and a step's tokens more; 0: no drafts are looked up here.
        """
        limits = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(limits, torch.zeros(num_rows, max_tokens, dtype=torch.int32, device=device), kv_pages)

    def admit(self, rows: Tensor, token_ids: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Write requests into rows [num_reqs] int64, in place: the tokens that they have, and may have."""
        device = self.limits.device
        self.limits[rows] = place(torch.tensor(limits, dtype=torch.int64), device)
        if not self.tokens.shape[1]:
            return
        table = torch.zeros(len(token_ids), self.tokens.shape[1], dtype=torch.int32)
        for row, own in zip(table, token_ids, strict=True):
            row[: len(own)] = torch.tensor(own, dtype=torch.int32)
        self.tokens[rows] = place(table, device)

    def append(self, rows: Tensor, places: Tensor, token_ids: Tensor, kept: Tensor) -> None:
        """Write what was sampled, in place; what lies behind a request's tokens is not read.

        Args:
            rows: [num_reqs] int64; -1 for padding.
            places: [num_reqs] int64, of each one's first new token.
            token_ids: [num_reqs, n] int64.
            kept: [num_reqs] bool, whether any is a request's next one.
        """
        if not self.tokens.shape[1]:
            return
        index = places[:, None] + torch.arange(token_ids.shape[1], device=places.device)
        row = rows[:, None].expand_as(index)
        old = self.tokens[row, index]
        self.tokens[row, index] = torch.where(kept[:, None], token_ids.to(torch.int32), old)
