"""`weft::send` and `weft::recv`: transfers between ranks as operators, so that a graph or a tape
can replay them.

An `End`, one rank's end of its edges, executes them. Operators cannot take objects, so a number
stands for the end.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import ProgramError
from weft.ops.register import define


class End(Protocol):
    """A rank's end of its edges: it sends tensors to peers and receives tensors from them, in
    order."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None:
        """Start to send; the tensors must not be modified until a fence, or on a device until the
        stream reaches the transfer."""

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None:
        """Fill the tensors with the peer's message `tag`; on a device, in stream order."""


# Weak, so that a captured graph, which holds only the number, does not keep a transport open.
_REGISTERED: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(executor: Any) -> int:
    """A number that stands for an `End`, or for a `Member` of collectives, in the operators, as
    long as the caller keeps that object alive."""
    number = next(_NUMBERS)
    _REGISTERED[number] = executor
    return number


def find(number: int, call: str) -> Any:
    """The end or the member for which a number stands.

    Raises:
        ProgramError: it no longer exists; `call` names the operator's call.
    """
    endpoint = _REGISTERED.get(number)
    if endpoint is None:
        raise ProgramError(call, "a transport that is closed", "make a new one")
    return endpoint


def _find(number: int) -> End:
    end: End = find(number, f"weft::send or weft::recv on end {number}")
    return end


def _send(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    _find(end).send(tensors, peer, tag)


def _recv(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    _find(end).recv(tensors, peer, tag)


define("send", _send, fake=lambda: None)
define("recv", _recv, writes=("tensors",), fake=lambda: None)


def send(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    """Start to send tensors to rank `peer`, which receives them under the same tag.

    Args:
        tensors: contiguous, of any dtype, not empty.
        end: the number from `register`.
        peer: the rank that receives.
        tag: identifies the message on both ends; a captured graph contains it.
    """
    torch.ops.weft.send(list(tensors), end, peer, tag)


def recv(tensors: Sequence[Tensor], end: int, peer: int, tag: int) -> None:
    """Fill tensors with the message that rank `peer` sent under the same tag."""
    torch.ops.weft.recv(list(tensors), end, peer, tag)
