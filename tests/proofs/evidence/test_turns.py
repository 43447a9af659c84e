"""weft and vLLM by turns, with small models, and a package that takes vLLM's place."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from weft.proofs.evidence.bench.turns import __main__ as by_turns
from weft.stages.random_weights import PRESETS


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "has no vllm: pass --python"),
        (("--rounds", "-1"), "pass 0 or more"),
        (
            ("--models", "large"),
            "large is no preset, and no large/config.json is there: pass a folder, or tiny, ",
        ),
        (("--pp", "0"), "--pp 0: pass 1 or more stages"),
        (
            ("--python", "no/python"),
            "--python no/python: not found: pass the Python of an environment that has vLLM",
        ),
        (
            ("--models", "tiny", "tiny"),
            "--models: two are called tiny, which their records are named after",
        ),
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
        (
            json.dumps({**PRESETS["tiny"], "architectures": ["GemmaForCausalLM"]}),
            "GemmaForCausalLM",
        ),
        (
            json.dumps({**PRESETS["tiny"], "max_position_embeddings": 300}),
            (
                "--workloads prefill: prefill has requests of 576 tokens, and some has 300"
                " positions: pass other workloads"
            ),
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


@pytest.mark.nightly
def test_an_older_weft_beside_weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        by_turns, "WORKLOADS", {"few": by_turns.Workload(2, 2, 3, num_long=1, long_len=40)}
    )
    model = tmp_path / "small-one"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    argv = [
        "--models",
        str(model),
        "--workloads",
        "few",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
        "--against",
    ]
    by_turns.main([*argv, str(Path(__file__).parents[3])])
    record = json.loads((tmp_path / "older-small-one-pp1.json").read_text())
    assert record["preset"] == "small-one"
    assert [row["engine"] for row in record["rows"]] == ["weft", "older", "older", "weft"]
    assert [row["input_tokens"] for row in record["rows"]] == [42] * 4
    [row] = record["table"]
    assert row["ratio"] == pytest.approx(
        record["rows"][2]["seconds"] / record["rows"][3]["seconds"]
    )
    assert "the older build in" in capsys.readouterr().out
    checkout = tmp_path / "checkout"
    with pytest.raises(SystemExit):
        by_turns.main([*argv, str(checkout)])
    assert "no .src/weft is there" in capsys.readouterr().err
    (checkout / ".src" / "weft").mkdir(parents=True)
    (checkout / ".src" / "weft" / "__init__.py").write_text(
        "raise SystemExit('this is the older one')"
    )
    with pytest.raises(SystemExit):
        by_turns.main([*argv, str(checkout)])
    assert "it has no proofs/**/turns/own.py" in capsys.readouterr().err
    side = checkout / "proofs" / "bench" / "turns" / "own.py"
    side.parent.mkdir(parents=True)
    side.write_text("import weft")
    with pytest.raises(
        SystemExit, match=r"(?s)older ended with 1 before older-ready.*this is the older one"
    ):
        by_turns.main([*argv, str(checkout)])


WORKLOADS = {
    "few": by_turns.Workload(2, 2, 3),
    "prompts": by_turns.Workload(
        3, 6, 2, varied=True, sampling={"temperature": 0.5, "top_k": 4, "top_p": 0.75}
    ),
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


@pytest.mark.nightly
@pytest.mark.parametrize("loses", [False, True])
def test_vllm_beside_weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loses: bool
) -> None:
    """The protocol of turns, with a package that takes vLLM's place: both end with the run,
    whatever happens."""
    (tmp_path / "vllm").mkdir()
    lost = (  # in the second round
        "self.count = getattr(self, 'count', -1) + 1; prompts = prompts[self.count // 2 :]"
    )
    source = FAKE_VLLM.replace("LOSES", lost if loses else "pass")
    (tmp_path / "vllm" / "__init__.py").write_text(source)
    (tmp_path / "vllm" / "inputs.py").write_text("class TokensPrompt(dict):\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(by_turns, "WORKLOADS", WORKLOADS)
    processes: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1]
    )
    argv = [
        "--models",
        "tiny",
        "--workloads",
        "few",
        "prompts",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
    ]
    if loses:
        with pytest.raises(
            SystemExit, match=r"(?s)vllm ended with 1 before vllm-2-done.*3 tokens, not 6"
        ):
            by_turns.main(argv)
        kept = json.loads((tmp_path / "vllm-tiny-pp1.json").read_text())
        assert [row["repeat"] for row in kept["rows"]] == [0] * 4  # the finished round
    else:
        by_turns.main(argv)
        record = json.loads((tmp_path / "vllm-tiny-pp1.json").read_text())
        order = [(row["engine"], row["workload"], row["first"]) for row in record["rows"]]
        orders = {True: ("weft", "vllm"), False: ("vllm", "weft")}
        workloads = "few", "prompts"
        assert order == [
            (engine, name, first)
            for first, both in orders.items()
            for name in workloads
            for engine in both
        ]
        few, prompts = record["table"]
        last = {row["engine"]: row for row in record["rows"][4:6]}
        assert few["weft"]["median"] == 6 / last["weft"]["seconds"]
        assert few["unit"] == "output_tokens_per_s"
        assert few["ratio"] == pytest.approx(last["vllm"]["seconds"] / last["weft"]["seconds"])
        requests = [
            json.loads(line) for line in (tmp_path / "vllm" / "asked").read_text().splitlines()
        ]
        assert [sampling for _, sampling in requests[:2]] == [
            WORKLOADS[name].sampling for name in workloads
        ]
        assert requests[0][0] == requests[2][0] == [2, 2]
        first = requests[1][0]
        second = requests[3][0]
        assert first != second
        assert all(1 <= length <= 6 for length in first + second)
        assert [row["input_tokens"] for row in record["rows"][6:]] == [
            sum(second)
        ] * 2  # the same for both engines
        assert prompts["weft"]["median"] == pytest.approx(
            (6 + sum(second)) / record["rows"][7]["seconds"]
        )
        assert record["vllm"]["log"] == ["Using no attention at all"]
        drawn = json.loads((tmp_path / "vllm" / "weights").read_text())
        assert drawn.pop("_k_scale") == [7.0, 0.0]
        assert drawn.pop("positions") == [1.0, 1.0]
        expected = {
            "weight": (0, 0.02),
            "bias": (0, 0.02),
            "norm.weight": (1, 0.02),
            "w13_weight": (0, 16),
        }
        for name, (mean, deviation) in expected.items():
            assert drawn[name] == [
                pytest.approx(mean, abs=deviation / 4),
                pytest.approx(deviation, rel=0.2),
            ], name
        assert 0.5 <= drawn["w13_weight_scale_inv"][0] * 800 <= 1.5
        assert record["vllm"]["arguments"]["model"] == "tiny"
        assert tempfile.gettempdir() not in json.dumps(
            {name: record["vllm"][name] for name in ("arguments", "log")}
        )
        printed = capsys.readouterr().out.splitlines()
        assert len(printed) == 2 * 6
        assert printed[6] == "after round 1 of 1:"
    assert len(processes) == 3  # the first was asked for vllm
    assert all(process.poll() is not None for process in processes)
    child = int((tmp_path / "vllm" / "child").read_text())
    until = time.monotonic() + 30
    while is_alive(child):  # init has to take note
        assert time.monotonic() < until, "what vLLM started goes on"
        time.sleep(0.05)
