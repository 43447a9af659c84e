"""A class of batches of one's own, and batches of it, as a user would write them."""

import attrs
from torch import Tensor

import weft


@attrs.frozen
class Length:
    """A class of batches of one's own."""

    steps: int

    def covers(self, other: "Length") -> bool:
        return self.steps >= other.steps


@weft.pytree
@attrs.frozen(eq=False)
class Signal:
    """A batch of one's own: x [steps], with as much behind it as its class has more."""

    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps"))
