"""`OperatorWatch`: what a watch sees, also when watches nest, and that torch lets go of it."""

import gc
import weakref
from typing import Any

import torch

from weft.torchapi.watching import OperatorWatch, unwatched, watched


class Names(OperatorWatch):
    """Collects the names of operators."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(func._schema.name)
        return self.pass_on(func, args, kwargs)


def test_a_watch_sees_operators_and_nothing_outside() -> None:
    watch = Names()
    x = torch.ones(3)
    with watch:
        assert watched()
        x.sin()
        with unwatched():
            x.cos()
    x.tan()
    assert watch.names == ["aten::sin"]
    assert not watched()


def test_the_outer_watch_sees_what_the_inner_one_calls() -> None:
    outer = Names()
    inner = Names()
    x = torch.ones(3)
    with outer:
        with inner:
            x.sin()
        x.cos()
    assert (inner.names, outer.names) == (["aten::sin"], ["aten::sin", "aten::cos"])


def test_a_watch_is_released_and_not_before_its_end() -> None:
    """torch 2.11 takes a reference to what it stashes for a thread without acquiring it."""
    references = []
    for _ in range(50):
        watch = Names()
        references.append(weakref.ref(watch))
        with watch, Names():
            torch.ones(3, requires_grad=True).sin().sum().backward()
        assert "aten::cos" in watch.names
        del watch
    gc.collect()
    assert [reference for reference in references if reference() is not None] == []
