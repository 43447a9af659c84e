"""Which layers a stage owns."""

import attrs

from weft.errors import ProgramError


@attrs.frozen
class StageLayout:
    """The half-open range of layers `start .. stop` that stage `index` of `num_stages` owns.

    The first stage owns the embedding too, the last one the final norm and the head.

    Raises:
        ProgramError: a stage that does not exist, or one without layers.
    """

    index: int
    num_stages: int
    start: int
    stop: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.index < self.num_stages:
            seen = f"index={self.index}, num_stages={self.num_stages}"
            raise ProgramError(repr(self), seen, "number the stages from 0 to num_stages - 1")
        if not 0 <= self.start < self.stop or (self.first and self.start != 0):
            seen = f"start={self.start}, stop={self.stop}"
            raise ProgramError(repr(self), seen, "give every stage at least one layer, and stage 0 layer 0")

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this stage computes the logits."""
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> range:
        """The indices of its layers in the whole model."""
        return range(self.start, self.stop)


def split_layers(num_layers: int, num_stages: int) -> tuple[StageLayout, ...]:
    """Contiguous stages whose sizes differ by at most one.

    A pipeline is as fast as its slowest stage. The last stage also computes the head, a matrix as large as several
    layers, and the first one the embedding, a mere look-up; so the layers left over go to the stages nearest the
    middle, to the earlier one of two as near, and the last stage never gets one.

    Args:
        num_layers: of the model.
        num_stages: from one to one a layer.

    Raises:
        ProgramError: fewer than one stage, or more stages than layers.

    >>> [stage.stop - stage.start for stage in split_layers(30, 4)]
    [7, 8, 8, 7]
    """
    if not 1 <= num_stages <= num_layers:
        raise ProgramError(
            f"split_layers({num_layers}, {num_stages})",
            f"{num_layers} layers for {num_stages} stages",
            f"use 1 to {num_layers} stages, so that each owns a layer" if num_layers > 0 else "use a model with layers",
        )
    least, left_over = divmod(num_layers, num_stages)
    by_nearness = sorted(range(num_stages), key=lambda i: (abs(2 * i - (num_stages - 1)), i))
    sizes = [least + (i in by_nearness[:left_over]) for i in range(num_stages)]
    starts = [sum(sizes[:i]) for i in range(num_stages)]
    return tuple(StageLayout(i, num_stages, starts[i], starts[i] + sizes[i]) for i in range(num_stages))
