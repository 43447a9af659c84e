"""What holds for every test: one thread a process, no network, a Hypothesis profile, and the marker `gpu`."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# huggingface_hub reads these when it is first imported, which is later; processes that tests start inherit them.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}

# The models are small, and the workers of pytest-xdist share the cores.
torch.set_num_threads(1)

# How long an example takes depends on what else the machine does, and must not decide.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# As `ci`, but each example captures graphs, which takes longer than to run it.
settings.register_profile("gpu", settings.get_profile("ci"), max_examples=50)
# Finds what `ci` does not, and remembers it in .hypothesis/.
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("WEFT_HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="marked gpu, and torch sees no CUDA device"))
