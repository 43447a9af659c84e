"""Predictions against measurements: the calibration looks at one GPU alone, and its errors are
within what is said."""

import attrs
import pytest
import torch

from weft.meshes.collectives import AllGather, AllReduce, AllToAll
from weft.proofs.evidence.pages.predictions import (
    Decode,
    calibrate,
    decodes,
    machines,
    measured_collective,
    predicted,
    table,
)
from weft.proofs.evidence.pages.records import read
from weft.transforms.pipelines.timing.hardware import Machine
from weft.values.schema import Schema, TensorSchema

WITHIN = 0.1
# Decodes that something bounds which no prediction knows (`proofs/evidence/NOTES.md`).
EXPLAINED = {
    ("qwen3-30b-a3b-fp8", 2, 1, 1),
    ("qwen3-30b-a3b-fp8", 1, 4, 512),
}


def test_decodes_over_several_gpus_are_predicted_within_a_tenth() -> None:
    off = {}
    for one, seconds in predicted():
        key = one.model, one.shards, one.stages, one.requests
        if one.num_gpus > 1 and abs(seconds / one.measured - 1) > WITHIN:
            off[key] = seconds / one.measured - 1
    assert off.keys() == EXPLAINED, off
    assert all(error < 0 for error in off.values())


def test_what_was_measured_over_several_gpus_is_not_looked_at() -> None:
    measured = list(decodes())
    altered = [one if one.num_gpus == 1 else attrs.evolve(one, seconds=(1.0,)) for one in measured]
    fitted, fitted_altered = (
        [(m.bandwidth, m.kernel) for m in machines(one).values()] for one in (measured, altered)
    )
    for one, other in zip(
        fitted, fitted_altered, strict=True
    ):  # the last bit is that of memory's alignment
        assert one == pytest.approx(other, rel=1e-12)


def test_a_machine_is_found_again_by_what_it_takes() -> None:
    machine = Machine(bandwidth=3e12, kernel=2e-6)
    record = read("h100x2-tensor")
    models = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b-fp8")
    alone = [
        Decode("H100", model, 1, 1, requests, (1.0,), record)
        for model in models
        for requests in (1, 128)
    ]
    calibrated = calibrate([attrs.evolve(one, seconds=(one.predicted(machine),)) for one in alone])
    assert (calibrated.bandwidth, calibrated.kernel) == (pytest.approx(3e12), pytest.approx(2e-6))


def test_collectives_take_what_was_measured_and_lines_between() -> None:
    seconds = measured_collective()

    def of(tokens: int) -> float:
        schema = Schema((TensorSchema("x", (tokens, 2048), torch.bfloat16),))
        took = seconds(AllReduce((0, 1), schema=schema))
        assert seconds(AllGather((0, 1), schema=schema)) == took
        return took

    for row in read("h100x2-collectives").data["rows"]:
        if row["way"] == "peer":
            kind = (
                AllReduce((0, 1))
                if "reduce" in row["collective"]
                else AllToAll((0, 1), concat_dim=1)
            )
            row_schema = Schema((TensorSchema("x", tuple(row["shape"]), torch.bfloat16),))
            assert seconds(attrs.evolve(kind, schema=row_schema)) == pytest.approx(
                row["graph_us"] / 1e6
            )
    assert of(192) == pytest.approx((of(128) + of(256)) / 2)
    assert of(16384) == pytest.approx(of(8192) + (of(8192) - of(4096)) * 2)


def test_the_table_has_every_decode() -> None:
    rows = table().rows
    assert len(rows) == len(list(decodes()))
    assert {row[-1] for row in rows} == {"fitted", ""}
