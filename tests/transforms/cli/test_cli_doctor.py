"""`weft doctor`: versions, devices, graphs and operators, and the reason why a graph is not used."""

import json

import pytest
import torch
from cli_calls import Weft

import weft


def test_doctor_says_versions_devices_graphs_and_ops(run: Weft) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    for row in (["weft", weft.__version__], ["torch", torch.__version__]):
        assert row in lines
    assert any(line[:2] == ["cpu", "tape"] for line in lines)
    assert any(line[:3] == ["cpu", "paged_attention", "reference"] for line in lines)


def test_doctor_as_json(run: Weft) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert list(report) == ["versions", "devices", "graph_backends", "ops"]
    cpu, *gpus = report["devices"]
    assert (cpu["device"], cpu["threads"]) == ("cpu", 1)
    assert len(gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert {op["device"] for op in report["ops"]} == {
        device["device"] for device in report["devices"]
    }
    assert all(op["reason"] for op in report["ops"])
    assert ("tape", "cpu") in {(b["backend"], b["device"]) for b in report["graph_backends"]}


def test_doctor_says_why_cuda_graphs_are_not_used(
    run: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    reports = json.loads(run("doctor", "--json")[1])["graph_backends"]
    why = "torch is built for CUDA 99.9, but finds no device or no driver"
    assert reports[1] == {"backend": "cuda", "device": None, "reason": why}
