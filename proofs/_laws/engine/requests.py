"""L16 and L17: a request's result depends only on the request, not on its batch, on its place in
the batch, or on how it is run."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.batches.outputs import Output
from weft.batches.sampling_rows import write_rows
from weft.batches.state import advance
from weft.ops.sampling.sample import sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.proofs._laws.compare import whole
from weft.proofs._strategies.models import Move, Scenario
from weft.proofs.checks.difference import LawViolation, assert_equal, visible
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import pipeline

WAYS = ("eager", "graph", "pipeline", "pipeline of graphs", "graph of a pipeline")


def make_way(
    scenario: Scenario,
    way: str,
    num_stages: int,
    microbatches: int,
    ladder: Sequence[BatchDescriptor],
    device: str = "cpu",
) -> tuple[Any, int]:
    """The scenario's model as a step that runs in one of `WAYS`, and the number of stages."""
    if way in ("eager", "graph"):
        step = whole(scenario, device)
        return (step if way == "eager" else graphify(step, ladder=ladder)), 1
    stages = scenario.stages(num_stages, device)
    if way == "pipeline of graphs":
        stages = [graphify(stage, ladder=ladder) for stage in stages]
    # A graph cannot split a ragged batch, because that reads the host.
    inside = way == "graph of a pipeline"
    step = pipeline(stages, microbatches=1 if inside else microbatches, advance=advance)
    return (graphify(step, ladder=ladder) if inside else step), num_stages


def seed_and_position_fix_the_sample(
    scenario: Scenario,
    way: str,
    num_stages: int,
    microbatches: int,
    ladder: Sequence[BatchDescriptor],
    device: str = "cpu",
) -> None:
    """L16: in any batch, bucket, order, mode and split, a request's sample is a function of its own
    logits, parameters, seed, position and tokens, and each of them has an effect.

    The law counts positions and tokens on the host."""
    step, count = make_way(scenario, way, num_stages, microbatches, ladder, device)
    params = scenario.params(count, device)
    state = scenario.state(count, device)
    done, said = [0] * len(scenario.prompts), [[] for _ in scenario.prompts]  # type: tuple[list[int], list[list[int]]]
    for batch, moves in zip(scenario.batches(device), scenario.moves, strict=True):
        state, out = step(params, state, batch)
        for index, move in enumerate(moves):
            done[move.row] += move.prompt_tokens or 1
            one = slice(index, index + 1)
            position = done[move.row] - 1
            expected = _draw_alone(scenario, move.row, said[move.row], out.logits[one], position)
            law = f"L16 the seed of row {move.row} and position {position} fix the sample"
            assert_equal(law, out.token_ids[one], expected[0])
            assert_equal(law, out.logprobs[one], expected[1], exact=False)
            # After a chunk that does not end its prompt the draw is discarded, and must not count.
            said[move.row] += out.token_ids[one].tolist() if batch.samples[index] else []


def _draw_alone(
    scenario: Scenario, row: int, said: Sequence[int], logits: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """The draw of a request alone in a sampling table, into which the host wrote all tokens
    generated so far."""
    # The last row of a table is the scratch row, and no request has more than 4 tokens with a bias.
    table = SamplingTable.zeros(2, scenario.config.vocab_size, 4, logits.device)
    write_rows(table, [0], [scenario.sampling[row]], [scenario.prompts[row]], [said])
    return sample_rows(logits, table, *torch.tensor([[0], [position]], device=logits.device))


def order_is_free(
    scenario: Scenario,
    orders: Sequence[Sequence[int]],
    ladder: Sequence[BatchDescriptor],
    device: str = "cpu",
) -> None:
    """L17: reordering a batch's requests changes neither their results nor the state, eagerly or
    through one graph for both orders."""
    moved = attrs.evolve(scenario, moves=tuple(map(_reordered, scenario.moves, orders)))
    steps: list[Any] = [
        whole(scenario, device),
        whole(scenario, device),
        graphify(whole(scenario, device), ladder=ladder),
    ]
    params = scenario.params(1, device)
    states = [scenario.state(1, device) for _ in steps]
    pairs = zip(scenario.batches(device), moved.batches(device), orders, strict=True)
    for batch, other, order in pairs:
        if batch.descriptor != other.descriptor:
            raise LawViolation(
                f"L17 order is free: '{batch.descriptor}' became '{other.descriptor}'"
            )
        outs: list[Any] = [None] * len(steps)
        for i, step_batch in enumerate((batch, other, other)):
            states[i], outs[i] = steps[i](params, states[i], step_batch)
        expected = _ordered(outs[0], order)
        for way, out, state in zip(("eagerly", "in a graph"), outs[1:], states[1:], strict=True):
            assert_equal(f"L17 order is free, {way}: output", out, expected, exact=False)
            assert_equal(
                f"L17 order is free, {way}: state", visible(state), visible(states[0]), exact=False
            )


def _reordered(moves: tuple[Move, ...], order: Sequence[int]) -> tuple[Move, ...]:
    return tuple(moves[i] for i in order)


def _ordered(out: Output, order: Sequence[int]) -> Output:
    index = torch.tensor(order, device=out.token_ids.device)
    if out.logits is None:
        logits = None
    else:
        logits = out.logits[index]
    return attrs.evolve(
        out, token_ids=out.token_ids[index], logprobs=out.logprobs[index], logits=logits
    )
