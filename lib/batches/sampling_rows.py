"""`write_rows` writes the `SamplingParams` of requests to the rows of a `SamplingTable`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from weft.batches.sampling import SamplingParams, check_tokens
from weft.errors import RequestError
from weft.ops.requests import EMBEDDED
from weft.ops.sampling.logits import (
    ALLOWED,
    BIAS,
    FILTERS,
    FLOATS,
    IN_PROMPT,
    INTS,
    MOST_COUNTED,
    PENALTIES,
    STOPS,
    pack_bits,
)
from weft.ops.sampling.table import SamplingTable
from weft.torchapi.private import to_device

T = TypeVar("T")

# The least top_p: a smaller one may be 0 in float32. This one still keeps the likeliest token.
_LEAST_TOP_P = 1e-30
# The most tokens that a request may bias, as in OpenAI's API.
MAX_BIASED = 300


def features(params: SamplingParams) -> int:
    """The bits of the features that a request uses. A greedy request never uses filters, which
    would not change its token."""
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (
        1,
        0,
        0,
    )
    allowed = params.allowed_token_ids is not None or bool(params.bad_token_ids)
    stops = params.min_tokens > 0 and bool(params.stop_token_ids)
    filters = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    used = {
        PENALTIES: penalties,
        BIAS: bool(params.logit_bias),
        ALLOWED: allowed,
        STOPS: stops,
        FILTERS: filters,
    }
    return sum(bit for bit, uses in used.items() if uses)


def write_rows(
    table: SamplingTable,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    generated: Sequence[Sequence[int]],
) -> None:
    """Write requests into rows of a table, in place.

    Args:
        params: each request's parameters, as `weft.batches.sampling.for_request` returns them.
        prompts: each request's token ids; EMBEDDED (-2) is not counted.
        generated: the token ids that a preempted request had generated before.

    Raises:
        RequestError: a request that draws has no seed, or the model does not have a token.
    """
    for each, prompt, completion in zip(params, prompts, generated, strict=True):
        if fault := _row_fault(table, each, prompt, completion):
            raise RequestError(f"admit(state, ..., {each!r})", *fault)
    device = table.floats.device
    index = to_device(torch.tensor(rows, dtype=torch.int64), device)
    # dtype and device are explicit, because the user may have set other defaults.
    float_rows = [_in_order(FLOATS, _floats(each)) for each in params]
    int_rows = [
        _in_order(INTS, _ints(each, len(prompt)))
        for each, prompt in zip(params, prompts, strict=True)
    ]
    floats = torch.tensor(float_rows, dtype=torch.float32, device="cpu").reshape(-1, len(FLOATS))
    ints = torch.tensor(int_rows, dtype=torch.int64, device="cpu").reshape(-1, len(INTS))
    table.floats[index], table.ints[index] = to_device(floats, device), to_device(ints, device)
    if table.vocab_size:
        for row, each, prompt, completion in zip(rows, params, prompts, generated, strict=True):
            _write_wide(table, row, each, prompt, completion)


def _row_fault(
    table: SamplingTable, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
) -> tuple[str, str] | None:
    if params.seed is None and params.temperature > 0:
        return "a request that draws, without a seed", "SamplingParams(temperature=..., seed=17)"
    if not table.vocab_size:
        return None
    vocab = table.vocab_size
    check_tokens(params, vocab, table.bias.shape[1])
    token_ids = {*prompt, *generated} - {EMBEDDED}
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab:
        wrong = next(
            token
            for token in (*prompt, *generated)
            if token in token_ids and not 0 <= token < vocab
        )
        return f"token {wrong} in a prompt", f"token ids from 0 to {vocab - 1}"
    return None


def _in_order(columns: Sequence[str], values: Mapping[str, T]) -> list[T]:
    """The values in the order of the columns; each column must have exactly one."""
    # By name: by position, a new column would take another one's value unnoticed.
    assert values.keys() == {*columns}, f"a row of {sorted(values)}, and columns {columns}"
    return [values[name] for name in columns]


def _floats(params: SamplingParams) -> dict[str, float]:
    return {
        "temperature": float(params.temperature),
        "top_p": max(float(params.top_p), _LEAST_TOP_P),
        # Not `-log`: for min_p = 1 that is -0.0, which differs from 0.0 in its bits.
        "margin": 0.0 - math.log(params.min_p) if params.min_p else math.inf,
        "repetition": float(params.repetition_penalty),
        "frequency": float(params.frequency_penalty),
        "presence": float(params.presence_penalty),
    }


def _ints(params: SamplingParams, prompt_len: int) -> dict[str, int]:
    return {
        # Without a seed, a request is greedy (`_row_fault`) and draws nothing.
        "seed": params.seed or 0,
        "features": features(params),
        "top_k": params.top_k,
        "min_len": prompt_len + params.min_tokens,
    }


def _write_wide(
    table: SamplingTable,
    row: int,
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
) -> None:
    """Write those parts of a row that the request uses and that are as wide as the vocabulary or
    the bias."""
    used = features(params)
    device = table.floats.device
    if used & ALLOWED:
        good = ~pack_bits(params.bad_token_ids, table.vocab_size)
        if params.allowed_token_ids is not None:
            good &= pack_bits(params.allowed_token_ids, table.vocab_size)
        table.allowed[row] = to_device(good, device)
    if used & STOPS:
        table.stops[row] = to_device(pack_bits(params.stop_token_ids, table.vocab_size), device)
    if used & BIAS:
        count = len(params.logit_bias)
        # An earlier request of this row may have had more biases.
        table.bias_ids[row] = -1
        table.bias_ids[row, :count] = to_device(
            torch.tensor(list(params.logit_bias), dtype=torch.int32), device
        )
        # `float(bias)`: a list of ints would pass through int64, which does not hold them all.
        bias = torch.tensor(
            [float(bias) for bias in params.logit_bias.values()], dtype=torch.float32, device="cpu"
        )
        table.bias[row, :count] = to_device(bias, device)
    if used & PENALTIES:
        counts = {token: min(count, MOST_COUNTED) for token, count in Counter(generated).items()}
        # IN_PROMPT is the sign bit, so that the sum sets it beside the count.
        counts |= {token: counts.get(token, 0) + IN_PROMPT for token in set(prompt) - {EMBEDDED}}
        # The row may have the counts of an earlier request.
        table.counts[row] = 0
        tokens = to_device(torch.tensor(list(counts), dtype=torch.int64), device)
        table.counts[row, tokens] = to_device(
            torch.tensor(list(counts.values()), dtype=torch.int16), device
        )
