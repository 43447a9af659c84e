"""The model and the server that these tests share."""

from collections.abc import Iterator

import pytest
from serving import Served, served

from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model


@pytest.fixture(scope="package")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Served]:
    with served(model) as running_server:
        yield running_server
