"""The shipped checkpoint, for the tests that generate with it."""

import pytest

import weft
from weft.stages.model import DEMO, Model


@pytest.fixture(scope="module")
def demo() -> Model:
    return weft.load(DEMO, "cpu", "float32")
