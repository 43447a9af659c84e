"""The page of measurements and the README's picture are those of the records in `proofs/results/`."""

import re
from xml.etree import ElementTree

import pytest
from pages import ROOT

from weft.proofs import measured, picture, records

ROWS = list(measured.table())


def test_the_page_is_of_these_records() -> None:
    # Written anew by: python -m weft.proofs.measured
    assert (ROOT / "proofs" / "pages" / "measured.md").read_text(encoding="utf-8") == measured.page()


def test_the_picture_is_of_these_records() -> None:
    text = (ROOT / "proofs" / "pages" / "modes.svg").read_text(encoding="utf-8")
    assert text == picture.picture()
    said = [node.text or "" for node in ElementTree.fromstring(text).iter()]
    for mode in ("eager", "piecewise", "full", "full_decode_only", "full_and_piecewise"):
        assert mode in said


def test_every_row_has_its_record() -> None:
    assert len(ROWS) >= 60
    for what, figure, _, build, machine, file in ROWS:
        assert what
        assert figure
        assert machine
        assert re.match(r"\d{4}-\d\d-\d\d", build)
        assert (records.RESULTS / file.strip("`")).is_file()


def test_no_two_rows_say_the_same_thing() -> None:
    keys = [(what, build, machine, file) for what, _, _, build, machine, file in ROWS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("what", "file", "figure"),
    [
        ("128 requests, 2 in, 512 out, `full`", "serving-dense-modes", "57,136 to 57,890 tokens/s"),
        ("requests, 2 in, 512 out, `full_and_piecewise`", "h200x2-serving-moe-peer.", "13,175 to 13,240 tokens/s"),
        ("completions of 128 tokens after 512", "serving-moe-ends", "55 of 64 equal; 8,163 of 8,192 tokens"),
        ("a layer on 128 tokens, its experts", "h200-kernels", "163.3 µs"),
        ("fresh inputs, safe results", "graphify-overhead", "16.2, 50, 456 µs"),
        ("in a graph, `peer`", "transfers", "8.7 to 9.1 µs"),
    ],
)
def test_figures_that_were_read_by_eye(what: str, file: str, figure: str) -> None:
    """A few rows, compared with what a person read in the record: a wrong key in the code would change them."""
    [found] = [row for row in ROWS if what in row[0] and file in row[5]]
    assert found[1].startswith(figure)
