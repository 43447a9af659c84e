"""The worker: performs one rank's effects in order. A transport's `Link` executes the sends and
receives among them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import attrs
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.effects import Broadcast, Effect, Fence, Recv, Run, Send
from weft.errors import ProgramError
from weft.meshes.collectives import AllGather, AllReduce, AllToAll, PPermute, ReduceScatter
from weft.meshes.mesh import Mesh
from weft.ops.transfers.collective import Place, placed
from weft.torchapi.private import storage_id
from weft.torchapi.ranges import profile_range
from weft.transforms.pipelines.timing.timeline import measuring
from weft.values.donation import clone
from weft.values.schema import Schema
from weft.values.trees import tree_leaves, tree_map


class Link(Protocol):
    """One rank's ends of the edges, made by a transport: it sends, receives, and waits until sent
    values have left."""

    @property
    def member(self) -> int | None:
        """The number of this rank as a member of collectives (`weft.ops.transfers.collective`);
        None if it takes part in no collectives."""

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        """Start sending `value` to the rank that `effect` names (to all ranks for a broadcast)."""

    def recv(self, effect: Recv | Broadcast) -> Any:
        """The value from the rank that `effect` names. It belongs to the receiver: nothing
        overwrites it."""

    def fence(self, effect: Fence, /) -> None:
        """Wait until everything that was sent for the micro-batch has left its buffer."""


@attrs.define(eq=False)
class StageRun:
    """One stage of a rank, with its params and its state.

    Args:
        index: the number of the stage.
        stage, params, state: the stage with its params and state; `run` replaces the state by the
            next one.
        copies_results: whether to copy the stage's results, because they are lent and stay here
            until the end of the run.
        copies_shared: whether to copy results that share memory with the state, because the state
            is written in place.
        copies_state: whether to copy the stage's next state, because it is lent.
    """

    index: int
    stage: Callable[..., Any]
    params: Any
    state: Any
    copies_results: bool = False
    copies_shared: bool = False
    copies_state: bool = False

    def run(self, batch: Any, x: Any) -> Any:
        """Run the stage on a micro-batch; returns its result."""
        result = call_stage(self.index, self.stage, self.params, self.state, batch, x)
        self.state = clone(result[0]) if self.copies_state else result[0]
        if self.copies_results:
            return clone(result[1])
        return self._unshared(result[1])

    def _unshared(self, result: Any) -> Any:
        """The result, with copies of the tensors that share memory with the state, since the next
        micro-batch may overwrite that memory."""
        if not self.copies_shared:
            return result
        tensors = {
            id(leaf): storage_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)
        }
        shared = set(tensors.values()) & {
            storage_of(x) for x in tree_leaves(self.state) if isinstance(x, Tensor)
        }
        # Inside a torch.func transform storages are unknown (None), which is no sign of sharing.
        shared.discard(None)
        if not shared:
            return result
        return tree_map(lambda x: x.clone() if tensors.get(id(x)) in shared else x, result)


@attrs.define(eq=False)
class Worker:
    """One rank of a run.

    Args:
        rank: the rank.
        stages: the stages that it runs, in order.
        advance: the function that `run advance` calls.
        batches: the micro-batches.
        later: the micro-batches for stages after the first one; empty unless the rank runs both
            the first stage and a later one.
        inputs: received values on which no stage has run yet, by the stage that made them and the
            micro-batch.
        results: results of stages that were not sent or used yet, by stage and micro-batch.
        outputs: the outputs of the last stage, by micro-batch.
        first: the number of micro-batch 0, counted over this run and the runs that it continues.
        mesh: the mesh of the ranks, if several ranks share a stage.
    """

    rank: int
    stages: Sequence[StageRun]
    advance: Callable[..., Any] | None
    batches: Sequence[Any] = ()
    later: Sequence[Any] = ()
    inputs: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    results: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    outputs: dict[int, Any] = attrs.field(factory=dict)
    first: int = 0
    mesh: Mesh | None = None

    def drop_finished(self, count: int) -> None:
        """Drop the first `count` micro-batches, which are over, and renumber the rest from 0."""
        for mapping in (self.inputs, self.results):
            left = {
                (stage, mb - count): value for (stage, mb), value in mapping.items() if mb >= count
            }
            mapping.clear()
            mapping.update(left)
        self.outputs = {mb - count: value for mb, value in self.outputs.items() if mb >= count}

    def perform(self, effect: Effect, link: Link) -> None:
        """Perform the next effect of the program."""
        recorder = measuring()
        with (
            profile_range("weft: rank {}: {}", self.rank, effect),
            nullcontext() if recorder is None else recorder.span(self.rank, effect),
        ):
            self._perform(effect, link)

    def _perform(self, effect: Effect, link: Link) -> None:
        mb = effect.microbatch
        match effect:
            case Run("advance"):
                assert self.advance is not None, "a program advances only where there is an advance"
                for stage_run in self.stages:
                    stage_run.state = call_advance(
                        stage_run.index,
                        self.advance,
                        stage_run.state,
                        self.batches[mb],
                        self.outputs.get(mb),
                    )
            case Run():
                stage_run = next(
                    stage_run for stage_run in self.stages if stage_run.index == effect.stage
                )
                batch = (self.later if stage_run.index and self.later else self.batches)[mb]
                before = stage_run.index - 1, mb
                # The previous stage is on this rank too if there is only one rank; otherwise its
                # result was received.
                if before not in self.results:
                    x = self.inputs.pop(before, None)
                else:
                    x = self.results.pop(before)
                with self._placed(link):
                    self.results[stage_run.index, mb] = stage_run.run(batch, x)
            case Send(_, _, schema, stage):
                key = self.rank if stage is None else stage, mb
                match_schema(self.rank, effect, schema, self.results[key])
                link.send(effect, self.results.pop(key))
            case Recv(source, _, schema, stage):
                value = self.inputs[source if stage is None else stage, mb] = link.recv(effect)
                match_schema(self.rank, effect, schema, value)
            case Broadcast(root) if root == self.rank:
                # The sender keeps its output: it advances with it as the receivers do.
                self.outputs[mb] = self.results.pop((self.stages[-1].index, mb))
                link.send(effect, self.outputs[mb])
            case Broadcast():
                self.outputs[mb] = link.recv(effect)
            case Fence():
                link.fence(effect)
            case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
                raise AssertionError(f"the checker refuses '{effect}' in a pipeline's program")

    def _placed(self, link: Link) -> AbstractContextManager[None]:
        """The context in which a stage runs that several ranks share."""
        if self.mesh is None:
            return nullcontext()
        if link.member is None:
            problem = f"{self.mesh} in one thread"
            instead = "Threads() or Distributed(); or weft.shard of each stage"
            raise ProgramError("pipeline(..., mesh=..., transport=Local())", problem, instead)
        return placed(Place(self.mesh, self.rank, link.member))


def put_batches(
    workers: Sequence[Worker], batches: Sequence[Any], later: Sequence[Any], first: int = 0
) -> None:
    """Give workers the micro-batches of a run. Stages after the first one get `later`, made by
    `after_first`."""
    for worker in workers:
        has_first = worker.stages[0].index == 0
        worker.batches = batches if has_first else later
        worker.first = first
        worker.later = later if has_first and len(worker.stages) > 1 else ()


def states_of(workers: Sequence[Worker]) -> tuple[Any, ...]:
    """The state of each stage that runs here, in the order of the stages."""
    return tuple(
        stage_run.state
        for stage_run in sorted(
            (stage_run for worker in workers for stage_run in worker.stages), key=_index
        )
    )


def in_kind(states: Sequence[Any], like: Sequence[Any]) -> Sequence[Any]:
    """The states as a list if `like` is a list, otherwise as a tuple, so that a step returns the
    kind of sequence that it takes."""
    if isinstance(like, list):
        return list(states)
    return tuple(states)


def _index(stage_run: StageRun) -> int:
    return stage_run.index


def storage_of(tensor: Tensor) -> int | None:
    """The identity of a tensor's storage; None inside a torch.func transform, which hides it."""
    try:
        return storage_id(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def call_stage(
    index: int, stage: Callable[..., Any], params: Any, state: Any, batch: Any, x: Any
) -> tuple[Any, Any]:
    """The stage's `(state, y)`. An error from inside the stage gets a note that names it."""
    try:
        result = stage(params, state, batch, x)
    except Exception as error:
        if x is None:
            first = "; x is None on the first stage, which computes from the batch"
        else:
            first = ""
        # A note rather than a new error, so that the caller's `except` still gets the stage's own.
        error.add_note(f"in stage {index} ({getattr(stage, '__name__', stage)}){first}")
        raise
    return check_pair(f"stage {index} ({getattr(stage, '__name__', stage)})", result, "(state, y)")


def call_advance(index: int, advance: Callable[..., Any], state: Any, batch: Any, out: Any) -> Any:
    """The stage's next state. An error from inside `advance` gets a note that names the stage."""
    try:
        return advance(state, batch, out)
    except Exception as error:
        if type(state).__name__ == "Carried":
            origin = ", which a transform made: advance=lift(...)"
        else:
            origin = ""
        name = getattr(advance, "__name__", advance)
        error.add_note(f"in advance ({name}) on stage {index}'s state, {kind_of(state)}{origin}")
        raise


def check_pair(call: str, result: Any, pair: str) -> tuple[Any, Any]:
    """The pair that a step or a stage returned. Anything but a tuple of two is refused, because a
    tensor of two rows, for example, would also unpack into two values."""
    if not isinstance(result, tuple) or len(result) != 2:
        if isinstance(result, tuple):
            length = f" of {len(result)}"
        else:
            length = ""
        raise ProgramError(call, f"it returned {kind_of(result)}{length}", f"return {pair}")
    return result


def match_schema(rank: int, effect: Effect, schema: Schema | None, value: Any) -> None:
    """Raise ProgramError unless a sent or received value has the schema declared for its edge."""
    if schema is not None and (actual := Schema.of(value)) != schema:
        raise ProgramError(
            f"rank {rank}: '{effect}'",
            f"a value of schema {actual}",
            f"return {schema} from the stage",
        )
