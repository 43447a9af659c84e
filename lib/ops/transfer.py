"""`weft::send` and `weft::recv`: transfers between ranks as operators, so that a graph or a tape repeats them.

What carries them out is an `End`, one rank's end of its edges, named by a number: operators take no objects.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, library

from weft.errors import ProgramError


class End(Protocol):
    """What starts to send tensors to a peer, and receives into tensors from one, in order."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None:
        """Start to send; the tensors' memory must stay as it is until a fence, or on a device until the stream is
        there."""

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None:
        """Fill the tensors with what the peer sent under `tag`; on a device in the order of the stream."""


_ENDS: "weakref.WeakValueDictionary[int, End]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()

library.define("weft::send", "(Tensor[] tensors, int end, int peer, int tag) -> ()")
library.define("weft::recv", "(Tensor(a!)[] tensors, int end, int peer, int tag) -> ()")


def register(end: End) -> int:
    """The number under which the operators know `end`, for as long as somebody else holds it."""
    number = next(_NUMBERS)
    _ENDS[number] = end
    return number


def _find(number: int) -> End:
    end = _ENDS.get(number)
    if end is None:
        raise ProgramError(f"weft::send or weft::recv on end {number}", "a transport that is closed", "make a new one")
    return end


@library.impl("weft::send", ("CPU", "CUDA"))
def _send(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    _find(end).send(tensors, peer, tag)


@library.impl("weft::recv", ("CPU", "CUDA"))
def _recv(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    _find(end).recv(tensors, peer, tag)


def _nothing(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    """What they compute, as far as shapes go."""


library.register_fake("weft::send", _nothing)
library.register_fake("weft::recv", _nothing)


def send(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    """Start to send tensors to rank `peer`, who receives them under the same tag.

    Args:
        tensors: contiguous, of any dtype; not empty.
        end: from `register`.
        peer: the rank.
        tag: what both ends agree that this message is; part of a captured graph.
    """
    torch.ops.weft.send(list(tensors), end, peer, tag)


def recv(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    """Fill tensors with what rank `peer` sent under the same tag."""
    torch.ops.weft.recv(list(tensors), end, peer, tag)
