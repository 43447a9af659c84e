"""`watching_writes`: finds the storages that a function writes but did not make itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.torchapi.private import DispatchMode, num_dispatch_modes, storage_id
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.operators import flat_tensors, tensors_in, written


class Writes:
    """The storages that operators wrote, as `storage_id` gives them.

    Args:
        outside: the written storages that existed before.
    """

    def __init__(self) -> None:
        self.outside = set[int]()
        self._new_storages = set[int]()

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what an operator wrote and made."""
        inputs = {storage_id(x) for x in flat_tensors(args, kwargs)}
        if func is torch.ops.aten.lift_fresh.default:  # its input is a new tensor of Python numbers
            inputs.clear()
        self.outside.update(
            {storage_id(x) for x in written(func, args, kwargs)} - self._new_storages
        )
        self._new_storages.update({storage_id(x) for x in tensors_in(result)} - inputs)


class _Watch(OperatorWatch):
    def __init__(self, writes: Writes) -> None:
        self._writes = writes

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.pass_on(func, args, kwargs)
        self._writes.note(func, args, kwargs, result)
        return result


class _Mode(DispatchMode):
    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._writes.note(func, args, kwargs or {}, result)
        return result


@contextmanager
def watching_writes() -> Iterator[Writes]:
    """Context that collects the writes of the operators in it."""
    writes = Writes()
    # Under a dispatch mode (a trace of another transform) a watch would not see the operators.
    with _Mode(writes) if num_dispatch_modes() else _Watch(writes):
        yield writes
