"""A shape class other than batches of requests: images, padded to a ladder of resolutions."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.batches.descriptor import Descriptor
from weft.values.donation import donates
from weft.values.trees import axes, descriptor_field, pytree

CHANNELS = 3


@attrs.frozen
class Resolution(Descriptor):
    """The shape class of an image; it covers images whose height and width are not larger."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@pytree
@attrs.frozen(eq=False)
class Image:
    """An image, padded in two dimensions.

    Args:
        resolution: its shape class.
        pixels: [height, width, channels].
        valid: [height, width] bool; false for padding.
    """

    resolution: Resolution = attrs.field(metadata=descriptor_field())
    pixels: Tensor = attrs.field(metadata=axes("height", "width", None))
    valid: Tensor = attrs.field(metadata=axes("height", "width", pad=0))


# "down" and "left" read a neighbour: padding that is not zero shows at the border of an image.
FILTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mix": lambda x, params: x @ params,
    "tanh": lambda x, params: torch.tanh(x),
    "bias": lambda x, params: x + params[0],
    "down": lambda x, params: x + torch.cat([torch.zeros_like(x[:1]), x[:-1]]),
    "left": lambda x, params: x * 0.5 + torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1),
    "flip": lambda x, params: x.flip(-1),
    "sort": lambda x, params: x.sort(-1).values,
}
"""Operations on [height, width, channels] that treat zero padding like the border of an image."""


@attrs.frozen(eq=False)
class ImageScenario:
    """A random step on images, `(params, state, image) -> (state, image)`, and images of different
    resolutions for it.

    Args:
        code: the filters, in order.
        resolutions: the images' resolutions.
        seed: the seed of the pixels and the parameters.
    """

    code: tuple[str, ...]
    resolutions: tuple[Resolution, ...]
    seed: int

    def __repr__(self) -> str:
        return (
            f"ImageScenario({' '.join(self.code)}, {', '.join(map(str, self.resolutions))},"
            f" seed={self.seed})"
        )

    def step(self) -> Callable[..., Any]:
        """The step, which applies each filter to valid pixels only.

        The state counts valid pixels, and sums the pixels of all images by channel."""

        @donates("state")
        def step(
            params: Tensor, state: dict[str, Tensor], image: Image
        ) -> tuple[dict[str, Tensor], Image]:
            inside = image.valid[..., None]
            x = torch.where(inside, image.pixels, 0.0)
            for name in self.code:
                # After each filter: "bias" writes to the padding, and "down" moves pixels into it.
                x = torch.where(inside, FILTERS[name](x, params), 0.0)
            # Sums over all places show padding that counts as pixels; the unpadded image would not
            # show it.
            state["sum"].add_(x.sum((0, 1)))
            state["pixels"].add_(image.valid.sum())
            return state, attrs.evolve(image, pixels=x)

        return step

    def images(self, device: torch.device | str = "cpu") -> list[Image]:
        """The images, one per call."""
        generator = torch.Generator().manual_seed(self.seed)
        images = []
        for size in self.resolutions:
            pixels = torch.randn(size.height, size.width, CHANNELS, generator=generator).to(device)
            images.append(
                Image(
                    size,
                    pixels,
                    torch.ones(size.height, size.width, dtype=torch.bool, device=device),
                )
            )
        return images

    def params(self, device: torch.device | str = "cpu") -> Tensor:
        """The parameters, a matrix [channels, channels]."""
        return torch.randn(
            CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(self.seed + 1)
        ).to(device)

    def state(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The state before the first image."""
        return {
            "sum": torch.zeros(CHANNELS, device=device),
            "pixels": torch.zeros((), dtype=torch.int64, device=device),
        }


def resolutions(most: int = 5) -> st.SearchStrategy[Resolution]:
    """Resolutions of at most `most` pixels a side."""
    return st.builds(Resolution, st.integers(1, most), st.integers(1, most))


def resolution_ladders() -> st.SearchStrategy[tuple[Resolution, ...]]:
    """Ladders of up to four resolutions, in any order: dispatch uses `covers`, not the position."""
    # Up to 7 pixels a side, where images have at most 5, so that padding may be wide.
    return st.lists(resolutions(7), max_size=4, unique=True).map(tuple)


def image_scenarios() -> st.SearchStrategy[ImageScenario]:
    """Scenarios of one to four filters and one to five images."""
    code = st.lists(st.sampled_from(sorted(FILTERS)), min_size=1, max_size=4).map(tuple)
    sizes = st.lists(resolutions(), min_size=1, max_size=5).map(tuple)
    return st.builds(ImageScenario, code, sizes, st.integers(0, 999))
