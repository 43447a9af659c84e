"""`Split`: the ranks that an engine's model is split over (stages, and shares of each stage), and
which of them run here."""

from typing import Any

import attrs
import torch

from weft.errors import ProgramError
from weft.meshes.mesh import Mesh, coordinates_of
from weft.stages.layout import StageLayout, split_model
from weft.stages.model import Model
from weft.stages.shares import AXIS
from weft.transforms.pipelines.lanes import PIPELINE, lane_rank
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.distributed import Distributed


@attrs.frozen(eq=False)
class Split:
    """The ranks of an engine.

    Args:
        transport: where they run.
        num_stages: pipeline stages.
        num_shards: the ranks that share each stage.
    """

    transport: Transport
    num_stages: int
    num_shards: int = 1

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of ranks, in which the ranks of one stage are consecutive; None if no stage is
        shared."""
        if self.num_shards == 1:
            return None
        # In this order, since the last axis varies fastest: the ranks of a stage exchange tensors
        # in every layer, and launchers number the ranks of a node in a row.
        return Mesh(**{PIPELINE: self.num_stages, AXIS: self.num_shards})

    @property
    def here(self) -> list[int]:
        """The stages that run in this process, in order."""
        return [
            lane_rank(self.mesh, rank)
            for rank in self.transport.ranks(self.num_stages * self.num_shards)
        ]

    @property
    def is_distributed(self) -> bool:
        """Whether other processes run some of the stages."""
        return len(self.here) < self.num_stages * self.num_shards

    def layouts(self, model: Model) -> list[StageLayout]:
        """The layers of the stages that run here."""
        every = split_model(model.config, self.num_stages)
        return [every[stage] for stage in self.here]

    def check(self, call: str, model: Model, backend: str | None = None) -> None:
        """Raise ProgramError unless the model is this rank's share, shares are in separate
        processes, and the graph backend fits the model's device."""
        if backend == "cuda" and torch.device(model.device).type != "cuda":
            instead = 'backend=None; or weft.load(..., device="cuda")'
            raise ProgramError(call, f"backend='cuda', and a model on '{model.device}'", instead)
        index, num_shards = model.shard
        problem: Any = None
        if num_shards != self.num_shards:
            problem = (
                f"a model that is share {index} of {num_shards}, for {self.num_shards} ranks that"
                " share each stage"
            )
        elif self.num_shards > 1 and not isinstance(self.transport, Distributed):
            problem = (
                f"transport={self.transport!r}, where {self.num_shards} ranks share each stage"
            )
        elif self.mesh is not None and isinstance(self.transport, Distributed):
            rank_share = coordinates_of(self.mesh, self.transport.rank)[AXIS]
            # Empty if the share is the rank's.
            problem = (
                f"share {index} of the model on rank {self.transport.rank}, which has share {rank_share}"
                * (rank_share != index)
            )
        if problem:
            instead = (
                f"Distributed(), and weft.load(path, shard=(index, {self.num_shards})), in a"
                " process for each rank"
            )
            if self.num_shards == 1:
                instead = f"weft.Engine(model, tensor={num_shards}, ...)"
            raise ProgramError(call, problem, instead)
