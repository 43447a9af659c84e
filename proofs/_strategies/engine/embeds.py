"""Prompts with an image, and models with mRoPE to place it; requests in scenarios and traces draw
from them."""

import attrs
import torch
from hypothesis import strategies as st

from weft.ops.requests import EMBEDDED
from weft.stages.config import ModelConfig
from weft.transforms.engine.requests.prompts import EmbedsPrompt


def with_mrope(config: ModelConfig) -> ModelConfig:
    """The model with mRoPE, with its frequency pairs divided among time, height and width."""
    pairs = config.head_dim // 2
    section = (1, (pairs - 1) // 2, pairs - 1 - (pairs - 1) // 2)
    return attrs.evolve(config, rope=attrs.evolve(config.rope, mrope_section=section))


@st.composite
def images(draw: st.DrawFn, prompt: tuple[int, ...], hidden_size: int, image: int) -> EmbedsPrompt:
    """A prompt with positions, in which some consecutive tokens may be an image.

    Args:
        image: the index of the image, which seeds its embeddings.
    """
    # Few places to choose from, so that two prompts often have the same ids and pages must be told
    # apart by their images.
    start = min(draw(st.sampled_from((0, 0, 0, 3))), len(prompt))
    stop = draw(st.sampled_from((len(prompt), min(start + 4, len(prompt)), len(prompt), start)))
    width, still = draw(st.sampled_from(((2, True), (3, False))))
    generator = torch.Generator().manual_seed(image)
    embeds = torch.randn(len(prompt), hidden_size, generator=generator)
    ids = [EMBEDDED if start <= at < stop else token for at, token in enumerate(prompt)]
    places = [
        (start + (0 if still else 2 * at), start + at // width, start + at % width)
        for at in range(stop - start)
    ]
    after = max((max(place) + 1 for place in places), default=start)
    text = (
        [(at,) * 3 for at in range(start)],
        [(after + at,) * 3 for at in range(len(prompt) - stop)],
    )
    return EmbedsPrompt(ids, embeds, torch.tensor([*text[0], *places, *text[1]]).T.contiguous())
