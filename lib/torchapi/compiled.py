"""Results of `torch.compile` in a capture: how a call of one is heard, and the kernels in it.

A call passes three places. torch's wrapper installs Dynamo's callback; Dynamo evaluates the guards
of the frames that follow, and runs its own code in their place; that code calls what a back end
made of a graph. A guard compares the dispatch keys of this thread, the function modes and
autocast's cache with those of the compilation. So the watches of a capture are off from the first
place on, and on again in the third. There a back end in Python calls operators, as any function
does. Inductor launches kernels instead, which no watch can see: one call of its code is passed to
the watches as one operator, `GRAPH`.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from weft.torchapi.private import uncompiled
from weft.torchapi.watching import OperatorWatch, set_in_sight, watches_see, watching_alone

_WRAPPER = "_TorchDynamoContext.__call__.<locals>"
_DISABLED = "DisableContext.__call__.<locals>._fn"
# The beginnings of the names that Dynamo gives to compiled graphs, and to the code after a break.
_GRAPH_NAME = "__compiled_fn"
_AFTER_BREAK = ("__resume_at", "torch_dynamo_resume_in")
# Parts of torch that compile what they are given, although the user has not called torch.compile.
_COMPILES_ITSELF = ("torch._higher_order_ops", "torch.nn.attention")
# Parts of torch between the caller and the wrapper.
_BETWEEN = ("torch._dynamo", "torch.nn.modules")


class Listener(Protocol):
    """Hears of the compiled functions that are called in its context."""

    def begins(self, caller: types.FrameType, *, by_torch: bool, cuda_graphs: str | None) -> bool:
        """A compiled function is called.

        Args:
            caller: the frame that calls it; if `by_torch`, of the torch function that the user's
                code called.
            by_torch: whether a function of torch compiled it.
            cuda_graphs: what makes it use CUDA graphs of its own, as torch.compile takes it; None
                if nothing does.

        Returns:
            Whether it may run. If not, `refused` is raised.
        """

    def refused(self) -> BaseException:
        """The error of the last `begins` that returned False."""

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """The surroundings of a call without a capture, for guards and for compilations."""

    def compiles(self, reason: str) -> None:
        """A frame is about to be compiled. An error from here takes the place of that.

        Args:
            reason: what says why no earlier compilation fits; may be empty.
        """

    def broken(self) -> BaseException:
        """The error for a function of which parts are not compiled."""

    def makes_constant(self, tensor: Tensor) -> None:
        """Dynamo has made a tensor of a number in Python, as the input of a graph."""

    def ends(self, num_graphs: int) -> None:
        """A compiled function has returned.

        Args:
            num_graphs: the number of graphs that it ran.
        """


_LISTENER: ContextVar["_Hearing | None"] = ContextVar("weft.compiled_listener", default=None)
_UNCOMPILED: ContextVar[bool] = ContextVar("weft.runs_uncompiled", default=False)


@attrs.define(eq=False)
class _Call:
    """A call of a compiled function, or of a graph in one.

    Args:
        frame: the frame of torch that ends it.
        callback: what that frame installs first; a graph's installs nothing.
        stack: the contexts to leave at the end.
    """

    frame: types.FrameType
    callback: Any
    stack: contextlib.ExitStack
    is_graph: bool = False
    num_graphs: int = 0


@attrs.frozen(eq=False)
class _Hearing:
    """A listener, and the calls that run now, innermost last."""

    listener: Listener
    calls: list[_Call] = attrs.field(factory=list)

    def begin(self, frame: types.FrameType, callback: Any) -> Any:
        """A compiled function is called; return the callback to install."""
        caller, by_torch = _caller_of(frame)
        call = _Call(frame, callback, contextlib.ExitStack())
        if self.listener.begins(caller, by_torch=by_torch, cuda_graphs=_cuda_graphs(callback)):
            call.stack.enter_context(self.listener.surroundings())
            if callback is not False:
                call.callback = self._heard(callback)
        else:
            # An error must not be raised here: torch would not undo what it has set by now.
            call.callback = self._refusing()
        call.stack.enter_context(_watches(see=False))
        self.calls.append(call)
        return call.callback

    def _heard(self, callback: Any) -> Any:
        def compiling(frame: Any, *args: Any, **kwargs: Any) -> Any:
            self.listener.compiles(_reason(frame, callback))
            return callback(frame, *args, **kwargs)

        # Dynamo looks for compilations of the same back end.
        compiling._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
        return compiling

    def _refusing(self) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise self.listener.refused()

        return refuse

    def begin_graph(self, frame: types.FrameType) -> None:
        """Code of Dynamo calls a graph."""
        outer = self.calls[-1]
        caller = frame.f_back
        assert caller is not None
        if _is_broken(caller, outer.frame):
            raise self.listener.broken()
        outer.num_graphs += 1
        call = _Call(frame, None, contextlib.ExitStack(), is_graph=True)
        call.stack.enter_context(_watches(see=True))
        self.calls.append(call)
        _pass_graphs_to_watches()

    def install(self, frame: types.FrameType, callback: Any) -> None:
        """A frame of torch installs a callback, which may end its call."""
        for i, call in enumerate(self.calls):
            if call.frame is frame and callback is not call.callback:
                # Those above have ended too: where Dynamo does not look at frames any more, a graph
                # installs no callback at its end.
                while len(self.calls) > i:
                    self.calls.pop().stack.close()
                if not call.is_graph and sys.exc_info()[1] is None:
                    self.listener.ends(call.num_graphs)
                return


@contextlib.contextmanager
def hearing_compiled(listener: Listener) -> Iterator[None]:
    """A context in which a listener hears of the compiled functions that this thread calls."""
    _hear()
    token = _LISTENER.set(_Hearing(listener))
    try:
        yield
    finally:
        _LISTENER.reset(token)


@functools.cache
def _hear() -> None:
    """Make torch's wrappers tell the listener of their thread when they begin and end. If Dynamo is
    not imported yet, which takes seconds, they will from its import on."""
    name = "torch._dynamo.eval_frame"
    if name in sys.modules:
        _patch(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AtImport(name))


class _AtImport(importlib.abc.MetaPathFinder):
    """Patches a module once it is imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch(module: Any) -> None:
    callback_of = module._callback_from_stance
    install = module._maybe_set_eval_frame

    def hearing_callback_of(callback: Any) -> Any:
        hearing = _LISTENER.get()
        installed = callback_of(callback)
        if _UNCOMPILED.get():
            return None
        if hearing is None:
            return installed
        frame = sys._getframe(1)
        is_inside = bool(hearing.calls) and not hearing.calls[-1].is_graph
        if is_inside:
            if frame.f_code.co_qualname == _DISABLED and _is_graph(frame):
                hearing.begin_graph(frame)
        elif frame.f_code.co_qualname.startswith(_WRAPPER) and installed is not None:
            return hearing.begin(frame, installed)
        return installed

    def hearing_install(callback: Any) -> Any:
        hearing = _LISTENER.get()
        try:
            if hearing is not None and hearing.calls:
                hearing.install(sys._getframe(1), callback)
        finally:
            # Last, for Dynamo would compile the code above.
            prior = install(callback)
        return prior

    package: Any = torch
    tensor_of = package._as_tensor_fullprec

    @uncompiled
    @functools.wraps(tensor_of)
    def hearing_tensor_of(number: Any) -> Tensor:
        tensor: Tensor = tensor_of(number)
        hearing = _LISTENER.get()
        if hearing is not None and hearing.calls:
            hearing.listener.makes_constant(tensor)
        return tensor

    module._callback_from_stance = hearing_callback_of
    module._maybe_set_eval_frame = hearing_install
    package._as_tensor_fullprec = hearing_tensor_of


@contextlib.contextmanager
def running_uncompiled() -> Iterator[None]:
    """A context in which this thread runs the function itself where it calls a compiled one."""
    _hear()
    # In newer versions of torch, which else refuse a function of which nothing is compiled.
    module = sys.modules.get("torch._dynamo.eval_frame")
    context = getattr(module, "_use_eager_on_nested_compile", None)
    token = _UNCOMPILED.set(True)
    try:
        with contextlib.nullcontext() if context is None else context():
            yield
    finally:
        _UNCOMPILED.reset(token)


@contextlib.contextmanager
def _watches(*, see: bool) -> Iterator[None]:
    """A context in which the watches see operators, or do not."""
    before = set_in_sight(see)
    try:
        yield
    finally:
        set_in_sight(before)


def _caller_of(wrapper: types.FrameType) -> tuple[types.FrameType, bool]:
    """The frame that calls a compiled function, and whether a function of torch compiled it."""
    frame = wrapper
    while frame.f_back is not None and _name(frame).startswith(_BETWEEN):
        frame = frame.f_back
    by_torch = _name(frame).startswith(_COMPILES_ITSELF)
    while by_torch and frame.f_back is not None and _name(frame.f_back).startswith("torch."):
        frame = frame.f_back
    return frame, by_torch


def _name(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_graph(frame: types.FrameType) -> bool:
    """Whether a frame of torch runs a graph, called by code of Dynamo."""
    caller = frame.f_back
    if caller is None:
        return False
    names = [name for name in caller.f_code.co_names if name.startswith(_GRAPH_NAME)]
    graph = frame.f_locals["fn"] if names else None
    return any(
        getattr(caller.f_globals.get(name), "_torchdynamo_orig_callable", None) is graph
        for name in names
    )


def _is_broken(code: types.FrameType, wrapper: types.FrameType) -> bool:
    """Whether code of Dynamo that calls a graph, below a wrapper, is one of several parts of a
    function between which Python runs."""
    names = (code.f_code.co_name, *code.f_code.co_names)
    if any(name.startswith(_AFTER_BREAK) for name in names):
        return True
    frame = code.f_back
    while frame is not None and frame is not wrapper:
        if not _name(frame).startswith("torch."):
            return True
        frame = frame.f_back
    return False


def _cuda_graphs(callback: Any) -> str | None:
    """The option by which the compiled functions of a callback use CUDA graphs of their own; None
    if they do not."""
    backend = callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None)
    if name == "cudagraphs":
        return "backend='cudagraphs'"
    if name != "inductor":
        return None
    switch = "triton.cudagraphs"
    config = getattr(backend, "config", {})
    if config.get(switch, torch._inductor.config.triton.cudagraphs):
        return "mode='reduce-overhead' or 'max-autotune', or options={'triton.cudagraphs': True}"
    return None


def _reason(frame: Any, callback: Any) -> str:
    """Why no earlier compilation of a frame fits; empty if there is none, or torch does not say."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    module: Any = torch._dynamo.eval_frame
    guards: Any = torch._dynamo.guards
    with contextlib.suppress(Exception):
        entries = _debug_get_cache_entry_list(frame.f_code)
        if not entries:
            return ""
        reasons = guards.get_and_maybe_log_recompilation_reasons(
            entries, frame, module.innermost_backend(callback), skip_logging=True
        )
        # The guard that fails, without the code that it comes from.
        return str(reasons[0]).splitlines()[0].partition("#")[0].strip()
    return ""


@attrs.define(eq=False)
class GraphRun:
    """A call of code that Inductor made of a graph.

    Args:
        run: takes the inputs as a list, and returns the outputs as one.
        plain_inputs: the inputs that are no tensors, by their position.
        written: the positions of the tensors that it writes.
        read: the positions of the other tensors.
        watch: what sees the operators that it calls; None: nothing does.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    plain_inputs: dict[int, Any]
    written: list[int]
    read: list[int]
    watch: OperatorWatch | None = None

    def __repr__(self) -> str:
        return "compiled"


class _Graph:
    """`GRAPH`, which looks to watches like the overload of an operator."""

    namespace = "inductor"
    tags: tuple[Any, ...] = ()
    _overloadname = "default"
    _schema = torch._C.parse_schema(
        "inductor::graph(Any run, Tensor(a!)[] written, Tensor[] read) -> Tensor[]"
    )

    @property
    def overloadpacket(self) -> "_Graph":
        return self

    def overloads(self) -> list[str]:
        return []

    def name(self) -> str:
        return self._schema.name

    def __repr__(self) -> str:
        return "inductor.graph"

    def __call__(
        self, run: GraphRun, written: Sequence[Tensor], read: Sequence[Tensor]
    ) -> list[Any]:
        inputs = dict(run.plain_inputs)
        inputs.update(zip(run.written, written, strict=True))
        inputs.update(zip(run.read, read, strict=True))
        in_order = [inputs[i] for i in range(len(inputs))]
        if run.watch is None:
            return list(run.run(in_order))
        with watching_alone(run.watch):
            return list(run.run(in_order))


GRAPH: Any = _Graph()


def _pass_graphs_to_watches() -> None:
    """Make the code that Inductor makes of a graph call `GRAPH` where a watch sees operators, and
    compile derivatives where none does."""
    # What is not imported has made no part of the graph.
    if (module := sys.modules.get("torch._inductor.output_code")) is not None:
        _pass_to_watches(module.CompiledFxGraph)
    if "torch._functorch._aot_autograd.runtime_wrappers" in sys.modules:
        _compile_derivatives_out_of_sight()


@functools.cache
def _compile_derivatives_out_of_sight() -> None:
    """Hide from watches the compilation of a graph's derivative in its first backward pass."""
    module: Any = sys.modules["torch._functorch._aot_autograd.runtime_wrappers"]
    around_compilation = module.track_graph_compiling

    @contextlib.contextmanager
    def unseen_compilation(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _watches(see=False), around_compilation(*args, **kwargs):
            yield

    module.track_graph_compiling = unseen_compilation


@functools.cache
def _pass_to_watches(kind: Any) -> None:
    call = kind.__call__

    @functools.wraps(call)
    def seen_call(self: Any, inputs: Any) -> Any:
        watch = watches_see()
        if watch is None:
            return call(self, inputs)
        written = [i for i in self.mutated_input_idxs if isinstance(inputs[i], Tensor)]
        read = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and i not in written]
        plain_inputs = {i: x for i, x in enumerate(inputs) if not isinstance(x, Tensor)}
        run = GraphRun(functools.partial(call, self), plain_inputs, written, read)
        tensors = [inputs[i] for i in written], [inputs[i] for i in read]
        if isinstance(inputs, list):
            inputs.clear()  # as the code itself does, so that memory is free early
        with _watches(see=False):
            return watch.operator(GRAPH, (run, *tensors), {})

    kind.__call__ = seen_call
