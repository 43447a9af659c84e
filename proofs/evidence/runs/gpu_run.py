"""One run on a GPU: the marked tests, the command line, and decode steps timed; a table last, and
all of it as JSON.

    python -m weft.proofs.evidence.runs.gpu_run --out FOLDER [--tests FOLDER_OF_TESTS]

The timed model has Qwen3-0.6B's dimensions and random weights, bfloat16. A step is timed by the
device's clock over repeated replays of one class; the floor is the bytes that a step must read
(weights, and the keys and values of the context) over the copy bandwidth, measured in the same run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.config import parse_config
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import num_bytes
from weft.stages.random_weights import random_params
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import Limits

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def copy_bandwidth(device: str = "cuda") -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    # 1 GiB on a GPU, many times its cache. A small copy would measure the cache, and the floor
    # would be too low.
    source = torch.randn(2**28 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    seconds = device_seconds(lambda: target.copy_(source), repeats=10, device=device)
    # Twice, since a copy reads and writes each byte.
    return 2 * source.numel() * source.element_size() / seconds


def device_seconds(fn: Callable[[], Any], repeats: int, device: str = "cuda") -> float:
    """The median over three rounds of the time of one call, by device events around `repeats` of
    them; on the CPU by the host's clock."""
    rounds = []
    for _ in range(3):
        fn()
        if device != "cuda":
            began = time.perf_counter()
            for _ in range(repeats):
                fn()
            rounds.append((time.perf_counter() - began) / repeats)
            continue
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            fn()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / 1000 / repeats)
    # The median of three: the first round may still compile, and a clock may change in one.
    return float(sorted(rounds)[1])


def random_model(raw: dict[str, Any], device: str = "cuda") -> Model:
    """A model of a configuration's dimensions, with random weights."""
    config = parse_config(raw, source="a configuration")
    (whole,) = split_layers(config.num_layers, 1)
    return Model(config, random_params(config, whole, seed=0, device=device), None, Path("random"))


def time_decode(
    model: Model, num_reqs: int, context: int, num_stages: int, mode: str, bandwidth: float
) -> dict[str, Any]:
    """Milliseconds a decode step at a context length, its floor, and what the graphs were asked to
    do."""
    runner = make_runner(model, Limits(num_reqs, 4096), num_stages=num_stages, mode=mode)
    repeats = 30
    # Room for all steps of all rounds, so that no request comes to its end while it is timed.
    lengths = [context + 4 * (repeats + 2)] * num_reqs
    state = make_state(
        model,
        runner.layouts,
        lengths,
        [SamplingParams(temperature=1.0, seed=row) for row in range(num_reqs)],
    )
    for stage in state:
        stage.positions[:-1] = (
            context  # as if prefilled: the time does not depend on what the pages hold
        )
        stage.kv_pages.normal_()
    batch = Batch.decode(range(num_reqs), device=model.device)

    def step() -> None:
        nonlocal state
        state, _ = runner.step(runner.params, state, batch)

    seconds = device_seconds(step, repeats, model.device.type)
    config = model.config
    kv_bytes = (
        # Keys and values, of two bytes each.
        2 * config.num_layers * config.num_kv_heads * config.head_dim * 2 * num_reqs * context
    )
    # The whole embedding is counted, although a step reads few of its rows: it is tied to the head,
    # which reads all.
    floor = (num_bytes(model.params) + kv_bytes) / bandwidth
    infos = [graph.cache_info() for graph in runner.graphs]
    return {
        "reqs": num_reqs,
        "context": context,
        "stages": num_stages,
        "mode": mode,
        "ms": seconds * 1e3,
        "floor_ms": floor * 1e3,
        "share": floor / seconds,
        "tokens_per_s": num_reqs / seconds,
        "captures": sum(i.captures for i in infos),
        "replays": sum(i.replays for i in infos),
    }


def run_tests(folder: str) -> dict[str, Any]:
    """Run the tests marked `gpu` in processes of their own, print the end of what they said, return
    how they closed."""
    environment = {**os.environ, "WEFT_HYPOTHESIS_PROFILE": "gpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "8",
        "-m",
        "gpu",
        "--durations=5",
        folder,
    ]
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print((done.stdout + done.stderr)[-4000:])
    closing = re.findall(r"\d+ (?:passed|failed).*|no tests ran.*", done.stdout) or [""]
    return {
        "exit": done.returncode,
        "closing": closing[-1].strip("= "),
        "seconds": time.time() - start,
    }


def run_command(*arguments: str) -> dict[str, Any]:
    """Run `python -m weft ...` and keep what it printed."""
    command = [sys.executable, "-m", "weft", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # The record must not name a folder of one machine.
    shown = " ".join(("weft", *arguments)).replace(str(DEMO), "stages/demo")
    return {"command": shown, "exit": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def main() -> None:
    """Run everything, write `gpu_run.json`, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tests", help="the folder of tests to run; none without it")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    model = random_model(QWEN3_0_6B)
    cases = [(1, 256), (64, 256), (128, 512)]
    timed = [
        time_decode(model, reqs, context, stages, mode, bandwidth)
        for reqs, context in cases
        for stages, mode in ((1, "none"), (1, "full"), (2, "full"))
    ]
    prompts = ["--prompt", "The function returns", "--prompt", "A list is"]
    commands = [
        run_command("doctor", "--json"),
        run_command(
            "generate", "--model", str(DEMO), *prompts, "--max-tokens", "32", "--pp", "2", "--json"
        ),
        run_command("demo"),
    ]
    if arguments.tests:
        tests = run_tests(arguments.tests)
    else:
        tests = None
    report = {"copy_bandwidth": bandwidth, "decode": timed, "commands": commands, "tests": tests}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_run.json").write_text(json.dumps(report, indent=1))
    show(report)


def show(report: dict[str, Any]) -> None:
    """Print the report, the figures last."""
    for command in report["commands"]:
        print(
            f"$ {command['command']}  -> exit"
            f" {command['exit']}\n{command['stdout'][-3000:]}{command['stderr'][-800:]}"
        )
    if report["tests"]:
        print(f"tests: {report['tests']['closing']} in {report['tests']['seconds']:.0f} s")
    print(
        f"copy bandwidth {report['copy_bandwidth'] / 1e12:.2f} TB/s; Qwen3-0.6B, bfloat16, random"
        " weights, decode"
    )
    print(
        f"{'reqs':>5}{'context':>8}{'stages':>7}"
        f" {'mode':<6}{'ms':>8}{'floor':>8}{'share':>7}{'tok/s':>9}{'graphs':>7}"
    )
    for row in report["decode"]:
        sizes = f"{row['reqs']:>5}{row['context']:>8}{row['stages']:>7} {row['mode']:<6}"
        times = f"{row['ms']:>8.3f}{row['floor_ms']:>8.3f}{row['share']:>7.0%}{row['tokens_per_s']:>9,.0f}"
        print(f"{sizes}{times}{row['captures']:>7}")


if __name__ == "__main__":
    main()
