"""A difference between ranks is detected at their first message, and each rank's error names it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import advance, scale, told

from weft.meshes.mesh import Mesh
from weft.ops.transfers.collective import all_gather, all_reduce
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.values.schema import Schema


def count_stages(num_stages: int) -> str:
    return told(lambda: pipeline([scale] * num_stages, transport=Distributed(timeout=5)))


def test_a_process_for_each_stage() -> None:
    assert (
        launch(count_stages, 2, 3)
        == [
            "ProgramError: pipeline(..., transport=Distributed(device='cpu', backend='gloo'))\n"
            "  saw: 3 ranks and 2 processes\n  instead: a process for each rank"
        ]
        * 2
    )


def other(p: Any, s: Any, batch: Any, x: Any) -> Any:
    y = (batch if x is None else x) * p
    return s + y.cos().sum(), y


def other_advance(s: torch.Tensor, batch: torch.Tensor, out: Any) -> torch.Tensor:
    return s - batch.sum()


def closing_over(value: Any) -> Callable[..., Any]:
    def stage(p: Any, s: Any, batch: Any, x: Any) -> Any:
        return s, (batch if x is None else x) * p + value

    return stage


def with_helper(p: Any, s: Any, batch: Any, x: Any) -> Any:
    return s, helper(batch if x is None else x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _other_helper(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def beside(
    _: Any, p: torch.Tensor, s: torch.Tensor, batch: torch.Tensor, x: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return scale(p, s, batch, x)


def differ(what: str) -> str:
    """Take a step in which something differs on rank 1."""
    torch.set_num_threads(1)
    transport = Distributed(timeout=5)
    mine = transport.rank == 1
    stage: Callable[..., Any] = scale
    if what == "stage":
        stage = other if mine else scale
    elif what == "closure":
        stage = closing_over(1 + mine)
    elif what == "partial":
        stage = partial(beside, torch.ones(()) if mine else None)
    elif what == "helper":
        globals()["helper"] = _other_helper if mine else helper
        stage = with_helper
    batch = torch.arange(4.0)
    schema = Schema.parse("[2] float64" if mine else "[2] float32") if what == "schema" else None
    microbatches = (2 + mine) if what == "microbatches" else 2
    step = pipeline(
        [stage] * transport.num_ranks,
        microbatches=microbatches,
        schema=schema,
        advance=(
            {"advance": None, "other advance": other_advance}.get(what, advance)
            if mine
            else advance
        ),
        transport=transport,
    )
    state: Any = [torch.zeros(())]
    if what == "batch":
        batch = torch.arange(5.0 if mine else 4.0)
    if what == "later batch":
        state, _ = step([torch.ones(())], state, batch)
        batch = torch.arange(5.0 if mine else 6.0)
    return told(lambda: step([torch.ones(())], state, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "zero", "one"),
    [
        ("stage", "stage 0: scale", "stage 0: other"),
        ("closure", "stage 0: stage", "stage 0: stage"),
        ("partial", "stage 0: partial", "stage 0: partial"),
        ("helper", "stage 0: with_helper", "stage 0: with_helper"),
        ("microbatches", "mb 0: [2] float32", "mb 0: [1] float32"),
        ("schema", "send to 1 [mb 0]: [2] float32", "send to 1 [mb 0]: [2] float64"),
        ("advance", "advance: advance", "advance: none"),
        ("other advance", "advance: advance", "advance: other_advance"),
        ("batch", "mb 1: [2] float32", "mb 1: [3] float32"),
        ("later batch", "mb 0: [3] float32", "mb 0: [2] float32"),
    ],
)
def test_what_differs_is_named_by_both_ranks(what: str, zero: str, one: str) -> None:
    first, second = launch(differ, 2, what)
    step = 2 if what == "later batch" else 1
    call, problem, instead = second.splitlines()
    assert call == f"ProgramError: step {step} of rank 1"
    assert problem.startswith(f"  saw: '{one}")
    assert f"', where rank 0 has '{zero}" in problem
    assert instead.startswith("  instead: the same code, configuration and batches on every rank")
    assert first.startswith("RankError: rank 0: '")
    schema = ": [2] float64" * (what == "schema")
    assert (
        f"rank 1 failed at 'recv from 0 [mb 0]{schema}': {second.splitlines()[0]}\n{problem}"
        in first
    )


@pytest.mark.slow
def test_of_three_ranks_all_name_the_one_that_differs() -> None:
    said = launch(differ, 3, "stage")
    assert said[1].startswith("ProgramError: step 1 of rank 1\n  saw: 'stage 0: other")
    for text in (said[0], said[2]):
        assert text.startswith("RankError: ")
        assert (
            "rank 1 failed at 'recv from 0 [mb 0]': ProgramError: step 1 of rank 1\n  saw: 'stage"
            " 0: other" in text
        )
        assert "', where rank 0 has 'stage 0: scale" in text


def differ_in_what_ran_before() -> str:
    """Rank 1 takes a step on which both have agreed, while rank 0 takes one on which they have
    not."""
    transport = Distributed(timeout=5)
    step = pipeline([scale] * 2, transport=transport)
    state, _ = step([torch.ones(())], [torch.ones(())], torch.ones(3))
    batch = torch.ones(3 if transport.rank else 2)
    return told(lambda: step([torch.ones(())], state, batch))


@pytest.mark.slow
def test_a_rank_in_another_program_is_named() -> None:
    first, second = launch(differ_in_what_ran_before, 2)
    assert second.startswith(
        "ProgramError: step 2 of rank 1\n  saw: 'mb 0: [3] float32', where rank 0 has 'mb 0: [2]"
        " float32'"
    )
    assert first.startswith(
        "RankError: rank 0: 'broadcast from 1 [mb 0]'\n  saw: rank 1 failed at 'recv from 0 [mb 0]'"
    )


# Ranks that share a stage


def reduces_and_gathers(p: Any, s: Any, batch: Any, x: Any) -> Any:
    y = all_reduce(batch * p, "tensor")
    return s + y.sum(), all_gather(y[:, None], "tensor", dim=1).sum(1)


def gathers_and_reduces(p: Any, s: Any, batch: Any, x: Any) -> Any:
    y = all_gather((batch * p)[:, None], "tensor", dim=1).sum(1)
    return s + y.sum(), all_reduce(y, "tensor")


def reduces_maxima(p: Any, s: Any, batch: Any, x: Any) -> Any:
    return s, all_reduce(batch * p, "tensor", reduce_op="max")


def reduces_sums(p: Any, s: Any, batch: Any, x: Any) -> Any:
    return s, all_reduce(batch * p, "tensor")


def reduces(times: dict[str, int], p: Any, s: Any, batch: Any, x: Any) -> Any:
    for _ in range(times["times"]):
        batch = all_reduce(batch * p, "tensor")
    return s, batch


def meet(what: str) -> str:
    """Take two steps in which something differs on rank 1. Unless it is a stage's source, it is a
    tensor or another value that no digest covers."""
    torch.set_num_threads(1)
    transport = Distributed(timeout=5)
    mine = transport.rank == 1
    p = torch.ones(1 if what in ("microbatches", "batch") else 4)
    stage: Callable[..., Any] = reduces_and_gathers
    if what == "order":
        stage = gathers_and_reduces if mine else reduces_and_gathers
    elif what == "reduce_op":
        stage = reduces_maxima if mine else reduces_sums
    elif what in ("one more", "one less"):
        stage = partial(reduces, Hidden(times=2 + mine if what == "one more" else 2 - mine))
    if what == "shape" and mine:
        p = torch.ones(4, 4)
        stage = reduces_sums
    elif what == "shape":
        stage = reduces_sums
    elif what == "dtype" and mine:
        p = p.double()
    mesh = Mesh(tensor=transport.num_ranks)
    step = pipeline(
        [stage],
        microbatches=2 if mine and what == "microbatches" else 1,
        transport=transport,
        mesh=mesh,
    )
    said = []
    for number in range(2):
        batch = torch.arange(5.0 if mine and what == "batch" else 4.0)
        if what == "calls":
            transport.assert_equal("the number", f"{number + (mine and number == 1)}")
        said.append(told(partial(step, [p], [torch.zeros(())], batch)))
    return said[0] if said[0] != "no error" else said[1]


class Hidden(dict[str, int]):
    """A dict that a digest of sources treats as empty, as it ignores tensors."""

    def items(self) -> Any:
        return ()


# What the errors of rank 0 and rank 1 say of themselves or of the other.
MEETINGS = {
    "order": ("'stage 0: reduces_and_gathers", "'stage 0: gathers_and_reduces"),
    "reduce_op": ("'stage 0: reduces_sums", "'stage 0: reduces_maxima"),
    "shape": (
        "all_reduce sum among 0, 1 [mb 0]: x[4] float32",
        "all_reduce sum among 0, 1 [mb 0]: x[4, 4] float32",
    ),
    "dtype": (
        "all_reduce sum among 0, 1 [mb 0]: x[4] float32",
        "all_reduce sum among 0, 1 [mb 0]: x[4] float64",
    ),
    "one more": ("number 3 in step 2", "number 3 in step 1"),
    "one less": ("number 2 in step 1", "number 2 in step 2"),
    "microbatches": ("'mb 0: [4] float32", "'mb 0: [2] float32"),
    "batch": ("'mb 0: [4] float32", "'mb 0: [5] float32"),
    "calls": ("'the number: 1'", "'the number: 2'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", MEETINGS)
def test_what_differs_between_ranks_that_share_a_stage_is_named_by_both(what: str) -> None:
    texts = launch(meet, 2, what, timeout=20)
    assert any(text.startswith("ProgramError") for text in texts)
    for text, (own_part, other) in zip(texts, (MEETINGS[what], MEETINGS[what][::-1]), strict=True):
        said = text.replace("its step", "step")
        assert own_part in said
        assert other in said
