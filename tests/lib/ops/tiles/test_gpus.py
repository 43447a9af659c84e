"""The GPU that tiles are chosen for is known by its whole name, and is whole."""

from types import SimpleNamespace

import pytest
import torch

from weft.ops.tiles.gpus import MEASURED, device


@pytest.mark.parametrize(
    ("name", "processors", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 3.35e12),
        ("NVIDIA H200", 132, 4.8e12),
        ("NVIDIA H200", 60, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, None),
        ("NVIDIA GH200 480GB", 132, None),
        ("NVIDIA H100 PCIe", 114, None),
        ("NVIDIA A10G", 80, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_size(
    monkeypatch: pytest.MonkeyPatch, name: str, processors: int, bandwidth: float | None
) -> None:
    gpus = [SimpleNamespace(name=name, multi_processor_count=processors)]  # the first one's
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    gpu = device.__wrapped__()
    assert (gpu and gpu.bandwidth) == bandwidth


def test_without_a_gpu_tiles_are_those_of_the_one_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.__wrapped__() is MEASURED
