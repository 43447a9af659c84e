"""`microbatch` runs a step on parts of its batch, and `scan` runs a step repeatedly."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from weft.arguments.checks import names_arguments
from weft.batches.batch import Batch
from weft.transforms.graphs.calls.borrowing import declare_lending, lends
from weft.transforms.pipelines.argument_checks import check_step
from weft.transforms.pipelines.parts import join, split
from weft.transforms.pipelines.worker import check_pair
from weft.values.containers import opened
from weft.values.donation import clone, declare_donated, donated_argnames, refuse_donated_in
from weft.values.schema import Schema
from weft.values.trees import find_descriptors, tree_map

F = TypeVar("F", bound=Callable[..., Any])


@names_arguments("step and parts")
def microbatch(step: F, parts: int) -> F:
    """Run a step `(params, state, batch) -> (state, out)` on at most `parts` parts of its batch,
    and thread the state through.

    The results stay the same if the step is separable by rows: what it returns for a request (for
    plain tensors, a row) depends only on that request, the params and the state of that request,
    and every output tensor holds one entry per request or token. The state must have an entry per
    request, or be a sum over requests. It must not be a mean over the batch, or a running mean that
    is updated once per step, since the step runs once per part. Sizes are checked (`join`), but
    separability cannot be: a `batch.sum(0)` with as many columns as a part has rows is joined
    without an error, and the result is wrong.

    Args:
        step: the step.
        parts: at least 1. A batch of fewer requests is split into one part per request.
            `weft.transforms.pipelines.parts.split` describes how batches are split, including
            custom batch classes. With `parts=1`, any batch works.

    Raises:
        ProgramError: `parts` is not a whole number >= 1, or the step does not return
            `(state, out)`.
        DescriptorError: a batch that cannot be split, or outputs that cannot be joined.
        DonatedError: at a call, an argument that was donated before.

    >>> import torch
    >>> double = microbatch(lambda params, state, batch: (state + len(batch), 2 * batch), 2)
    >>> double(None, 0, torch.arange(3))
    (3, tensor([0, 2, 4]))
    """

    call = check_step("microbatch", step, "parts", parts)

    @functools.wraps(step)
    def run(params: Any, state: Any, batch: Any) -> Any:
        refuse_donated_in(f"{call}(...)", params=params, state=state, batch=batch)
        outputs = []
        batches = split(batch, parts)
        for part in batches:
            state, out = check_pair(call, step(params, state, part), "(state, out)")
            # The step overwrites a lent result when it runs on the next part.
            outputs.append(clone(out) if lends(step) else out)
        # This function is declared to lend nothing, so it must not return the step's own buffer.
        return clone(state) if lends_state(step) else state, join(outputs, batches, batch)

    return cast(F, declare_lending(declare_donated(run, donated_argnames(step)), False))


def lends_state(step: Callable[..., Any]) -> bool:
    """Whether the next call of a step or stage may overwrite the state that this call returns. It
    does not if the state is donated: a donated state stays in its own storage."""
    return lends(step) and not donated_argnames(step)


def after_first(tree: Any) -> Any:
    """A batch, or a tree with batches in it, without the fields that only the first stage reads."""
    return tree_map(
        lambda x: x.after_first() if isinstance(x, Batch) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Batch),
    )


def class_of(batch: Any) -> Any:
    """The class of a batch, on which all ranks must agree: its descriptor, or the schema of its
    tensors if it has no descriptor."""
    descriptors = find_descriptors(batch)
    if descriptors:
        return descriptors[0]
    return Schema.of(opened(batch))


def class_text(batch: Any) -> str:
    """The class of a batch (or of a value with a field `batch`) as text, including whether the
    batch asks for logprobs of targets. All ranks must agree on this text, and the layout of the
    batch's messages follows from it."""
    targets = getattr(getattr(batch, "batch", batch), "targets", None)
    return f"{class_of(batch)}{'' if targets is None else ', with targets'}"


@runtime_checkable
class Repeats(Protocol):
    """A step that has a faster way to repeat itself than separate calls, as a pipeline does."""

    def __weft_repeat__(
        self, params: Any, state: Any, batch: Any, length: int, /
    ) -> tuple[Any, list[Any]]:
        """The state after `length` steps on the same batch, and the output of each."""


@names_arguments(
    "step and length: scan(step, length)(params, state, batch), where each step has the same batch",
    xs="scan(step, length)(params, state, batch): each step has the same batch",
    init="scan(step, length)(params, state, batch), where the state is carried",
    f="step=...",
)
def scan(
    step: Callable[[Any, Any, Any], tuple[Any, Any]], length: int
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Run a step `length` times on the same batch, and thread the state through. This makes a
    decode loop: a decode batch only names rows of the state, and the state holds their last tokens.

    Args:
        step: `(params, state, batch) -> (state, out)`. A pipeline overlaps its stages: its
            micro-batches are cohorts of requests, each of which waits only for its own tokens.
        length: at least 1.

    Returns:
        A step `(params, state, batch) -> (state, outs)`, where `outs` lists the output of each
        step. Unlike in `jax.lax.scan`, the outputs are not stacked, so that their dimensions keep
        the names by which a ladder pads and unpads.

    Raises:
        ProgramError: a length that is not a whole number >= 1, or a step that is not a function to
            `(state, out)`.
        DonatedError: at a call, an argument that was donated before.

    >>> double = scan(lambda params, state, batch: (2 * state, state + batch), 3)
    >>> double(None, 1, 10)
    (8, [11, 12, 14])
    """
    call = check_step("scan", step, "length", length)
    whole: Any = step

    def run(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        if isinstance(whole, Repeats):
            return whole.__weft_repeat__(params, state, batch, length)
        refuse_donated_in(f"{call}(...)", params=params, state=state, batch=batch)
        outs = []
        for _ in range(length):
            state, out = check_pair(call, step(params, state, batch), "(state, out)")
            # The step overwrites a lent result when it runs again.
            outs.append(clone(out) if lends(step) else out)
        return clone(state) if lends_state(step) else state, outs

    functools.update_wrapper(
        run, step, assigned=("__module__", "__name__", "__qualname__"), updated=()
    )
    del vars(run)["__wrapped__"]
    return declare_donated(run, donated_argnames(step))
