"""The persistent back end: graphs in which runs of weft's operators are one kernel each (`weft.ops.persistent`).

While a function is captured, the calls that an instruction could take are put off: their results are handed out
unwritten. Any other operator but a view, a loop, and the end of the function let them run first, as programs of which
each is one launch. So a program has all calls between two operators that it cannot take. What reads a result in another
way than by an operator of the thread, or a kernel of Triton that it launches, may see it unwritten.
"""

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.persistent.instructions import FIELDS, Instruction
from weft.ops.persistent.matching import Call, Matched, match, results_of
from weft.ops.persistent.program import RUN, TABLES, Tables, is_one, operands_of, processors
from weft.ops.products.parts import sum_parts
from weft.torchapi.private import BelowAutograd, is_composite
from weft.torchapi.watching import OperatorWatch, unwatched
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.backends.loops import Looper, current_looper, looping
from weft.transforms.graphs.backends.operators import ONLY_MEMORY, map_tensors
from weft.transforms.graphs.calls.buffers import InputBufferPool

_SHORTEST = 4
"""Instructions of a program. Fewer operators run as they are."""


class Fuser(OperatorWatch):
    """A watch that puts calls off, and runs them as programs.

    Args:
        programs: of a launch, among which products are cut into parts; 1: they are whole.
        tables: those that the programs of a captured graph read; None: on the CPU.
        split_at: operators that run as they are, because the graph is split at them.
    """

    def __init__(self, programs: int, tables: Tables | None = None, split_at: Set[str] = frozenset()) -> None:
        super().__init__()
        self.programs, self.tables, self.split_at = programs, tables, split_at
        self._calls: list[Call] = []
        self._inference = False  # whether they were called in inference mode

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inference is not (inference := torch.is_inference_mode_enabled()):
            self.flush()
            self._inference = inference
        may_wait = not kwargs and func._schema.name not in self.split_at and not _autocasts()
        if may_wait and (outs := results_of(func, args, self.programs, self._empty)) is not None:
            self._calls.append(Call(func, map_tensors(Tensor.detach, args), tuple(x.detach() for x in outs)))
            return outs[0] if len(outs) == 1 else outs
        if not _only_views(func):
            self.flush()
        return self.pass_on(func, args, kwargs)

    def _empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        options = {"dtype": dtype, "device": like.device, "pin_memory": False}
        made: Tensor = self.pass_on(torch.ops.aten.empty.memory_format, (list(shape),), options)
        return made

    def finish(self) -> None:
        """Run the calls that were put off, when no operator is being called."""
        with unwatched(), BelowAutograd():
            self.flush()

    def flush(self) -> None:
        """Run the calls that were put off, while an operator is being called."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        if self._inference is torch.is_inference_mode_enabled():
            self._run(calls)
            return
        with torch.inference_mode(self._inference):
            self._run(calls)

    def _run(self, calls: Sequence[Call]) -> None:
        run = list[Matched]()
        for each in match(calls):
            if isinstance(each, Matched) and is_one([*(one.instruction for one in run), each.instruction]):
                run.append(each)
                continue
            self._run_program(run)
            run = [each] if isinstance(each, Matched) else []
            if isinstance(each, Call):
                self._run_call(each)
        self._run_program(run)

    def _run_program(self, matched: Sequence[Matched]) -> None:
        instructions = [each.instruction for each in matched]
        if len(instructions) < _SHORTEST or not self._has_room(instructions):
            for each in matched:
                for call in each.calls:
                    self._run_call(call)
            return
        given = operands_of(instructions)
        self.pass_on(RUN, (list(given.reads), list(given.writes), given.text), {})

    def _has_room(self, instructions: Sequence[Instruction]) -> bool:
        return self.tables is None or self.tables.left >= 2 * len(instructions) * FIELDS

    def _run_call(self, call: Call) -> None:
        """Run a call as it is, into the results that were handed out."""
        made = self.pass_on(call.func, call.args, {})
        for out, value in zip(call.outs, (made,) if isinstance(made, Tensor) else made, strict=True):
            if out.shape != value.shape:  # other parts
                self.pass_on(torch.ops.aten.zero_.default, (out,), {})
                out, value = out[0] if out.dim() == 3 else out, sum_parts(value, out.dtype)
            self.pass_on(torch.ops.aten.copy_.default, (out, value), {})

    @contextmanager
    def watching_launches(self) -> Iterator[None]:
        """A context in which what was put off also runs before each launch of a kernel in Triton, which may read it."""
        if self.tables is None:
            yield
            return
        from weft.ops.kernel_triton import before_launches  # imported here so that weft imports without triton

        with before_launches(self.finish):
            yield

    @contextmanager
    def watching_loops(self) -> Iterator[None]:
        """A context in which what was put off also runs before each loop, and at the end of each of its steps."""
        outer = current_looper()
        if outer is None:
            yield
            return
        with looping(_Flushing(self, outer)):
            yield


@attrs.frozen(eq=False)
class _Flushing:
    """What records loops as `looper` does, after what `fuser` has put off. (A class inside of the method would be a
    cycle, which keeps what the function reads until Python collects it.)"""

    fuser: Fuser
    looper: Looper

    @property
    def unable(self) -> str | None:
        return self.looper.unable

    def loop(self, flag: Tensor, step: Callable[[], None]) -> None:
        def whole() -> None:
            step()
            self.fuser.finish()

        self.fuser.finish()
        self.looper.loop(flag, whole)


def _autocasts() -> bool:
    """Whether autocast is on, which changes what the operators compute when they are called."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@functools.cache
def _only_views(func: Any) -> bool:
    """Whether an operator only makes a view of its argument, or memory that is yet unwritten."""
    schema = func._schema
    if func.namespace != "aten":  # one of others may read and write whatever its schema says
        return False
    if is_composite(func):  # `reshape`, `contiguous` and `to` come whole in inference mode, and may copy
        return False
    writes = any(x.alias_info is not None and x.alias_info.is_write for x in schema.arguments)
    views = bool(schema.returns) and all(x.alias_info is not None for x in schema.returns)
    return not writes and (views or func.overloadpacket in ONLY_MEMORY)


@attrs.frozen(eq=False)
class PersistentBackend:
    """Another back end, whose captures run programs.

    Args:
        inner: `cuda` or `tape`.
    """

    inner: Any
    name: str = "persistent"
    _tables: list[Tables] = attrs.field(factory=list)

    @property
    def device(self) -> torch.device:
        """That of the inner back end."""
        device: torch.device = self.inner.device
        return device

    @property
    def input_buffers(self) -> InputBufferPool:
        """Those of the inner back end."""
        pool: InputBufferPool = self.inner.input_buffers
        return pool

    @property
    def wait_for_last_replay(self) -> Callable[[], None] | None:
        """That of the inner back end."""
        wait: Callable[[], None] | None = self.inner.wait_for_last_replay
        return wait

    def allocating(self) -> AbstractContextManager[None]:
        """That of the inner back end."""
        context: AbstractContextManager[None] = self.inner.allocating()
        return context

    def capture(self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str] = frozenset()) -> Any:
        """Capture `fn` with its calls as programs."""
        tables = self._room() if self.device.type == "cuda" else None
        token = TABLES.set(tables)
        try:
            recording = self.inner.capture(self.changed(fn, split_at), audit, split_at)
        finally:
            TABLES.reset(token)
        if tables is None:
            return recording
        with self.allocating():
            tables.fill()
        return attrs.evolve(recording, external=(*recording.external, tables.memory))

    def changed(self, fn: Callable[[], Any], split_at: Set[str] = frozenset()) -> Callable[[], Any]:
        """`fn` with its calls as programs, but for those that `split_at` names."""
        programs = processors(self.device) if self.device.type == "cuda" else 1

        def run() -> Any:
            with Fuser(programs, TABLES.get(), split_at) as fuser, fuser.watching_loops(), fuser.watching_launches():
                result = fn()
                fuser.finish()
            return result

        return run

    def release_output_memory(self, recording: Any, made: Set[int]) -> Any:
        """As the inner back end does it."""
        return self.inner.release_output_memory(recording, made)

    def _room(self) -> Tables:
        """Tables with room for a capture."""
        if not self._tables or not self._tables[-1].has_room:
            with self.allocating():
                self._tables[:] = [Tables(self.device)]
        return self._tables[-1]
