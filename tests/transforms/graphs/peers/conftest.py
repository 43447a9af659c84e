"""The devices of the scenarios that CUDA graphs must answer as tapes do."""

import pytest


@pytest.fixture
def device(weft_device: str) -> str:
    """The CPU, where captures are tapes, and a GPU where there is one."""
    return weft_device
