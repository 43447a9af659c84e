"""Requests in a table of sampling parameters, with the logits that they are drawn from."""

from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import write_rows
from weft.ops.sampling.sample import sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.values.trees import tree_map

VOCAB = 40


@attrs.frozen(eq=False)
class Case:
    """The arguments of `sample_rows`."""

    logits: Tensor
    table: SamplingTable
    rows: Tensor
    positions: Tensor
    token_mask: Tensor | None = None

    def drawn(self) -> tuple[Tensor, Tensor]:
        return sample_rows(self.logits, self.table, self.rows, self.positions, self.token_mask)

    def of(self, index: list[int]) -> "Case":
        """Some of the requests, in a given order."""
        mask = None if self.token_mask is None else self.token_mask[index]
        return Case(self.logits[index], self.table, self.rows[index], self.positions[index], mask)

    def to(self, device: str) -> "Case":
        def move(x: Any) -> Any:
            return None if x is None else x.to(device)

        table = tree_map(move, self.table)
        return Case(
            move(self.logits), table, move(self.rows), move(self.positions), move(self.token_mask)
        )


def make_case(
    params: list[SamplingParams],
    logits: Tensor,
    seed: int = 0,
    mask: bool = False,
    padding: int = 0,
) -> Case:
    """Requests with these parameters in a table full of old data, not in the order of its rows."""
    generator = torch.Generator().manual_seed(seed)
    count, vocab = logits.shape
    table = SamplingTable.zeros(count + 3, vocab, 5, "cpu")
    table.counts.random_(-100, 100, generator=generator)
    for old in (table.allowed, table.stops):
        old.random_(-(2**31), 2**31 - 1, generator=generator)
    prompts = torch.randint(0, vocab, (count, 9), generator=generator).tolist()
    said = [
        ids[: n % 7]
        for n, ids in enumerate(torch.randint(0, vocab, (count, 9), generator=generator).tolist())
    ]
    rows = torch.randperm(count + 2, generator=generator)[:count]
    write_rows(table, rows.tolist(), params, prompts, said)
    positions = torch.tensor([8 + len(row_ids) for row_ids in said])
    rows[count - padding :] = -1
    bits = torch.randint(-(2**31), 2**31 - 1, (count, -(-vocab // 32)), generator=generator)
    return Case(logits, table, rows, positions, bits.to(torch.int32) if mask else None)


def random_logits(rows: int, vocab: int, seed: int = 0, width: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * width
