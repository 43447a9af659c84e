"""One step as data: the scheduler's `Work`, its tensors on a device, and its edits to the state's
tables."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.batch import IN_ORDER, Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output, PerToken
from weft.batches.sampling import SamplingParams
from weft.batches.state import State, admit, advance, copy_pages, grow
from weft.ops.requests import EMBEDDED, LAST_TOKEN
from weft.torchapi.inductor import Compiler
from weft.torchapi.private import to_device
from weft.transforms.engine.requests.prompts import PromptContent, RequestExtras
from weft.transforms.graphs.calls.borrowing import declare_owning, owns_results
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.pipelines.pipeline import Stage, compose
from weft.values.donation import declare_donated, donates
from weft.values.trees import pytree

_STATIC = {"weft.static": True}
# The operators at which piecewise graphs cut a decoder.
_SPLIT_AT = ("weft::paged_attention", "weft::attend_outside")


@attrs.frozen
class Admission:
    """A request gets a row of the device state.

    Args:
        row: the row.
        pages: its pages, in order.
        computed: the number of tokens whose keys and values are already in the pages.
        sampling, prompt: the request's.
        generated: the tokens that it generated before it was preempted.
        adapter: the slot of its LoRA adapter; -1: none.
        limit: the most tokens that it can have, its prompt included.
        mrope_position_delta: position minus index, for each token after the prompt.
        extras: the request's extras, by name; missing ones have the model's defaults.
        num_cached: tokens that are in its shared pages already: they are recomputed, but not
            written.
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
    extras: RequestExtras | None = None
    num_cached: int = 0


@attrs.frozen
class Growth:
    """A request gets more pages, after the `start` pages that it already has."""

    row: int
    start: int
    pages: tuple[int, ...]


@attrs.frozen
class Edits:
    """Changes to the state's tables before a step.

    Args:
        copies: (source, target) pages: copies on which another request can write.
        admissions, growths: requests that get a row, and requests that get pages.
    """

    copies: tuple[tuple[int, int], ...] = ()
    admissions: tuple[Admission, ...] = ()
    growths: tuple[Growth, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.copies or self.admissions or self.growths)


@attrs.frozen
class Work:
    """One step as the scheduler decided it on the host; equal on all ranks.

    Each tuple has one entry per request, in the order of the batch.

    Args:
        job: the number of the step.
        edits: changes to the tables before it.
        requests: ids.
        rows: rows of the device state.
        token_ids: the tokens to compute; empty for a uniform decode, which continues from each
            request's last token.
        samples: whether the request samples a token.
        after: the job whose tokens must have returned before this one runs; None: there is none.
        targets: for each token, the prompt token after it, whose logprob is computed; 0 for
            requests without prompt logprobs. Empty if no request wants them.
        starts: tokens in the KV cache before this step; for a decode, an upper bound.
        num_active_loras: number of different adapters.
        query_len: tokens per request of a uniform decode: the last token, and drafts.
        contents: each prompt's embeddings, positions and per-token inputs; empty if no prompt has
            them.
        masks: for each request, the bits of the tokens that may be sampled, or None for any token;
            empty if no request has a mask.
        captures: whether the stages capture values for its tokens.
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
    contents: tuple[PromptContent | None, ...] = ()
    masks: tuple[bytes | None, ...] = ()
    captures: bool = False

    @property
    def feeds(self) -> bool:
        """Whether the step returns tokens, logprobs or captured values."""
        return any(self.samples) or bool(self.targets) or self.captures

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        # A uniform decode brings no ids: its tokens are in the device state, and the host may not
        # have read them yet.
        return sum(map(len, self.token_ids)) or len(self.rows) * self.query_len

    @property
    def descriptor(self) -> BatchDescriptor:
        """The shape class of the batch."""
        count = len(self.rows)
        loras = self.num_active_loras
        if not self.token_ids:
            return BatchDescriptor.uniform(count, self.query_len, loras)
        return BatchDescriptor(self.num_tokens, count, num_active_loras=loras)

    @property
    def kind(self) -> str:
        """`decode`, `prompts`, or `mixed`."""
        if not self.token_ids:
            return "decode"
        if (LAST_TOKEN,) in self.token_ids:
            return "mixed"
        return "prompts"

    @property
    def summary(self) -> str:
        """One line that must be equal on all ranks: the rows, their numbers of tokens, and a digest
        of the masks."""
        # A digest, because a mask has a bit for each token of the vocabulary, and ranks compare
        # this line at each step.
        digest = hashlib.blake2b(digest_size=6)
        for mask in self.masks:
            # With lengths, so that no two lists of masks give the same bytes.
            digest.update(b"any;" if mask is None else b"%d;" % len(mask) + mask)
        return f"{self}{f', masks {digest.hexdigest()}' * bool(self.masks)}"

    def place(self, device: torch.device | str, first: bool = True) -> "DeviceWork":
        """The batch as tensors on a device.

        Args:
            first: whether the first stage runs here; only it takes embeddings and positions.
        """
        loras = self.num_active_loras
        if not self.token_ids:
            batch = Batch.decode(
                self.rows, query_len=self.query_len, num_active_loras=loras, device=device
            )
            return DeviceWork(self._masked(batch, device), self.edits)
        ids = self.token_ids
        contents = self.contents if first else ()
        if self.contents and not first:
            # `Batch.ragged` refuses EMBEDDED without embeddings. Only the first stage embeds
            # tokens, so that any id will do here.
            ids = tuple(tuple(0 if token == EMBEDDED else token for token in row) for row in ids)
        batch = Batch.ragged(
            self.rows,
            ids,
            samples=self.samples,
            inputs_embeds=batch_embeds(contents, self.starts, ids, device) if contents else None,
            positions=batch_positions(contents, self.starts, ids, device) if contents else None,
            token_extras=batch_token_extras(self.contents, self.starts, ids, device)
            if self.contents
            else None,
            num_active_loras=loras,
            device=device,
        )
        if self.targets:
            targets = torch.tensor(
                [token for row in self.targets for token in row], dtype=torch.int64
            )
            batch = attrs.evolve(batch, targets=to_device(targets, device))
        return DeviceWork(self._masked(batch, device), self.edits)

    def _masked(self, batch: Batch, device: torch.device | str) -> Batch:
        if self.masks:
            return attrs.evolve(batch, token_mask=to_device(stack_masks(self.masks), device))
        return batch

    def __str__(self) -> str:
        if not self.token_ids:
            return f"job {self.job}: {_decode_text(self.rows)}"
        counts = [len(ids) if ids != (LAST_TOKEN,) else "last" for ids in self.token_ids]
        more = ["" if sampled else " and more" for sampled in self.samples]
        parts = (
            f"row {row}: {count}{rest}"
            for row, count, rest in zip(self.rows, counts, more, strict=True)
        )
        return f"job {self.job}: " + ", ".join(parts)


# Cached: consecutive decodes mostly have the same rows.
@functools.lru_cache(maxsize=64)
def _decode_text(rows: tuple[int, ...]) -> str:
    return ", ".join(f"row {row}: last" for row in rows)


@pytree
@attrs.frozen(eq=False)
class DeviceWork:
    """Work whose batch is on the device: the input of a stage made by `with_edits`."""

    batch: Batch
    edits: Edits = attrs.field(metadata=_STATIC)


def batch_embeds(
    contents: Sequence[PromptContent | None],
    starts: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    device: torch.device | str,
) -> Tensor | None:
    """The embeddings [num_tokens, hidden_size] of a batch's tokens; None if no token is EMBEDDED.

    Args:
        contents: one entry per request.
        starts: each request's tokens before the batch.
        token_ids: each request's tokens in the batch.
    """
    if not any(EMBEDDED in ids for ids in token_ids):
        return None
    prompt_embeds = [None if content is None else content.inputs_embeds for content in contents]
    like = next(tensor for tensor in prompt_embeds if tensor is not None)
    embeds = torch.zeros(sum(map(len, token_ids)), like.shape[1], dtype=like.dtype, device=device)
    for first, rows in _in_batch(prompt_embeds, starts, token_ids):
        embeds[first : first + len(rows)] = to_device(rows, device)
    return embeds


def batch_positions(
    contents: Sequence[PromptContent | None],
    starts: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    device: torch.device | str,
) -> Tensor | None:
    """The positions [3, num_tokens] of a batch's tokens, -1 where they follow from the state; None
    if they all do.

    Args:
        contents, starts, token_ids: as for `batch_embeds`.
    """
    # On the host: the check below would otherwise wait for the device in each step with a prompt.
    positions = torch.full((sum(map(len, token_ids)), 3), IN_ORDER)
    prompt_positions = [
        None if content is None or content.positions is None else content.positions.T
        for content in contents
    ]
    for first, rows in _in_batch(prompt_positions, starts, token_ids):
        positions[first : first + len(rows)] = rows
    if bool((positions >= 0).any()):
        return to_device(positions.T.contiguous(), device)
    return None


def batch_token_extras(
    contents: Sequence[PromptContent | None],
    starts: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    device: torch.device | str,
) -> dict[str, PerToken]:
    """The per-token inputs [num_tokens, ...] of a batch, by name; empty if no request gives any.

    Args:
        contents, starts, token_ids: as for `batch_embeds`.
    """
    prompt_extras = [{} if content is None else content.token_extras for content in contents]
    names = next((extras.keys() for extras in prompt_extras if extras), ())
    token_extras = dict[str, PerToken]()
    for name in names:
        # The last row of a request's values is the default.
        default = next(extras[name][-1] for extras in prompt_extras if extras)
        values = to_device(default, device).repeat(sum(map(len, token_ids)), *[1] * default.dim())
        for first, rows in _in_batch(
            [extras[name][:-1] if extras else None for extras in prompt_extras], starts, token_ids
        ):
            values[first : first + len(rows)] = to_device(rows, device)
        token_extras[name] = PerToken(values)
    return token_extras


def _in_batch(
    values: Sequence[Tensor | None], starts: Sequence[int], token_ids: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Tensor]]:
    """For each request whose prompt has a row of values per token: the index of its first token in
    the batch, and the rows of its tokens in the batch."""
    first = 0
    for rows, start, ids in zip(values, starts, token_ids, strict=True):
        if rows is not None:
            yield first, rows[start : start + len(ids)]
        first += len(ids)


def stack_masks(masks: Sequence[bytes | None]) -> Tensor:
    """`Batch.token_mask` [num_reqs, ceil(vocab_size / 32)] int32 from a batch's masks, at least one
    of which is not None."""
    size = max(len(mask) for mask in masks if mask is not None)
    rows = b"".join(b"\xff" * size if mask is None else mask for mask in masks)
    # A bytearray, because torch warns about buffers that it could not write, such as bytes.
    return torch.frombuffer(bytearray(rows), dtype=torch.int32).view(len(masks), -1)


def with_edits(stage: Stage) -> Stage:
    """Turn a stage over batches into a stage over `DeviceWork` that edits the tables first and
    records nothing for autograd. The edits run outside the stage's graph."""

    @functools.wraps(stage)
    def run(params: Any, state: Any, work: DeviceWork, x: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            return stage(
                params, apply_edits(state, work.edits) if work.edits else state, work.batch, x
            )

    # The mark that `wraps` copies refers to the inner stage and does not count. Without a new one,
    # workers would compare the memory of each result with the state's.
    return declare_owning(declare_donated(run, ("state",)), owns_results(stage))


def with_advance(stage: Stage) -> Stage:
    """Turn a model's only stage into one that also advances the state, so that one graph holds
    both."""
    step = compose([stage], advance=advance)

    @donates("state")
    @functools.wraps(stage)
    def run(params: Any, state: Any, batch: Any, x: Any) -> tuple[Any, Any]:
        (state,), out = step((params,), (state,), batch)
        return state, out

    return run


def is_advanced(state: State, _: DeviceWork, __: Output | None) -> State:
    """The state of a stage that advances it itself (`with_advance`)."""
    return state


def advance_work(state: State, work: DeviceWork, out: Output | None) -> State:
    """`weft.batches.state.advance` over `DeviceWork`."""
    return advance(state, work.batch, out)


declare_donated(advance_work, ("state",))


@donates("state")
def apply_edits(state: State, edits: Edits) -> State:
    """Apply a step's edits to the tables of a state.

    Args:
        state: donated.
        edits: no two of them admit into the same row.
    """
    if edits.copies:
        state = copy_pages(state, *zip(*edits.copies, strict=True))
    if admissions := edits.admissions:
        state = admit(
            state,
            [a.row for a in admissions],
            [a.pages for a in admissions],
            [a.sampling for a in admissions],
            [a.prompt for a in admissions],
            generated=[a.generated for a in admissions],
            positions=[a.computed for a in admissions],
            adapters=[a.adapter for a in admissions],
            limits=[a.limit for a in admissions],
            mrope_position_deltas=[a.mrope_position_delta for a in admissions],
            extras=[{} if a.extras is None else a.extras.values for a in admissions],
            num_recomputed_tokens=[a.num_cached for a in admissions],
        )
    if edits.growths:
        state = grow(state, [(g.row, g.start, g.pages) for g in edits.growths])
    return state


def graph_step(
    step: Any,
    ladder: Ladder[BatchDescriptor],
    backend: str | None = None,
    compiler: Compiler | None = None,
    strict: bool = False,
) -> Any:
    """Graphify a decoder's step or stage; piecewise classes are cut at its attention. With an empty
    ladder, return it unchanged."""
    if not len(ladder):
        return step
    return graphify(
        step,
        ladder=ladder,
        split_at=_SPLIT_AT,
        backend=backend,
        compiler=compiler,
        strict=strict,
    )
