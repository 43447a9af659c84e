"""`from_module`: any `nn.Module` as a stage, through `torch.func.functional_call`."""

import inspect
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import is_dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from weft.arguments.checks import kind_of
from weft.display.summary import Summarized
from weft.errors import CaptureError, ProgramError
from weft.torchapi.private import storage_id
from weft.torchapi.watching import watched
from weft.values.donation import donates
from weft.values.objects import Change, Place, Snapshot, places_of_tensors, reachable_tensors

if TYPE_CHECKING:
    from _thread import RLock

Call = Callable[[Any, Any, Any], Any]
"""Calls a module for a stage: `(module, batch, x) -> y`."""

_CALL = "call=lambda module, batch, x: module(...)"

# By the id of a part of a module, or of an object in it. `functional_call` writes a stage's values
# into the module itself, so two threads must not run stages that share a part at the same time.
_LOCKS: "dict[int, tuple[weakref.ref[Any], RLock]]" = {}


@attrs.frozen(eq=False, repr=False)
class ModuleStage(Summarized):
    """A module taken apart into a pure function and its values.

    Args:
        stage: `(params, state, batch, x) -> (state, y)`.
        params: the module's parameters by name.
        state: its buffers by name, and the tensors in plain objects that it holds, by path
            (`cache.layers[0].keys`). What the module updates (running statistics, a cache) is
            returned in the new state.
    """

    stage: Callable[[dict[str, Tensor], dict[str, Tensor], Any, Any], tuple[dict[str, Tensor], Any]]
    params: dict[str, Tensor]
    state: dict[str, Tensor]


def from_module(module: nn.Module, *, call: Call | None = None) -> ModuleStage:
    """Make a stage of `module`.

    The module is called on `x`, or on the batch in the first stage (where `x` is None). A mapping,
    such as a tokenizer's encoding, is passed by keyword; a tuple by position; anything else as the
    only argument.

    At each call, the module runs in its current mode, `train()` or `eval()`. Dropout draws from
    torch's default generator, as in the module itself, and a graph draws new numbers at each
    replay. The bits are those of the module after `requires_grad_(False)`: torch may round
    differently if parameters require grad.

    Tensors in plain objects (instances of classes that are not modules, such as a cache of
    transformers), however deep below the module's attributes, are state like buffers, provided that
    they exist when the stage is made. Parameters, views of other values, and tensors that torch's
    own objects hold are not part of it.

    Args:
        module: a run of the stage does not change its buffers, nor the tensors in its objects. A
            graph is refused if a run changes anything else that can be reached from the module:
            numbers, lists, nonlocals, attributes of classes; the error names it. The same holds for
            draws from the generators of Python or NumPy.
        call: `(module, batch, x) -> y`, replaces the call above: for arguments from both the batch
            and `x`, or to return a part of the output, such as `lambda module, batch, x: module(x,
            mask=batch["mask"]).logits`.

    Returns:
        The stage; its parameters; and its state: the buffers and the tensors in its objects. The
        stage donates its state.

    Raises:
        ProgramError: `module` is not a module, has parameters without a shape yet, buffers that
            share memory, or other tensors that share memory with a parameter or a buffer; or `call`
            is not a function. When the stage is called: the module's `forward` does not take these
            arguments, makes a buffer, replaces a parameter, removes a tensor of the state, or puts
            different tensors where the state had one.

    >>> made = from_module(nn.Linear(2, 1))
    >>> state, y = made.stage(made.params, made.state, torch.ones(3, 2), None)
    >>> y.shape
    torch.Size([3, 1])
    """

    _check_module(module, call)
    buffers = dict(module.named_buffers())
    in_objects = _tensors_in_objects(module)
    _refuse_aliases(module, {id(one.tensor) for one in in_objects})
    caller = _Caller(module, _call_on_inputs if call is None else call, in_objects)
    locks = _locks_of([*module.modules(), *(owner for one in in_objects for owner in one.owners())])

    @donates("state")
    def stage(
        params: dict[str, Tensor], state: dict[str, Tensor], batch: Any, x: Any
    ) -> tuple[dict[str, Tensor], Any]:
        of_objects = {one.name: state[one.name] for one in in_objects if one.name in state}
        values = {f"module.{name}": value for name, value in {**params, **state}.items()}
        # `functional_call` replaces parameters and buffers only; `_Caller` puts the others in their
        # places.
        for name in of_objects.keys() - buffers.keys():
            del values[f"module.{name}"]
        with ExitStack() as stack:
            # Always in the order of `_locks_of`, so that two stages that share parts cannot
            # deadlock.
            for lock in locks:
                stack.enter_context(lock)
            y, next_of_objects = torch.func.functional_call(caller, values, (batch, x, of_objects))
            _refuse_new(module, buffers, params, values)
        for one in in_objects:
            if one.name in state:
                if one.name in buffers:
                    tied = [values[f"module.{one.name}"]]
                else:
                    tied = []
                values[f"module.{one.name}"] = one.the_one_of(
                    [*next_of_objects[one.name], *tied], module
                )
        # From `values`, where `functional_call` has put a buffer that the module replaced.
        return {name: values[f"module.{name}"] for name in state}, y

    # `graphify` reads the module's training mode.
    vars(stage)["__weft_module__"] = module
    stage.__name__ = stage.__qualname__ = f"stage {type(module).__name__}"
    params = {name: p.detach() for name, p in module.named_parameters()}
    state = {**buffers, **{one.name: one.tensor for one in in_objects}}
    # Copies, because the stage donates its state: a run would write to the module's own buffers.
    return ModuleStage(stage, params, {name: b.detach().clone() for name, b in state.items()})


@attrs.frozen(eq=False)
class _ObjectTensor:
    """A tensor of the state that plain objects hold.

    Args:
        name: its name in the state: the name of the buffer, if it is one too; otherwise the path of
            its first place.
        tensor: the tensor that the module holds.
        places: all places that hold it.
    """

    name: str
    tensor: Tensor
    places: list[Place]

    def owners(self) -> list[Any]:
        """The objects on the paths to it."""
        return [owner for place in self.places for owner in place.owners()]

    def put(self, value: Tensor, module: nn.Module) -> list[Any]:
        """Put a value in all places. Returns what was there."""
        try:
            before = [place.get() for place in self.places]
        except (LookupError, AttributeError) as error:
            problem = f"{self.name} is not there any more, which was when the stage was made"
            raise ProgramError(_call_of(module), problem, "from_module(module) again") from error
        for place in self.places:
            place.put(value)
        return before

    def next_values(self, module: nn.Module) -> list[Any]:
        """The values in the places after a run."""
        try:
            values = [place.get() for place in self.places]
        except (LookupError, AttributeError):
            values = [None]
        if not all(isinstance(value, Tensor) for value in values):
            problem = f"the run removed {self.name}, a tensor of the state"
            raise ProgramError(
                _call_of(module),
                problem,
                f"leave it there, or write it in place: {self.name}.zero_()",
            )
        return values

    def the_one_of(self, values: list[Any], module: nn.Module) -> Any:
        """The next value; raises ProgramError unless all places have the same tensor."""
        if all(value is values[0] for value in values):
            return values[0]
        places = " and ".join(dict.fromkeys([self.name, *(place.path for place in self.places)]))
        problem = f"{places} are one tensor before the run, and are not after it"
        raise ProgramError(
            _call_of(module),
            problem,
            "give the other ones the new tensor, too, or write it in place",
        )


def _call_of(module: nn.Module) -> str:
    return f"stage {type(module).__name__}(params, state, ...)"


def _tensors_in_objects(module: nn.Module) -> list[_ObjectTensor]:
    """The tensors of the state that plain objects hold, without those that share memory with
    another value."""
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    object_tensors = [
        _ObjectTensor(names.get(id(tensor), places[0].path), tensor, places)
        for tensor, places in places_of_tensors(*_roots_of(module))
    ]
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # `_overlapping` returns one pair at a time.
    while pair := _overlapping(values | {one.name: one.tensor for one in object_tensors}):
        object_tensors = [
            one for one in object_tensors if one.name not in pair or one.name in values
        ]
        for name in pair:
            values.pop(name, None)
    return object_tensors


def _refuse_aliases(module: nn.Module, state: Set[int]) -> None:
    """Raise ProgramError if a tensor that is not one of the stage's values shares memory with a
    parameter or a buffer: a run would read the module's own values from it, not the stage's.

    Args:
        state: the ids of the tensors in plain objects that are part of the state.
    """
    values: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    owners = {storage_id(value): name for name, value in values.items() if _has_memory(value)}

    def aliases() -> list[tuple[str, str]]:
        return [
            (place.path, owners[storage_id(tensor)])
            for place, tensor, _ in reachable_tensors(*_roots_of(module))
            if id(tensor) not in state
            and _has_memory(tensor)
            and storage_id(tensor) in owners
            and f"{place.path}_orig" not in values  # a hook computes it before each call
        ]

    if not aliases():
        return
    # Look again while the module has other parameters: some modules update their aliases, as
    # recurrent ones do with their list of weights. Only an alias that is still there is a fault.
    empty = {f"module.{name}": torch.empty(0) for name in values}
    if remaining := torch.func.functional_call(_Looking(module, aliases), empty, ()):
        alias, owner = remaining[0]
        problem = f"{alias}, which shares memory with {owner} and would keep its first values"
        instead = f"a view that forward makes of {owner}, or a clone() of it"
        raise ProgramError(
            f"weft.stages.from_module({type(module).__name__}(...))", problem, instead
        )


class _Looking(nn.Module):
    """A module whose forward calls a function while another module has the values of
    `functional_call`."""

    def __init__(self, module: nn.Module, look: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.look = look

    def forward(self) -> Any:
        return self.look()


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _locks_of(parts: list[Any]) -> list["RLock"]:
    """The locks of all parts of a module, in a global order. Parts without a lock get the first of
    them, or a new one if there is none."""
    new = threading.RLock()
    locks = {id(lock): lock for part in parts if (lock := _lock_of(part)) is not None} or {
        id(new): new
    }
    first = next(iter(locks.values()))
    for part in parts:
        if _lock_of(part) is None:
            # An object that does not support weak references gets no lock.
            with suppress(TypeError):
                _LOCKS[id(part)] = weakref.ref(part, partial(_forget_lock, id(part))), first
    return [locks[key] for key in sorted(locks)]


def _forget_lock(key: int, part: Any) -> None:
    _LOCKS.pop(key, None)


def _lock_of(part: Any) -> "RLock | None":
    reference, lock = _LOCKS.get(id(part), (None, None))
    # The id of an object that is gone may be that of a new one, so the object is compared, too.
    if reference is not None and reference() is part:
        return lock
    return None


def _refuse_new(
    module: nn.Module, buffers: Mapping[str, Tensor], params: Mapping[str, Any], values: Any
) -> None:
    """Raise ProgramError if the run made a buffer or replaced a parameter: neither has a place in
    the new state."""
    new = [name for name, _ in module.named_buffers() if name not in buffers]
    replaced = [name for name, value in params.items() if values[f"module.{name}"] is not value]
    if new:
        problem = f"the run made the buffer {new[0]}"
        instead = "make it before that: run the module once"
    elif replaced:
        problem = (
            f"the run replaced the parameter {replaced[0]}, which is not part of the new state"
        )
        instead = f"a buffer in its place: register_buffer({replaced[0].rpartition('.')[2]!r}, ...)"
    else:
        return
    raise ProgramError(_call_of(module), problem, instead)


class _Caller(nn.Module):
    """A module whose forward calls another one by `call`, so that `functional_call` applies to any
    way of calling it."""

    def __init__(self, module: nn.Module, call: Call, in_objects: list[_ObjectTensor]) -> None:
        super().__init__()
        self.module = module
        self.call = call
        self.in_objects = in_objects

    def forward(
        self, batch: Any, x: Any, of_objects: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, list[Any]]]:
        """Call the module with these tensors in its objects. Returns its output, and the tensors in
        its objects after the run."""
        with ExitStack() as stack:
            object_tensors = [one for one in self.in_objects if one.name in of_objects]
            for one in object_tensors:
                before = one.put(of_objects[one.name], self.module)
                # Also if the run raises: the module keeps its own tensors.
                stack.callback(_put_back, one.places, before)
            if watched():
                stack.enter_context(
                    _unchanged(self.module, {id(value) for value in of_objects.values()})
                )
            y = self.call(self.module, batch, x)
            return y, {one.name: one.next_values(self.module) for one in object_tensors}


def _put_back(places: list[Place], before: list[Any]) -> None:
    """Restore the values that the places had before a run, unless the run removed the places."""
    for place, value in zip(places, before, strict=True):
        with suppress(LookupError, AttributeError, TypeError):
            place.put(value)


def _call_on_inputs(module: nn.Module, batch: Any, x: Any) -> Any:
    inputs = batch if x is None else x
    # An output of transformers is a mapping and a dataclass, and is passed on as one value.
    by_name = isinstance(inputs, Mapping) and not is_dataclass(inputs)
    if by_name:
        kwargs: dict[str, Any] = dict(inputs)
    else:
        kwargs = {}
    if by_name:
        args: tuple[Any, ...] = ()
    # Not `isinstance`: a named tuple is one argument.
    elif type(inputs) is tuple:
        args = inputs
    else:
        args = (inputs,)
    # The `forward` of a ScriptModule has no signature to check.
    if not isinstance(module, ScriptModule):
        _check_arguments(module, "batch, None" if x is None else "batch, x", args, kwargs)
    return module(*args, **kwargs)


def _check_arguments(
    module: nn.Module, given_as: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise ProgramError for arguments that the module's `forward` does not take."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        arguments = ", ".join(
            [*(kind_of(value) for value in args), *(f"{name}=..." for name in kwargs)]
        )
        problem = f"forward({', '.join(signature.parameters)}) is given ({arguments}): {error}"
        call = f"stage {type(module).__name__}(params, state, {given_as})"
        raise ProgramError(call, problem, f"from_module(module, {_CALL})") from error


def _overlapping(buffers: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of two buffers that share memory, if any: their copies in the state would not."""
    spans = []
    for name, buffer in buffers.items():
        if buffer.numel() and not buffer.is_meta and buffer.layout is torch.strided:
            start = buffer.storage_offset() * buffer.itemsize
            steps = sum(
                (size - 1) * stride
                for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
            )
            spans.append((storage_id(buffer), start, start + (steps + 1) * buffer.itemsize, name))
    # Sorted by storage and start, spans overlap only if two neighbours do.
    pairs = pairwise(sorted(spans))
    return next(
        ((one[3], other[3]) for one, other in pairs if one[0] == other[0] and other[1] < one[2]),
        None,
    )


def _check_module(module: Any, call: Any) -> None:
    if isinstance(module, nn.Module):
        values: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
        if lazy := [name for name, value in values if is_lazy(value)]:
            problem = f"{lazy[0]}, which has no shape yet"
            instead = "call the module once on inputs before that"
        elif both := _overlapping(dict(module.named_buffers())):
            problem = f"buffers {both[0]} and {both[1]}, which share memory"
            instead = "a clone() of one of them"
        elif call is not None and not callable(call):
            problem = f"call={call!r:.60}, {kind_of(call)}"
            instead = _CALL
        else:
            return
        raise ProgramError(
            f"weft.stages.from_module({type(module).__name__}(...))", problem, instead
        )
    problem = f"{getattr(module, '__name__', module)!s:.60}, {kind_of(module)} and not an nn.Module"
    instead = "a function (params, state, batch, x) -> (state, y) is a stage as it is"
    if isinstance(module, type) and issubclass(module, nn.Module):
        problem = f"{module.__name__}, the class"
        instead = f"a module of it: {module.__name__}(...)"
    raise ProgramError("weft.stages.from_module(module)", problem, instead)


@contextmanager
def _unchanged(module: nn.Module, state: Set[int]) -> Iterator[None]:
    """A context for the captured run of a module, in which the run may not change Python state.

    At the end it restores what the module holds in Python, however deep, and the generators of
    Python and NumPy.

    Args:
        module: all of its parts are watched: their attributes, and the objects and containers that
            can be reached from these.
        state: the ids of the tensors in plain objects that are part of the state; the run may
            replace these.

    Raises:
        CaptureError: the run changed something.
    """
    roots, registered = _roots_of(module)
    before = Snapshot(roots, registered)
    draws = [(generator, get, put, get()) for generator, get, put in _generators()]
    try:
        yield
        change = next(before.changes(state), None)
    finally:
        before.restore()
        # `put` returns None: it puts back each generator that has drawn, and keeps it in the list.
        drawn = [
            generator
            for generator, get, put, state in draws
            if _differs(get(), state) and not put(state)
        ]
    if change is not None:
        problem = f"{change.path} of the module {change}, and a replay does not repeat that"
        instead = _instead_of(change, module)
    elif drawn:
        problem = f"a draw from {drawn[0]}, which a replay does not repeat"
        instead = "a draw from torch: torch.rand(...)"
    else:
        return
    raise CaptureError(f"graphify(stage {type(module).__name__})", problem, instead)


def _roots_of(module: nn.Module) -> tuple[dict[str, nn.Module], Set[int]]:
    """The parts of a module by path, and their ids; without parts in TorchScript, which hold
    nothing in Python."""
    parts = {
        path: part for path, part in module.named_modules() if not isinstance(part, ScriptModule)
    }
    return parts, {id(part) for part in parts.values()}


def _instead_of(change: Change, module: nn.Module) -> str:
    """The remedy for a change that a replay does not repeat."""
    path, _, key = change.path.rpartition(".")
    parts = dict(module.named_modules())
    if path in parts and f"{key}_orig" in vars(parts[path])["_parameters"]:
        return (
            "torch.nn.utils.parametrizations in the place of this hook; prune.remove(...) of a"
            " pruned module"
        )
    once = "if it is set only once, run the module before"
    if path in parts:
        return f"return it, or register_buffer({key!r}, ...); {once}"
    if isinstance(change.after, Tensor):
        return (
            "a tensor that is there before from_module(module), and is then part of the state;"
            f" {once}"
        )
    if isinstance(change.before, int | float):
        value = repr(change.before)
    else:
        value = "..."
    return f"a tensor in its place, torch.tensor({value}), which is then part of the state; {once}"


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The random generators of Python and NumPy: their names, and functions that get and set their
    states."""
    generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("random", random.getstate, random.setstate)
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        generators.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    return generators


def _differs(now: Any, was: Any) -> bool:
    """Whether the states of a generator differ. They are tuples of numbers, and one array."""
    return [list(x) if hasattr(x, "shape") else x for x in now] != [
        list(x) if hasattr(x, "shape") else x for x in was
    ]
