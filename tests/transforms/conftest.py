"""The shipped checkpoint, for the tests that generate with it."""

import pytest

import weft
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.model import Model


@pytest.fixture(scope="module")
def demo() -> Model:
    return weft.load(DEMO, "cpu", "float32")
