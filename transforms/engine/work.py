"""Work: what one step does, as data that every rank gets alike; and how it is done to a state."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import attrs
import torch

from weft.batch import EMBEDDED, LAST_TOKEN, Batch
from weft.descriptor import BatchDescriptor
from weft.donation import donates
from weft.outputs import Output
from weft.sampling import SamplingParams
from weft.state import State, admit, advance, copy_pages, grow
from weft.torchapi import to_device
from weft.transforms.engine.masks import stack_masks
from weft.transforms.engine.prompts import Given, place_embeds, place_positions
from weft.trees import pytree

_STATIC = {"weft.static": True}


@attrs.frozen
class Admission:
    """A request gets a row of the state.

    Args:
        row: which.
        pages: its pages, in order.
        computed: tokens that are in them already.
        sampling, prompt: of the request.
        generated: what it had generated before it was preempted.
        adapter: the slot of its LoRA adapter; -1: none.
        limit: tokens that it has at most, its prompt included.
        mrope_position_delta: how far its tokens behind its prompt stand from their places.
    """

    row: int
    pages: tuple[int, ...]
    computed: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    adapter: int = -1
    limit: int = 0
    mrope_position_delta: int = 0


@attrs.frozen
class Growth:
    """A request gets more pages: behind the `start` that it has."""

    row: int
    start: int
    pages: tuple[int, ...]


@attrs.frozen
class Edits:
    """What changes in the tables before a step.

    Args:
        copies: (from, to): pages copied, to be written on by another request.
        admissions, growths: rows given, and pages.
    """

    copies: tuple[tuple[int, int], ...] = ()
    admissions: tuple[Admission, ...] = ()
    growths: tuple[Growth, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.copies or self.admissions or self.growths)


@attrs.frozen
class Work:
    """One step, on the host.

    Args:
        job: its number, over all steps.
        edits: made before it.
        requests: their ids.
        rows: of the state, one a request.
        token_ids: of each request; none for a uniform decode, which goes on from the last tokens.
        samples: whether each samples a token.
        after: the job whose tokens must have returned before this one runs; None: no such job.
        targets: of each request, the prompt's next token behind each, or 0 where it does not want its logprobs; none
            where nobody does.
        starts: of each request, the tokens before this step; of a decode at most.
        num_active_loras: different adapters of these requests.
        query_len: tokens of each request of a uniform decode: the last one, and drafts.
        given: of each request what its prompt has beside token ids; none where no prompt has.
        masks: of each request the bits of the tokens that it may say next; None: any; none where nobody has a mask.
    """

    job: int
    edits: Edits
    requests: tuple[str, ...]
    rows: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    after: int | None
    targets: tuple[tuple[int, ...], ...] = ()
    starts: tuple[int, ...] = ()
    num_active_loras: int = 0
    query_len: int = 1
    given: tuple[Given | None, ...] = ()
    masks: tuple[bytes | None, ...] = ()

    @property
    def feeds(self) -> bool:
        """Whether anything returns."""
        return any(self.samples) or bool(self.targets)

    @property
    def num_tokens(self) -> int:
        """Of the batch."""
        return sum(map(len, self.token_ids)) or len(self.rows) * self.query_len

    @property
    def descriptor(self) -> BatchDescriptor:
        """Of the batch."""
        count, loras = len(self.rows), self.num_active_loras
        if not self.token_ids:
            return BatchDescriptor.uniform(count, self.query_len, loras)
        return BatchDescriptor(self.num_tokens, count, num_active_loras=loras)

    @property
    def kind(self) -> str:
        """`decode`, `prompts`, or both: `mixed`."""
        return "decode" if not self.token_ids else "mixed" if (LAST_TOKEN,) in self.token_ids else "prompts"

    @property
    def summary(self) -> str:
        """What ranks must say alike of it, in a line: its rows, how many tokens of each, and what each may say next."""
        found = hashlib.blake2b(digest_size=6)
        for mask in self.masks:
            found.update(b"any;" if mask is None else b"%d;" % len(mask) + mask)
        return f"{self}{f', masks {found.hexdigest()}' * bool(self.masks)}"

    def place(self, device: torch.device | str, first: bool = True) -> "PlacedWork":
        """Its tensors on a device.

        Args:
            first: whether the first stage runs here, which alone takes embeddings and positions.
        """
        loras = self.num_active_loras
        if not self.token_ids:
            batch = Batch.decode(self.rows, query_len=self.query_len, num_active_loras=loras, device=device)
            return PlacedWork(self._masked(batch, device), self.edits)
        ids, given = self.token_ids, self.given if first else ()
        if self.given and not first:
            ids = tuple(tuple(0 if token == EMBEDDED else token for token in own) for own in ids)
        batch = Batch.ragged(
            self.rows,
            ids,
            samples=self.samples,
            inputs_embeds=place_embeds(given, self.starts, ids, device) if given else None,
            positions=place_positions(given, self.starts, ids, device) if given else None,
            num_active_loras=loras,
            device=device,
        )
        if self.targets:
            targets = torch.tensor([token for own in self.targets for token in own], dtype=torch.int64)
            batch = attrs.evolve(batch, targets=to_device(targets, device))
        return PlacedWork(self._masked(batch, device), self.edits)

    def _masked(self, batch: Batch, device: torch.device | str) -> Batch:
        return attrs.evolve(batch, token_mask=to_device(stack_masks(self.masks), device)) if self.masks else batch

    def __str__(self) -> str:
        counts = [len(ids) if ids != (LAST_TOKEN,) else "last" for ids in self.token_ids] or ["last"] * len(self.rows)
        more = ["" if sampled else " and more" for sampled in self.samples]
        parts = (f"row {row}: {count}{rest}" for row, count, rest in zip(self.rows, counts, more, strict=True))
        return f"job {self.job}: " + ", ".join(parts)


@pytree
@attrs.frozen(eq=False)
class PlacedWork:
    """Work whose batch is on a device: what a stage made by `edited` takes for its batch."""

    batch: Batch
    edits: Edits = attrs.field(metadata=_STATIC)


Stage = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def edited(stage: Stage) -> Stage:
    """A stage over work, of a stage over batches: it edits its tables, and runs. Only what runs can be a graph."""

    @donates("state")
    @functools.wraps(stage)
    def run(params: Any, state: Any, work: PlacedWork, x: Any) -> tuple[Any, Any]:
        return stage(params, apply_edits(state, work.edits), work.batch, x)

    return run


@donates("state")
def advance_work(state: State, work: PlacedWork, out: Output | None) -> State:
    """`advance`, over work."""
    return advance(state, work.batch, out)


@donates("state")
def apply_edits(state: State, edits: Edits) -> State:
    """The state with its tables edited.

    Args:
        state: donated.
        edits: rows given to no two requests.
    """
    if edits.copies:
        state = copy_pages(state, *zip(*edits.copies, strict=True))
    if given := edits.admissions:
        state = admit(
            state,
            [a.row for a in given],
            [a.pages for a in given],
            [a.sampling for a in given],
            [a.prompt for a in given],
            generated=[a.generated for a in given],
            positions=[a.computed for a in given],
            adapters=[a.adapter for a in given],
            limits=[a.limit for a in given],
            mrope_position_deltas=[a.mrope_position_delta for a in given],
        )
    if edits.growths:
        state = grow(state, [(g.row, g.start, g.pages) for g in edits.growths])
    return state
