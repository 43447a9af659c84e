"""The page of measurements and its pictures are those of the records in `proofs/results/`."""

import csv
import re
from collections import Counter
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest
from pages import ROOT

from weft.proofs.evidence.bench.turns import tables
from weft.proofs.evidence.pages import measured, records, roofline as shares
from weft.proofs.evidence.pages.pictures import modes, roofline, tiles
from weft.proofs.evidence.pages.roofline import before_and_after


@cache
def every_row() -> list[tuple[str, ...]]:
    """The rows of the page and of the data."""
    return list(measured.table())


def test_the_page_is_of_these_records() -> None:
    # Written anew by: python -m weft.proofs.evidence.pages.measured
    assert (ROOT / "proofs" / "pages" / "measured.md").read_text(
        encoding="utf-8"
    ) == measured.page()


@pytest.mark.parametrize("module", measured.PICTURES, ids=lambda module: module.PICTURE.stem)
def test_a_picture_is_of_these_records(module: Any) -> None:
    assert module.PICTURE.read_text(encoding="utf-8") == module.picture()


def said(module: Any) -> list[str]:
    """The texts in a picture."""
    root = ElementTree.parse(module.PICTURE).getroot()
    return [node.text or "" for node in root.iter()]


def test_the_modes_are_in_their_picture() -> None:
    for mode in ("eager", "piecewise", "full", "full_decode_only", "full_and_piecewise"):
        assert mode in said(modes)


def test_shares_of_the_roofline_are_of_bytes_over_bandwidth() -> None:
    by_workload = before_and_after()
    assert {gpu for gpu, _, _ in by_workload} == {"H100", "H200"}
    # Llama-3.1-8B reads 15.0 GB of weights, and 128 times 258 tokens with 131 kB of keys and values
    # each.
    assert shares.roofline("H200", "llama-3.1-8b", 1) == pytest.approx(4.8e12 / 15.05e9, rel=0.01)
    assert shares.roofline("H200", "llama-3.1-8b", 128) == pytest.approx(
        128 * 4.8e12 / 19.7e9, rel=0.01
    )
    assert shares.roofline("H200", "llama-3.1-8b", 128, 256) == pytest.approx(
        128 * 4.8e12 / 17.6e9, rel=0.01
    )
    oldest, newest = by_workload["H200", "qwen3-30b-a3b-fp8", 128]
    assert oldest.record.file == "2026-11-21-h200-bench-moe.json"
    assert newest.time > oldest.time
    for ends in by_workload.values():
        assert all(0.2 < one.share < 1 for one in ends)
        assert {one.gpu for one in ends} == {ends[0].gpu}


def test_the_picture_of_the_roofline_has_a_bar_for_each_end() -> None:
    texts = said(roofline)
    ends = before_and_after().values()
    assert sum("tokens/s" in text for text in texts) == sum(map(len, ends))
    assert sum("no other record" in text for text in texts) == sum(
        len(group) == 1 for group in ends
    )


@pytest.mark.parametrize("model", ["bf16", "fp8"])
def test_no_fold_has_a_shape_of_another(model: str) -> None:
    folds = records.read("h100-tile-losses").data["models"][model]
    shapes = [tuple(shape) for fold in folds for shape in fold["shapes"]]
    assert len(set(shapes)) == len(shapes)
    for fold in folds:
        assert {tuple(row[1:3]) for row in fold["products"]} <= {
            tuple(shape) for shape in fold["shapes"]
        }


def test_losses_are_of_many_shapes_and_of_eight_numbers_of_tokens() -> None:
    record = records.read("h100-tile-losses")
    for model in ("bf16", "fp8"):
        counts = Counter((one.rows, one.columns) for one in tiles.losses(record, model))
        assert len(counts) >= 60
        assert min(counts.values()) >= 8
        assert all(one.loss >= 0 for one in tiles.losses(record, model))


def test_the_data_are_of_these_records() -> None:
    assert measured.DATA.read_text(encoding="utf-8") == measured.data()
    with measured.DATA.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == measured.HEADER
    assert [[*cells, file.strip("`")] for *cells, file in every_row()] == rows


def test_the_table_of_serving_has_a_row_for_each_model_and_type_of_gpu() -> None:
    header, *lines = tables.serving_table()
    assert header[:4] == ("model", "vLLM", "GPU", "128 decodes")
    assert sorted((line[0], line[2].rstrip("¹²³")) for line in lines) == sorted(
        {(one.model, one.gpu) for one in tables.turns()}
    )
    # Two records, of which this is the later
    [cells] = [line[1:] for line in lines if line[0].startswith("Qwen3-14B")]
    assert cells == (
        "0.24.0",
        "H200",
        "11,765 (1.11; 65%)",
        "7.76 ms (1.09; 75%)",
        "982 (1.06; 72%)",
        "20,352 (1.02)",
        "6,794 (1.06)",
    )
    # Two configurations of vLLM, of which DeepGEMM's is the faster; and a GPU that was alone.
    [cells] = [line[1:4] for line in lines if line[0].startswith("Qwen3-30B")]
    assert cells == ("0.24.0 with DeepGEMM", "H200", "11,908 (1.20; 66%)")


def test_the_table_of_overheads_has_rows_of_the_data() -> None:
    _, *lines = measured.overhead_table()
    assert len({line[0] for line in lines}) == len(measured._OVERHEADS)
    data = [(figure, against, machine) for _, figure, against, _, machine, _ in every_row()]
    assert [line for line in lines if line[1:] not in data] == []


def test_the_page_is_short() -> None:
    assert measured.page().count("\n") <= 120


def test_every_row_has_its_record() -> None:
    assert len(every_row()) >= 60
    for what, figure, _, build, machine, file in every_row():
        assert what
        assert figure
        assert machine
        assert re.match(r"\d{4}-\d\d-\d\d", build)
        assert (records.RESULTS / file.strip("`")).is_file()


def test_no_two_rows_say_the_same_thing() -> None:
    keys = [(what, build, machine, file) for what, _, _, build, machine, file in every_row()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("what", "file", "figure"),
    [
        ("128 requests, 2 in, 512 out, `full`", "serving-dense-modes", "57,136 to 57,890 tokens/s"),
        (
            "requests, 2 in, 512 out, `full_and_piecewise`",
            "h200x2-serving-moe-peer.",
            "13,175 to 13,240 tokens/s",
        ),
        (
            "completions of 128 tokens after 512",
            "serving-moe-ends",
            "55 of 64 equal; 8,163 of 8,192 tokens",
        ),
        ("a layer on 128 tokens, its experts", "h200-kernels", "163.3 µs"),
        ("fresh inputs, safe results", "graphify-overhead", "16.2, 50, 456 µs"),
        ("in a graph, `peer`", "transfers", "8.7 to 9.1 µs"),
    ],
)
def test_figures_that_were_read_by_eye(what: str, file: str, figure: str) -> None:
    """A few rows, compared with what a person read in the record: a wrong key in the code would
    change them."""
    [matching_row] = [row for row in every_row() if what in row[0] and file in row[5]]
    assert matching_row[1].startswith(figure)
