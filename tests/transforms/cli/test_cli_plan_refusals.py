"""`weft plan` refuses bad input, and says what to write instead."""

import json
from pathlib import Path

import pytest
from cli_calls import Weft, assert_refused

BAD: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "more stages than layers": (
        ("--pp", "9"),
        ("error: weft plan --pp 9\n", "saw: 8 layers for 9 stages", "instead: use 1 to 8 stages"),
    ),
    "no stage": (("--pp", "0"), ("argument --pp: '0': write a whole number from 1",)),
    "a split and a search": (
        ("--pp", "2", "--gpus", "4"),
        (
            "error: weft plan --pp 2",
            "--pp has no effect with --gpus",
            "leave out one of the two",
        ),
    ),
    "shares of three heads": (("--pp", "1", "--tp", "3"), ("error: weft plan --tp 3", "heads")),
    "more GPUs than parts": (
        ("--gpus", "1009"),
        ("error: weft plan --gpus 1009", "instead: fewer GPUs"),
    ),
    "more cohorts than requests": (
        ("--pp", "2", "--requests", "4", "--cohorts", "5"),
        ("error: weft plan --cohorts 5", "saw: 5 cohorts for 4 requests", "instead: from 1 to 4"),
    ),
    "no cohort": (
        ("--pp", "2", "--cohorts", "0"),
        ("argument --cohorts: '0': write a whole number from 1 to 1000",),
    ),
    "no step": (
        ("--pp", "2", "--steps", "0"),
        ("argument --steps: '0': write a whole number from 1 to 1000000000",),
    ),
    "no request": (
        ("--pp", "2", "--requests", "-1"),
        ("argument --requests: '-1': write a whole number from 1",),
    ),
    "no room": (
        ("--pp", "2", "--capacity", "0"),
        ("argument --capacity: '0': write a whole number from 1",),
    ),
    "no bandwidth": (
        ("--pp", "2", "--bandwidth", "0"),
        ("argument --bandwidth: '0': write a finite number > 0, in GB/s",),
    ),
    "free memory": (
        ("--pp", "2", "--bandwidth", "inf"),
        ("argument --bandwidth: 'inf': write a finite number > 0",),
    ),
    "a link that is none": (
        ("--pp", "2", "--link", "nan"),
        ("argument --link: 'nan': write a number > 0, in GB/s",),
    ),
    "a message from the future": (
        ("--pp", "2", "--latency", "-1"),
        ("argument --latency: '-1': write a finite number >= 0, in microseconds",),
    ),
    "more context than positions": (
        ("--pp", "2", "--context", "4096"),
        (
            "error: weft plan --context 4096",
            "the model has 4096 positions",
            "instead: from 0 to 4095",
        ),
    ),
    "a network of one node": (
        ("--pp", "2", "--node-link", "50"),
        (
            "error: weft plan --node-link 50",
            "saw: one node",
            "--gpus-per-node 8 with --node-link, or neither",
        ),
    ),
    "no number": (("--pp", "two"), ("argument --pp: 'two': write a whole number",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_with_its_remedy(run: Weft, folder: str, case: str) -> None:
    more, parts = BAD[case]
    assert_refused(run("plan", "--model", folder, *more), *parts)


def test_a_missing_folder_and_a_field_that_is_not_supported_are_named(
    run: Weft, folder: str
) -> None:
    code, _, err = run("plan", "--model", f"{folder}/none", "--pp", "2")
    assert code == 2
    assert "there is no folder" in err
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": 8}))
    code, _, err = run("plan", "--model", folder, "--pp", "2")
    assert code == 2
    assert "num_experts" in err
