"""Planted bugs of attention back ends: windows, and the graphs that they can be in."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from weft.ops.attention import backends
from weft.ops.attention.backends import AttentionBackend
from weft.ops.attention.functional import attend
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.stages.attention.context import arguments

_attend: Any = attend
_ATTENDED = find("L21", "with another attention")
_BACKENDS = "weft.ops.attention.backends"


def _of_the_first_layer(
    config: Any, layer: Any, q: Tensor, batch: Any, window: int | None = None
) -> Any:
    """All layers have the first one's window."""
    # Right for every model whose layers have one window, and for contexts shorter than all windows.
    return arguments(config, layer, q, batch, config.windows[0] if window is None else window)


def _one_longer(*args: Any) -> Tensor:
    """A window has one token more."""
    *rest, window = args
    mixed: Tensor = _attend(*rest, window + 1 if window else 0)
    return mixed


_BY_HANDLE = backends.attend_by_handle


def _without_window(q: Tensor, kv_pages: Tensor, *rest: Any) -> Tensor:
    """Between two graphs, nothing has a window."""
    *where, _, handle, begins = rest
    # Attention between two graphs is an operator of its own, called by a handle: a test of whole
    # graphs does not come here.
    return _BY_HANDLE(q, kv_pages, *where, 0, handle, begins)


def _of_the_step_before(q: Tensor, kv_pages: Tensor, *rest: Any) -> Tensor:
    """A step whose tensors have the memory of the one before it, as in a graph, has its plan too."""
    *where, _ = rest
    # `begins` is what makes a new plan where the addresses are those of the last step, and in a
    # graph they always are. A back end without a plan computes the right result all the same.
    return _BY_HANDLE(q, kv_pages, *where, False)


_CALL = AttentionBackend.__call__


def _with_kept_plans(
    self: AttentionBackend, query_len: int | None, *args: Any, plans: Any = None
) -> Tensor:
    """The plan of a step is that of each later one of the same shapes."""
    return _CALL(self, query_len, *args, plans=vars(_with_kept_plans).setdefault("plans", {}))


@contextmanager
def _in_any_graph() -> Iterator[None]:
    """A back end runs inside of every graph, whatever it declares."""

    def always(backend: AttentionBackend, query_len: int | None) -> bool:
        return True

    # Both modules have the function under a name of their own, so a patch of one leaves the other
    # right.
    called_from = _BACKENDS, "weft.stages.custom.functions"
    with ExitStack() as stack:
        for home in called_from:
            stack.enter_context(replace(home, "can_run_inside", always)())
        yield


# The laws compare with dense attention and not with the same back end in another mode, since a bug
# of the back end would then be on both sides.
_CONTEXT = "weft.stages.attention.context"

# At least one planted bug for each way in which custom attention can be wrong.
ATTENTION = (
    Mutant(
        "the first layer's window is every layer's",
        _ATTENDED,
        replace(_CONTEXT, "arguments", _of_the_first_layer),
    ),
    Mutant("a window has one token more", _ATTENDED, replace(_BACKENDS, "attend", _one_longer)),
    Mutant(
        "nothing between graphs has a window",
        _ATTENDED,
        replace(_BACKENDS, "attend_by_handle", _without_window),
    ),
    Mutant(
        "a step has the plan of the one before it",
        _ATTENDED,
        replace(_BACKENDS, "attend_by_handle", _of_the_step_before),
    ),
    Mutant(
        "a plan is kept outside of its step",
        _ATTENDED,
        partial(mock.patch.object, AttentionBackend, "__call__", _with_kept_plans),
    ),
    Mutant(
        "a back end is in every graph, whatever it declares",
        _ATTENDED,
        _in_any_graph,
    ),
)
