"""Ranks whose decisions differ are detected, by name, before any of them returns."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.state import advance
from weft.errors import ProgramError, RankError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.decoder import decoder_stage
from weft.stages.layout import split_layers
from weft.transforms.engine.setup import make_state
from weft.transforms.graphs import cache
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.agreement import source_digest
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.values.trees import OF_THIS_PROCESS

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank finds this module by its name


def _largest(descriptor: Any, ladder: Ladder[Any]) -> Decision[Any]:
    return Decision(
        "full",
        max(ladder.full, key=lambda d: d.num_tokens),
        "the largest: of this rank's own accord",
    )


def whole_step(deciding: int | None, from_step: int) -> list[int]:
    """A rank's whole step as one graph: receive, run, sample, send, advance. From some step on, one
    rank may dispatch by a different rule."""
    transport = Distributed(backend="gloo", timeout=8.0)
    rank = transport.rank
    model = load(DEMO, "cpu", stage=(transport.rank, 2))
    layouts = split_layers(model.config.num_layers, 2)
    stages = [decoder_stage(model.config, layout) for layout in layouts]
    ladder = [BatchDescriptor(16, 4), BatchDescriptor(4, 2), BatchDescriptor.uniform(2)]
    step = graphify(
        pipeline(stages, advance=advance, transport=transport), ladder=ladder, collectives=True
    )
    state = make_state(model, [layouts[rank]], [32, 32])
    prompts = Batch.ragged([0, 1], [[5, 6], [7]])
    for number, batch in enumerate((prompts, Batch.decode([0, 1]), Batch.decode([0, 1]))):
        by_itself = rank == deciding and number >= from_step
        with mock.patch.object(cache, "dispatch", _largest) if by_itself else nullcontext():
            state, out = step((model.params,), state, batch)
    ids: list[int] = out.token_ids.tolist()
    return ids


def advancing(how: str) -> None:
    transport = Distributed(backend="gloo", timeout=8.0)
    advances: dict[str, Any] = {
        "first": lambda s, batch, out: s + 1,
        "other": lambda s, batch, out: s,
        "none": None,
    }
    rank_advance = advances[how if transport.rank else "first"]
    step = pipeline(
        [lambda p, s, batch, x: (s, batch)] * 2, advance=rank_advance, transport=transport
    )
    step([None], [0], torch.ones(2))


@pytest.mark.parametrize("how", ["other", "none"])
def test_what_advances_is_compared_too(how: str) -> None:
    """Otherwise the ranks' states would drift apart."""
    with pytest.raises(
        ProgramError, match=r"saw: 'advance: .*', where rank 0 has 'advance: <lambda> \w{12}'"
    ) as error:
        launch(advancing, 2, how)
    assert ("'advance: none'" in error.value.problem) == (how == "none")


def _one_more(x: Any) -> Any:
    return x + 1


def _twice(x: Any) -> Any:
    return 2 * x


@attrs.frozen
class OfTheRank:
    """A stage whose function does not depend on any argument."""

    f: Any = attrs.field(init=False)
    _call_counts: dict[str, int] = attrs.field(factory=dict, init=False, metadata=OF_THIS_PROCESS)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "f", _one_more if os.environ.get("OF_THE_RANK") else _twice)

    def __call__(self, x: Any) -> Any:
        return self.f(x)


def test_what_is_no_argument_is_compared_but_for_what_a_process_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = OfTheRank()
    second = OfTheRank()
    second._call_counts["calls"] = 3
    assert source_digest("stage 0", first) == source_digest("stage 0", second)
    monkeypatch.setenv("OF_THE_RANK", "1")
    assert source_digest("stage 0", first) != source_digest("stage 0", OfTheRank())


def test_ranks_that_dispatch_alike_agree() -> None:
    first, second = launch(whole_step, 2, None, 0)
    assert first == second
    assert len(first) == 2


@pytest.mark.parametrize("deciding", [0, 1])
def test_programs_of_different_classes_are_found_out_at_their_first_step(deciding: int) -> None:
    classes = ["'mb 0: ragged 16 tokens, 4 reqs'", "'mb 0: ragged 4 tokens, 2 reqs'"]
    with pytest.raises(
        ProgramError, match=", where rank 0 has ".join(classes[::-1] if deciding == 0 else classes)
    ):
        launch(whole_step, 2, deciding, 0)


def test_a_rank_that_takes_another_graph_later_keeps_nobody_waiting() -> None:
    """One rank replays a graph that the others do not have, and the others are told which rank is
    in another step."""
    with pytest.raises((ProgramError, RankError)):
        launch(whole_step, 2, 1, 1)
