"""The benchmarks run on the tape, with small numbers."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from weft.ops.attention.launch import plan_launch
from weft.proofs.bench import (
    accuracy_http,
    changed_models,
    decode_modes,
    graphify_overhead,
    http,
)
from weft.proofs.bench.operators import attention, kernels, sampling
from weft.proofs.bench.startup import ladder_capture
from weft.proofs.bench.turns import __main__ as by_turns
from weft.proofs.http.client import Answer, _Client
from weft.stages.random_weights import PRESETS


def test_graphify_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["graphify_overhead", "--out", str(tmp_path), "--quick", "--leaves", "3"])
    graphify_overhead.main()
    report = json.loads((tmp_path / "graphify_overhead.json").read_text())
    found = {(row["what"], row["given"], row["captures"]) for row in report["rows"]}
    for given in ("reference, borrowed", "fresh, borrowed", "fresh, safe"):
        assert {("graphify", given, 1), ("graphify", given, 10), ("graphify, in turn", given, 10)} <= found
    assert all(row["us"] >= row["least_us"] > 0 for row in report["rows"])
    assert report["environment"]["torch"]
    assert "copies" in [row["op"] for row in report["environment"]["ops"]]
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(report["rows"])


def test_tiles_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["attention", "--out", str(tmp_path), "--quick", "--tiles"])
    before = plan_launch(600, 2, 4, 8, 128, 1024, 600, 2, 2, 132)
    attention.main()
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [row["backend"] for row in rows][:2] == ["128 x 64, 4 warps, 2 stages", "128 x 64, 8 warps, 2 stages"]
    assert len({row["backend"] for row in rows}) == len(rows) == 1 + len(attention.TILES)
    assert sum(row["best"] for row in rows) == 1
    with attention.prompt_tile(64, (32, 4, 3)):
        tried = plan_launch(600, 2, 4, 8, 128, 1024, 600, 2, 2, 132)
    assert (tried.rows, tried.keys, tried.warps, tried.stages) == (64, 32, 4, 3)
    assert plan_launch(600, 2, 4, 8, 128, 1024, 600, 2, 2, 132) == before


@pytest.mark.slow
def test_decode_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["decode_modes", "--out", str(tmp_path), "--quick", "--curves"])
    decode_modes.main()
    report = json.loads((tmp_path / "decode_modes.json").read_text())
    assert [row["mode"] for row in report["rows"]] == [*decode_modes.MODES] * len(decode_modes.QUICK)
    assert [row["captures"] > 0 for row in report["rows"]] == [False, True, True] * len(decode_modes.QUICK)
    assert "floor" in (tmp_path / "decode_modes.svg").read_text()
    for row in report["rows"]:
        assert row["replays"] >= 90 * (row["mode"] != "none")
        assert row["share"] * row["ms"] == pytest.approx(row["floor_ms"])
        assert row["floor_ms"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(report["rows"])


def test_ladder_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ladder_capture", "--out", str(tmp_path), "--quick"])
    ladder_capture.main()
    runs = json.loads((tmp_path / "ladder_capture.json").read_text())["runs"]
    assert [(run["graphs"], run["in_pieces"]) for run in runs] == [(5, 3), (5, 3)]
    for run in runs:
        assert run["bytes"] <= run["estimated_bytes"] <= 1.1 * run["bytes"]
        assert run["seconds"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_changed_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--preset", "tiny", "--requests", "2", "--lengths", "3", "4", "--turns", "2")
    changed_models.main([*few, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "changed_models.json").read_text())["rows"]
    assert [row["model"] for row in rows] == [*changed_models.CHANGES] * 2
    assert all(row["output_tokens"] == 8 for row in rows)
    assert "fp8 cache" in capsys.readouterr().out.splitlines()[-1]


def test_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["attention", "--out", str(tmp_path), "--quick"])
    attention.main()
    rows = json.loads((tmp_path / "attention.json").read_text())["rows"]
    assert [(row["shape"], row["backend"]) for row in rows] == [
        (shape, name) for shape in ("2 x 20", "2 x 5") for name in ("reference", "torch")
    ]
    assert all(row["us"] > 0 and row["error"] < 0.02 for row in rows)
    assert sum(row["best"] for row in rows) == 2
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


@pytest.mark.slow
def test_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sampling", "--out", str(tmp_path), "--quick"])
    sampling.main()
    rows = json.loads((tmp_path / "sampling.json").read_text())["rows"]
    assert [row["asked"] for row in rows] == list(sampling.ASKED)
    assert all(row["us"] > 0 < row["sample_us"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "--out", str(tmp_path), "--quick", "--tokens", "1", "3"])
    kernels.main()
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert {(row["model"], row["tokens"]) for row in rows} == {
        (m, n) for m in ("tiny, experts", "tiny") for n in (1, 3)
    }
    assert {"run_experts", "route", "fp8_linear", "linear", "rotate_and_keep", "swiglu"} <= {r["kernel"] for r in rows}
    for row in rows:
        assert row["share"] * row["us"] == pytest.approx(row["floor_us"])
        assert row["floor_us"] > 0
        assert row["error"] < 1e-2
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) + 4


@pytest.mark.slow
def test_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    few = ("--models", "demo", "--device", "cpu", "--graph", "none", "--rates", "50", "inf", "--num-prompts", "6")
    sizes = ("--concurrency", "4", "--input-len", "3", "--output-len", "9", "--repeats", "1")
    with pytest.raises(SystemExit) as ended:
        http.main([*few, *sizes, "--out", str(tmp_path)])
    assert ended.value.code == 0
    [record] = json.loads((tmp_path / "http.json").read_text())["models"]
    assert [(row["rate"], row["completed"], row["failed"], row["wrong_lengths"]) for row in record["rows"]] == [
        (50.0, 6, 0, 0),
        ("inf", 6, 0, 0),
    ]
    assert all(row["output_tokens_per_s"] > 0 and row["ttft"]["p50"] > 0 for row in record["rows"])
    assert record["alone"][0]["output_tokens"] == 54
    assert record["ratio"] > 0
    assert "demo, alone, p50" in (tmp_path / "http.svg").read_text()
    assert "without HTTP" in capsys.readouterr().out.splitlines()[-1]


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
"""Takes the flags of `vllm bench serve` 0.24.0, and writes the fields of its results that are read."""


@pytest.mark.slow
def test_a_preset_has_a_tokenizer_and_vllms_client_asks_it_too(tmp_path: Path) -> None:
    http.write_preset(tmp_path, "tiny")
    tokenizer, size = AutoTokenizer.from_pretrained(tmp_path), PRESETS["tiny"]["vocab_size"]
    assert len({tokenizer.decode([token]) for token in range(128, size)} | {"\ufffd"}) > size - 256
    assert tokenizer.decode(tokenizer("two words").input_ids) == "two words"
    pytest.importorskip("uvicorn")
    (tmp_path / "client.py").write_text(CLIENT)
    few = ("--presets", "tiny", "--device", "cpu", "--graph", "none", "--rates", "inf", "--num-prompts", "3")
    sizes = ("--concurrency", "2", "--input-len", "3", "--output-len", "5", "--repeats", "1")
    with pytest.raises(SystemExit) as ended:
        http.main([*few, *sizes, "--vllm", f"{sys.executable} {tmp_path / 'client.py'}", "--out", str(tmp_path)])
    assert ended.value.code == 0
    [record] = json.loads((tmp_path / "http.json").read_text())["models"]
    [row] = record["vllm"]
    assert (row["completed"], row["failed"], row["wrong_lengths"], row["ttft"]["p99"]) == (3, 0, 0, 1.5)
    (tmp_path / "client.py").write_text("raise SystemExit('no such flag')")
    with pytest.raises(RuntimeError, match=r"client.py --ignore-eos .* ended with 1:\nno such flag"):
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
    for name, found in accuracy_http.questions().items():
        assert len(found) == {"sums": 200, "sums_choice": 60}.get(name, 48)
        for own in found:
            assert len(set(own["choices"])) == 4
            assert own["choices"][own["place"]] == own["answer"]
            if name.startswith("sums"):
                a, b = own["text"].removesuffix(" =").split(" + ")
                assert int(a) + int(b) == int(own["answer"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "has no vllm: pass --python"),
        (("--rounds", "-1"), "pass 0 or more"),
        (("--models", "large"), "large is no preset, and no large/config.json is there: pass a folder, or tiny, "),
        (("--pp", "0"), "--pp 0: pass 1 or more stages"),
        (("--python", "no/python"), "--python no/python: not found: pass the Python of an environment that has vLLM"),
        (("--models", "tiny", "tiny"), "--models: two are called tiny, which their records are named after"),
    ],
)
def test_vllm_is_asked_for_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit):
        by_turns.main(["--models", "tiny", "--out", str(tmp_path), *more])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[]", "holds no JSON object: pass the folder of a model"),
        (json.dumps({**PRESETS["tiny"], "architectures": ["GemmaForCausalLM"]}), "GemmaForCausalLM"),
        (
            json.dumps({**PRESETS["tiny"], "max_position_embeddings": 300}),
            "--workloads prefill: prefill has requests of 576 tokens, and some has 300 positions: pass other workloads",
        ),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, said: str
) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "config.json").write_text(config)
    with pytest.raises(SystemExit):
        by_turns.main(["--models", str(folder), "--workloads", "prefill", "--out", str(tmp_path)])
    assert said in capsys.readouterr().err


def test_an_older_weft_beside_weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(by_turns, "WORKLOADS", {"few": by_turns.Workload(2, 2, 3)})
    model = tmp_path / "small-one"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    argv = ["--models", str(model), "--workloads", "few", "--rounds", "1", "--out", str(tmp_path), "--against"]
    by_turns.main([*argv, str(Path(__file__).parents[2])])
    record = json.loads((tmp_path / "older-small-one-pp1.json").read_text())
    assert record["preset"] == "small-one"
    assert [row["engine"] for row in record["rows"]] == ["weft", "older", "older", "weft"]
    [row] = record["table"]
    assert row["ratio"] == pytest.approx(record["rows"][2]["seconds"] / record["rows"][3]["seconds"])
    assert "the older build in" in capsys.readouterr().out
    checkout = tmp_path / "checkout"
    with pytest.raises(SystemExit):
        by_turns.main([*argv, str(checkout)])
    assert "no .src/weft is there" in capsys.readouterr().err
    (checkout / ".src" / "weft").mkdir(parents=True)
    (checkout / ".src" / "weft" / "__init__.py").write_text("raise SystemExit('this is the older one')")
    with pytest.raises(SystemExit, match=r"(?s)older ended with 1 before older-ready.*this is the older one"):
        by_turns.main([*argv, str(checkout)])


WORKLOADS = {
    "few": by_turns.Workload(2, 2, 3),
    "prompts": by_turns.Workload(3, 6, 2, varied=True, sampling={"temperature": 0.5, "top_k": 4, "top_p": 0.75}),
}
FAKE_VLLM = """
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace as Some
__version__ = "0"
class SamplingParams:
    def __init__(self, max_tokens, ignore_eos, detokenize, **sampling):
        self.max_tokens, self.sampling = max_tokens, sampling
class LLM:
    def __init__(self, model, pipeline_parallel_size, **_):
        print("INFO 01-01 [llm.py:1] Using no attention at all")
        scheduler, compilation, config = (Some(**kept) for kept in (
            {"max_num_batched_tokens": 1}, {"cudagraph_mode": "none"}, {"quantization": None}
        ))
        parts = {"scheduler_config": scheduler, "compilation_config": compilation, "model_config": config}
        self.llm_engine = Some(vllm_config=Some(**parts))
        Path(__file__).with_name("child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    def apply_model(self, function):
        import torch
        scale = torch.full((3, 1), 7.0)
        values = torch.zeros(300, 8).to(torch.float8_e4m3fn).t()
        self.model = torch.nn.Linear(700, 300, dtype=torch.bfloat16)
        self.model.norm = torch.nn.RMSNorm(500)
        self.model.register_buffer("_k_scale", scale)
        self.model.register_buffer("w13_weight", values)
        self.model.register_buffer("w13_weight_scale_inv", scale.clone())
        self.model.register_buffer("weight_scale", torch.tensor(7.0))
        self.model.register_buffer("positions", torch.arange(3))
        function(self.model)
        found = {name: [value.float().mean().item(), value.float().std().item()]
                 for name, value in self.model.state_dict().items()}
        Path(__file__).with_name("weights").write_text(json.dumps(found))
    def generate(self, prompts, wanted, use_tqdm):
        assert all(0 <= one < 257 for prompt in prompts for one in prompt["prompt_token_ids"])
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        with open(Path(__file__).with_name("asked"), "a") as asked:
            print(json.dumps([lengths, wanted.sampling]), file=asked)
        LOSES
        return [Some(outputs=[Some(token_ids=[0] * wanted.max_tokens)]) for _ in prompts]
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may still be listed."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("loses", [False, True])
def test_vllm_beside_weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loses: bool
) -> None:
    """The protocol of turns, with a package that takes vLLM's place: both end with the run, whatever happens."""
    (tmp_path / "vllm").mkdir()
    lost = "self.count = getattr(self, 'count', -1) + 1; prompts = prompts[self.count // 2 :]"  # in the second round
    made = FAKE_VLLM.replace("LOSES", lost if loses else "pass")
    (tmp_path / "vllm" / "__init__.py").write_text(made)
    (tmp_path / "vllm" / "inputs.py").write_text("class TokensPrompt(dict):\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(by_turns, "WORKLOADS", WORKLOADS)
    processes: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1])
    argv = ["--models", "tiny", "--workloads", "few", "prompts", "--rounds", "1", "--out", str(tmp_path)]
    if loses:
        with pytest.raises(SystemExit, match=r"(?s)vllm ended with 1 before vllm-2-done.*3 tokens, not 6"):
            by_turns.main(argv)
        kept = json.loads((tmp_path / "vllm-tiny-pp1.json").read_text())
        assert [row["repeat"] for row in kept["rows"]] == [0] * 4  # the finished round
    else:
        by_turns.main(argv)
        record = json.loads((tmp_path / "vllm-tiny-pp1.json").read_text())
        order = [(row["engine"], row["workload"], row["first"]) for row in record["rows"]]
        orders = {True: ("weft", "vllm"), False: ("vllm", "weft")}
        workloads = "few", "prompts"
        assert order == [(own, name, first) for first, both in orders.items() for name in workloads for own in both]
        few, prompts = record["table"]
        last = {row["engine"]: row for row in record["rows"][4:6]}
        assert few["weft"]["median"] == 6 / last["weft"]["seconds"]
        assert few["unit"] == "output_tokens_per_s"
        assert few["ratio"] == pytest.approx(last["vllm"]["seconds"] / last["weft"]["seconds"])
        asked = [json.loads(line) for line in (tmp_path / "vllm" / "asked").read_text().splitlines()]
        assert [sampling for _, sampling in asked[:2]] == [WORKLOADS[name].sampling for name in workloads]
        assert asked[0][0] == asked[2][0] == [2, 2]
        first, second = asked[1][0], asked[3][0]
        assert first != second
        assert all(1 <= length <= 6 for length in first + second)
        assert [row["input_tokens"] for row in record["rows"][6:]] == [sum(second)] * 2  # the same for both engines
        assert prompts["weft"]["median"] == pytest.approx((6 + sum(second)) / record["rows"][7]["seconds"])
        assert record["vllm"]["log"] == ["Using no attention at all"]
        drawn = json.loads((tmp_path / "vllm" / "weights").read_text())
        assert drawn.pop("_k_scale") == [7.0, 0.0]
        assert drawn.pop("positions") == [1.0, 1.0]
        wanted = {"weight": (0, 0.02), "bias": (0, 0.02), "norm.weight": (1, 0.02), "w13_weight": (0, 16)}
        for name, (mean, deviation) in wanted.items():
            assert drawn[name] == [pytest.approx(mean, abs=deviation / 4), pytest.approx(deviation, rel=0.2)], name
        assert 0.5 <= drawn["w13_weight_scale_inv"][0] * 800 <= 1.5
        assert record["vllm"]["arguments"]["model"] == "tiny"
        assert tempfile.gettempdir() not in json.dumps({name: record["vllm"][name] for name in ("arguments", "log")})
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 2 * 5
        assert printed[5] == "after round 1 of 1:"
    assert len(processes) == 3  # the first was asked for vllm
    assert all(process.poll() is not None for process in processes)
    child = int((tmp_path / "vllm" / "child").read_text())
    until = time.monotonic() + 30
    while is_alive(child):  # init has to take note
        assert time.monotonic() < until, "what vLLM started goes on"
        time.sleep(0.05)
