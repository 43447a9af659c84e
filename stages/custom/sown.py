"""`sow` and `carry`: what functions of one's own, in a stage, capture of each token, and carry to
the next one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batch import ResolvedBatch
from weft.errors import ProgramError
from weft.outputs import IntermediateTensors, PerRequest, PerToken
from weft.state import State
from weft.trees import OF_THIS_PROCESS


@attrs.define
class SownNames:
    """The names that the stages of a model have captured and carried so far, as far as they run in
    this process: a stage's layers see only their own.

    Args:
        num_stages: of the model's split.
        last: for the index of each stage that ran, the names that it captured, and carried, in its
            last step.
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
            ProgramError: another layer carries one of them; or all stages ran, and a declared name
                is missing.
        """
        self.last[stage] = frozenset(sown.values), frozenset(sown.carried)
        for name, layer in sown.carried_in.items():
            if (first := self.carried_in.setdefault(name, layer)) != layer:
                raise _carried_twice(name, first, layer)
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
    problem = f"the second call in a step: layer {first} carries it"
    instead = "a name for each layer, in layers={index: change}"
    return ProgramError(f"weft.stages.carry({name!r}, value) in layer {layer}", problem, instead)


@attrs.define
class Sown:
    """The values that functions of one's own capture and carry while a stage runs.

    Args:
        captures: an example of each value that may be captured, by name.
        num_tokens: of the batch, padding included.
        carries: the same of those that may be carried.
        values: what was captured, [num_tokens, ...] by name.
        carried: what was carried, [num_tokens, ...] by name.
        refused: why nothing can be captured or carried here; empty: it can.
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
        """Capture a value; one of the same name replaces it."""
        self.values[name] = self._checked("sow", "captures", self.captures, name, value)

    def carry(self, name: str, value: Any) -> None:
        """Carry a value."""
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
                f"model.with_stages(..., {option}={{{name!r}: torch.zeros(...)}}), as of one token"
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
        return value.to(example.dtype, copy=True)  # it may be written to later

    def check_carried(self) -> None:
        """Raise ProgramError, once the layers have run, for a value that was read in another layer
        than the one that carries it."""
        for name, layer in sorted(self.reads):
            if self.carried_in.get(name) != layer:
                problem = "which this layer does not carry"
                if name in self.carried_in:
                    problem = f"which layer {self.carried_in[name]} carries"
                instead = (
                    f"carry({name!r}, value) in the same layer: others compute the step's tokens at"
                    " other times"
                )
                raise ProgramError(f"batch.carried[{name!r}] in layer {layer}", problem, instead)

    def after(self, x: IntermediateTensors | None, device: torch.device) -> dict[str, PerToken]:
        """The captures of this stage and of those before it; 0 where there is none yet."""
        captured = {} if x is None else x.captured
        for name, example in self.captures.items():
            if name in self.values:
                captured = {**captured, name: PerToken(self.values[name])}
            elif name not in captured:
                shape = self.num_tokens, *example.shape
                captured = {
                    **captured,
                    name: PerToken(torch.zeros(shape, dtype=example.dtype, device=device)),
                }
        return captured


def carried_on(name: str, state: State, batch: ResolvedBatch, sown: Sown) -> State:
    """The state with what the batch's requests carry on from this stage."""
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


_SOWN: ContextVar[Sown | None] = ContextVar("weft.sown", default=None)


def sow(name: str, value: Tensor) -> None:
    """Capture a value of each token, from within a function of one's own in a stage: it comes back,
    per token, as `captured[name]` of the stage's output, of `RequestOutput` and of `Completion`.

    As `sow` of Flax does, it leaves the function's signature as it is, and does nothing where
    nobody collects.

    Args:
        name: one that `model.with_stages(..., captures={name: example})` declares.
        value: [num_tokens, ...], of the example's shape for each token; cast to its dtype. If a
            name is sown twice in a step, the last value counts. It is copied, so that you may write
            to yours later.

    Raises:
        ProgramError: a name that is not declared, a value of another shape, or a call from `logits`
            or from a transform of a whole stage, where values are not of tokens.
    """
    if (sown := _SOWN.get()) is not None:
        sown.add(name, value)


def carry(name: str, value: Tensor) -> None:
    """Carry a value from each token to the next of its request, from within a layer of one's own:
    the state of a recurrence. `batch.carried[name]` is what came from the token before the batch's
    first one, for each request.

    It is exact however a request is served: in chunks, after wrong drafts, preempted, and under a
    prefix hit, as `model.with_stages(..., prefix_caching=...)` says. A preempted request begins
    again, as if it were new: with the default, or with the snapshot of the last of its pages that
    the prefix cache still has.

    Args:
        name: one that `model.with_stages(..., carries={name: default})` declares; each layer has
            names of its own.
        value: [num_tokens, ...], the value after each token of the batch, of the default's shape
            for each; cast to its dtype. `batch.scan_tokens` computes such values one after the
            other. It is copied, so that you may write to yours later.

    Raises:
        ProgramError: a name that is not declared, or is carried twice in a step; a value of another
            shape; or a call from `logits` or from a transform of a whole stage, where values are
            not of tokens.
    """
    if (sown := _SOWN.get()) is not None:
        sown.carry(name, value)


class _Read(Mapping[str, PerRequest]):
    """Carried values that note the layer in which each is read."""

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
    """A context that collects what is sown and carried in it, with the batch for the layers."""
    token = _SOWN.set(sown := Sown(captures, len(batch.input_ids), carries))
    try:
        yield sown, attrs.evolve(batch, carried=_Read(sown, batch.carried)) if carries else batch
    finally:
        _SOWN.reset(token)


def at_layer(index: int) -> None:
    """Note the layer that runs, for what it sows."""
    if (sown := _SOWN.get()) is not None:
        sown.layer = index


@contextmanager
def sowing_nothing(where: str) -> Iterator[None]:
    """A context in which `sow` raises."""
    token = _SOWN.set(Sown({}, 0, refused=f"a call from {where}, whose values are not of tokens"))
    try:
        yield
    finally:
        _SOWN.reset(token)
