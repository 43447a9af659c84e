"""`from_module`: any `nn.Module` as a stage, through `torch.func.functional_call`."""

import inspect
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from weft.arguments.checks import kind_of
from weft.display.summary import Summarized
from weft.donation import donates
from weft.errors import CaptureError, ProgramError
from weft.torchapi.private import storage_id
from weft.torchapi.watching import watched

if TYPE_CHECKING:
    from _thread import RLock

_VALUES = (int, float, complex, str, bytes, type(None))
_MEMBERS = ("_parameters", "_buffers", "_modules")
"""The attributes whose values `functional_call` gives and takes back."""

Call = Callable[[Any, Any, Any], Any]
"""Calls a module for a stage: `(module, batch, x) -> y`."""

_CALL = "call=lambda module, batch, x: module(...)"

_LOCKS: "weakref.WeakKeyDictionary[nn.Module, RLock]" = weakref.WeakKeyDictionary()
"""By part of a module: two stages that share it, on two threads, must not give it their values at the same time."""


@attrs.frozen(eq=False, repr=False)
class ModuleStage(Summarized):
    """A module taken apart into a pure function and its values.

    Args:
        stage: `(params, state, batch, x) -> (state, y)`.
        params: the module's parameters by name.
        state: its buffers by name; a buffer that the module updates (running statistics) comes back in the new state.
    """

    stage: Callable[[dict[str, Tensor], dict[str, Tensor], Any, Any], tuple[dict[str, Tensor], Any]]
    params: dict[str, Tensor]
    state: dict[str, Tensor]


def from_module(module: nn.Module, *, call: Call | None = None) -> ModuleStage:
    """Make a stage of `module`.

    It is called on `x`, or on the batch if it is the first stage (`x` is None). A mapping, such as the encoding of a
    tokenizer, is passed by keyword; a tuple by position; anything else as the only argument.

    The module runs in its own mode, `train()` or `eval()`, at each call. Dropout draws from torch's default generator,
    as in the module itself, and a graph draws new numbers at each replay. The bits are those of the module after
    `requires_grad_(False)`: torch rounds otherwise where parameters require grad.

    Args:
        module: a run of the stage does not change its buffers. A graph is refused if the module keeps what changes in
            other attributes, or draws from the generators of Python or NumPy.
        call: `(module, batch, x) -> y`, instead of the call above: for arguments from both the batch and `x`, or to
            return a part of the output, such as `lambda module, batch, x: module(x, mask=batch["mask"]).logits`.

    Returns:
        The stage, its parameters, and its buffers as the state, which the stage donates.

    Raises:
        ProgramError: `module` is not a module, has parameters without a shape yet, or buffers that share memory; or
            `call` is not a function. From the stage: the module's `forward` does not take these arguments, makes a
            buffer or replaces a parameter.

    >>> made = from_module(nn.Linear(2, 1))
    >>> state, y = made.stage(made.params, made.state, torch.ones(3, 2), None)
    >>> y.shape
    torch.Size([3, 1])
    """

    _check_module(module, call)
    caller, buffers = _Caller(module, _call_on_inputs if call is None else call), dict(module.named_buffers())
    locks = _locks_of(module)

    @donates("state")
    def stage(params: dict[str, Tensor], state: dict[str, Tensor], batch: Any, x: Any) -> tuple[dict[str, Tensor], Any]:
        values = {f"module.{name}": value for name, value in {**params, **state}.items()}
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            y = torch.func.functional_call(caller, values, (batch, x))
            _refuse_new(module, buffers, params, values)
        return {name: values[f"module.{name}"] for name in state}, y  # the module may have replaced a buffer

    vars(stage)["__weft_module__"] = module  # whose training mode `graphify` asks for
    stage.__name__ = stage.__qualname__ = f"stage {type(module).__name__}"
    params = {name: p.detach() for name, p in module.named_parameters()}
    return ModuleStage(stage, params, {name: b.detach().clone() for name, b in buffers.items()})


def _locks_of(module: nn.Module) -> list["RLock"]:
    """The locks of all parts of a module, in one order for all; a new one for those that have none."""
    parts, own = list(module.modules()), threading.RLock()
    known = {id(lock): lock for part in parts if (lock := _LOCKS.get(part)) is not None} or {id(own): own}
    for part in parts:
        _LOCKS.setdefault(part, next(iter(known.values())))
    return [known[key] for key in sorted(known)]


def _refuse_new(module: nn.Module, buffers: Mapping[str, Tensor], params: Mapping[str, Any], values: Any) -> None:
    """Raise ProgramError if the run made a buffer or replaced a parameter: neither has a place in the new state."""
    new = [name for name, _ in module.named_buffers() if name not in buffers]
    replaced = [name for name, value in params.items() if values[f"module.{name}"] is not value]
    if new:
        seen, instead = f"the run made the buffer {new[0]}", "make it before that: run the module once"
    elif replaced:
        seen = f"the run replaced the parameter {replaced[0]}, which is not part of the new state"
        instead = f"a buffer in its place: register_buffer({replaced[0].rpartition('.')[2]!r}, ...)"
    else:
        return
    raise ProgramError(f"stage {type(module).__name__}(params, state, ...)", seen, instead)


class _Caller(nn.Module):
    """A module whose forward is a call of another one, so that `functional_call` gives it the values."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, batch: Any, x: Any) -> Any:
        with _unchanged(self.module) if watched() else nullcontext():
            return self.call(self.module, batch, x)


def _call_on_inputs(module: nn.Module, batch: Any, x: Any) -> Any:
    inputs = batch if x is None else x
    by_name = isinstance(inputs, Mapping) and not is_dataclass(inputs)
    kwargs: dict[str, Any] = dict(inputs) if by_name else {}
    args: tuple[Any, ...] = () if by_name else inputs if type(inputs) is tuple else (inputs,)
    if not isinstance(module, ScriptModule):  # which has no signature
        _check_arguments(module, "batch, None" if x is None else "batch, x", args, kwargs)
    return module(*args, **kwargs)


def _check_arguments(module: nn.Module, given_as: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ProgramError for arguments that the module's `forward` does not take."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(kind_of(value) for value in args), *(f"{name}=..." for name in kwargs)])
        seen = f"forward({', '.join(signature.parameters)}) is given ({given}): {error}"
        call = f"stage {type(module).__name__}(params, state, {given_as})"
        raise ProgramError(call, seen, f"from_module(module, {_CALL})") from error


def _overlapping(buffers: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of two buffers that share memory, so that copies of them would not."""
    spans = []
    for name, buffer in buffers.items():
        if buffer.numel() and not buffer.is_meta and buffer.layout is torch.strided:
            start = buffer.storage_offset() * buffer.itemsize
            steps = sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
            spans.append((storage_id(buffer), start, start + (steps + 1) * buffer.itemsize, name))
    pairs = pairwise(sorted(spans))
    return next(((one[3], other[3]) for one, other in pairs if one[0] == other[0] and other[1] < one[2]), None)


def _check_module(module: Any, call: Any) -> None:
    if isinstance(module, nn.Module):
        values: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
        if lazy := [name for name, value in values if is_lazy(value)]:
            seen, instead = f"{lazy[0]}, which has no shape yet", "call the module once on inputs before that"
        elif both := _overlapping(dict(module.named_buffers())):
            seen, instead = f"buffers {both[0]} and {both[1]}, which share memory", "a clone() of one of them"
        elif call is not None and not callable(call):
            seen, instead = f"call={call!r:.60}, {kind_of(call)}", _CALL
        else:
            return
        raise ProgramError(f"weft.stages.from_module({type(module).__name__}(...))", seen, instead)
    seen = f"{getattr(module, '__name__', module)!s:.60}, {kind_of(module)} and not an nn.Module"
    instead = "a function (params, state, batch, x) -> (state, y) is a stage as it is"
    if isinstance(module, type) and issubclass(module, nn.Module):
        seen, instead = f"{module.__name__}, the class", f"a module of it: {module.__name__}(...)"
    raise ProgramError("weft.stages.from_module(module)", seen, instead)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Context of a captured run of a module. It restores the module's attributes, and the generators of Python and
    NumPy, if the run changed them.

    Args:
        module: all of its parts are watched: their attributes, and the contents of lists, dicts and sets among them.

    Raises:
        CaptureError: the run changed one.
    """
    parts = [(path, part) for path, part in module.named_modules() if not isinstance(part, ScriptModule)]
    before = {path: {key: (value, _contents(value)) for key, value in _attributes(part)} for path, part in parts}
    draws = [(generator, get, put, get()) for generator, get, put in _generators()]
    try:
        yield
    finally:
        changed = [f"{path}.{key}".lstrip(".") for path, part in parts for key in _restore(part, before[path])]
        drawn = [generator for generator, get, put, state in draws if _differs(get(), state) and not put(state)]
    if changed:
        seen = f"{changed[0]} of the module changes while it runs, and a replay does not repeat that"
        path, _, key = changed[0].rpartition(".")
        instead = f"return it, or register_buffer({key!r}, ...); if it is set only once, run the module before"
        if f"{key}_orig" in vars(module.get_submodule(path))["_parameters"]:
            instead = "torch.nn.utils.parametrizations in the place of this hook; prune.remove(...) of a pruned module"
    elif drawn:
        seen, instead = f"a draw from {drawn[0]}, which a replay does not repeat", "a draw from torch: torch.rand(...)"
    else:
        return
    raise CaptureError(f"graphify(stage {type(module).__name__})", seen, instead)


def _attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module; without those that torch's own modules keep for themselves."""
    skipped = "_" if type(part).__module__.startswith("torch.nn.") else _MEMBERS
    return [(key, value) for key, value in vars(part).items() if not key.startswith(skipped)]


def _contents(value: Any) -> Any:
    """A copy of what a container holds; None for any other value."""
    return value.copy() if type(value) in (list, dict, set) else None


def _same(now: Any, was: Any) -> bool:
    return now is was or (type(now) is type(was) and isinstance(now, _VALUES) and now == was)


def _same_contents(now: Any, was: Any) -> bool:
    if was is None or isinstance(was, set):
        return was is None or now == was
    items = [*now.items()] if isinstance(was, dict) else [*enumerate(now)]
    others = [*was.items()] if isinstance(was, dict) else [*enumerate(was)]
    return len(items) == len(others) and all(
        key == other and _same(value, own) for (key, value), (other, own) in zip(items, others, strict=True)
    )


def _restore(part: nn.Module, before: dict[str, tuple[Any, Any]]) -> list[str]:
    """Give a module its attributes back. Returns the names of those that had changed."""
    now, changed = dict(_attributes(part)), []
    for key in now.keys() - before.keys():
        vars(part).pop(key)
        changed.append(key)
    for key, (value, contents) in before.items():
        if key in now and _same(now[key], value) and _same_contents(value, contents):
            continue
        vars(part)[key] = value
        if isinstance(value, list):
            value[:] = contents
        elif contents is not None:
            value.clear()
            value.update(contents)
        changed.append(key)
    return changed


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The generators that are not torch's: their names, and functions that get and set their states."""
    found: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [("random", random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    return found


def _differs(now: Any, was: Any) -> bool:
    """Whether the states of a generator differ. They are tuples of numbers, and one array."""
    return [list(x) if hasattr(x, "shape") else x for x in now] != [list(x) if hasattr(x, "shape") else x for x in was]
