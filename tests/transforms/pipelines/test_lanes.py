"""Pipelines over a mesh: the programs of its lanes, results in threads and processes, and
collectives that differ."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusal import refused
from torch import Tensor

import weft
from weft.effects import Broadcast, Recv, Send
from weft.errors import MeshError, ProgramError, WeftError
from weft.meshes.mesh import coordinates_of, group_of
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.lanes import lane_rank, pipeline_mesh, spread
from weft.transforms.pipelines.machine import interleave
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job, make_programs
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads

MESH = weft.Mesh(pipeline=2, tensor=2)
TIMEOUT = 20.0


def first(
    params: dict[str, Tensor], state: Tensor, batch: Tensor, x: None
) -> tuple[Tensor, Tensor]:
    """A feed-forward block, sharded by columns and rows."""
    return state + 1, weft.all_reduce(torch.relu(batch @ params["up"]) @ params["down"], "tensor")


def second(params: Tensor, state: Tensor, batch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer, sharded by columns."""
    return state + 1, weft.all_gather(x @ params, "tensor", dim=-1)


def advance(state: Tensor, batch: Tensor, out: Tensor) -> Tensor:
    """Adds what the last stage returned."""
    return state + out.sum()


def example_call() -> tuple[list[Any], Tensor, Tensor]:
    """Each rank's parameters, the batch, and the result."""
    generator = torch.Generator().manual_seed(0)
    up, down, out, x = (
        torch.randn(shape, generator=generator) for shape in ((4, 8), (8, 4), (4, 6), (6, 4))
    )
    together = weft.Mesh(tensor=2)
    cut = weft.distribute(
        {"up": up, "down": down}, together, {"up": weft.Shard(1), "down": weft.Shard(0)}
    )
    return (
        [*cut, *weft.distribute(out, together, weft.Shard(1))],
        x,
        torch.relu(x @ up) @ down @ out,
    )


def test_threads_run_the_lanes() -> None:
    params, x, expected = example_call()
    step = pipeline(
        [first, second], microbatches=2, advance=advance, transport=Threads(), mesh=MESH
    )
    state, out = step(params, [torch.zeros(())] * 4, x)
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(torch.stack(state), 2 + expected.sum(), atol=1e-4)


@pytest.mark.parametrize("advances", [advance, None])
def test_ranks_of_the_last_stage_that_return_different_outputs_are_refused(advances: Any) -> None:
    params, x, _ = example_call()

    def forgot(params: Tensor, state: Tensor, batch: Tensor, x: Tensor) -> Any:
        return state, {"x": x, "y": x @ params}

    add = advances and (lambda state, batch, out: state + out["y"].sum())
    step = pipeline([first, forgot], microbatches=2, advance=add, transport=Threads(), mesh=MESH)
    ranks = "ranks 0 and 1" if add else "ranks 2 and 3"
    problem = f"output['y'] of micro-batch 0: {ranks} have different values"
    instead = (
        "weft.all_reduce or weft.all_gather in the last stage, so that all of its ranks return it"
    )
    with refused(
        MeshError, f"pipeline(<2 stages>, mesh={MESH})(params, state, batch)", problem, instead
    ):
        step(params, [torch.zeros(())] * 4, x)


def test_entries_are_counted_by_ranks() -> None:
    params, x, _ = example_call()
    step = pipeline([first, second], transport=Threads(), mesh=MESH)
    call = f"pipeline(<2 stages>, mesh={MESH})(params, state, batch)"
    instead = (
        "pass a tuple or list of 4 entries, each a rank's part: for stage 0, 0, 1, 1, in the order"
        " of the ranks"
    )
    with refused(ProgramError, call, "params has 2 entries", instead):
        step(params[:2], [torch.zeros(())] * 2, x)


def on_lanes(graphs: bool) -> tuple[list[Tensor], Tensor]:
    """The results of three calls, in a process for each rank."""
    transport, (params, x, _) = Distributed(), example_call()
    place = coordinates_of(MESH, transport.rank)
    stages: list[Any] = [
        graphify(stage, collectives=True) if graphs else stage for stage in (first, second)
    ]
    step = pipeline(stages, microbatches=2, advance=advance, transport=transport, mesh=MESH)
    rank_params = [params[place["pipeline"] * 2 + place["tensor"]]]
    outs = []
    for scale in (1.0, 2.0, 3.0):
        (state,), out = step(rank_params, [torch.zeros(())], x * scale)
        outs.append(out)
    transport.received()()
    transport.close()
    return outs, state


def test_processes_run_the_lanes() -> None:
    _, _, expected = example_call()
    for outs, state in launch(on_lanes, 4, False):
        for scale, out in zip((1.0, 2.0, 3.0), outs, strict=True):
            assert torch.allclose(out, expected * scale, atol=1e-4)
        assert torch.allclose(state, 2 + 3 * expected.sum(), atol=1e-3)


@pytest.mark.parametrize("sizes", [{"pipeline": 3, "tensor": 2}, {"data": 2, "pipeline": 3}])
def test_each_lane_has_the_programs_of_one_pipeline(sizes: dict[str, int]) -> None:
    mesh = weft.Mesh(**sizes)
    programs = make_programs(3, [Job()] * 2)
    lane_programs = spread(programs, mesh)
    assert [program.rank for program in lane_programs] == list(mesh)
    assert len(list(interleave(lane_programs))) == sum(
        len(program.effects) for program in lane_programs
    )
    for rank in mesh:
        lane = group_of(mesh, rank, "pipeline")
        stage_program = programs[lane_rank(mesh, rank)]
        for ours, theirs in zip(lane_programs[rank].effects, stage_program.effects, strict=True):
            if isinstance(theirs, Send):
                assert isinstance(ours, Send)
                assert (ours.to, ours.stage) == (lane[theirs.to], stage_program.rank)
            elif isinstance(theirs, Recv):
                assert isinstance(ours, Recv)
                assert (ours.source, ours.stage) == (lane[theirs.source], theirs.source)
            elif isinstance(theirs, Broadcast):
                assert isinstance(ours, Broadcast)
                assert (ours.root, ours.ranks) == (lane[theirs.root], lane)
            else:
                assert ours == theirs
    assert spread(programs, None) == tuple(programs)


def test_the_mesh_of_a_pipeline() -> None:
    assert pipeline_mesh(None, 2, "f()") is None
    assert pipeline_mesh({"tensor": 2}, 1, "f()") == weft.Mesh(pipeline=1, tensor=2)
    assert pipeline_mesh(MESH, 2, "f()") is MESH
    problem = "Mesh(pipeline=2, tensor=2), and 3 ranks of the pipeline"
    with refused(ProgramError, "f()", problem, "Mesh(pipeline=3, ...)"):
        pipeline_mesh(MESH, 3, "f()")
    with refused(MeshError, "f()", "mesh is an int", "weft.Mesh(tensor=2), or <any>"):
        pipeline_mesh(3, 3, "f()")


Meets = Callable[[Tensor], Any]
DIFFERENT: dict[str, Meets] = {
    "all_reduce max among 0, 1 [mb 0]: x[2, 3] float32": lambda x: weft.all_reduce(
        x, "tensor", reduce_op="max"
    ),
    "all_gather dim 0 among 0, 1 [mb 0]: x[2, 3] float32": lambda x: weft.all_gather(x, "tensor"),
    "all_reduce sum among 0, 1 [mb 0]: x[3, 2] float32": lambda x: weft.all_reduce(x.T, "tensor"),
    "all_reduce sum among 0, 1 [mb 0]: x[2, 3] float64": lambda x: weft.all_reduce(
        x.double(), "tensor"
    ),
}
OURS = "all_reduce sum among 0, 1 [mb 0]: x[2, 3] float32"
SAME = "the same collectives in the same order on all ranks of a group, with one shape and dtype"


def differing(name: str) -> Callable[..., Any]:
    """A stage of two ranks, the second of which performs a different collective."""

    def stage(params: Any, state: Any, batch: Tensor, x: None) -> Any:
        meets: Meets = (
            DIFFERENT[name] if weft.axis_index("tensor") else lambda x: weft.all_reduce(x, "tensor")
        )
        meets(batch)
        return state, batch

    return stage


@pytest.mark.parametrize("name", DIFFERENT)
def test_threads_that_come_to_different_collectives_are_refused(name: str) -> None:
    start = time.monotonic()
    step = pipeline([differing(name)], transport=Threads(timeout=TIMEOUT), mesh={"tensor": 2})
    with pytest.raises(ProgramError) as caught:
        step([None] * 2, [None] * 2, torch.ones(2, 3))
    assert time.monotonic() - start < TIMEOUT / 2
    ends = {
        (f"rank 0: '{OURS}'", f"rank 1 is at '{name}'"),
        (f"rank 1: '{name}'", f"rank 0 is at '{OURS}'"),
    }
    assert (caught.value.call, caught.value.problem) in ends
    assert caught.value.instead == SAME


def lacking(params: Any, state: Any, batch: Tensor, x: None) -> Any:
    """A stage of two ranks, the second of which lacks a collective."""
    return state, batch if weft.axis_index("tensor") else weft.all_reduce(batch, "tensor")


def test_a_thread_that_lacks_a_collective_is_named_at_once() -> None:
    start = time.monotonic()
    step = pipeline([lacking], transport=Threads(timeout=TIMEOUT), mesh={"tensor": 2})
    with pytest.raises(ProgramError) as caught:
        step([None] * 2, [None] * 2, torch.ones(2, 3))
    assert time.monotonic() - start < TIMEOUT / 2
    assert (caught.value.call, caught.value.problem, caught.value.instead) == (
        f"rank 0: '{OURS}'",
        "rank 1 is at its end",
        SAME,
    )


def in_a_process(name: str) -> tuple[str, str]:
    """The kind and the text of the error on this rank."""
    transport = Distributed(timeout=5.0)
    stage = differing(name) if name in DIFFERENT else lacking
    step = pipeline([stage], transport=transport, mesh={"tensor": 2})
    try:
        step([None], [None], torch.ones(2, 3))
        transport.received()()
    except WeftError as error:
        return type(error).__name__, str(error)
    finally:
        transport.close()
    return "nothing", ""


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_come_to_different_collectives_are_refused(name: str) -> None:
    start = time.monotonic()
    errors = launch(in_a_process, 2, name)
    assert time.monotonic() - start < 2 * TIMEOUT
    assert {kind for kind, _ in errors} <= {"ProgramError", "RankError"}
    assert any(kind == "ProgramError" for kind, _ in errors)
    assert all(name in text or OURS in text for _, text in errors), errors


def test_a_collective_in_one_thread_needs_a_shard() -> None:
    step = pipeline(
        [lambda params, state, batch, x: (state, weft.all_reduce(batch, "tensor"))],
        transport=Local(),
    )
    with pytest.raises(
        MeshError, match=r"no mesh: the call is not in a function that weft.shard runs"
    ):
        step([None], [None], torch.ones(2, 3))
