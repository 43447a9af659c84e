"""Planted bugs of captures (L24): hazards that weft no longer refuses, remembers or has in a key."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.stages.custom.module import _ObjectTensor
from weft.torchapi.private import in_plain_surroundings
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.backends.host_reads import refusal
from weft.transforms.graphs.backends.randomness import Randomness
from weft.transforms.graphs.backends.tape import TapeBackend, TapeRecording
from weft.transforms.graphs.calls.aliasing import Storages
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Roles, bind, check_call, make_call, signature_of
from weft.transforms.graphs.capture import capture
from weft.transforms.graphs.outside import Outside, _Names
from weft.transforms.pipelines.microbatch import microbatch
from weft.transforms.pipelines.pipeline import pipeline
from weft.values.objects import Snapshot

Plant = Callable[[], AbstractContextManager[Any]]
_HAZARDS, _PROGRAMS = find("L24", "hazards"), find("L24", "programs")


def _beside(thing: Any, name: str, value: Any) -> Plant:
    """A context in which `name`, as the module that defines `thing` reads it, is `value`."""
    # Where it is read and not where it is defined: a module that imported the name has it as its
    # own.
    return replace(thing.__module__, name, value)


def _method(owner: type, name: str, value: Any) -> Plant:
    return partial(mock.patch.object, owner, name, value)


def _all(*plants: Plant) -> Plant:
    @contextmanager
    def planted() -> Iterator[None]:
        with ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant())
            yield

    return planted


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


# The right one notes the refusal too, so that the capture raises it in the end if the function
# swallows it. A function without an `except` of its own passes.
def _forget_refusal(
    self: Audit, fault: str, instead: str, error: BaseException | None = None
) -> Any:
    return refusal(self.call, fault, instead, error)


@contextmanager
def _watched_by_a_mode() -> Iterator[None]:
    """A dispatch mode is active too; it changes nothing, but torch's composite operators notice it."""
    enter = OperatorWatch.__enter__
    leave = OperatorWatch.__exit__

    def enter_both(self: Any) -> Any:
        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()
        return enter(self)

    def leave_both(self: Any, *error: Any) -> None:
        leave(self, *error)
        self._mode.__exit__(*error)

    with mock.patch.multiple(OperatorWatch, __enter__=enter_both, __exit__=leave_both):
        yield


# The right one notes that an operator raised: a function that goes on after the error has branched
# on data. Inputs that raise in every call, or in none, do not show it.
def _call_without_note(self: Audit, func: Any, args: Any, kwargs: Any) -> Any:
    return self.pass_on(func, args, kwargs)


def _plain_alias(leaf: Any, like: Any, grad: bool) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.data
    return leaf


# A decorator may have other defaults than the function that it wraps. Filled in here, those of the
# inner function hide them; calls that pass every argument are right.
def _with_defaults_of_the_inner(roles: Roles, name: str, args: Any, kwargs: Any) -> Any:
    bound = bind(roles, name, args, kwargs)
    bound.apply_defaults()
    return bound


# A module among the static arguments has a mode as well, and dropout and batch norm depend on it.
def _modules_of_its_own(self: Roles, statics: Any) -> tuple[nn.Module, ...]:
    if isinstance(self.module, nn.Module):
        return tuple(self.module.modules())
    return ()


@contextmanager
def _addresses_forgotten() -> Iterator[None]:
    """Only names are compared, and not where the tensors lie."""
    make = Outside.__init__

    def init(self: Outside, fn: Any, external: Any, **options: Any) -> None:
        # `p.data = other` leaves the name and the object as they were: only the address tells.
        make(self, fn, (), **options)

    with mock.patch.object(Outside, "__init__", init):
        yield


@contextmanager
def _names_forgotten() -> Iterator[None]:
    """Only addresses are compared, and not what the names stand for."""
    make = Outside.__init__

    def init(self: Outside, fn: Any, external: Any, **options: Any) -> None:
        # The graph keeps the tensor alive that the name stood for, so its address does not change
        # when the name is bound to another one.
        make(self, _nothing, external, **options | {"thorough": False})

    with mock.patch.object(Outside, "__init__", init):
        yield


def _note_no_elements(
    self: _Names, storages: Any, note: Callable[..., Any] = _Names.note_tensors
) -> None:
    self._in_places.clear()
    note(self, storages)


def _hold_nothing(self: Storages, tensors: Any) -> bool:
    return False


# The first call is right. A tensor that a module carries from call to call then stays where it was.
def _values_before(self: _ObjectTensor, module: nn.Module) -> list[Any]:
    return [self.tensor.clone()] * len(self.places)


# The bugs of `graphify` that only odd functions show.
CAPTURES = (
    Mutant(
        "a refusal that the function swallows is forgotten",
        _HAZARDS,
        _method(Audit, "refuse", _forget_refusal),
    ),
    # A capture runs the function more often than its caller does, and each run draws. A program
    # that draws nothing passes, as does one whose draws are not compared with eager ones.
    Mutant("a capture advances generators", _HAZARDS, _method(Randomness, "restore", _nothing)),
    Mutant(
        # Other threads draw from that generator meanwhile, and its state is set back after the
        # capture: they would get the same numbers twice.
        "a capture draws from the default generator",
        _HAZARDS,
        _method(Randomness, "private_draws", nullcontext),
    ),
    Mutant(
        # What was recorded lies below autocast and function modes and has their effect in it; under
        # them a replay would have it twice. On the CPU both contexts are entered by the tape.
        "replays enter the modes of their caller",
        _HAZARDS,
        _all(
            *(
                _beside(TapeRecording, name, nullcontext)
                for name in ("WithoutAutocast", "WithoutFunctionModes")
            )
        ),
    ),
    Mutant(
        # Both paths ask for the hooks. If one of them still did, it would tell the calls apart.
        "the key forgets hooks on saved tensors",
        _HAZARDS,
        _all(
            _beside(signature_of, "saved_tensors_hooks", _nothing),
            _beside(in_plain_surroundings, "saved_tensors_hooks", _nothing),
        ),
    ),
    Mutant("a watch is a dispatch mode", _HAZARDS, _watched_by_a_mode),
    Mutant(
        "arguments are plain tensors inside", _HAZARDS, _beside(capture, "_alias", _plain_alias)
    ),
    Mutant(
        "an expanded argument is made dense",
        _HAZARDS,
        _beside(InputBufferPool, "buffer_like", lambda value: torch.empty_like(value).copy_(value)),
    ),
    Mutant(
        # f(x, x) and f(x, y) have equal shapes, but a write to one argument changes the other in
        # the first.
        "the key forgets which arguments are one",
        _HAZARDS,
        _beside(signature_of, "_repeated", lambda call: ()),
    ),
    Mutant(
        "defaults are those of the wrapped function",
        _HAZARDS,
        _beside(make_call, "bind", _with_defaults_of_the_inner),
    ),
    Mutant(
        # 1, 1.0 and True are equal, and give results of other dtypes.
        "the key compares contexts by ==",
        _HAZARDS,
        _beside(signature_of, "keys_in", lambda structure: ()),
    ),
    Mutant(
        "the key forgets static modules' modes",
        _HAZARDS,
        _method(Roles, "modules", _modules_of_its_own),
    ),
    Mutant(
        # The result is right. Only the list or dict that was passed in shows that a replay did not
        # fill it.
        "changes of containers are lost",
        _HAZARDS,
        _beside(capture, "changed_container", _nothing),
    ),
    Mutant(
        # The refusal goes too: with it alone in place, the call would stop before it comes to the
        # copy.
        "a view of a donated tensor is copied",
        _HAZARDS,
        _all(
            _beside(make_call, "refuse_donated_twice", _nothing),
            _method(Storages, "hold", _hold_nothing),
        ),
    ),
    Mutant(
        "two donated tensors share memory", _HAZARDS, _beside(check_call, "refuse_shared", _nothing)
    ),
    Mutant(
        "a branch on an operator's error is kept",
        _HAZARDS,
        _method(Audit, "_call", _call_without_note),
    ),
    # A replay runs no Python, so a tensor that the first run put aside is never replaced. The first
    # call is right, and so is a second one with equal inputs.
    Mutant("the first run keeps tensors", _HAZARDS, _method(Audit, "refuse_leaks", _nothing)),
    # What the function keeps of a result is memory that the next replay writes: what the caller
    # gets stays right.
    Mutant("a result may be kept", _HAZARDS, _method(Audit, "refuse_kept_results", _nothing)),
    Mutant("TorchScript reads unheard", _HAZARDS, _beside(Audit, "hearing_scripts", nullcontext)),
    Mutant("new storage of a parameter is not seen", _HAZARDS, _addresses_forgotten),
    Mutant(
        # A counter in the module has its value at the capture forever; the first call is right.
        "what a module keeps in Python is frozen",
        _HAZARDS,
        _method(Snapshot, "changes", lambda self, state=frozenset(): iter(())),
    ),
    Mutant(
        # Torch's fused kernel rounds in another way than the operators that were recorded, by the
        # last bit: the function itself would not equal its own graph.
        "the function itself takes the fast path of attention",
        _HAZARDS,
        _beside(make_call, "without_attention_fast_path", nullcontext),
    ),
    Mutant(
        "tensors in objects are not taken back",
        _HAZARDS,
        _method(_ObjectTensor, "next_values", _values_before),
    ),
    Mutant("a name that is bound anew is not seen", _HAZARDS, _names_forgotten),
    Mutant(
        "a tensor that is put in a list or a dict is not seen",
        _HAZARDS,
        _method(_Names, "note_tensors", _note_no_elements),
    ),
    Mutant(
        "the mode of a closed-over module is not seen",
        _HAZARDS,
        _beside(Outside, "_asks_for_mode", lambda kind: False),
    ),
    Mutant("nothing outside is compared", _PROGRAMS, _method(Outside, "_comparison", _nothing)),
    Mutant(
        "a replay runs without grad mode",
        _HAZARDS,
        _beside(TapeRecording, "set_grad_mode", _nothing),
    ),
    Mutant(
        "tensors of inference mode are written outside it",
        _HAZARDS,
        _beside(TapeBackend, "TapeRecording", lambda *parts, inference: TapeRecording(*parts)),
    ),
    Mutant(
        # Each result is right when it is returned. Only one that is looked at after later calls has
        # changed.
        "micro-batches lend the state",
        _HAZARDS,
        _beside(microbatch, "lends_state", lambda step: False),
    ),
    Mutant(
        # As above; the check goes too, since it refuses such a pipeline before anything runs.
        "a lent stage runs on several ranks",
        _HAZARDS,
        _all(
            _beside(pipeline, "check_lending", _nothing),
            _beside(pipeline, "lends_state", lambda step: False),
        ),
    ),
    Mutant(
        # The first call is right, and so is each later one of a name that changed only once.
        "a name that a run binds and uses is frozen",
        _HAZARDS,
        _method(_Names, "_note_carried", _nothing),
    ),
)
