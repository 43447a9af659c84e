"""The benchmarks run on the tape, with small numbers."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from weft.ops.attention.launch import plan_launch
from weft.proofs.evidence.bench import (
    accuracy_http,
    changed_models,
    decode_modes,
    graphify_overhead,
    http,
)
from weft.proofs.evidence.bench.operators import attention, kernels, sampling
from weft.proofs.evidence.bench.startup import ladder_capture
from weft.proofs.evidence.http.client import Answer, _Client
from weft.stages.random_weights import PRESETS


@pytest.mark.slow
def test_graphify_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["graphify_overhead", "--out", str(tmp_path), "--quick", "--leaves", "3"]
    )
    graphify_overhead.main()
    report = json.loads((tmp_path / "graphify_overhead.json").read_text())
    cases = {(row["what"], row["mode"], row["captures"]) for row in report["rows"]}
    for argument_mode in ("reference, borrowed", "fresh, borrowed", "fresh, safe"):
        assert {
            ("graphify", argument_mode, 1),
            ("graphify", argument_mode, 10),
            ("graphify, in turn", argument_mode, 10),
        } <= cases
    assert all(row["us"] >= row["least_us"] > 0 for row in report["rows"])
    assert report["environment"]["torch"]
    assert "copies" in [row["op"] for row in report["environment"]["ops"]]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(report["rows"])


@pytest.mark.slow
def test_tiles_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["attention", "--out", str(tmp_path), "--quick", "--tiles"])
    before = plan_launch(600, 2, 4, 8, 128, 1024, 600, 2, 2, 132)
    attention.main()
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [row["backend"] for row in rows][:2] == [
        "128 x 64, 8 warps, 2 stages",
        "128 x 64, 4 warps, 2 stages",
    ]
    assert len({row["backend"] for row in rows}) == len(rows) == 1 + len(attention.TILES)
    assert sum(row["best"] for row in rows) == 1
    with attention.prompt_tile(64, (32, 4, 3)):
        tried = plan_launch(600, 2, 4, 8, 128, 1024, 600, 2, 2, 132)
    assert (tried.rows, tried.keys, tried.warps, tried.stages) == (64, 32, 4, 3)
    assert plan_launch(600, 2, 4, 8, 128, 1024, 600, 2, 2, 132) == before


@pytest.mark.nightly
def test_decode_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["decode_modes", "--out", str(tmp_path), "--quick", "--curves"])
    decode_modes.main()
    report = json.loads((tmp_path / "decode_modes.json").read_text())
    assert [row["mode"] for row in report["rows"]] == [*decode_modes.MODES] * len(
        decode_modes.QUICK
    )
    assert [row["captures"] > 0 for row in report["rows"]] == [False, True, True] * len(
        decode_modes.QUICK
    )
    assert "floor" in (tmp_path / "decode_modes.svg").read_text()
    for row in report["rows"]:
        assert row["replays"] >= 90 * (row["mode"] != "none")
        assert row["share"] * row["ms"] == pytest.approx(row["floor_ms"])
        assert row["floor_ms"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(report["rows"])


@pytest.mark.slow
def test_ladder_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ladder_capture", "--out", str(tmp_path), "--quick"])
    ladder_capture.main()
    runs = json.loads((tmp_path / "ladder_capture.json").read_text())["runs"]
    assert [(run["graphs"], run["in_pieces"]) for run in runs] == [(5, 3), (5, 3)]
    for run in runs:
        assert run["bytes"] <= run["estimated_bytes"] <= 1.1 * run["bytes"]
        assert run["seconds"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.nightly
def test_changed_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--preset", "tiny", "--requests", "2", "--lengths", "3", "4", "--turns", "2")
    changed_models.main([*few, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "changed_models.json").read_text())["rows"]
    assert [row["model"] for row in rows] == [*changed_models.CHANGES] * 2
    assert all(row["output_tokens"] == 8 for row in rows)
    assert "fp8 cache" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["attention", "--out", str(tmp_path), "--quick"])
    attention.main()
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [(row["shape"], row["backend"]) for row in rows] == [
        (shape, name)
        for shape in ("5, 20 and 9", "2 x 20", "2 x 5")
        for name in ("reference", "torch")
    ]
    assert all(row["us"] > 0 and row["error"] < 0.02 for row in rows)
    assert sum(row["best"] for row in rows) == 3
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


@pytest.mark.nightly
def test_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["sampling", "--out", str(tmp_path), "--quick"])
    sampling.main()
    rows = json.loads((tmp_path / "sampling.json").read_text())["rows"]
    assert [row["asked"] for row in rows] == list(sampling.ASKED)
    assert all(row["us"] > 0 < row["sample_us"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


@pytest.mark.slow
def test_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["kernels", "--out", str(tmp_path), "--quick", "--tokens", "1", "3"]
    )
    kernels.main()
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {(row["model"], row["tokens"]) for row in rows} == {
        (m, n) for m in ("tiny, experts", "tiny") for n in (1, 3)
    }
    assert {"run_experts", "route", "fp8_linear", "linear", "rotate_and_keep", "swiglu"} <= {
        r["kernel"] for r in rows
    }
    for row in rows:
        assert row["share"] * row["us"] == pytest.approx(row["floor_us"])
        assert row["floor_us"] > 0
        assert row["error"] < 1e-2
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) + 4


@pytest.mark.nightly
def test_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    few = (
        "--models",
        "demo",
        "--device",
        "cpu",
        "--graph",
        "none",
        "--rates",
        "50",
        "inf",
        "--num-prompts",
        "6",
    )
    sizes = ("--concurrency", "4", "--input-len", "3", "--output-len", "9", "--repeats", "1")
    with pytest.raises(SystemExit) as ended:
        http.main([*few, *sizes, "--out", str(tmp_path)])
    assert ended.value.code == 0
    [record] = json.loads((tmp_path / "http.json").read_text())["models"]
    assert [
        (row["rate"], row["completed"], row["failed"], row["wrong_lengths"])
        for row in record["rows"]
    ] == [
        (50.0, 6, 0, 0),
        ("inf", 6, 0, 0),
    ]
    assert all(row["output_tokens_per_s"] > 0 and row["ttft"]["p50"] > 0 for row in record["rows"])
    assert record["alone"][0]["output_tokens"] == 54
    assert record["ratio"] > 0
    assert "demo, engine without HTTP, p50" in (tmp_path / "http.svg").read_text()
    assert "without HTTP" in capsys.readouterr().out.splitlines()[-1]


# Takes the flags of `vllm bench serve` 0.24.0, and writes the fields of its results that are read.
CLIENT = """
import argparse, json, urllib.request
parser = argparse.ArgumentParser()
for name in ("base-url", "backend", "model", "endpoint", "tokenizer", "dataset-name", "request-rate", "result-dir",
             "result-filename"):
    parser.add_argument(f"--{name}", required=True)
for name in ("random-input-len", "random-output-len", "num-prompts", "max-concurrency", "seed"):
    parser.add_argument(f"--{name}", required=True, type=int)
parser.add_argument("--ignore-eos", action="store_true")
parser.add_argument("--save-result", action="store_true")
given, tokens = parser.parse_args(), 0
for _ in range(given.num_prompts):
    body = {"model": given.model, "prompt": "a b", "max_tokens": given.random_output_len}
    body["ignore_eos"] = given.ignore_eos
    sent = urllib.request.Request(given.base_url + given.endpoint, json.dumps(body).encode())
    answer = json.load(urllib.request.urlopen(sent))
    assert answer["choices"][0]["text"]
    tokens += answer["usage"]["completion_tokens"]
times = {f"{part}_{key}_ms": 1.5 for part in ("mean", "median", "p99") for key in ("ttft", "tpot", "itl")}
with open(f"{given.result_dir}/{given.result_filename}", "w") as file:
    json.dump({"completed": given.num_prompts, "total_output_tokens": tokens, "duration": 1.0, "output_throughput": 9.0}
              | times, file)
"""


@pytest.mark.nightly
def test_a_preset_has_a_tokenizer_and_vllms_client_asks_it_too(tmp_path: Path) -> None:
    http.write_preset(tmp_path, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    size = PRESETS["tiny"]["vocab_size"]
    assert len({tokenizer.decode([token]) for token in range(128, size)} | {"\ufffd"}) > size - 256
    assert tokenizer.decode(tokenizer("two words").input_ids) == "two words"
    pytest.importorskip("uvicorn")
    (tmp_path / "client.py").write_text(CLIENT)
    few = (
        "--presets",
        "tiny",
        "--device",
        "cpu",
        "--graph",
        "none",
        "--rates",
        "inf",
        "--num-prompts",
        "3",
    )
    sizes = ("--concurrency", "2", "--input-len", "3", "--output-len", "5", "--repeats", "1")
    with pytest.raises(SystemExit) as ended:
        http.main(
            [
                *few,
                *sizes,
                "--vllm",
                f"{sys.executable} {tmp_path / 'client.py'}",
                "--out",
                str(tmp_path),
            ]
        )
    assert ended.value.code == 0
    [record] = json.loads((tmp_path / "http.json").read_text())["models"]
    [row] = record["vllm"]
    assert (row["completed"], row["failed"], row["wrong_lengths"], row["ttft"]["p99"]) == (
        3,
        0,
        0,
        1.5,
    )
    (tmp_path / "client.py").write_text("raise SystemExit('no such flag')")
    with pytest.raises(
        RuntimeError, match=r"client.py --ignore-eos .* ended with 1:\nno such flag"
    ):
        http.main([*few, *sizes, "--vllm", f"{sys.executable} {tmp_path / 'client.py'}"])


def test_a_client_counts_events_in_any_pieces() -> None:
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + b'data: {"choices":[{}]}\n\n' * 3
    raw += b'data: {"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'

    class Transport(asyncio.WriteTransport):
        def write(self, data: Any) -> None: ...

        def close(self) -> None: ...

    for size in (1, 3, 7, 8, 1000):
        loop = asyncio.new_event_loop()
        answer = Answer(0.0)
        client = _Client(b"", answer, loop.create_future())
        client.connection_made(Transport())
        for place in range(0, len(raw), size):
            client.data_received(raw[place : place + size])
        assert (len(answer.times), answer.num_tokens) == (4, 7)
        loop.close()


def test_the_tasks_have_one_right_answer() -> None:
    for name, questions in accuracy_http.questions().items():
        assert len(questions) == {"sums": 200, "sums_choice": 60}.get(name, 48)
        for question in questions:
            assert len(set(question["choices"])) == 4
            assert question["choices"][question["place"]] == question["answer"]
            if name.startswith("sums"):
                a, b = question["text"].removesuffix(" =").split(" + ")
                assert int(a) + int(b) == int(question["answer"])
