"""Lanes: on a mesh, each position along the other axes has a separate pipeline, its lane, and all
lanes run the same programs.

The ranks of a stage, one from each lane, share its layers. They communicate by collectives inside
the runs of the stage.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.meshes.collectives import AllGather, AllReduce, AllToAll, PPermute, ReduceScatter
from weft.meshes.mesh import Mesh, as_mesh, coordinates_of, group_of
from weft.transforms.pipelines.machine import Step, stage_sent

# The axis of a mesh along which the ranks of a pipeline are.
PIPELINE = "pipeline"


def pipeline_mesh(mesh_like: Any, num_ranks: int, call: str) -> Mesh | None:
    """The mesh of a pipeline of `num_ranks` ranks; None if `mesh_like` is None (one lane).

    Raises:
        MeshError: `mesh_like` is not a mesh.
        ProgramError: the axis `pipeline` (of size 1 if missing) does not have size `num_ranks`.
    """
    if mesh_like is None:
        return None
    mesh = as_mesh(mesh_like, call)
    if mesh.sizes.get(PIPELINE, 1) != num_ranks:
        problem = f"{mesh}, and {num_ranks} rank{'s' * (num_ranks > 1)} of the pipeline"
        raise ProgramError(call, problem, f"Mesh({PIPELINE}={num_ranks}, ...)")
    if PIPELINE in mesh.sizes:
        return mesh
    return Mesh(**{PIPELINE: 1}, **mesh.sizes)


def lane_rank(mesh: Mesh | None, rank: int) -> int:
    """The number of a rank within its lane."""
    if mesh is None:
        return rank
    return coordinates_of(mesh, rank)[PIPELINE]


def spread(programs: Sequence[Program], mesh: Mesh | None) -> tuple[Program, ...]:
    """The programs of all ranks of a mesh, made from the programs of one lane.

    >>> from weft.transforms import Job, make_programs
    >>> for program in spread(make_programs(2, [Job()]), Mesh(pipeline=2, tensor=2))[1::2]:
    ...     print(program)
    rank 1 of 4
      run stage 0 [mb 0]
      send stage 0 to 3 [mb 0]
      broadcast from 3 among 1, 3 [mb 0]
      run advance [mb 0]
    rank 3 of 4
      recv stage 0 from 1 [mb 0]
      run stage 1 [mb 0]
      broadcast from 3 among 1, 3 [mb 0]
      run advance [mb 0]
    """
    if mesh is None:
        return tuple(programs)
    result = []
    for rank in mesh:
        lane = group_of(mesh, rank, PIPELINE)
        program = programs[lane_rank(mesh, rank)]
        effects = tuple(_moved(effect, program.rank, lane) for effect in program.effects)
        result.append(Program(rank, mesh.num_ranks, effects, program.classes))
    return tuple(result)


def _moved(effect: Effect, rank: int, lane: tuple[int, ...]) -> Effect:
    """An effect of a rank in a lane, with ranks renumbered from the lane to the mesh."""
    match effect:
        case Send(to):
            # With the stage written out: a send without one means the stage of its rank's number,
            # and ranks are renumbered here.
            return attrs.evolve(effect, to=lane[to], stage=stage_sent(Step(rank, effect)))
        case Recv(source):
            return attrs.evolve(effect, source=lane[source], stage=stage_sent(Step(rank, effect)))
        case Broadcast(root):
            return attrs.evolve(effect, root=lane[root], ranks=lane)
        case (
            Run() | Fence() | AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute()
        ):
            return effect
