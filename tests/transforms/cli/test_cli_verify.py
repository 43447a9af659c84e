"""`weft verify`: it computes again what `weft generate --certificates` wrote, and names the first
difference."""

import json
import re
from pathlib import Path

import pytest
from cli_calls import Weft, assert_refused

PROMPTS = "--prompt", "The function returns", "--prompt", "A list is"
SAMPLED = (
    "--temperature",
    "1",
    "--seed",
    "4",
    "--max-tokens",
    "9",
    "--device",
    "cpu",
    "--model",
    "demo",
)
DEMO = "--model", "demo", "--device", "cpu"


@pytest.fixture
def file(run: Weft, tmp_path: Path) -> Path:
    path = tmp_path / "certificates.jsonl"
    code, out, err = run(
        "generate", *PROMPTS, *SAMPLED, "--batch-invariant", "--certificates", str(path)
    )
    assert (code, err) == (0, "")
    assert "A list is" in out
    return path


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "how",
    [
        (),
        ("--pp", "2", "--transport", "threads"),
        ("--graph", "none", "--max-num-tokens", "5", "--speculate", "2"),
    ],
)
def test_every_way_is_equal(run: Weft, file: Path, how: tuple[str, ...]) -> None:
    code, out, err = run("verify", str(file), *DEMO, *how)
    assert (code, err) == (0, "")
    assert out.endswith("2 of 2 completions equal, bit for bit\n")


@pytest.mark.slow
def test_processes_certify_and_verify_as_one_does(run: Weft, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "ranks.jsonl"
    ranks = "--pp", "2", "--transport", "gloo"
    code, _, err = run(
        "generate", *PROMPTS, *SAMPLED, *ranks, "--batch-invariant", "--certificates", str(other)
    )
    assert (code, err) == (0, "")
    assert other.read_text() == file.read_text()
    code, out, _ = run("verify", str(file), *DEMO, *ranks, "--json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert (
        rows
        == [{"equal": True, "result": "equal", "first_difference": None, "other_facts": {}}] * 2
    )


def test_a_difference_is_named(run: Weft, file: Path) -> None:
    first, second = map(json.loads, file.read_text().splitlines())
    first["token_ids"][3] = 9
    second["versions"]["torch"] = "1.0"
    file.write_text("\n".join(map(json.dumps, (first, second))))
    code, out, _ = run("verify", str(file), *DEMO)
    assert code == 1
    assert "token 3: " in out
    assert "certified 9" in out
    assert "torch" in out
    assert "other here" not in out
    assert re.search(r"what differs\W+fact +here +certified", out)
    assert out.endswith("1 of 2 completions equal, bit for bit\n")
    code, out, _ = run("verify", str(file), *DEMO, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["equal"], row["first_difference"]) for row in rows] == [(False, 3), (True, None)]
    assert rows[1]["other_facts"]["torch"]["certified"] == "1.0"


def test_what_is_refused(run: Weft, file: Path, tmp_path: Path) -> None:
    to = str(tmp_path / "more.jsonl")
    assert_refused(
        run("generate", *PROMPTS, *SAMPLED, "--certificates", to), "no --batch-invariant"
    )
    gone = str(tmp_path / "no" / "folder")
    command = "generate", *PROMPTS, *SAMPLED, "--batch-invariant", "--certificates"
    assert_refused(run(*command, gone), "there is no folder")
    assert_refused(run("verify", to, *DEMO), f"weft verify {to}", f"there is no file {to!r}")
    first = json.loads(file.read_text().splitlines()[0])
    other = tmp_path / "adapted.jsonl"
    other.write_text(json.dumps(first | {"adapter": "sha256:0"}))
    said = run("verify", str(other), *DEMO)
    assert_refused(said, "instead: --adapter DIR of that one")
    assert "adapters=" not in said[2]
    said = run("verify", str(file), *DEMO, "--attention", "torch")
    assert_refused(said, "--attention auto, or reference\n")
    assert "batch_invariant" not in said[2]
    said = run("generate", *PROMPTS, *SAMPLED, "--batch-invariant", "--attention", "torch")
    assert_refused(said, "--attention auto, or reference; or leave out --batch-invariant\n")
    file.write_text("{}\n")
    assert_refused(
        run("verify", str(file), *DEMO),
        "certificates.jsonl, line 1, has no format",
        "weft certificate 1",
    )
    assert_refused(
        run("verify", str(file), "--model", str(tmp_path / "none")), f"weft verify {file}"
    )
