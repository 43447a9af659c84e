"""`sow` and `carry`: the values that custom functions in a stage capture of each token, and carry
to the next one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batches.batch import ResolvedBatch
from weft.batches.outputs import IntermediateTensors, PerRequest, PerToken
from weft.batches.state import State
from weft.errors import ProgramError
from weft.values.trees import OF_THIS_PROCESS


@attrs.define
class SownNames:
    """The names that the stages of a model in this process have captured and carried so far. A
    stage alone sees only the names of its own layers.

    Args:
        num_stages: the number of stages that the model is split into.
        last: a dict from the index of each stage that ran to the names that it captured, and those
            that it carried, in its last step.
        carried_in: the layer that carried each name.
    """

    num_stages: int
    last: dict[int, tuple[frozenset[str], frozenset[str]]] = attrs.field(
        factory=dict, metadata=OF_THIS_PROCESS
    )
    carried_in: dict[str, int] = attrs.field(factory=dict, metadata=OF_THIS_PROCESS)

    def add(self, stage: int, sown: "Sown") -> None:
        """Add the names of a stage that ran.

        Raises:
            ProgramError: another layer carries one of them; or all stages ran, and none of them
                sowed a declared name.
        """
        # Replaced and never written to, since threads of other stages may be reading it.
        self.last[stage] = frozenset(sown.values), frozenset(sown.carried)
        for name, layer in sown.carried_in.items():
            if (first := self.carried_in.setdefault(name, layer)) != layer:
                raise _carried_twice(name, first, layer)
        # A name that is still missing may belong to a stage that has not run, or that runs in
        # another process.
        if len(self.last) < self.num_stages:
            return
        kinds = ("sow", "captures", sown.captures), ("carry", "carries", sown.carries)
        for (verb, option, declared), by_stage in zip(
            kinds, zip(*self.last.values(), strict=True), strict=True
        ):
            if missing := [
                name for name in declared if not any(name in names for names in by_stage)
            ]:
                problem = f"no function that calls weft.stages.{verb}({missing[0]!r}, value)"
                instead = f"leave it out, or {verb} it"
                raise ProgramError(
                    f"with_stages({option}={{{missing[0]!r}: ...}})", problem, instead
                )


def _carried_twice(name: str, first: int, layer: int) -> ProgramError:
    problem = f"layer {first} has already carried this name"
    if first == layer:
        problem += " in this step"
    instead = "one call for each name; layers={index: change} can give each layer a different name"
    return ProgramError(f"weft.stages.carry({name!r}, value) in layer {layer}", problem, instead)


@attrs.define
class Sown:
    """The values that custom functions capture and carry while a stage runs.

    Args:
        captures: an example of each value that may be captured, by name.
        num_tokens: the number of tokens in the batch, padding included.
        carries: an example of each value that may be carried, by name.
        values: the captured values, [num_tokens, ...] by name.
        carried: the carried values, [num_tokens, ...] by name.
        refused: why nothing can be captured or carried here; empty if it can.
        layer: the index of the layer that runs.
        reads: the names of carried values that were read, each with the layer that read it.
        carried_in: the layer that carried each value.
    """

    captures: Mapping[str, Tensor]
    num_tokens: int
    carries: Mapping[str, Tensor] = attrs.field(factory=dict)
    values: dict[str, Tensor] = attrs.field(factory=dict)
    carried: dict[str, Tensor] = attrs.field(factory=dict)
    refused: str = ""
    layer: int = 0
    reads: set[tuple[str, int]] = attrs.field(factory=set)
    carried_in: dict[str, int] = attrs.field(factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Capture a value; it replaces an earlier one of the same name."""
        self.values[name] = self._checked("sow", "captures", self.captures, name, value)

    def carry(self, name: str, value: Any) -> None:
        checked = self._checked("carry", "carries", self.carries, name, value)
        if name in self.carried:
            raise _carried_twice(name, self.carried_in[name], self.layer)
        self.carried[name], self.carried_in[name] = checked, self.layer

    def _checked(
        self, verb: str, option: str, declared: Mapping[str, Tensor], name: str, value: Any
    ) -> Tensor:
        call = f"weft.stages.{verb}({name!r}, value)"
        example = declared.get(name)
        if self.refused:
            raise ProgramError(
                call, self.refused, f"{verb} in a layer, or in an attention, feed_forward or norm"
            )
        if example is None:
            declared_names = ", ".join(map(repr, declared)) or "none"
            instead = (
                f"model.with_stages(..., {option}={{{name!r}: torch.zeros(...)}}), in the"
                " shape of one token's value"
            )
            raise ProgramError(
                call,
                f"a name that the stages do not declare; they declare {declared_names}",
                instead,
            )
        shape = (self.num_tokens, *example.shape)
        if not isinstance(value, Tensor) or value.shape != shape:
            if isinstance(value, Tensor):
                problem = f"shape {tuple(value.shape)}"
            else:
                problem = kind_of(value)
            raise ProgramError(
                call,
                problem,
                f"a tensor {list(shape)}: {list(example.shape)} for each token of the batch",
            )
        # Copied, as the function may write to its tensor later in the step.
        return value.to(example.dtype, copy=True)

    def check_carried(self) -> None:
        """Raise ProgramError if a value was read in another layer than the one that carries it.
        Call it after the layers have run."""
        for name, layer in sorted(self.reads):
            if self.carried_in.get(name) != layer:
                problem = f"this layer does not carry {name!r}"
                if name in self.carried_in:
                    problem += f"; layer {self.carried_in[name]} does"
                instead = (
                    f"read and carry {name!r} in the same layer: each layer computes the step's"
                    " tokens at a different time"
                )
                raise ProgramError(f"batch.carried[{name!r}] in layer {layer}", problem, instead)

    def after(self, x: IntermediateTensors | None, device: torch.device) -> dict[str, PerToken]:
        """The captures of this stage and of the stages before it; zeros for a name that none of
        them has captured."""
        captured = {} if x is None else x.captured
        # Every declared name is in every stage's result, whichever layers capture: the structure of
        # what stages exchange is fixed.
        for name, example in self.captures.items():
            if name in self.values:
                # A new dict, because `x.captured` belongs to the result of the stage before.
                captured = {**captured, name: PerToken(self.values[name])}
            elif name not in captured:
                shape = self.num_tokens, *example.shape
                captured = {
                    **captured,
                    name: PerToken(torch.zeros(shape, dtype=example.dtype, device=device)),
                }
        return captured


def carried_on(name: str, state: State, batch: ResolvedBatch, sown: Sown) -> State:
    """The state with the values that this stage's layers carried, for the requests of the batch."""
    if state.carried is None:
        instead = (
            "a state of this model: make_state(model, ...), or Carried.of(model.functions.carries,"
            " ...)"
        )
        raise ProgramError(f"{name}(params, state, batch, x)", "a state without `carried`", instead)
    carried = state.carried.write(batch, state.kv_pages.shape[3], sown.carried)
    if carried is state.carried:
        return state
    return attrs.evolve(state, carried=carried)


# A context variable, so that functions keep their signatures; each thread has its own value.
_SOWN: ContextVar[Sown | None] = ContextVar("weft.sown", default=None)


def sow(name: str, value: Tensor) -> None:
    """Capture a value of each token from within a custom function in a stage; it is returned, per
    token, as `captured[name]` of the stage's output, of `RequestOutput` and of `Completion`.

    Like Flax's `sow`, it leaves the function's signature unchanged, and does nothing where nobody
    collects the values.

    Args:
        name: one that `model.with_stages(..., captures={name: example})` declares.
        value: [num_tokens, ...], with the example's shape for each token; cast to its dtype. If a
            name is sown twice in a step, the last value counts. The value is copied, so you may
            write to your tensor later.

    Raises:
        ProgramError: a name that is not declared, a value of another shape, or a call from `logits`
            or from a transform of a whole stage, where values are not per token.
    """
    if (sown := _SOWN.get()) is not None:
        sown.add(name, value)


def carry(name: str, value: Tensor) -> None:
    """Carry a value, such as the state of a recurrence, from each token to the next of its request,
    from within a custom layer. `batch.carried[name]` has, for each request, the value after the
    last token before the batch.

    It is exact however a request is served: in chunks, after wrong drafts, after preemption, and
    after a prefix hit, as `model.with_stages(..., prefix_caching=...)` says. A preempted request
    starts again as a new one does: from the default, or from the snapshot of the last of its pages
    that is still in the prefix cache.

    Args:
        name: one that `model.with_stages(..., carries={name: default})` declares; no two layers may
            carry the same name.
        value: [num_tokens, ...], the value after each token of the batch, with the default's shape
            for each; cast to its dtype. `batch.scan_tokens` computes such values one token after
            another. The value is copied, so you may write to your tensor later.

    Raises:
        ProgramError: a name that is not declared, or is carried twice in a step; a value of another
            shape; or a call from `logits` or from a transform of a whole stage, where values are
            not per token.
    """
    if (sown := _SOWN.get()) is not None:
        sown.carry(name, value)


class _Read(Mapping[str, PerRequest]):
    """The carried values of a batch; reading one records the layer that reads it."""

    def __init__(self, sown: Sown, values: Mapping[str, PerRequest]) -> None:
        self._sown = sown
        self._values = values

    def __getitem__(self, name: str) -> PerRequest:
        value = self._values[name]
        self._sown.reads.add((name, self._sown.layer))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@contextmanager
def sowing(
    captures: Mapping[str, Tensor], carries: Mapping[str, Tensor], batch: ResolvedBatch
) -> Iterator[tuple[Sown, ResolvedBatch]]:
    """A context that collects the values that are sown and carried in it; it yields them, and the
    batch for the layers."""
    token = _SOWN.set(sown := Sown(captures, len(batch.input_ids), carries))
    try:
        yield sown, attrs.evolve(batch, carried=_Read(sown, batch.carried)) if carries else batch
    finally:
        _SOWN.reset(token)


def at_layer(index: int) -> None:
    """Record the index of the layer that is about to run."""
    if (sown := _SOWN.get()) is not None:
        sown.layer = index


@contextmanager
def sowing_nothing(where: str) -> Iterator[None]:
    """A context in which `sow` and `carry` raise."""
    token = _SOWN.set(Sown({}, 0, refused=f"a call from {where}, where values are not per token"))
    try:
        yield
    finally:
        _SOWN.reset(token)
