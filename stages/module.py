"""`from_module`: any `nn.Module` as a stage, through `torch.func.functional_call`."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from weft.arguments.checks import kind_of
from weft.display.summary import Summarized
from weft.donation import donates
from weft.errors import ProgramError


@attrs.frozen(eq=False, repr=False)
class ModuleStage(Summarized):
    """A module taken apart into a pure function and its values.

    Args:
        stage: `(params, state, batch, x) -> (state, y)`.
        params: the module's parameters by name.
        state: its buffers by name; a buffer that the module updates (running statistics) comes back in the new state.
    """

    stage: Callable[[dict[str, Tensor], dict[str, Tensor], Any, Any], tuple[dict[str, Tensor], Any]]
    params: dict[str, Tensor]
    state: dict[str, Tensor]


def from_module(module: nn.Module) -> ModuleStage:
    """Make a stage of `module`. It is called on `x`, or on the batch if it is the first stage (`x` is None).

    Args:
        module: a run of the stage changes nothing in it, not even its buffers.

    Returns:
        The stage, its parameters, and its buffers as the state.

    Raises:
        ProgramError: it is not a module.

    >>> made = from_module(nn.Linear(2, 1))
    >>> state, y = made.stage(made.params, made.state, torch.ones(3, 2), None)
    >>> y.shape
    torch.Size([3, 1])
    """

    _check_module(module)

    @donates("state")
    def stage(params: dict[str, Tensor], state: dict[str, Tensor], batch: Any, x: Any) -> tuple[dict[str, Tensor], Any]:
        values = {**params, **state}
        y = torch.func.functional_call(module, values, (batch if x is None else x,))
        return {name: values[name] for name in state}, y  # the module may have replaced a buffer

    vars(stage)["__weft_module__"] = module  # whose training mode `graphify` asks for
    stage.__name__ = stage.__qualname__ = f"stage {type(module).__name__}"
    params = {name: p.detach() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    return ModuleStage(stage, params, buffers)


def _check_module(module: Any) -> None:
    if isinstance(module, nn.Module):
        return
    seen = f"{getattr(module, '__name__', module)!s:.60}, {kind_of(module)} and not an nn.Module"
    instead = "a function (params, state, batch, x) -> (state, y) is a stage as it is"
    if isinstance(module, type) and issubclass(module, nn.Module):
        seen, instead = f"{module.__name__}, the class", f"a module of it: {module.__name__}(...)"
    raise ProgramError("weft.stages.from_module(module)", seen, instead)
