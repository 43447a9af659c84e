"""Functions of one's own in the stages of a decoder (`StageFunctions`), and stages made from its stages
(`transformed`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int, kind_of
from weft.batch import Batch, ResolvedBatch
from weft.donation import donates
from weft.errors import ProgramError
from weft.ops.fp8 import Quantized
from weft.outputs import IntermediateTensors, Output, PerToken
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams, LayerParams
from weft.state import State
from weft.trees import tree_structure

DecoderStage = Callable[
    [DecoderParams, State, Batch, IntermediateTensors | None], tuple[State, IntermediateTensors | Output]
]
Transform = Callable[[DecoderStage], DecoderStage]
Tables = tuple[Tensor, Tensor]
Layer = Callable[[LayerParams, Tensor, ResolvedBatch, Tables, Tensor], tuple[Tensor, Tensor]]
"""A decoder layer: `(params, kv_pages, batch, tables, hidden) -> (hidden, kv_pages)`, with the shapes of `layers`, but
that `kv_pages` are the layer's own."""
ChangeLogits = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]
"""`(logits [n, vocab_size], rows [n], extras) -> logits`: a function on logits, each with its request's extras."""


@attrs.frozen(eq=False)
class Normed:
    """The result of a norm: [num_tokens, hidden_size], and the same in FP8 if the next weights are in FP8."""

    plain: Tensor
    quantized: Quantized | None = None


@attrs.frozen
class StageFunctions:
    """The functions of one's own in a decoder's stages; None: the decoder's. Each is pure, runs in every graph of the
    step, and has the signature of the function in `weft.stages.decoder` whose name it has.

    Args:
        attention: `(config, layer, kv_pages, batch, tables, x) -> (added, kv_pages)`, as `attention`.
        feed_forward: `(config, layer, batch, x) -> added`, as `feed_forward`.
        norm: `(weight, eps, added, hidden, *, quantized) -> (normed, hidden)`, as `norm`, for the norms inside layers.
        logits: `(logits, rows, extras) -> logits`, before biases, masks and penalties: `logits` [n, vocab_size],
            `rows` [n] int64, the row of the state that each belongs to, and the extras of its request, [n, ...] by
            name. Logprobs are those of its result.
        layers: for the index of a layer in the model, `f(layer) -> layer`, where a layer is a `Layer`.
        extras: the default value, by name, of each input that a request has of its own. The functions read the
            requests' values in `batch.extras[name]` [num_reqs, ...], and `batch.per_token(...)` of it.
        captures: for the name of each value that the functions capture of a token (`sow`), an example of one.
    """

    attention: Callable[..., tuple[Tensor, Tensor]] | None = None
    feed_forward: Callable[..., Tensor] | None = None
    norm: Callable[..., tuple[Normed, Tensor]] | None = None
    logits: ChangeLogits | None = None
    layers: Mapping[int, Callable[[Layer], Layer]] = attrs.field(factory=dict)
    extras: Mapping[str, Tensor] = attrs.field(factory=dict)
    captures: Mapping[str, Tensor] = attrs.field(factory=dict)

    def __str__(self) -> str:
        named = {name: getattr(self, name) for name in ("attention", "feed_forward", "norm", "logits")}
        named |= {f"layer {index}": change for index, change in sorted(self.layers.items())}
        parts = [f"{name}={name_of(f)}" for name, f in named.items() if f is not None]
        for kind, tensors in (("extra", self.extras), ("captured", self.captures)):
            parts += [f"{kind} {name}: {list(x.shape)} {x.dtype}" for name, x in sorted(tensors.items())]
        return ", ".join(parts) or "the decoder's own"


OWN = StageFunctions()
"""The decoder's own functions alone."""


def name_of(f: Any) -> str:
    """A function's module and name, to be the same in all processes."""
    return f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__qualname__)}"


def check_functions(call: str, functions: StageFunctions, num_layers: int) -> None:
    """Raise ProgramError for what is not a function, and for layers that the model does not have."""
    given = attrs.asdict(functions, recurse=False)
    others = {name: given.pop(name) for name in ("layers", "extras", "captures")}
    rules: dict[str, Rule] = {name: (lambda f: f is None or callable(f), "a function, or None") for name in given}
    rules["layers"] = (
        lambda found: (
            isinstance(found, Mapping)
            and all(is_int(index, 0, num_layers - 1) and callable(f) for index, f in found.items())
        ),
        f"a dict from a layer's index, 0 to {num_layers - 1}, to a function of a layer: layers={{0: f}}",
    )
    rules["extras"] = _are_tensors, "a dict of the default values by name: extras={'vector': torch.zeros(hidden_size)}"
    rules["captures"] = _are_tensors, "a dict of examples by name: captures={'hidden': torch.zeros(hidden_size)}"
    check_values(call, rules, {**given, **others}, ProgramError)


def changed_layer(index: int, change: Callable[[Layer], Layer], layer: Layer, *args: Any) -> tuple[Tensor, Tensor]:
    """The result of a layer of one's own, checked.

    Raises:
        ProgramError: it is something else than a layer's.
    """
    hidden: Tensor = args[-1]
    with blamed_on(f"layer {index}", args[2].extras):
        made: Any = change(layer)
        if not callable(made):
            instead = "a function of the layer that returns a layer: layers={index: change}"
            raise ProgramError(f"layers={{{index}: ...}}(layer)", f"it returned {kind_of(made)}", instead)
        result: Any = made(*args)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        if (result[0].shape, result[0].dtype) == (hidden.shape, hidden.dtype):
            return result
        seen = f"it returned hidden states {list(result[0].shape)}, {result[0].dtype}"
    else:
        seen = f"it returned {_kinds(result)}"
    instead = f"(hidden, kv_pages), where hidden is {list(hidden.shape)}, {hidden.dtype}, as the given one"
    raise ProgramError(f"layer {index} of with_stages(layers=...)", seen, instead)


def _are_tensors(found: Any) -> bool:
    if not isinstance(found, Mapping):
        return False
    return all(isinstance(name, str) and isinstance(x, Tensor) for name, x in found.items())


@attrs.define
class Sown:
    """The values that functions of one's own capture while a stage runs.

    Args:
        captures: an example of each value, by name.
        num_tokens: of the batch, padding included.
        values: what was captured, [num_tokens, ...] by name.
        refused: why nothing can be captured here; empty: it can.
    """

    captures: Mapping[str, Tensor]
    num_tokens: int
    values: dict[str, Tensor] = attrs.field(factory=dict)
    refused: str = ""

    def add(self, name: str, value: Any) -> None:
        """Add a value; one of the same name replaces it."""
        call, example = f"weft.stages.sow({name!r}, value)", self.captures.get(name)
        if self.refused:
            raise ProgramError(call, self.refused, "sow in a layer, or in an attention, feed_forward or norm")
        if example is None:
            known = ", ".join(map(repr, self.captures)) or "none"
            instead = f"model.with_stages(..., captures={{{name!r}: torch.zeros(...)}}), an example for one token"
            raise ProgramError(call, f"a name that the stages do not declare; they declare {known}", instead)
        shape = (self.num_tokens, *example.shape)
        if not isinstance(value, Tensor) or value.shape != shape:
            seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            raise ProgramError(call, seen, f"a tensor {list(shape)}: {list(example.shape)} for each token of the batch")
        self.values[name] = value.to(example.dtype, copy=True)  # it may be written to later

    def after(self, x: IntermediateTensors | None, device: torch.device, alone: bool) -> dict[str, PerToken]:
        """The captures of this stage and of those before it.

        Args:
            alone: whether there are no other stages.

        Raises:
            ProgramError: the only stage has not captured all that it declares.
        """
        found = {} if x is None else x.captured
        for name, example in self.captures.items():
            if name in self.values:
                found = {**found, name: PerToken(self.values[name])}
            elif alone:
                seen = f"no function that calls weft.stages.sow({name!r}, value)"
                raise ProgramError(f"with_stages(captures={{{name!r}: ...}})", seen, "leave it out, or sow it")
            elif name not in found:
                shape = self.num_tokens, *example.shape
                found = {**found, name: PerToken(torch.zeros(shape, dtype=example.dtype, device=device))}
        return found


_SOWN: ContextVar[Sown | None] = ContextVar("weft.sown", default=None)


def sow(name: str, value: Tensor) -> None:
    """Capture a value of each token, from within a function of one's own in a stage: it comes back, per token, as
    `captured[name]` of the stage's output, of `RequestOutput` and of `Completion`.

    As `sow` of Flax does, it leaves the function's signature as it is, and does nothing where nobody collects.

    Args:
        name: one that `model.with_stages(..., captures={name: example})` declares.
        value: [num_tokens, ...], of the example's shape for each token; cast to its dtype. If a name is sown twice in a
            step, the last value counts. It is copied, so that you may write to yours later.

    Raises:
        ProgramError: a name that is not declared, a value of another shape, or a call from `logits` or from a transform
            of a whole stage, where values are not of tokens.
    """
    if (own := _SOWN.get()) is not None:
        own.add(name, value)


@contextmanager
def sowing(captures: Mapping[str, Tensor], num_tokens: int) -> Iterator[Sown]:
    """A context that collects what is sown in it."""
    token = _SOWN.set(own := Sown(captures, num_tokens))
    try:
        yield own
    finally:
        _SOWN.reset(token)


@contextmanager
def sowing_nothing(where: str) -> Iterator[None]:
    """A context in which `sow` raises."""
    token = _SOWN.set(Sown({}, 0, refused=f"a call from {where}, whose values are not of tokens"))
    try:
        yield
    finally:
        _SOWN.reset(token)


@contextmanager
def blamed_on(function: str, extras: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which each error gets a note: which of the user's functions raised it, and what it could read."""
    try:
        yield
    except Exception as error:
        known = f"; batch.extras has {', '.join(extras)}" if extras else ""
        error.add_note(f"in {function} of with_stages(...){known}")
        raise


def check_added(function: str, added: Any, hidden: Tensor) -> Tensor:
    """The result of a block of one's own, which is added to the hidden states, checked.

    Raises:
        ProgramError: it is not of the hidden states' shape, or parts of it.
    """
    seen = f"it returned {_kinds(added)}"
    if isinstance(added, Tensor):
        fits = added.shape[-2:] == hidden.shape and added.dim() in (2, 3)
        if fits and added.dtype in (hidden.dtype, torch.float32):
            return added
        seen = f"it returned {list(added.shape)}, {added.dtype}"
    instead = f"{list(hidden.shape)}, {hidden.dtype}; or parts of it, [parts, *{list(hidden.shape)}], to be added up"
    raise ProgramError(f"{function} of with_stages({function}=...)", seen, instead)


def transformed(stage: DecoderStage, transform: Transform, layout: StageLayout) -> DecoderStage:
    """A transformed stage, which takes the storage of its state, and whose results are checked.

    Raises:
        ProgramError: the transform returns no function; or, at a call, that returns something else than a stage does.
    """
    call, inner = f"{name_of(transform)}({stage.__name__})", transform(stage)
    check_values(
        call,
        {"its result": (callable, "a stage: a function (params, state, batch, x)")},
        {"its result": inner},
        ProgramError,
    )

    @donates("state")
    def run(
        params: DecoderParams, state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        before = tree_structure(state)
        with sowing_nothing("a transform of a stage"):
            result: Any = inner(params, state, batch, x)
        kind, seen = Output if layout.last else IntermediateTensors, f"it returned {_kinds(result)}"
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], kind):
            if tree_structure(result[0]) == before:
                return result[0], result[1]
            seen = "it returned a state of another structure than the given one"
        raise ProgramError(f"{call}(params, state, batch, x)", seen, f"(state, {kind.__name__}), as the stage does")

    run.__name__ = run.__qualname__ = f"{stage.__name__}, {getattr(transform, '__name__', 'transformed')}"
    return run


def _kinds(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(kind_of(x) for x in result)})"
    return kind_of(result)
