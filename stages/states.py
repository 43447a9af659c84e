"""The states that a decoder's stages start from."""

from collections.abc import Sequence

import torch

from weft.sampling_table import MAX_BIASED
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout
from weft.state import State


def empty_states(
    config: ModelConfig,
    layouts: Sequence[StageLayout],
    *,
    max_num_reqs: int,
    num_pages: int,
    max_pages: int,
    page_size: int,
    max_biased: int = MAX_BIASED,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[State, ...]:
    """A state with no request in it for each stage: pages for the layers that it owns, and a sampling table as wide as
    the vocabulary for the last one alone.

    Args:
        max_num_reqs, num_pages, max_pages, page_size, max_biased, dtype, device: as `State.zeros` takes them.
    """

    def one(layout: StageLayout) -> State:
        return State.zeros(
            num_layers=len(layout.layers),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_num_reqs=max_num_reqs,
            num_pages=num_pages,
            max_pages=max_pages,
            page_size=page_size,
            vocab_size=config.vocab_size if layout.last else 0,
            max_biased=max_biased,
            dtype=dtype,
            device=device,
        )

    return tuple(map(one, layouts))
