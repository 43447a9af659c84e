"""`Batch`: what the host passes to a step. `ResolvedBatch`: that batch with everything that a step
derives from the state filled in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self, cast

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import PerRequest, PerToken
from weft.batches.splitting import cut_sized, find_bounds, read_starts
from weft.display.summary import Summarized
from weft.errors import DescriptorError, ProgramError
from weft.ops.requests import DRAFT, EMBEDDED, LAST_TOKEN, find_owners
from weft.torchapi.private import to_device
from weft.values.trees import OF_THIS_VALUE, axes, descriptor_field, pytree

# In `Batch.positions`: the token's place in its request plus the request's mRoPE delta.
IN_ORDER = -1

# In `Batch.rows`: padding. As an index, -1 selects the state's last row, which no request owns.
SCRATCH_ROW = -1


def _of_tokens(values: Any) -> Any:
    """Wrap the tensors in a dict in `PerToken`; other values pass through."""
    if not isinstance(values, dict) or not any(
        isinstance(value, Tensor) for value in values.values()
    ):
        return values
    return {
        name: PerToken(value) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


@pytree
@attrs.frozen(eq=False, repr=False)
class Batch(Summarized):
    """The input of a step: a descriptor, and tensors of the sizes that it gives.

    It refers to rows of the state, not to their contents, so the host can launch a step before it
    has read the previous step's tokens.

    Args:
        descriptor: the shape class.
        rows: [num_reqs] int64, the request's row in the state; -1 for padding.
        input_ids: [num_tokens] int64, request after request. `weft.LAST_TOKEN` (-1) stands for the
            request's last sampled token, `weft.EMBEDDED` (-2) for a token whose embedding is given,
            and `weft.DRAFT` (-3) for a draft that the step fills in.
        query_start_loc: [num_reqs + 1] int32, the start of each request's tokens; padding repeats
            the last entry.
        samples: [num_reqs] bool, whether the step reaches the end of the request's prompt or is
            past it; only then is a token sampled and kept.
        token_mask: [num_reqs, ceil(vocab_size / 32)] int32, one bit per token, set if a grammar
            allows the request to draw it; lowest bit first, as in llguidance. None: all tokens are
            allowed. Batches with and without a mask have different graphs.
        targets: [num_tokens] int64, the prompt's next token after each token; the step also returns
            the logprobs of these. None if no request asks for them.
        inputs_embeds: [num_tokens, hidden_size] in the model's dtype, the embeddings of the tokens
            whose `input_ids` are `weft.EMBEDDED`, because they have no id (image tokens, for
            example). None if there are no such tokens. Only the first stage takes it.
        positions: [3, num_tokens] int64, for a model with mRoPE: the positions of a prompt's tokens
            in time, height and width, as transformers' `get_rope_index` returns them. -1 marks a
            token whose three positions all equal its place in the request plus the request's
            `mrope_position_deltas` in the state, as for every decode token. None: all tokens are
            like that. Only the first stage takes it.
        token_extras: [num_tokens, ...] by name, per-token inputs of a prompt for stages that take
            extra ones; a name that is missing here has its default for all tokens.
    """

    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    rows: Tensor = attrs.field(metadata=axes("num_reqs", pad=SCRATCH_ROW))
    input_ids: Tensor = attrs.field(metadata=axes("num_tokens", pad=0))
    query_start_loc: Tensor = attrs.field(metadata=axes("num_reqs+1", pad="last"))
    samples: Tensor = attrs.field(metadata=axes("num_reqs", pad=0))
    token_mask: Tensor | None = attrs.field(default=None, metadata=axes("num_reqs", pad=-1))
    targets: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens", pad=0))
    inputs_embeds: Tensor | None = attrs.field(default=None, metadata=axes("num_tokens", pad=0))
    positions: Tensor | None = attrs.field(
        default=None, metadata=axes(None, "num_tokens", pad=IN_ORDER)
    )
    token_extras: dict[str, PerToken] = attrs.field(factory=dict, converter=_of_tokens)

    @classmethod
    def decode(
        cls,
        rows: Sequence[int],
        *,
        query_len: int = 1,
        num_active_loras: int = 0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A uniform decode batch: each row's last sampled token, followed by its drafts.

        All rows must be past their prefill.

        Args:
            rows: the requests' rows in the state.
            query_len: the tokens of each request: the last token and `query_len - 1` drafts.
            num_active_loras: the number of different adapters that these requests use.
            device: the device of the tensors.

        >>> Batch.decode([0, 2]).descriptor
        BatchDescriptor(num_tokens=2, num_reqs=2, query_len=1, num_active_loras=0)
        """
        rows = _as_list("Batch.decode(rows)", "rows", rows)
        n = len(rows)
        _check(f"Batch.decode({rows})", rows)
        # `device="cpu"`, because the user may have set another default device.
        return cls(
            BatchDescriptor.uniform(n, query_len, num_active_loras),
            to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device),
            to_device(
                torch.tensor(
                    [LAST_TOKEN, *[DRAFT] * (query_len - 1)] * n, dtype=torch.int64, device="cpu"
                ),
                device,
            ),
            torch.arange(n + 1, dtype=torch.int32, device=device) * query_len,
            torch.ones(n, dtype=torch.bool, device=device),
        )

    @classmethod
    def ragged(
        cls,
        rows: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        *,
        samples: Sequence[bool] | None = None,
        inputs_embeds: Tensor | None = None,
        positions: Tensor | None = None,
        token_extras: Mapping[str, Tensor | PerToken] | None = None,
        num_active_loras: int = 0,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A batch of prompts, chunks of prompts and single decode tokens (`[LAST_TOKEN]`), in any
        mix.

        Args:
            rows: the requests' rows in the state.
            token_ids: the tokens of each request, at least one.
            samples: whether each request is past its prompt after this step; by default all are.
            inputs_embeds: [num_tokens, hidden_size], the embeddings of the tokens that are
                `weft.EMBEDDED`.
            positions: [3, num_tokens] int64, for a model with mRoPE: time, height, width; -1 for a
                token in order (see `Batch`).
            token_extras: [num_tokens, ...] by name, per-token inputs for stages that take extra
                ones.
            num_active_loras: the number of different adapters that these requests use.
            device: the device of the tensors.

        Raises:
            DescriptorError: lengths differ, a request has no token, a row is listed twice, or
                embeddings, positions or token extras do not fit the tokens.
        """
        call = "Batch.ragged(rows, token_ids)"
        rows = _as_list(call, "rows", rows)
        token_ids = _as_list(call, "token_ids", token_ids, of_numbers=False)
        token_ids = [_as_list(call, f"token_ids[{i}]", ids) for i, ids in enumerate(token_ids)]
        lengths = [len(ids) for ids in token_ids]
        if samples is None:
            flags = [True] * len(rows)
        else:
            flags = list(samples)
        call = f"Batch.ragged(rows={rows}, token_ids=<{len(lengths)} of lengths {lengths}>)"
        extras = _of_tokens(dict(token_extras or {}))
        _check(call, rows, token_ids, flags, inputs_embeds, positions, extras)
        return cls(
            BatchDescriptor(sum(lengths), len(rows), num_active_loras=num_active_loras),
            to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device),
            to_device(
                torch.tensor(
                    [t for ids in token_ids for t in ids], dtype=torch.int64, device="cpu"
                ),
                device,
            ),
            to_device(
                torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device="cpu"),
                device,
            ),
            to_device(torch.tensor(flags, dtype=torch.bool, device="cpu"), device),
            inputs_embeds=None if inputs_embeds is None else to_device(inputs_embeds, device),
            positions=None if positions is None else to_device(positions, device),
            token_extras={
                name: PerToken(to_device(extra.values, device)) for name, extra in extras.items()
            },
        )

    def split(self, parts: int) -> tuple[Self, ...]:
        """Split the batch into at most `parts` batches of whole requests.

        To cut a ragged batch, its `query_start_loc` is read on the host.
        """
        whole = self.descriptor
        bounds = find_bounds(whole.num_reqs, parts)
        if whole.query_len is not None:  # known without a host read
            starts = [bound * whole.query_len for bound in bounds]
        else:
            query_starts = read_starts(f"split(<'{whole}'>, {parts})", self.query_start_loc)
            starts = [*(query_starts[bound] for bound in bounds[:-1]), whole.num_tokens]
        batches = []
        for reqs, tokens in zip(pairwise(bounds), pairwise(starts), strict=True):
            size = {"num_tokens": tokens[1] - tokens[0], "num_reqs": reqs[1] - reqs[0]}
            spans = {"num_reqs": reqs, "num_tokens": tokens}
            batches.append(cut_sized(self, spans, attrs.evolve(whole, **size), "query_start_loc"))
        return tuple(batches)

    def after_first(self) -> Self:
        """The batch for the stages after the first one."""
        if self.inputs_embeds is None and self.positions is None:
            return self
        return attrs.evolve(self, inputs_embeds=None, positions=None)


def continues(batch: Batch) -> Tensor:
    """[num_reqs] bool: whether each request continues from its last sampled token, so that its
    tokens are that token and drafts. Meaningless for padding."""
    # Padding starts after the last token; the clamp keeps its index valid.
    first = batch.query_start_loc[:-1].clamp(max=max(len(batch.input_ids) - 1, 0))
    return batch.input_ids[first] == LAST_TOKEN


def owners_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The request that each token belongs to, and the token's place in it (see
    `find_owners`)."""
    return find_owners(batch.query_start_loc, len(batch.input_ids))


def _as_list(call: str, name: str, value: Any, *, of_numbers: bool = True) -> list[Any]:
    """An argument as a list on the host; numbers that are not whole are refused, since torch would
    truncate them silently."""
    if isinstance(value, Iterable) and not isinstance(value, str | Tensor):
        items = list(value)
        if not of_numbers or _are_whole(items):
            return items
        strange = next(number for number in items if not hasattr(number, "__index__"))
        problem = f"{name} holds {strange!r:.40}, {kind_of(strange)}"
        instead = "whole numbers"
    elif isinstance(value, Tensor):
        problem = f"{name} is a tensor, and is wanted on the host"
        instead = f"{name}.tolist()"
    else:
        problem = f"{name} is {value!r:.40}, {kind_of(value)}"
        instead = "one list of token ids a row"
        if name == "rows":
            instead = "rows of the state, as in [0, 2]"
        elif isinstance(value, str):
            instead = f"model.encode({name})"
    raise DescriptorError(call, problem, instead)


def _are_whole(numbers: list[Any]) -> bool:
    try:
        return not isinstance(sum(numbers), float)  # one sum for all: prompts are long
    except TypeError:
        return False


def _check(
    call: str,
    rows: Sequence[int],
    token_ids: Sequence[Sequence[int]] | None = None,
    samples: Sequence[bool] = (),
    inputs_embeds: Tensor | None = None,
    positions: Tensor | None = None,
    token_extras: Mapping[str, Any] | None = None,
) -> None:
    """Raise DescriptorError unless the rows can form one batch and the other arguments fit them.
    If `token_ids` is None, only the rows are checked."""
    if token_ids is None:
        lengths = [1] * len(rows)
    else:
        lengths = [len(ids) for ids in token_ids]
    count = sum(lengths)
    if 0 in lengths:
        problem = f"request {lengths.index(0)} has no token"
        instead = "leave such a request out of the batch"
    elif token_ids is not None and not len(rows) == len(lengths) == len(samples):
        problem = f"{len(rows)} rows, {len(lengths)} token lists, {len(samples)} samples"
        instead = "one token list and one sample flag for each row"
    elif len(set(rows)) != len(rows):
        twice = next(row for row in rows if list(rows).count(row) > 1)
        problem = f"row {twice} is listed twice"
        instead = "join the request's tokens in one list"
    elif rows and min(rows) < 0:
        problem = f"row {min(rows)}"
        instead = "rows are >= 0; weft.pad adds the padding"
    elif (
        token_ids is not None
        and inputs_embeds is None
        and any(EMBEDDED in ids for ids in token_ids)
    ):
        problem = "a token that is EMBEDDED (-2), and no inputs_embeds"
        instead = f"inputs_embeds [{count}, …]"
    elif inputs_embeds is not None and (inputs_embeds.dim() != 2 or len(inputs_embeds) != count):
        problem = f"inputs_embeds of shape {list(inputs_embeds.shape)} for {count} tokens"
        instead = "a row for each token, [num_tokens, hidden_size]"
    elif positions is not None and (
        positions.shape != (3, count) or positions.dtype != torch.int64
    ):
        problem = (
            f"positions of shape {list(positions.shape)}, {positions.dtype}, for {count} tokens"
        )
        instead = (
            "rows for time, height and width, [3, num_tokens] int64, as"
            " get_rope_index(...)[0][:, 0]"
        )
    elif strange := [
        name for name, extra in (token_extras or {}).items() if not _has_rows(extra, count)
    ]:
        extra = (token_extras or {})[strange[0]]
        problem = (
            f"token_extras[{strange[0]!r}] is"
            f" {_described(extra.values if isinstance(extra, PerToken) else extra)}"
        )
        instead = f"a value for each of the {count} tokens, [num_tokens, ...]"
    else:
        return
    raise DescriptorError(call, problem, instead)


def _has_rows(extra: Any, count: int) -> bool:
    return isinstance(extra, PerToken) and extra.values.dim() > 0 and len(extra.values) == count


@pytree
@attrs.frozen(eq=False, repr=False)
class ResolvedBatch(Summarized):
    """A batch resolved against one state: the input of the layers, made on the device by
    `weft.batches.state.resolve`.

    Args:
        descriptor: the batch's.
        rows: [num_reqs] int64, as in the batch.
        input_ids: [num_tokens] int64, with the request's last token in place of -1 and of drafts
            that are not filled in; -2 where the embedding is given; 0 for padding.
        positions: [num_tokens] int64, each token's place in its request (not its position in a
            model with mRoPE); 0 for padding.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32, the length of the context after this step; 0 for padding.
        block_table: [num_reqs, max_pages] int32.
        slot_mapping: [num_tokens] int64, page * page_size + offset; -1 for padding.
        last_index: [num_reqs] int64, the index of each request's last token.
        adapters: [num_tokens] int32, the slot of each token's adapter; -1: no adapter. None if the
            batch has none.
        active_adapters: [num_active_loras] int32, the distinct slots in `adapters`, then -1.
        extras: by name, per-request inputs for stages that take extra ones; the defaults for
            padding. `per_token` turns one into a tensor [num_tokens, ...]; its `values` are
            [num_reqs, ...].
        carried: by name, the value that each request carries from the token before its first one in
            this batch (`weft.stages.carry`); the defaults for padding. It serves as the `init` of
            `scan_tokens`.
        token_extras: [num_tokens, ...] by name: per-token inputs for stages that take extra ones.
        plans: attention work that all layers share, filled in by `AttentionBackend`.
    """

    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    rows: Tensor
    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    last_index: Tensor
    adapters: Tensor | None = None
    active_adapters: Tensor | None = None
    extras: dict[str, PerRequest] = attrs.field(factory=dict)
    carried: Mapping[str, PerRequest] = attrs.field(factory=dict)
    token_extras: dict[str, Tensor] = attrs.field(factory=dict)
    plans: dict[Any, Any] = attrs.field(factory=dict, init=False, metadata=OF_THIS_VALUE)

    def per_token(self, values: PerRequest | Tensor) -> Tensor:
        """[num_tokens, ...]: for each token the value of its request, from `values` [num_reqs,
        ...].

        Raises:
            ProgramError: `values` does not have one value for each request.
        """
        per_request = self._of_requests("batch.per_token(values)", "values", values)
        owners, _ = find_owners(self.query_start_loc, len(self.input_ids))
        return per_request[owners]

    def _of_requests(self, call: str, name: str, values: Any) -> Tensor:
        """A tensor [num_reqs, ...], checked."""
        tensor = values.values if isinstance(values, PerRequest) else values
        count = len(self.rows)
        _check_first(
            call,
            name,
            tensor,
            count,
            f"a tensor [{count}, ...], or batch.extras[...]: a value for each request",
        )
        return cast(Tensor, tensor)

    def scan_tokens(
        self, f: Callable[..., Tensor], init: PerRequest | Tensor, *xs: Tensor
    ) -> Tensor:
        """Run a recurrence over the tokens of each request, all requests at once; returns the value
        after each token, [num_tokens, ...].

        Like `jax.lax.scan`, it calls `f` once per step: as many times as the longest request may
        have tokens. That is the query length of a uniform batch, and `num_tokens` otherwise. A
        linear recurrence is faster if written as sums over tokens.

        Args:
            f: `(value, *xs) -> value`, each [num_reqs, ...]: computes the value after a token from
                the value before it.
            init: [num_reqs, ...], the values before the first tokens, such as
                `batch.carried[name]`.
            xs: [num_tokens, ...], read by `f` token by token.

        Raises:
            ProgramError: `init` does not have one value for each request, one of `xs` does not have
                one for each token, or the value that `f` returns has another shape or dtype than
                the one before it.
        """
        call = "batch.scan_tokens(f, init, *xs)"
        value = self._of_requests(call, "init", init)
        starts = self.query_start_loc[:-1].to(torch.int64)
        num_tokens = len(self.input_ids)
        for index, x in enumerate(xs):
            _check_first(
                call,
                f"xs[{index}]",
                x,
                num_tokens,
                f"a tensor [{num_tokens}, ...]: a value for each token",
            )
        lengths = self.query_start_loc[1:] - starts
        # The result for a batch without tokens, for which the loop does not run.
        outputs = value[:0]
        for place in range(self.descriptor.query_len or num_tokens):
            # The shapes are the same in each step, for a capture: requests that have no token at
            # this place compute with another one, and `where` drops the result.
            live = place < lengths
            token = (starts + place).clamp(max=num_tokens - 1)
            next_value: Any = f(value, *(x[token] for x in xs))
            if not isinstance(next_value, Tensor) or (next_value.shape, next_value.dtype) != (
                value.shape,
                value.dtype,
            ):
                instead = f"the next value, as the one before it: {_described(value)}"
                raise ProgramError(call, f"f returned {_described(next_value)}", instead)
            value = torch.where(live.view(-1, *[1] * (next_value.dim() - 1)), next_value, value)
            # One more entry as scratch: requests without a token at this place write there.
            if not place:
                outputs = value.new_zeros(num_tokens + 1, *value.shape[1:])
            outputs[torch.where(live, token, num_tokens)] = value
        return outputs[:num_tokens]


def _check_first(call: str, name: str, value: Any, count: int, instead: str) -> None:
    """Raise ProgramError unless `value` is a tensor with `count` entries in its first dimension."""
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
        raise ProgramError(call, f"{name} is {_described(value)}", instead)


def _described(value: Any) -> str:
    """A value's shape and dtype, for an error."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)}, {value.dtype}"
    return kind_of(value)
