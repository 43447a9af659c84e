"""`Graphified`: the result of `graphify`, a function that memoizes one captured graph per key and
replays it."""

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, Self, TypeVar

import attrs
import torch
from tqdm.auto import tqdm

from weft.errors import CaptureError
from weft.ops.transfers.collective import current_place
from weft.settings import is_batch_invariant, may_replay
from weft.torchapi.inductor import Compiler
from weft.torchapi.patches import without_attention_fast_path
from weft.torchapi.private import (
    WithoutFunctionModes,
    in_plain_surroundings,
    num_function_modes,
    uncompiled,
)
from weft.torchapi.ranges import is_profiled, profile_range
from weft.transforms.graphs.cache import NO_REPLAY, Cache, Eager, Plan
from weft.transforms.graphs.calls.borrowing import lend, watches_borrows
from weft.transforms.graphs.calls.call import (
    Call,
    Roles,
    check_call,
    enclosing_transform,
    hashable_signature,
    inline_reason,
    make_call,
    modules_keep_training,
    runs_inline,
)
from weft.transforms.graphs.calls.fast_path import Missed, modes_around
from weft.transforms.graphs.calls.key import CacheInfo, without_grad_mode
from weft.transforms.graphs.calls.method import Method
from weft.transforms.graphs.calls.results import keep_in_place
from weft.transforms.graphs.capture import compile_class
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.explain import Explanation, miss_between
from weft.transforms.graphs.ladder import Ladder
from weft.transforms.graphs.lower import (
    Compiled,
    Lowered,
    compile_ahead,
    lower,
    refuse_call,
    rehearse,
)
from weft.transforms.graphs.memory import (
    CapturedGraphs,
    MemoryAnalysis,
    MemoryEstimate,
    analysis_of,
    captured_graphs,
    estimate,
)
from weft.transforms.graphs.options import Graphable, check_compiler
from weft.values.donation import donate
from weft.values.trees import tree_leaves

P = ParamSpec("P")
R = TypeVar("R")

# Seconds before a progress bar shows: a notebook keeps every bar, so bars of short captures would
# be noise.
_PROGRESS_BAR_DELAY = 1.0
# For `clear_caches`. Weak, so that a function's graphs go with the function.
_ALL: "weakref.WeakSet[Graphified[..., Any]]" = weakref.WeakSet()


class Graphified(Generic[P, R]):
    """A function and its captured graphs, as `graphify` returns it."""

    __wrapped__: Callable[P, R]

    def __init__(self, graphable: Graphable) -> None:
        functools.update_wrapper(self, graphable.fn, updated=())
        # Attributes of the function show on this object, but must not hide the methods of this
        # class; so `update_wrapper` may not copy them itself.
        attributes = getattr(graphable.fn, "__dict__", {})
        extra_attributes = {
            name: value for name, value in attributes.items() if not hasattr(Graphified, name)
        }
        vars(self).update(extra_attributes | {"__wrapped__": graphable.fn})
        self.__weft_lends__ = graphable.borrow
        self._graphable = graphable
        self._fn: Callable[P, R] = graphable.fn
        self._lock = threading.RLock()
        self._cache = Cache(graphable)
        _ALL.add(self)

    @property
    def __weft_owns_results__(self) -> Self:
        """Marks results as copies (`weft.transforms.graphs.calls.borrowing.owns_results`), which
        they are unless the function lends them."""
        return self

    @property
    def ladder(self) -> Ladder[Any] | None:
        """The classes that may be captured; None allows any signature."""
        return self._graphable.ladder

    @uncompiled
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Take the fast path if an earlier call was like this one, else the general path."""
        call = None
        modes = None
        if in_plain_surroundings() and may_replay():
            if num_function_modes() or is_batch_invariant() or current_place():
                return self._call_in_modes(args, kwargs)
            fast_paths = self._cache.fast_paths
            modes = ()
            missed: list[Missed[Plan]] = []
            for fast_path in fast_paths.by_form.get((len(args), *kwargs), ()):
                if (read := fast_path.read(args, kwargs)) is None:
                    continue
                if (plan := fast_path.find(read)) is not None:
                    with self._lock:
                        return self._replay(
                            plan, fast_path.take_donated(read) if fast_path.num_donated else read[1]
                        )
                missed.append((fast_path, read))
            call = fast_paths.known_call(missed, args, kwargs)
        return self._call(args, kwargs, call, modes)

    def _call_in_modes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Take the fast path of calls in function modes, in `batch_invariant()` or on a rank of a
        mesh. The modes are off meanwhile, because torch would call them for every property that the
        fast path reads of a tensor."""
        # Only the general path marks results as borrowed, which `check_borrowed` needs.
        if watches_borrows():
            return self._call(args, kwargs)
        modes = modes_around()
        fast_paths = self._cache.fast_paths
        with WithoutFunctionModes():
            missed: list[Missed[Plan]] = []
            for fast_path in fast_paths.by_form.get((len(args), *kwargs, *modes), ()):
                if (read := fast_path.read(args, kwargs)) is None:
                    continue
                if (plan := fast_path.find(read)) is not None:
                    with self._lock:
                        return self._replay(
                            plan, fast_path.take_donated(read) if fast_path.num_donated else read[1]
                        )
                missed.append((fast_path, read))
            call = fast_paths.known_call(missed, args, kwargs)
        return self._call(args, kwargs, call, modes)

    def _replay(self, plan: Plan, leaves: Sequence[Any], *, in_range: bool = False) -> R:
        """Fill the input buffers from the leaves of a call, whose donated leaves are already taken;
        replay; make the result.

        Args:
            in_range: whether the range of this replay in torch's profiles has begun.
        """
        # Not a context for every replay: entering one costs more than this check.
        if not in_range and is_profiled():
            with profile_range("weft: replay {}", plan.graph.title):
                return self._replay(plan, leaves, in_range=True)
        if plan.wait_for_last_replay is not None:
            plan.wait_for_last_replay()
        if plan.fill is not None:
            plan.fill(leaves)
        try:
            plan.run()
        except Exception as error:
            raise self._with_donation_note(error) from None
        count = self._cache.count
        handover = plan.handover
        count.replays = plan.graph.last_use = count.replays + 1
        result: R = handover.build(handover.clone_or_lend(handover.outputs), leaves)
        return result

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepared_call: Call | None = None,
        modes: tuple[Any, ...] | None = None,
    ) -> R:
        """Answer any call, including the first of its signature.

        Args:
            prepared_call: the call, if its arguments are already sorted by role.
            modes: the function modes around the call; None if it cannot take the fast path.
        """
        call = prepared_call or make_call(self._graphable.roles, self._graphable.name, args, kwargs)
        if runs_inline(call):
            return self._inline(call, args, kwargs)
        with self._lock:
            plan = self._plan(call, args, kwargs, modes)
        return self._answer(plan, call, args, kwargs)

    def _plan(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modes: tuple[Any, ...] | None,
    ) -> Plan | Eager:
        """The plan of a call, or the reason why the function itself runs. If later calls may use
        the plan, the fast path finds it from now on."""
        plan, is_kept = self._cache.plan(call, hashable_signature(call, self._graphable.name))
        if isinstance(plan, Plan) and is_kept and modes is not None and plan.may_run():
            with WithoutFunctionModes() if modes else contextlib.nullcontext():
                self._cache.fast_paths.add(
                    args, kwargs, modes, call, plan, self._condition(plan, call)
                )
        return plan

    def _condition(self, plan: Plan, call: Call) -> Callable[[Plan], bool] | None:
        """The condition under which the fast path may use a plan for calls like this one; None if
        there is none."""
        holds, training = plan.condition(), modules_keep_training(call, self._graphable.roles)
        if training is None:
            return holds
        # The plan is an argument: a closure over it would keep an evicted graph alive.
        return lambda plan: training() and (holds is None or holds(plan))

    def _inline(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the function itself, and count the call unless it is inside another capture or
        transform."""
        if enclosing_transform() is None:
            with self._lock:
                self._cache.note_inline(lambda: inline_reason(call))
        return self._run_without_graph(args, kwargs)

    def _run_without_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run the function without a graph, with the same bits in the result as a graph's."""
        with without_attention_fast_path():
            return self._fn(*args, **kwargs)

    def _answer(
        self, plan: Plan | Eager, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> R:
        """Replay the graph, or run the function itself if there is no graph or if the graph may not
        replay here."""
        if isinstance(plan, Eager) or not plan.may_run():
            with self._lock:
                if isinstance(plan, Eager):
                    self._cache.eager_calls.note(plan.reason)
                elif plan.graph.needs_autograd():
                    self._cache.note_inline(
                        functools.partial(self._cache.needs_autograd_reason, plan.graph)
                    )
                else:
                    self._cache.eager_calls.note(NO_REPLAY)
            return keep_in_place(
                self._run_without_graph(args, kwargs), self._graphable.roles.donated, call
            )
        with self._lock:
            result = self._replay(plan, (*self._take_donated(call), *call.copied_leaves))
            if watches_borrows():
                return lend(result, plan.graph.outputs, self._graphable.name, self._cache.count)
            return result

    def _with_donation_note(self, error: Exception) -> Exception:
        """Add a note about the donated arguments to an error that a replay raised."""
        if donated := ", ".join(self._graphable.roles.donated):
            error.add_note(
                f"{self._graphable.name} took {donated} before its replay failed: their storage"
                " holds what the replay had written by then. Continue from a copy (weft.clone)."
            )
        return error

    def _take_donated(self, call: Call) -> list[Any]:
        """Take the donated arguments from the caller, and return all leaves by reference, donated
        ones first."""
        roles = self._graphable.roles
        donated = {name: call.references[name] for name in roles.donated if name in call.references}
        taken = [
            donate(value, to=f"{self._graphable.name}({name})") for name, value in donated.items()
        ]
        return [*tree_leaves(taken), *call.reference_leaves[call.num_donated :]]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, which becomes the first argument and part of the key, if the
        function itself would bind; bound methods and callable objects do not."""
        fn = self._graphable.fn
        binds = hasattr(type(fn), "__get__") and not isinstance(fn, types.MethodType)
        if binds and instance is not None:
            return Method(self, instance)
        return self

    def _example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Make a call whose arguments serve as examples: nothing is taken from the caller."""
        call = make_call(self._graphable.roles, self._graphable.name, args, kwargs)
        hashable_signature(call, self._graphable.name)
        check_call(call, self._graphable.name)
        return call

    def capture(self, /, *args: P.args, **kwargs: P.kwargs) -> CacheInfo:
        """Capture every class of the ladder, largest first, with a progress bar; without a ladder,
        this call's signature.

        The arguments serve as examples: nothing is donated, and no state changes. If the device's
        memory is full, a warning says so, and later calls use the graphs that exist; on a rank of a
        mesh, that is an error.

        Raises:
            CaptureError: the ladder has more classes than `max_captures`; also whatever a call
                raises.
        """
        call = self._example(args, kwargs)
        rungs = self._cache.rungs(call)
        max_captures = self._graphable.max_captures
        if max_captures is not None and len(rungs) > max_captures:
            problem = f"a ladder of {len(rungs)} classes, and max_captures={max_captures}"
            raise CaptureError(
                f"{self._graphable.name}.capture(...)",
                problem,
                "call it, and it captures what each call needs",
            )
        with self._lock:
            for decision in _with_bar(rungs, f"capture {self._graphable.name}"):
                if self._cache.find(key := self._cache.key(call, decision)) is None:
                    try:
                        self._cache.capture(call, decision, key)
                    except torch.OutOfMemoryError:
                        self._cache.note_full_memory(decision)
                        break
        return self.cache_info()

    def compile_ahead(self, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Compile the kernels that `capture` will launch, several at once, with a progress bar; or
        the kernels of the call itself, if no class of the ladder covers it. On a CPU there are none.
        With a `compiler`, what `capture` will record is compiled too, class by class, on any device.

        Nothing is captured, and no state changes. The function runs once per class, with zeros as
        the results of weft's own operators, so it should consist of these operators (transfers
        excepted). Without `compile_ahead`, a capture compiles its kernels one after another.
        """
        call = self._example(args, kwargs)
        cache = self._cache
        with self._lock:
            if cache.compilations is not None and cache.decide(call).mode != "none":
                missing = [
                    rung for rung in cache.rungs(call) if cache.find(cache.key(call, rung)) is None
                ]
                backend = cache.backend_for(call)
                for rung in _with_bar(missing, f"compile {self._graphable.name}"):
                    compile_class(self._graphable, call, rung, backend, cache.compilations)
        compile_kernels(self, *args, **kwargs)

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> "Lowered[R]":
        """Run the function once on its own buffers, without side effects, and list its operators.

        The result prints as that listing; its `compile()` captures the graph for calls of this
        signature.
        """
        call = self._example(args, kwargs)
        decision = self._cache.decide(call)
        if decision.mode == "none":
            instead = "a ladder with a class that covers it, or call the function itself"
            raise CaptureError(f"{self._graphable.name}.lower(...)", decision.reason, instead)
        with self._lock:
            backend = self._cache.backend_for(call)
            return lower(
                self._graphable,
                call,
                decision,
                backend.device,
                functools.partial(self._compile, call, decision),
            )

    def _compile(
        self,
        call: Call,
        decision: Decision[Any],
        lowered: "Lowered[R]",
        compiler: Compiler | None = None,
    ) -> "Compiled[R]":
        if compiler not in (None, self._graphable.compiler):
            check_compiler(f"{self._graphable.name}.lower(...).compile(...)", compiler)
            other = Graphified[P, R](attrs.evolve(self._graphable, compiler=compiler))
            return other._compile(call, decision, lowered)
        call = attrs.evolve(call)  # drops the cached key: a parameter may have moved since `lower`
        with self._lock:
            key = self._cache.key(call, decision)
            graph = self._cache.find(key) or self._cache.capture(call, decision, key)
            plan = self._cache.make_plan(graph, call, decision)
        signature = hashable_signature(call, self._graphable.name)

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
            new_call = make_call(self._graphable.roles, self._graphable.name, args, kwargs)
            if runs_inline(new_call):
                return self._inline(new_call, args, kwargs)
            # The graph is stale: the graphified function captures anew, or raises if it is frozen.
            if not plan.reads_the_same():
                return self._call(args, kwargs)
            if (other := hashable_signature(new_call, self._graphable.name)) != signature:
                if without_grad_mode(other) == without_grad_mode(signature):
                    return self._call(args, kwargs)
                refuse_call(
                    lowered,
                    miss_between(
                        other, signature, new_call.leaf_names(), self._graphable.roles.donated
                    ),
                )
            return self._answer(plan, new_call, args, kwargs)

        return Compiled(lowered, graph, self._graphable.compiler, run)

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Say whether this call would replay, capture, or run the function itself, and why, without
        doing it."""
        call = make_call(self._graphable.roles, self._graphable.name, args, kwargs)
        if reason := inline_reason(call):
            return Explanation(Decision("none", None, reason), False, f"runs inline: {reason}")
        hashable_signature(call, self._graphable.name)
        return self._cache.explain(call)

    def freeze(self) -> "Graphified[P, R]":
        """Make every later miss raise CacheMissError, which names the field that differed, instead
        of capturing.

        A batch that no class of the ladder covers is not a miss: it runs eagerly, as before
        (`cache_info().eager`). So does a call that autograd must see, or a call with a sparse
        argument (`explain`). Inside `weft.no_capture()` there are no misses either, because nothing
        would be captured there."""
        self._cache.frozen = True
        return self

    def cache_info(self) -> CacheInfo:
        """The numbers of captures, replays, eager calls by reason, and graphs held."""
        return self._cache.info()

    def graphs(self) -> CapturedGraphs:
        """Each graph held, in the order of capture: pieces, operators, bytes and seconds, as a
        table and as a plot."""
        return captured_graphs(
            self._graphable.name,
            [(key, entry.graph) for key, entry in self._cache.entries.items()],
            self._cache.info(),
            self._graphable.compiler,
        )

    def memory_analysis(self) -> MemoryAnalysis:
        """The memory of the graphs held, as measured at their capture."""
        return analysis_of(self._cache.graphs())

    def memory_estimate(self, /, *args: P.args, **kwargs: P.kwargs) -> MemoryEstimate:
        """Estimate the memory of the ladder's graphs (without a ladder, of this call's) before they
        are captured.

        The arguments serve as examples. A few classes are captured in a separate pool, and dropped
        again.
        """
        call = self._example(args, kwargs)
        with self._lock:
            return estimate(
                self._graphable,
                call,
                self._cache.rungs(call),
                lambda: self._cache.new_backend(call),
                self._cache.compilations,
            )

    def cache_clear(self) -> None:
        """Drop all graphs, their memory and the counts, and end a freeze."""
        with self._lock:
            self._cache.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the function without its graphs, for example in `copy.deepcopy` of a
        module that holds it."""
        return type(self), (self._graphable,)

    def _repr_html_(self) -> str:
        return self.graphs()._repr_html_()

    def __repr__(self) -> str:
        return f"<graphify({self._graphable.name}), {len(self._cache.entries)} graphs>"


def _with_bar(rungs: Sequence[Decision[Any]], description: str) -> Iterable[Decision[Any]]:
    """Classes, with a progress bar while they are gone through."""
    bar: Iterable[Decision[Any]] = tqdm(
        rungs,
        desc=description,
        unit="graph",
        leave=False,
        disable=None,
        delay=_PROGRESS_BAR_DELAY,
    )
    return bar


def compile_kernels(graphified: Graphified[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """`Graphified.compile_ahead` without the part of a `compiler`, which would compile its own
    kernels in a context of `compiling_at_once`."""
    call = graphified._example(args, kwargs)
    with graphified._lock:
        if graphified._cache.backend_for(call).device.type == "cuda":
            compile_ahead(graphified._graphable, call, graphified._cache)


def rehearse_call(graphified: Graphified[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Prepare for calls like this one: plan the replay if their class is captured.

    If no class covers them, run the function once on padding, if there is memory, so that
    libraries are ready. Arguments and default generators are left as they are. Unlike a
    capture, this does not refuse a function that writes to anything else."""
    call = graphified._example(args, kwargs)
    if runs_inline(call):
        return
    is_plain = in_plain_surroundings() and may_replay() and not watches_borrows()
    with graphified._lock:
        if (decision := graphified._cache.decide(call)).mode == "none":
            rehearse(graphified._graphable, call, graphified._cache)
        elif graphified._cache.find(graphified._cache.key(call, decision)) is not None:
            graphified._plan(call, args, kwargs, modes_around() if is_plain else None)


def roles_of(graphified: Graphified[..., Any]) -> Roles:
    """The role of each argument: static, donated, by reference, or copied."""
    return graphified._graphable.roles


def classes_held(graphified: Graphified[..., Any]) -> tuple[tuple[str, Any], ...]:
    """The mode and the class (None without a ladder) of each graph held, in the order of
    capture."""
    return tuple((key.mode, key.descriptor) for key in graphified._cache.entries)


def num_pieces(graphified: Graphified[..., Any]) -> tuple[int, ...]:
    """The number of pieces of each graph held, in the order of capture."""
    return tuple(graph.recording.num_pieces for graph in graphified._cache.graphs())


def clear_caches() -> None:
    """Call `cache_clear()` on every graphified function that is alive."""
    for graphified in list(_ALL):
        graphified.cache_clear()
