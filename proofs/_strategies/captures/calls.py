"""Sequences of calls, each of which differs from the one before in a single property that a graph
must notice."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda z: z,
    "transposed": lambda z: z.t(),
    "conjugate": lambda z: z.conj(),
    "imaginary": lambda z: z.imag,
    # A view with the negative bit set, a flag of its own beside the conjugate bit.
    "negative": lambda z: z.conj().imag,
    "as real": lambda z: torch.view_as_real(z).flatten(1),
    "one row": lambda z: z[:1],
}
"""Views of one storage, because tensors captured by reference differ in more than their address."""

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x,
    "float64": lambda x: x.double(),
    "int32": lambda x: x.int(),
    "one row": lambda x: x[:1],
    "transposed": lambda x: x.t(),
    # Another device, on any machine.
    "meta": lambda x: x.to("meta"),
}
"""The inputs that a graph copies into its buffers."""

# 1, True and 1.0 are equal in Python, and a planted bug takes one for the other.
STATICS: tuple[bool | int | float, ...] = (1, 2, True, 1.0)


@attrs.frozen
class Call:
    """A call of `called`: a parameter of `worlds`, a view of it, an input, and a static value."""

    world: int
    place: str
    value: str
    static: bool | int | float

    def arguments(
        self, worlds: tuple[Tensor, ...], x: Tensor
    ) -> tuple[Tensor, Tensor, bool | int | float]:
        """The call's arguments."""
        return PLACES[self.place](worlds[self.world]), VALUES[self.value](x), self.static


def called(params: Tensor, x: Tensor, static: float) -> tuple[Tensor, Tensor, Tensor]:
    """A pure function whose result depends on each property of its arguments."""
    return (
        params.sum(-1) * static,
        torch.cumsum(x, 0) * static,
        # Its dtype is that of the Python value, so that 1, True and 1.0 give three results.
        torch.full((2,), static, device=x.device),
    )


def worlds(device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Two complex matrices [2, 2]."""
    z = torch.tensor([[1 + 2j, 3 - 1j], [-2 + 5j, 4 + 7j]], device=device)
    # Alike in all but address and values.
    return z, z + 1


@st.composite
def call_sequences(draw: st.DrawFn) -> tuple[Call, ...]:
    """Two to six calls, each of which differs from the one before in at most one argument."""
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "world": st.integers(0, 1),
        "place": st.sampled_from(sorted(PLACES)),
        "value": st.sampled_from(sorted(VALUES)),
        "static": st.sampled_from(STATICS),
    }
    # The first call is fixed, since only a later one can meet a graph of another call.
    calls = [Call(0, "plain", "float32", 1)]
    for _ in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(sorted(kinds)))
        calls.append(attrs.evolve(calls[-1], **{name: draw(kinds[name])}))
    return tuple(calls)
