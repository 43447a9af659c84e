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


def _call_without_note(self: Audit, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _plain_alias(leaf: Any, like: Any, grad: bool) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.data
    return leaf


def _with_defaults_of_the_inner(roles: Roles, name: str, args: Any, kwargs: Any) -> Any:
    bound = bind(roles, name, args, kwargs)
    bound.apply_defaults()
    return bound


def _modules_of_its_own(self: Roles, statics: Any) -> tuple[nn.Module, ...]:
    if isinstance(self.module, nn.Module):
        return tuple(self.module.modules())
    return ()


@contextmanager
def _addresses_forgotten() -> Iterator[None]:
    """Only names are compared, and not where the tensors lie."""
    make = Outside.__init__

    def init(self: Outside, fn: Any, external: Any, thorough: bool) -> None:
        make(self, fn, (), thorough)

    with mock.patch.object(Outside, "__init__", init):
        yield


@contextmanager
def _names_forgotten() -> Iterator[None]:
    """Only addresses are compared, and not what the names stand for."""
    make = Outside.__init__

    def init(self: Outside, fn: Any, external: Any, thorough: bool) -> None:
        make(self, _nothing, external, False)

    with mock.patch.object(Outside, "__init__", init):
        yield


def _note_no_elements(
    self: _Names, storages: Any, note: Callable[..., Any] = _Names.note_tensors
) -> None:
    self._in_places.clear()
    note(self, storages)


def _hold_nothing(self: Storages, tensors: Any) -> bool:
    return False


def _values_before(self: _ObjectTensor, module: nn.Module) -> list[Any]:
    return [self.tensor.clone()] * len(self.places)


# The bugs of `graphify` that only odd functions show.
CAPTURES = (
    Mutant(
        "a refusal that the function swallows is forgotten",
        _HAZARDS,
        _method(Audit, "refuse", _forget_refusal),
    ),
    Mutant("a capture advances generators", _HAZARDS, _method(Randomness, "restore", _nothing)),
    Mutant(
        "a capture draws from the default generator",
        _HAZARDS,
        _method(Randomness, "private_draws", nullcontext),
    ),
    Mutant(
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
        "changes of containers are lost", _HAZARDS, _beside(capture, "changed_container", _nothing)
    ),
    Mutant(
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
    Mutant("the first run keeps tensors", _HAZARDS, _method(Audit, "refuse_leaks", _nothing)),
    Mutant("a result may be kept", _HAZARDS, _method(Audit, "refuse_kept_results", _nothing)),
    Mutant("TorchScript reads unheard", _HAZARDS, _beside(Audit, "hearing_scripts", nullcontext)),
    Mutant("new storage of a parameter is not seen", _HAZARDS, _addresses_forgotten),
    Mutant(
        "what a module keeps in Python is frozen",
        _HAZARDS,
        _method(Snapshot, "changes", lambda self, state=frozenset(): iter(())),
    ),
    Mutant(
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
        "micro-batches lend the state",
        _HAZARDS,
        _beside(microbatch, "lends_state", lambda step: False),
    ),
    Mutant(
        "a lent stage runs on several ranks",
        _HAZARDS,
        _all(
            _beside(pipeline, "check_lending", _nothing),
            _beside(pipeline, "lends_state", lambda step: False),
        ),
    ),
)
