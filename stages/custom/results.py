"""Checks of the results of custom functions in a decoder's stages, and notes on the errors that
they raise."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, kind_of, other_signature
from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.outputs import IntermediateTensors, Output
from weft.batches.state import State
from weft.errors import ProgramError
from weft.stages.custom.functions import LAYER, DecoderStage, Layer, Transform, name_of
from weft.stages.custom.sown import sowing_nothing
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams
from weft.values.donation import donates
from weft.values.trees import tree_structure


def changed_layer(
    index: int, change: Callable[[Layer], Layer], layer: Layer, *args: Any
) -> tuple[Tensor, Tensor]:
    """The checked result of a custom layer.

    Raises:
        ProgramError: it is not what a layer returns.
    """
    hidden: Tensor = args[-1]
    with blamed_on(f"layer {index}", args[2]):
        changed: Any = change(layer)
        if not callable(changed):
            instead = "a function of the layer that returns a layer: layers={index: change}"
            raise ProgramError(
                f"layers={{{index}: ...}}(layer)", f"it returned {kind_of(changed)}", instead
            )
        if (problem := other_signature(changed, len(args))) is not None:
            raise ProgramError(
                f"layers={{{index}: ...}}(layer)", f"it returned {problem}", f"a layer {LAYER}"
            )
        result: Any = changed(*args)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        if (result[0].shape, result[0].dtype) == (hidden.shape, hidden.dtype):
            return result
        problem = f"it returned hidden states {list(result[0].shape)}, {result[0].dtype}"
    else:
        problem = f"it returned {_kinds(result)}"
    instead = (
        f"(hidden, kv_pages), where hidden is {list(hidden.shape)}, {hidden.dtype}, as the"
        " given one"
    )
    raise ProgramError(f"layer {index} of with_stages(layers=...)", problem, instead)


@contextmanager
def blamed_on(function: str, inputs: ResolvedBatch | Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which each error gets a note that says which of the user's functions raised it,
    and which names it could read, in a batch or in the extras of logits."""

    def note(error: Exception) -> str:
        if isinstance(inputs, ResolvedBatch):
            names = {
                f"batch.{kind}": getattr(inputs, kind)
                for kind in ("extras", "carried", "token_extras")
            }
        else:
            names = {"extras": inputs}
        parts = [
            f"{kind} has {', '.join(map(repr, values))}" for kind, values in names.items() if values
        ]
        if not parts and isinstance(error, KeyError):
            parts = [f"{', '.join(names)} are empty: declare names with model.with_stages(...)"]
        return f"in {function} of with_stages(...){'; ' * bool(parts)}{', '.join(parts)}"

    with noted(note):
        yield


@contextmanager
def noted(note: Callable[[Exception], str]) -> Iterator[None]:
    """A context in which each error gets this note."""
    try:
        yield
    except Exception as error:
        error.add_note(note(error))
        raise


def check_added(function: str, added: Any, hidden: Tensor) -> Tensor:
    """The checked result of a custom block, which is added to the hidden states.

    Raises:
        ProgramError: it has not the shape of the hidden states, nor is it parts of that shape.
    """
    problem = f"it returned {_kinds(added)}"
    if isinstance(added, Tensor):
        fits = added.shape[-2:] == hidden.shape and added.dim() in (2, 3)
        # Parts are in float32, whatever the model's dtype is.
        if fits and added.dtype in (hidden.dtype, torch.float32):
            return added
        problem = f"it returned {list(added.shape)}, {added.dtype}"
    instead = (
        f"{list(hidden.shape)}, {hidden.dtype}; or parts of it, [parts, *{list(hidden.shape)}], to"
        " be added up"
    )
    raise ProgramError(f"{function} of with_stages({function}=...)", problem, instead)


def check_attended(mixed: Any, q: Tensor) -> Tensor:
    """The checked result of a custom `attend`.

    Raises:
        ProgramError: it is not of the queries' shape and dtype.
    """
    if isinstance(mixed, Tensor) and (mixed.shape, mixed.dtype) == (q.shape, q.dtype):
        return mixed
    if isinstance(mixed, Tensor):
        returned = f"{list(mixed.shape)}, {mixed.dtype}"
    else:
        returned = _kinds(mixed)
    instead = f"a value for each head of each token, {list(q.shape)}, {q.dtype}, as the queries"
    raise ProgramError("attend of with_stages(attend=...)", f"it returned {returned}", instead)


def transformed(stage: DecoderStage, transform: Transform, layout: StageLayout) -> DecoderStage:
    """A transformed stage, which donates its state and checks its results.

    Raises:
        ProgramError: the transform does not return a function; or, when that is called, it does not
            return what a stage returns.
    """
    call, inner = f"{name_of(transform)}({stage.__name__})", transform(stage)
    rule: Rule = callable, "a stage: a function (params, state, batch, x) -> (state, y)"
    check_values(call, {"its result": rule}, {"its result": inner}, ProgramError)
    if (problem := other_signature(inner, 4)) is not None:
        raise ProgramError(call, f"it returned {problem}", rule[1])

    @donates("state")
    def run(
        params: DecoderParams, state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        # Before the call, which donates the state.
        before = tree_structure(state)
        # The stage inside opens a context of its own, so its layers can sow.
        with sowing_nothing("a transform of a stage"):
            result: Any = inner(params, state, batch, x)
        kind = Output if layout.last else IntermediateTensors
        problem = f"it returned {_kinds(result)}"
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], kind):
            if tree_structure(result[0]) == before:
                return result[0], result[1]
            problem = "it returned a state of another structure than the given one"
        raise ProgramError(
            f"{call}(params, state, batch, x)",
            problem,
            f"(state, {kind.__name__}), as the stage does",
        )

    run.__name__ = run.__qualname__ = (
        f"{stage.__name__}, {getattr(transform, '__name__', 'transformed')}"
    )
    return run


def _kinds(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(kind_of(x) for x in result)})"
    return kind_of(result)
