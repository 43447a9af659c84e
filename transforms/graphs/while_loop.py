"""`while_loop`: repeats a pure function while a condition on its results holds; one launch in a graph."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.arguments.checks import COUNT, Rule, check_values, is_int, kind_of
from weft.donation import clone, donated_argnames
from weft.errors import CaptureError, ProgramError
from weft.torchapi.private import in_functorch_transform, storage_id
from weft.transforms.graphs.backends.loops import Looper, current_looper
from weft.transforms.graphs.calls.borrowing import lends
from weft.trees import TreeSpec, leaves_with_names, tree_flatten, tree_leaves, tree_unflatten

T = TypeVar("T")

_RULES: dict[str, Rule] = {
    "cond_fun": (callable, "a function carry -> a tensor of shape [] and dtype bool"),
    "body_fun": (callable, "a function carry -> the next carry, of the same structure, shapes and dtypes"),
    "max_steps": (lambda value: value is None or is_int(value, 1), f"{COUNT[1]}; or None, for no bound"),
}


def while_loop(
    cond_fun: Callable[[T], Tensor], body_fun: Callable[[T], T], init_val: T, *, max_steps: int | None = None
) -> T:
    """Repeat `carry = body_fun(carry)` while `cond_fun(carry)` holds, as `jax.lax.while_loop` does; returns the last
    carry. It computes what this Python loop does:

        while cond_fun(carry):
            carry = body_fun(carry)

    Inside `graphify` the loop is a part of the graph, which reads the condition on the device: a decode loop until
    every request has ended is one launch. On a GPU that is a conditional node (`cuda-bindings`, and a driver for CUDA
    12.4 or newer). Where there can be none, the graph has `max_steps` steps; each after the last one keeps the carry.

    Args:
        cond_fun: `carry -> [] bool`, on the device of the loop.
        body_fun: `carry -> carry`, with the same structure and, for each tensor, the same shape, dtype and device;
            values that are not tensors stay equal. A body that takes the storage of its carry (`weft.donates`) updates
            it in place, without a copy in each step.
        init_val: the first carry, a pytree of tensors.
        max_steps: the loop ends after this many steps, whatever `cond_fun` says; None: only `cond_fun` ends it.

    A capture runs the body once on the first carry, whatever `cond_fun` says; in a graph it cannot draw random numbers.
    Under torch.func's transforms, and where autograd records, the Python loop runs; under `vmap`, where the condition
    differs from row to row, `max_steps` steps do.

    Raises:
        ProgramError: `cond_fun` returns something else, the carry changes its structure, a shape or a dtype, or the
            condition has no single value and there is no `max_steps`.
        CaptureError: in a graph, a host read, a random draw, or a device that cannot repeat.

    >>> while_loop(lambda x: x < 100, lambda x: 3 * x, torch.tensor(5))
    tensor(135)
    """
    names = (getattr(f, "__name__", kind_of(f))[:40] for f in (cond_fun, body_fun))
    call = f"while_loop({', '.join(names)}, init_val)"
    values = {"cond_fun": cond_fun, "body_fun": body_fun, "max_steps": max_steps}
    check_values(call, _RULES, values, ProgramError)
    result: T = _Loop(call, cond_fun, body_fun, max_steps).start(init_val)
    return result


class _Loop:
    """A call of `while_loop`."""

    def __init__(
        self, call: str, cond: Callable[[Any], Any], body: Callable[[Any], Any], max_steps: int | None
    ) -> None:
        self.call, self.cond, self.body, self.max_steps = call, cond, body, max_steps

    def start(self, init: Any) -> Any:
        """Run the loop, or record it in the capture around it."""
        looper = current_looper()
        if looper is None:
            return self.run(init)
        unable = "a transform of torch.func inside it" if in_functorch_transform() else looper.unable
        if unable is None:
            return self.record(init, looper)
        if self.max_steps is None:
            seen = f"a graph that cannot repeat: {unable}"
            raise CaptureError(self.call, seen, "while_loop(..., max_steps=...), which the graph then has in full")
        return self.run_masked(init)

    def run(self, carry: Any) -> Any:
        """The Python loop."""
        first, steps = carry, 0
        while steps != self.max_steps:
            flag = self._flag(carry)
            try:
                goes_on = bool(flag)
            except Exception as error:  # a row of vmap, a fake tensor, a tensor that is traced
                if self.max_steps is not None:
                    return self.run_masked(first)
                seen = f"a condition whose value the host cannot read: {str(error).splitlines()[0]:.150}"
                instead = (
                    "while_loop(..., max_steps=...), which then runs so many steps; or the loop outside the transform"
                )
                raise ProgramError(self.call, seen, instead) from error
            if not goes_on:
                break
            carry, steps = self._step(carry), steps + 1
        return clone(carry) if steps and lends(self.body) else carry

    def run_masked(self, carry: Any) -> Any:
        """`max_steps` steps, of which each after the last one keeps the carry as it is."""
        if donated_argnames(self.body):
            seen = "a body that updates its carry in place, which steps after the last one cannot undo"
            raise ProgramError(self.call, seen, "a body that returns new tensors, without weft.donates")
        assert self.max_steps is not None, "the caller has seen to it"
        live = self._flag(carry)
        for step in range(self.max_steps):
            new = self._step(carry)
            leaves, structure = tree_flatten(carry)
            pairs = zip(leaves, tree_leaves(new), strict=True)
            chosen = [torch.where(live, b, a) if isinstance(a, Tensor) and b is not a else a for a, b in pairs]
            carry = tree_unflatten(chosen, structure)
            if step + 1 < self.max_steps:
                live = live & self._flag(carry)
        return carry

    def record(self, init: Any, looper: Looper) -> Any:
        """Record the loop: the carry has fixed addresses, to which each step writes the next one."""
        leaves, structure = tree_flatten(init)
        in_place = bool(donated_argnames(self.body))
        buffers = [x.clone() if isinstance(x, Tensor) and not in_place else x for x in leaves]
        flag = self._flag(tree_unflatten(buffers, structure)).clone()
        left = None if self.max_steps is None else torch.full_like(flag, self.max_steps, dtype=torch.int64)

        def step() -> None:
            made = self._step(tree_unflatten(buffers, structure))
            _write(buffers, tree_leaves(made))
            goes_on = self._flag(tree_unflatten(buffers, structure))
            if left is not None:
                left.sub_(1)
                goes_on = goes_on & (left > 0)
            flag.copy_(goes_on)

        looper.loop(flag, step)
        return tree_unflatten(buffers, structure)

    def _flag(self, carry: Any) -> Tensor:
        flag = self.cond(carry)
        if not isinstance(flag, Tensor) or flag.dim() or flag.dtype is not torch.bool:
            shown = f"{flag.dtype} of shape {tuple(flag.shape)}" if isinstance(flag, Tensor) else kind_of(flag)
            instead = "a tensor of shape [] and dtype bool: (carry[0] < 3).any(), ~done.all()"
            raise ProgramError(self.call, f"cond_fun returned {shown.replace('torch.', '')}", instead)
        return flag

    def _step(self, carry: Any) -> Any:
        """The next carry."""
        before = leaves_with_names(carry)
        structure = tree_flatten(carry)[1]
        kinds = [_kind(leaf) for _, leaf in before]  # read now: a body may change its argument
        made = self.body(carry)
        if (seen := _difference(before, kinds, structure, made)) is not None:
            raise ProgramError(self.call, f"body_fun returned {seen}", "the carry's structure, shapes and dtypes")
        return made


def _kind(leaf: Any) -> Any:
    """What must not change from step to step."""
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf


def _difference(before: Sequence[tuple[str, Any]], kinds: Sequence[Any], structure: TreeSpec, made: Any) -> str | None:
    """What a body returned that its carry was not; None if there is nothing."""
    leaves, found = tree_flatten(made)
    if found != structure:
        return f"another structure: {found}, for {structure}".replace("\n", " ")[:300]
    for (name, old), kind, new in zip(before, kinds, leaves, strict=True):
        where = f"leaf {name or '(the whole)'}"
        if isinstance(old, Tensor) != isinstance(new, Tensor):
            return f"{where} as {kind_of(new)}, which was {kind_of(old)}"
        if not isinstance(new, Tensor):
            if new is not kind and new != kind:
                return f"{where} as {new!r:.60}, which was {kind!r:.60}: what changes must be a tensor"
        elif _kind(new) != kind:
            return f"{where} of {_shown(*_kind(new))}, which was {_shown(*kind)}"
    return None


def _shown(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {shape}, {str(dtype).removeprefix('torch.')} on '{device}'"


def _write(buffers: Sequence[Any], made: Sequence[Any]) -> None:
    """Write the next carry to the addresses of this one. What was updated in place is there already; what is another
    part of the carry is copied first, since it may be overwritten before it is read."""
    own = {storage_id(x) for x in buffers if isinstance(x, Tensor)}
    pairs = [(a, b) for a, b in zip(buffers, made, strict=True) if isinstance(a, Tensor) and not _is_same(a, b)]
    values = [b.clone() if storage_id(b) in own else b for _, b in pairs]
    for (buffer, _), value in zip(pairs, values, strict=True):
        buffer.copy_(value)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of one storage."""
    same = storage_id(a) == storage_id(b) and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
