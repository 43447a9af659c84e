"""`Carried`: the values that custom functions carry from token to token of each request, in rows of
the state."""

from collections.abc import Mapping, Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from weft.batches.batch import ResolvedBatch
from weft.batches.outputs import PerRequest
from weft.display.summary import Summarized
from weft.torchapi.private import in_functorch_transform, to_device
from weft.values.trees import pytree


@pytree
@attrs.frozen(eq=False, repr=False)
class Carried(Summarized):
    """The values that each request carries from token to token (`weft.stages.carry`).

    A step writes the values after each of its tokens before it is known how many tokens a request
    keeps, since drafts may be rejected. So a row holds the values after each token that the request
    may be set back to, and the request's position says which one is current. The values of rejected
    drafts are never read.

    Args:
        values: [max_num_reqs + 1, n, ...] by name: a request's value after p tokens is in slot p %
            n, where n is the most tokens of a decode step. The last row holds the defaults.
        snapshots: [num_pages + 1, ...] by name: the value after the last token of each full page;
            the last entry is scratch. Empty if there are no snapshots.
    """

    values: dict[str, Tensor]
    snapshots: dict[str, Tensor] = attrs.field(factory=dict)

    @classmethod
    def of(
        cls,
        defaults: Mapping[str, Tensor],
        num_rows: int,
        *,
        num_drafts: int = 0,
        num_pages: int | None = None,
    ) -> Self:
        """Rows that hold the defaults.

        Args:
            defaults: the value before a request's first token, by name.
            num_rows: the state's rows, scratch row included.
            num_drafts: the most drafts of a request in a step.
            num_pages: the number of pages that have snapshots; None: no snapshots.
        """

        def repeated(x: Tensor, *sizes: int) -> Tensor:
            return x.repeat(*sizes, *[1] * x.dim())

        rows = {name: repeated(x, num_rows, num_drafts + 1) for name, x in defaults.items()}
        if num_pages is None:
            snapshots = {}
        else:
            snapshots = {name: repeated(x, num_pages + 1) for name, x in defaults.items()}
        return cls(rows, snapshots)

    def admit(self, rows: Tensor, positions: Sequence[int], last_pages: Sequence[int]) -> None:
        """Start requests in rows [num_reqs] int64, in place. A request that has full pages starts
        from the snapshot of the last one, any other from the default.

        Args:
            positions: the number of tokens that each request has in its pages; whole pages, if
                there are snapshots.
            last_pages: the page of the last of these tokens; -1 if there is none.
        """
        places, pages = to_device(
            torch.tensor([positions, last_pages], dtype=torch.int64), rows.device
        )
        for name, buffer in self.values.items():
            start = buffer[-1, 0].clone().expand(len(rows), *buffer.shape[2:])
            if name in self.snapshots:
                # Page -1 reads the scratch snapshot, which `where` discards.
                has_snapshot = (pages >= 0).view(-1, *[1] * (start.dim() - 1))
                start = torch.where(has_snapshot, self.snapshots[name][pages], start)
            buffer[rows, places % buffer.shape[1]] = start

    def read(self, rows: Tensor, positions: Tensor) -> dict[str, PerRequest]:
        """The values of rows [num_reqs] int64 after `positions` tokens; for padding, the
        defaults."""
        return {
            name: PerRequest(buffer[rows, positions % buffer.shape[1]])
            for name, buffer in self.values.items()
        }

    def write(self, batch: ResolvedBatch, page_size: int, values: Mapping[str, Tensor]) -> Self:
        """The rows and snapshots after a step. They are written in place, except where autograd or
        a transform of torch.func follows them: then new ones are made.

        Args:
            batch: the step's.
            values: [num_tokens, ...] by name, the value after each token.
        """
        rows = dict(self.values)
        snapshots = dict(self.snapshots)
        for name, new in values.items():
            rows[name] = _put(rows[name], *_last_values(batch, rows[name], new))
            if name in snapshots:
                snapshots[name] = _put(
                    snapshots[name], (_ended_pages(batch, page_size, len(snapshots[name])),), new
                )
        same = all(rows[name] is old for name, old in self.values.items())
        same = same and all(snapshots[name] is old for name, old in self.snapshots.items())
        if same:
            return self
        return attrs.evolve(self, values=rows, snapshots=snapshots)


def _last_values(
    batch: ResolvedBatch, buffer: Tensor, new: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The index at which to write the values of each request's last tokens, one for each slot of a
    row, and these values. Slots without a token in the batch, and the last row, which stands for
    padding, are given the values that they already hold."""
    # Every slot is written, so that the shapes do not depend on how many tokens a request has.
    back = torch.arange(buffer.shape[1], device=new.device)
    tokens = batch.last_index[:, None] - back
    rows = batch.rows[:, None]
    slots = (batch.positions[batch.last_index][:, None] + 1 - back) % buffer.shape[1]
    kept = (tokens >= batch.query_start_loc[:-1, None]) & (rows >= 0)
    index = rows.expand_as(slots), slots
    kept = kept.view(*kept.shape, *[1] * (buffer.dim() - 2))
    return index, torch.where(kept, new[tokens.clamp(min=0)], buffer[index])


def _ended_pages(batch: ResolvedBatch, page_size: int, num_snapshots: int) -> Tensor:
    """The page [num_tokens] that each token completes; for a token that completes none, the last
    entry, which is scratch."""
    slots = batch.slot_mapping.to(torch.int64)
    fills = (slots >= 0) & (slots % page_size == page_size - 1)
    return torch.where(fills, slots // page_size, num_snapshots - 1)


def _put(buffer: Tensor, index: tuple[Tensor, ...], new: Tensor) -> Tensor:
    """`buffer` with `new` at an index: in place where `Carried.write` allows it."""
    if in_functorch_transform() or (
        torch.is_grad_enabled() and (buffer.requires_grad or new.requires_grad)
    ):
        return buffer.index_put(index, new)
    return buffer.index_put_(index, new)
