"""`while_loop`: repeats a pure function while a condition on its results holds; in a graph the
whole loop is one launch."""

from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.arguments.checks import COUNT, Rule, check_values, is_int, kind_of, names_arguments
from weft.errors import CaptureError, ProgramError
from weft.torchapi.faking import reads_values
from weft.torchapi.private import (
    in_dispatch_mode,
    in_functorch_transform,
    innermost,
    innermost_storage_id,
    is_fake,
)
from weft.transforms.graphs.backends.loops import Looper, current_looper
from weft.transforms.graphs.backends.writes import watching_writes
from weft.transforms.graphs.calls.aliasing import overlap, overlaps_itself
from weft.transforms.graphs.masked_steps import DerivativesWhere, safe_next, safe_start
from weft.values.donation import donated_argnames, refuse_donated
from weft.values.keys import value_key
from weft.values.trees import (
    TreeSpec,
    leaves_with_names,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

T = TypeVar("T")

_RULES: dict[str, Rule] = {
    "cond_fun": (callable, "a function carry -> a tensor of shape [] and dtype bool"),
    "body_fun": (
        callable,
        "a function carry -> the next carry, of the same structure, shapes and dtypes",
    ),
    "max_steps": (
        lambda value: value is None or is_int(value, 1),
        f"{COUNT[1]}; or None, for no bound",
    ),
}


@names_arguments(
    "cond_fun, body_fun, init_val, and max_steps=...",
    maxiter="max_steps=...",
    max_iterations="max_steps=...",
)
def while_loop(
    cond_fun: Callable[[T], Tensor],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    max_steps: int | None = None,
) -> T:
    """Repeat `carry = body_fun(carry)` while `cond_fun(carry)` holds, as `jax.lax.while_loop` does;
    returns the last carry. It computes what this Python loop does:

        while cond_fun(carry):
            carry = body_fun(carry)

    Inside `graphify` the loop is a part of the graph, which reads the condition on the device: a
    decode loop until every request has ended is one launch. On a GPU that is a conditional node
    (`cuda-bindings`, and a driver for CUDA 12.4 or newer). Where conditional nodes are unavailable,
    the graph has `max_steps` steps, and steps after the loop's end keep the carry.

    Args:
        cond_fun: `carry -> [] bool`, on the device of the loop.
        body_fun: `carry -> carry`, with the same structure and, for each tensor, the same shape,
            dtype and device; values that are not tensors stay the same, also in type. A body that
            takes the storage of its carry (`weft.donates`) updates it in place, without a copy in
            each step; any other body returns new tensors.
        init_val: the first carry, a pytree of tensors.
        max_steps: the loop ends after this many steps, whatever `cond_fun` says; None: only
            `cond_fun` ends it.

    The result is in new memory, and each carry has the memory layout of the first one.

    A capture runs the body once on the first carry, whatever `cond_fun` says. In a graph the carry
    is data: an index by it is a gather, the host cannot read it, and the body cannot draw random
    numbers. Under torch.func's transforms, and where autograd records, the Python loop runs. Under
    `vmap`, where the condition differs from row to row, and in `shard`, up to `max_steps` steps
    run: a row that has ended keeps its carry, but still runs the body, on its last carry for which
    the condition held.

    Raises:
        ProgramError: `cond_fun` does not return a [] bool tensor; the carry changes its structure,
            a shape or a dtype; a function writes its carry without taking its storage; or the
            condition has no single value and there is no `max_steps`.
        CaptureError: in a graph, a host read, a random draw, a derivative by autograd without
            `max_steps`, or a device that cannot repeat a part of a graph.

    >>> while_loop(lambda x: x < 100, lambda x: 3 * x, torch.tensor(5))
    tensor(135)
    """
    names = (getattr(f, "__name__", kind_of(f))[:40] for f in (cond_fun, body_fun))
    call = f"while_loop({', '.join(names)}, init_val)"
    values = {"cond_fun": cond_fun, "body_fun": body_fun, "max_steps": max_steps}
    check_values(call, _RULES, values, ProgramError)
    result: T = _Loop(call, cond_fun, body_fun, max_steps).start(init_val)
    return result


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


# The dimensions of a tensor by decreasing stride; None for a leaf without strides.
_Order = tuple[int, ...] | None


def _order(leaf: Any) -> _Order:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    strides = leaf.stride()
    # `sorted` is stable: dimensions of equal stride keep their order, as in torch's `clone`.
    return tuple(sorted(range(leaf.dim()), key=lambda dim: -strides[dim]))


def _in_order(carry: Any, orders: Sequence[_Order] | None) -> Any:
    """The carry with the memory layout that it has in each step, and without lazy conjugates or
    negatives; leaves that differ are copied. A replay finds the carry at fixed addresses, so every
    way to run a loop keeps this layout."""
    if orders is None:
        return carry
    leaves, structure = tree_flatten(carry)
    return tree_unflatten(
        [_leaf_in_order(*pair) for pair in zip(leaves, orders, strict=True)], structure
    )


def _leaf_in_order(x: Any, order: _Order) -> Any:
    if order is None or not isinstance(x, Tensor) or x.layout is not torch.strided:
        return x
    x = x.resolve_conj().resolve_neg()
    step = 1
    for dim in reversed(order):
        # The stride of a dimension of size 1 says nothing.
        if x.shape[dim] > 1 and x.stride(dim) != step:
            inverse = sorted(range(len(order)), key=order.__getitem__)
            return x.permute(order).contiguous().permute(inverse)
        step *= x.shape[dim]
    return x


def _value(flag: Tensor) -> bool:
    """The value of a condition.

    Raises:
        ValueError: the flag is a fake tensor; if it were read, a trace would record the read.
        RuntimeError: the flag has a value for each row of `vmap`.
    """
    if is_fake(innermost(flag)):
        raise ValueError("a fake tensor, which has no value")
    return bool(flag)


def _holds_anywhere(flags: Tensor) -> bool | None:
    """Whether a condition holds in any row of `vmap`; None if it has no value, as in a trace."""
    rows = innermost(flags)
    if is_fake(rows):
        return None
    try:
        return bool(rows.any().item())
    except RuntimeError as error:
        if not reads_values(error):
            raise
        return None


class _Underivable(torch.autograd.Function):
    """Makes the derivative of a recorded loop's result an error: autograd has not seen its
    steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, call: str) -> Tensor:
        ctx.call = call
        # A view, so that the result is no new memory, and autograd has a node to call.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        problem = (
            "a derivative of its result in a graph, which repeats the loop and does not record its"
            " steps"
        )
        raise CaptureError(
            ctx.call, problem, "while_loop(..., max_steps=...), which the graph then has in full"
        )


def _without_derivative(x: Any, differentiated: Tensor, call: str) -> Any:
    """A result of a recorded loop; asking autograd for its derivative is an error."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return _Underivable.apply(x, differentiated, call)


class _Loop:
    """A call of `while_loop`."""

    def __init__(
        self,
        call: str,
        cond: Callable[[Any], Any],
        body: Callable[[Any], Any],
        max_steps: int | None,
    ) -> None:
        self.call = call
        self.cond = cond
        self.body = body
        self.max_steps = max_steps
        self.takes_carry = bool(donated_argnames(body))

    def start(self, init: Any) -> Any:
        """Run the loop, or record it in the capture around it."""
        for x in _tensors(init):
            refuse_donated(x, call=self.call)
        looper = current_looper()
        # Outside any capture.
        if looper is None:
            return self.run(init)
        unable = self._why_unable(init, looper)
        if unable is None:
            return self.record(init, looper)
        if self.max_steps is None:
            problem = f"a graph that cannot repeat: {unable}"
            raise CaptureError(
                self.call,
                problem,
                "while_loop(..., max_steps=...), which the graph then has in full",
            )
        return self.run_masked(init, host_reads=False)

    def _why_unable(self, init: Any, looper: Looper) -> str | None:
        """The reason why the loop cannot be recorded; None if it can.

        Without `max_steps` a loop that autograd follows is recorded all the same: only a request
        for its derivative is an error (`_Underivable`)."""
        if in_functorch_transform():
            return "a transform of torch.func inside it"
        differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(init))
        if differentiates and self.max_steps is not None:
            return "autograd inside it"
        return looper.unable

    def run(self, init: Any) -> Any:
        """The Python loop."""
        orders = self._orders(init)
        if self.takes_carry:
            taken = frozenset(map(innermost_storage_id, _tensors(init)))
        else:
            taken = frozenset()
        carry = _in_order(init, orders)
        steps = 0
        # Also right for None, which no number equals.
        while steps != self.max_steps:
            flag = self._flag(carry)
            try:
                # Whether the host can read a condition is found out by trying: torch has no test
                # for it.
                goes_on = _value(flag)
            except Exception as error:  # a row of vmap, a fake tensor
                if self.max_steps is not None:
                    return self.run_masked(init, host_reads=True)
                problem = (
                    "a condition whose value the host cannot read:"
                    f" {str(error).splitlines()[0]:.150}"
                )
                instead = (
                    "while_loop(..., max_steps=...), which then runs so many steps; or the loop"
                    " outside the transform"
                )
                raise ProgramError(self.call, problem, instead) from error
            if not goes_on:
                break
            carry = _in_order(self._step(carry), orders)
            steps += 1
        return self._owned(carry, taken)

    def run_masked(self, init: Any, *, host_reads: bool) -> Any:
        """Run up to `max_steps` steps; those after the loop's end keep the carry as it is.

        A row whose loop has ended still runs the body, on its own last carry for which `cond_fun`
        held. A row whose loop never began runs it on the first carry of a row whose loop did. The
        results of these runs are dropped, but the body must not fail there, and its derivatives
        must be finite: the derivative of `where` is 0 times theirs, which is nan for inf or nan.

        Args:
            init: the first carry.
            host_reads: whether the host may read whether any row goes on, to stop early.
        """
        if self.takes_carry:
            problem = (
                "a body that updates its carry in place, which steps after the last one cannot undo"
            )
            raise ProgramError(
                self.call, problem, "a body that returns new tensors, without weft.donates"
            )
        assert self.max_steps is not None, "the caller has seen to it"
        orders = self._orders(init)
        carry, structure = tree_flatten(_in_order(init, orders))
        live = self._flag(tree_unflatten(carry, structure))
        safe = [safe_start(live, x) for x in carry]
        for step in range(self.max_steps):
            if host_reads:
                anywhere = _holds_anywhere(live)
            else:
                anywhere = None
            if anywhere is False:
                break
            with DerivativesWhere(live, safe, anywhere=anywhere is True):
                next_carry = self._step(tree_unflatten(safe, structure), is_masked=True)
            new = tree_leaves(_in_order(next_carry, orders))
            changed = [i for i, x in enumerate(new) if isinstance(x, Tensor) and x is not safe[i]]
            for i in changed:
                carry[i] = torch.where(live, new[i], carry[i])
            if step + 1 < self.max_steps:
                live = live & self._flag(tree_unflatten(carry, structure))
                for i in changed:
                    safe[i] = safe_next(live, carry[i], safe[i])
        return self._owned(_in_order(tree_unflatten(carry, structure), orders), frozenset())

    def record(self, init: Any, looper: Looper) -> Any:
        """Record the loop: each step writes the next carry to the fixed addresses of the first."""
        leaves, structure = tree_flatten(init)
        if self.takes_carry:
            self._refuse_overlaps(init)
            buffers = leaves
        else:
            orders = self._orders(init)
            detached = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
            ordered = tree_leaves(_in_order(tree_unflatten(detached, structure), orders))
            # Each leaf is cloned by itself: leaves that share memory now may get different next
            # values.
            buffers = [x.clone() if isinstance(x, Tensor) else x for x in ordered]
        # Leaves that require grad, and later those that a step returns: a closed-over parameter
        # shows only there.
        differentiated = [x for x in _tensors(leaves) if x.requires_grad]
        # A clone, because `cond_fun` may return a part of the carry, which the steps overwrite.
        flag = self._flag(tree_unflatten(buffers, structure)).clone()
        if self.max_steps is None:
            left = None
        else:
            left = torch.full_like(flag, self.max_steps, dtype=torch.int64)

        def step() -> None:
            carry = tree_unflatten(buffers, structure)
            next_leaves = tree_leaves(self._step(carry))
            differentiated.extend(x for x in _tensors(next_leaves) if x.requires_grad)
            _write(buffers, [x.detach() if isinstance(x, Tensor) else x for x in next_leaves])
            goes_on = self._flag(tree_unflatten(buffers, structure))
            if left is not None:
                # Counted on the device: the host does not know how often the graph repeats.
                left.sub_(1)
                goes_on = goes_on & (left > 0)
            flag.copy_(goes_on)

        looper.loop(flag, _tensors(buffers), step)
        if torch.is_grad_enabled() and differentiated:
            buffers = [_without_derivative(x, differentiated[0], self.call) for x in buffers]
        return tree_unflatten(buffers, structure)

    def _orders(self, init: Any) -> tuple[_Order, ...] | None:
        """The order of dimensions in memory that each leaf keeps; None if the body takes the
        carry's storage, whose layout cannot change."""
        if self.takes_carry:
            return None
        return tuple(map(_order, tree_leaves(init)))

    def _owned(self, carry: Any, taken: Set[int]) -> Any:
        """The result in new memory, as a replay returns it, whether it repeats the body or not.

        Args:
            carry: the last carry. Its tensors may be those of the first carry, tensors that the
                body closes over, or borrowed results of the body.
            taken: the storages that the body takes and gives back; these are not copied.
        """
        return tree_map(
            lambda x: (
                x.clone() if isinstance(x, Tensor) and innermost_storage_id(x) not in taken else x
            ),
            carry,
        )

    def _refuse_overlaps(self, init: Any) -> None:
        """Raise ProgramError for a carry whose parts share memory: they cannot all have their next
        value in place."""
        leaves = [(name, x) for name, x in leaves_with_names(init) if isinstance(x, Tensor)]
        for index, (name, x) in enumerate(leaves):
            if x.layout is not torch.strided:
                continue
            instead = "weft.clone(...) of one of them, in init_val"
            if overlaps_itself(x):
                problem = f"leaf {name} of a carry in place, which has two elements at one address"
                raise ProgramError(self.call, problem, instead)
            for other, y in leaves[:index]:
                if innermost_storage_id(x) == innermost_storage_id(y) and overlap(x, y):
                    problem = f"leaves {other} and {name} of a carry in place, which share memory"
                    raise ProgramError(self.call, problem, instead)

    def _flag(self, carry: Any) -> Tensor:
        flag = self._call(self.cond, "cond_fun", carry)
        if not isinstance(flag, Tensor) or flag.dim() or flag.dtype is not torch.bool:
            instead = "a tensor of shape [] and dtype bool: (carry[0] < 3).any(), ~done.all()"
            if isinstance(flag, Tensor):
                shown = f"{flag.dtype} of shape {tuple(flag.shape)}"
            else:
                shown = kind_of(flag)
                numbers = [leaf for leaf in tree_leaves(carry) if isinstance(leaf, int | float)]
                if numbers:
                    instead = f"a tensor in init_val, which the loop can carry: torch.tensor({numbers[0]!r})"
            raise ProgramError(
                self.call, f"cond_fun returned {shown.replace('torch.', '')}", instead
            )
        return flag

    def _step(self, carry: Any, *, is_masked: bool = False) -> Any:
        """The next carry."""
        before = leaves_with_names(carry)
        structure = tree_flatten(carry)[1]
        kinds = [_kind(leaf) for _, leaf in before]  # before the body, which may change its carry
        next_carry = self._call(self.body, "body_fun", carry, is_masked=is_masked)
        if (difference := _difference(before, kinds, structure, next_carry)) is not None:
            raise ProgramError(
                self.call,
                f"body_fun returned {difference}",
                "the carry's structure, shapes and dtypes",
            )
        return next_carry

    def _call(
        self, function: Callable[[Any], Any], name: str, carry: Any, *, is_masked: bool = False
    ) -> Any:
        """Call a function of the carry. Unless it takes the carry's storage, it must not write the
        carry: a replay would write a copy. In steps that may come after the loop's end it must not
        write anything else either."""
        if self.takes_carry:
            return function(carry)
        leaves = [(path, x) for path, x in leaves_with_names(carry) if isinstance(x, Tensor)]
        # Version counters find writes cheaply, but inference tensors have none, and they do not
        # show writes to tensors outside the carry.
        if is_masked or in_dispatch_mode() or any(innermost(x).is_inference() for _, x in leaves):
            with watching_writes() as writes:
                result = function(carry)
            written = [path for path, x in leaves if innermost_storage_id(x) in writes.outside]
        else:
            before = [innermost(x)._version for _, x in leaves]
            result = function(carry)
            pairs = zip(leaves, before, strict=True)
            written = [path for (path, x), version in pairs if innermost(x)._version != version]
            writes = None
        if written:
            problem = f"{name} writes leaf {written[0] or '(the whole)'} of its carry in place"
            instead = (
                "new tensors (x + 1, not x.add_(1)); or a body marked by @weft.donates, which takes"
                " the storage"
            )
            raise ProgramError(self.call, problem, instead)
        if is_masked and writes is not None and writes.outside:
            problem = (
                f"{name} writes a tensor that is no part of its carry, and may run after the last"
                " step"
            )
            raise ProgramError(
                self.call,
                problem,
                "the tensor in the carry, and its next value in what body_fun returns",
            )
        return result


def _kind(leaf: Any) -> Any:
    """The properties of a leaf that must not change from step to step."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device)
    return leaf


def _difference(
    before: Sequence[tuple[str, Any]], kinds: Sequence[Any], structure: TreeSpec, next_carry: Any
) -> str | None:
    """How the carry that a body returned differs from the one it got; None if it does not."""
    leaves, next_structure = tree_flatten(next_carry)
    if next_structure != structure:
        return f"another structure: {next_structure}, for {structure}".replace("\n", " ")[:300]
    for (name, old), kind, new in zip(before, kinds, leaves, strict=True):
        where = f"leaf {name or '(the whole)'}"
        if isinstance(old, Tensor) != isinstance(new, Tensor):
            return f"{where} as {kind_of(new)}, which was {kind_of(old)}"
        if not isinstance(new, Tensor):
            if new is not kind and value_key(new) != value_key(kind):
                return (
                    f"{where} as {new!r:.60}, which was {kind!r:.60}: what changes must be a tensor"
                )
        elif _kind(new) != kind:
            return f"{where} of {_shown(*_kind(new))}, which was {_shown(*kind)}"
    return None


def _shown(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {shape}, {str(dtype).removeprefix('torch.')} on '{device}'"


def _write(buffers: Sequence[Any], next_leaves: Sequence[Any]) -> None:
    """Write the next carry to the addresses of this one. A leaf that was updated in place is
    already there. A value that aliases another slot of the carry is cloned first, because it might
    be overwritten before it is read."""
    storages = {innermost_storage_id(x) for x in buffers if isinstance(x, Tensor)}
    pairs = [
        (a, b)
        for a, b in zip(buffers, next_leaves, strict=True)
        if isinstance(a, Tensor) and not _is_same(a, b)
    ]
    values = [b.clone() if innermost_storage_id(b) in storages else b for _, b in pairs]
    for (buffer, _), value in zip(pairs, values, strict=True):
        buffer.copy_(value)


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same elements of one storage."""
    same = (
        innermost_storage_id(a) == innermost_storage_id(b)
        and a.storage_offset() == b.storage_offset()
    )
    same = same and a.shape == b.shape and a.stride() == b.stride()
    # By torch 2.14's types the comparison of shapes may be a SymBool.
    return bool(same and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg())
