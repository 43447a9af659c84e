"""Serve requests of the same lengths by weft and by vLLM, or by an older weft, both alive at once,
by turns: how many times as fast weft is.

    python -m weft.proofs.evidence.bench.turns --models llama-3.1-8b qwen3-30b-a3b-fp8 --out FOLDER
    python -m weft.proofs.evidence.bench.turns --models qwen3-30b-a3b-fp8 --out FOLDER \\
        --pp 2 --gpus 0,1 --peer-gpus 2,3
    VLLM_USE_DEEP_GEMM=0 python -m weft.proofs.evidence.bench.turns --models qwen3-0.6b \\
        --python vllm/bin/python --out FOLDER
    python -m weft.proofs.evidence.bench.turns --models qwen3-0.6b --out FOLDER \\
        --against ../weft-of-last-month

A model is a preset of `weft bench`, or a folder with a `config.json`. Each engine serves a workload
in turn, `--rounds` times after a first pass; the one that is first alternates. weft starts first,
and vLLM may then use 7/6 of the memory that weft has at its peak, and 6 GB. Weights of both are
random and of one distribution, which flatters the routing of experts; no completion ends early. The
temperature is 1, but in `sampled`, which has top-k and top-p too; `varied` has prompts of 1 to 960
tokens, `long` of 7,936, `uneven` of 1 to 7,936; in `few_long` 4 of 15,360 come before 128 of 512.
Both run as many requests at once as a workload of the run has. After fewer than three rounds equal
builds may differ by a fourth. vLLM has its defaults but for the arguments and variables that the
record names. An older weft is a checkout that has this benchmark, and serves by its own `own.py`;
give both memory enough, since an engine takes fewer pages where there is less.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from weft.errors import WeftError
from weft.proofs.evidence.bench.turns.peer import write
from weft.proofs.evidence.bench.turns.workloads import LONG, WORKLOADS, Workload, num_pages
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS

_START_SECONDS = 300.0
_TURN_SECONDS = 120.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.005
_SAMPLE_SECONDS = 2.0
_CHOICES = re.compile(
    r"\] ((?:Using (?!cache)|Selected|Chunked|Asynchronous|torch\.compile took|GPU KV|Graph"
    r" capturing|init engine).*)"
)
_GPU_FIELDS = "clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active"
# The bit of `clocks_event_reasons` that says that the power cap holds the clock down.
_POWER_CAP = 4
_FEW_ROUNDS = 3
# Without importing it, which takes many seconds.
_HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
# The folder of a checkout that has the package.
_SOURCE = ".src"
# weft's side of the benchmark, beside this file, and in a checkout of any age.
_SIDE = "own.py"
_SIDE_IN_CHECKOUT = f"proofs/**/turns/{_SIDE}"


class Engine:
    """A process that serves turns.

    Args:
        name: `weft`, `vllm` or `older`.
        folder: holds turns, answers and its output.
        process: the running command.
    """

    def __init__(self, name: str, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.name = name
        self.folder = folder
        self.process = process
        self.count = 0

    @property
    def log(self) -> str:
        """The process's output so far."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def ask(self, requests: dict[str, Any] | None) -> Path:
        """Give the process a turn, or None if there are no more; returns where its answer will be."""
        turn = self.folder / f"{self.name}-{self.count}"
        self.count += 1
        write(turn, requests)
        return turn.with_name(turn.name + "-done")

    def answer(self, path: Path, seconds: float) -> dict[str, Any]:
        """Wait for the answer at a path, and read it.

        Raises:
            SystemExit: the process ended first, or took longer than `seconds`; with the end of its
                output.
        """
        until = time.monotonic() + seconds
        while not path.exists():
            # An engine that has died gives no answer, and its log says why.
            if self.process.poll() is not None or time.monotonic() > until:
                if self.process.poll() is None:
                    ended = "took too long"
                else:
                    ended = f"ended with {self.process.returncode}"
                raise SystemExit(f"{self.name} {ended} before {path.name}:\n{self.log[-4000:]}")
            time.sleep(_POLL_SECONDS)
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer


@contextmanager
def running(
    name: str, folder: Path, command: Sequence[str], gpus: str | None, source: Path | None = None
) -> Iterator[Engine]:
    """An engine's process, which ends with the block; it finds modules in `source` first."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # its log is read while it runs
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    if source is not None:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(source), os.environ.get("PYTHONPATH")))
        )
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            # A session of its own, since an engine starts processes, which must end with it.
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        engine = Engine(name, folder, process)
        try:
            yield engine
        finally:
            engine.ask(None)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            with suppress(ProcessLookupError):  # with what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def watched(gpu: str) -> Iterator[list[list[float]]]:
    """Samples of a GPU in the meantime: the clock in MHz, degrees Celsius, watts, and why the clock
    is what it is; none without nvidia-smi."""
    samples, stop = list[list[float]](), threading.Event()
    command = [
        "nvidia-smi",
        "-i",
        gpu,
        f"--query-gpu={','.join(_GPU_FIELDS)}",
        "--format=csv,noheader,nounits",
    ]

    def sample() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            try:
                text = subprocess.run(
                    command, capture_output=True, text=True, check=True, timeout=10
                ).stdout
                samples.append(
                    [
                        float(int(part, 0) if "x" in part else float(part))
                        for part in text.split(",")
                    ]
                )
            except (OSError, ValueError, subprocess.SubprocessError):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def compare(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start both engines with a model and let them take turns: after each round, all that was
    measured so far."""
    workloads = {name: WORKLOADS[name] for name in args.workloads}
    longest = max((one.longest for one in workloads.values()), key=sum)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        (folder / "driver").write_text(str(os.getpid()))
        model = folder / "models" / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(args.models[name]))
        # The real dimensions with random weights: no checkpoint is needed, and times do not depend
        # on it but for the power of the GPU.
        weft_options = {"model": str(model), "load_format": "dummy", "pp": args.pp}
        most = max(one.num_requests for one in workloads.values())
        weft_options |= {"input_len": longest[0], "output_len": longest[1], "max_num_seqs": most}
        if (pages := num_pages(workloads.values())) is not None:
            weft_options["num_pages"] = pages

        def command_of(side: Path, engine: str) -> list[str]:
            return [sys.executable, str(side), temporary, json.dumps(weft_options), engine]

        side = Path(__file__).with_name(_SIDE)
        weft = stack.enter_context(running("weft", folder, command_of(side, "weft"), args.gpus))
        # weft first: what it takes says how much memory is left for the other.
        started = weft.answer(folder / "weft-ready", _START_SECONDS)
        gpus = args.peer_gpus or args.gpus
        if args.against is not None:
            [side] = args.against.glob(_SIDE_IN_CHECKOUT)
            command = command_of(side, "older")
            peer = stack.enter_context(
                running("older", folder, command, gpus, args.against / _SOURCE)
            )
        else:
            positions = parse_config(args.models[name], source=name).max_position_embeddings
            peer_options = {
                "model": str(model),
                "pipeline_parallel_size": args.pp or 1,
                "max_num_seqs": most,
            }
            # No longer than needed, since vLLM keeps room for it.
            peer_options["max_model_len"] = min(sum(longest) + 64, positions)
            if started["device_bytes"] is not None:
                used = max(rank["peak_bytes"] + rank["graph_bytes"] for rank in started["ranks"])
                peer_options["gpu_memory_utilization"] = round(
                    (used * 7 / 6 + 6e9) / started["device_bytes"], 3
                )
            command = [
                args.python,
                str(Path(__file__).with_name("peer.py")),
                temporary,
                json.dumps(peer_options),
            ]
            peer = stack.enter_context(running("vllm", folder, command, gpus))
        chosen = peer.answer(folder / f"{peer.name}-ready", _START_SECONDS)
        if args.against is None:
            lines = (
                re.sub(r"\x1b\[[0-9;]*m|/\S*/", "", line) for line in _CHOICES.findall(peer.log)
            )
            chosen["arguments"]["model"] = name  # the folder is gone afterwards
            chosen["log"] = [*dict.fromkeys(lines)]  # of its choices, without colours and folders
        rows = list[dict[str, Any]]()
        orders = (weft, peer), (peer, weft)  # each first in every other round
        total = (args.rounds + 1) * len(workloads) * 2
        visible = args.gpus or os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
        progress = stack.enter_context(tqdm(total=total, desc=name, unit="turn", disable=None))
        samples = stack.enter_context(watched(visible.split(",")[0]))
        for repeat in range(args.rounds + 1):
            # Both on one workload, one right after the other: whatever slows the machine slows
            # both.
            for workload, engine in itertools.product(workloads, orders[repeat % 2]):
                request = workloads[workload].turn(seed=repeat)
                answer = engine.answer(engine.ask(request), _TURN_SECONDS)
                row = {
                    "engine": engine.name,
                    "workload": workload,
                    "repeat": repeat,
                    "first": repeat == 0,
                }
                row |= {
                    **workloads[workload]._asdict(),
                    "input_tokens": sum(request["input_lens"]),
                    **answer,
                }
                output = row["num_requests"] * row["output_len"]
                row["output_tokens_per_s"] = output / row["seconds"]
                row["total_tokens_per_s"] = (output + row["input_tokens"]) / row["seconds"]
                rows.append(row)
                progress.update()
            gpu_rows = list(samples)
            yield {
                "preset": name,
                "config": args.models[name],
                "stages": args.pp or 1,
                "weft": started,
                peer.name: chosen,
                "rows": rows,
                "table": list(table(rows, workloads, peer.name)),
                "gpu_samples": {
                    "fields": _GPU_FIELDS,
                    "rows": gpu_rows,
                    "power_capped": sum(int(sample[-1]) & _POWER_CAP > 0 for sample in gpu_rows),
                },
            }


def table(
    rows: Sequence[dict[str, Any]], workloads: Iterable[str], other: str
) -> Iterator[dict[str, Any]]:
    """A row for each workload: both engines' passes after the first, and the ratio of their
    medians. Tokens of prompts count where they are most of all."""
    for workload in workloads:
        weft_rows, peer = (
            [row for row in rows if (row["engine"], row["workload"]) == (name, workload)]
            for name in ("weft", other)
        )
        one = weft_rows[0]
        if one["input_len"] > one["output_len"]:
            unit = "total_tokens_per_s"
        else:
            unit = "output_tokens_per_s"
        speeds = [[row[unit] for row in side] for side in (weft_rows, peer)]
        # Without the first pass, which may compile and capture.
        medians = [statistics.median(side[1:] or side) for side in speeds]
        yield {
            "workload": workload,
            **{name: one[name] for name in Workload._fields},
            "unit": unit,
            **{
                name: {
                    "median": median,
                    "min": min(side[1:] or side),
                    "max": max(side[1:] or side),
                    "first": side[0],
                }
                for name, side, median in zip(("weft", other), speeds, medians, strict=True)
            },
            "ratio": medians[0] / medians[1],
        }


def _first_token(side: dict[str, Any]) -> float:
    """The seconds from the start of an engine of weft's to its first token."""
    return float(max(rank["first_token_seconds"] for rank in side["ranks"]))


def show(record: dict[str, Any]) -> Iterator[str]:
    """The printed lines of a comparison."""
    name = "vllm" if "vllm" in record else "older"
    peer = record[name]
    if name == "vllm":
        beside = f"vLLM {peer['version']} in {peer['ready_seconds']:.1f}"
    else:
        beside = f"the older build in {_first_token(peer):.1f}"
    yield (
        f"{record['preset']}, {record['stages']} stage(s): ready in {_first_token(record['weft']):.1f}"
        f" s, {beside}; power capped in {record['gpu_samples']['power_capped']} of"
        f" {len(record['gpu_samples']['rows'])} samples"
    )
    yield (
        "  tokens/s: the median (the least to the most; the first pass) of weft, of the other; how"
        " many times as fast"
    )
    if len({row["repeat"] for row in record["rows"] if not row["first"]}) < _FEW_ROUNDS:
        yield "  fewer than three rounds after the first: equal builds may differ by a fourth"
    for row in record["table"]:
        ours = row["weft"]
        other = row[name]
        yield (
            f"  {row['workload']:<8} {ours['median']:>9,.0f} ({ours['min']:,.0f} to"
            f" {ours['max']:,.0f}; first {ours['first']:,.0f})   {other['median']:>9,.0f}"
            f" ({other['min']:,.0f} to {other['max']:,.0f}; first {other['first']:,.0f})  "
            f" {row['ratio']:.2f}"
        )


def _config(model: str) -> tuple[str, Mapping[str, Any]]:
    """The name and the config of a preset, or of a folder."""
    if model in PRESETS:
        return model, PRESETS[model]
    path = Path(model, "config.json")
    if not path.is_file():
        preset_names = ", ".join(PRESETS)
        raise argparse.ArgumentTypeError(
            f"{model} is no preset, and no {path} is there: pass a folder, or {preset_names}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise argparse.ArgumentTypeError(
                f"{path} holds no JSON object: pass the folder of a model"
            )
        parse_config(config, source=str(path))
    except (ValueError, WeftError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from error
    return path.resolve().parent.name, config


def _refusal(args: argparse.Namespace) -> str | None:
    """The error of arguments that do not fit, with what to pass instead; None: they fit."""
    names = [name for name, _ in args.models]
    for name, config in args.models:
        positions = parse_config(config, source=name).max_position_embeddings
        for workload in args.workloads:
            length = sum(WORKLOADS[workload].longest)
            if length > positions:
                problem = (
                    f"{workload} has requests of {length} tokens, and {name} has {positions}"
                    " positions"
                )
                return f"--workloads {workload}: {problem}: pass other workloads"
        if names.count(name) > 1:
            return (
                f"--models: two are called {name}, which their records are named after: run them"
                " one by one"
            )
    if args.rounds < 0:
        return f"--rounds {args.rounds}: pass 0 or more, the rounds after the first pass"
    if args.pp is not None and args.pp < 1:
        return f"--pp {args.pp}: pass 1 or more stages"
    if args.against is not None:
        if not (args.against / _SOURCE / "weft").is_dir():
            return f"--against {args.against}: no {_SOURCE}/weft is there: pass a checkout of weft"
        if not any(args.against.glob(_SIDE_IN_CHECKOUT)):
            return f"--against {args.against}: it has no {_SIDE_IN_CHECKOUT}: pass a later checkout"
    elif shutil.which(args.python) is None:
        return f"--python {args.python}: not found: pass the Python of an environment that has vLLM"
    elif subprocess.run([args.python, "-c", _HAS_VLLM], check=False).returncode:
        return (
            f"{args.python} has no vllm: pass --python PATH, the Python of an environment that"
            " has it"
        )
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Compare both with each model, print a table after each round, and write
    `vllm-MODEL-ppN.json`, or `older-MODEL-ppN.json`: who is stopped keeps the rounds that were
    finished."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        type=_config,
        required=True,
        help="presets of `weft bench`, or folders with a config.json",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        default=[name for name in WORKLOADS if name not in LONG],
        help=f"in order (all but {', '.join(LONG)})",
    )
    parser.add_argument(
        "--rounds", type=int, default=4, metavar="N", help="after the first pass (4)"
    )
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages of both (1)")
    parser.add_argument(
        "--gpus",
        metavar="LIST",
        help="CUDA_VISIBLE_DEVICES of weft, and of vLLM without --peer-gpus",
    )
    parser.add_argument("--peer-gpus", metavar="LIST", help="CUDA_VISIBLE_DEVICES of vLLM")
    parser.add_argument("--python", default=sys.executable, help="that has vLLM (this one)")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="an older weft in the place of vLLM"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    args = parser.parse_args(argv)
    if (refusal := _refusal(args)) is not None:
        parser.error(refusal)
    args.against = args.against and args.against.resolve()
    args.models = dict(args.models)
    args.out.mkdir(parents=True, exist_ok=True)
    # So that both engines are ended too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if args.against is None:
        other = "vllm"
    else:
        other = "older"
    for name in args.models:
        path = args.out / f"{other}-{name}-pp{args.pp or 1}.json"
        for repeat, record in enumerate(compare(name, args)):
            write(path, record, indent=1)
            print(f"after round {repeat} of {args.rounds}:", *show(record), sep="\n", flush=True)


if __name__ == "__main__":
    main()
