"""Compare weft to eager torch, `torch.compile` and `jax.jit`, on functions that others wrote.

    python -m weft.proofs.evidence.bench.modules --out FOLDER [--cases decode train ...]
    python -m weft.proofs.evidence.bench.modules --out FOLDER --small --device cpu --passes 1

Cases: a decode step of transformers' Llama (Llama-3.2-1B's shape, 1 and 16 rows) and a LoRA step of
it, a GPT-2 training step (`train-fused`: weft's AdamW by torch's operators on lists), ConvNeXt-Tiny,
ViT-B, a U-Net, 20 steps of it as a sampler, a graph network over graphs of 8 sizes, and an MLP of
1,000 parameters. Each variant of each case runs in a process of its own, `--passes` times, in turns.
In the first pass its compiler's caches are empty (`cold`), and later ones find them (`warm`). Times
are those of the first call, without imports, and of later ones, the median over passes. The first
four results are compared to eager ones: logits, losses or outputs.

`reduce-overhead` lends its results: the next call overwrites them. weft's are safe. Without a GPU
there is no memory and there are no kernels to count, and graphs are tapes.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
from tqdm import tqdm

from weft.proofs.evidence.bench.modules.cases import CASES
from weft.proofs.evidence.bench.modules.one import MARK
from weft.proofs.evidence.bench.modules.report import text
from weft.proofs.evidence.bench.modules.variants import EAGER, VARIANTS
from weft.proofs.evidence.environment import environment

_SECONDS = 300.0
# A line such as `ValueError: why`, and how much of it is kept.
_ERROR = re.compile(r"[A-Za-z_][\w.]*: ")
_MOST_OF_A_LINE = 200
_ONE = "weft.proofs.evidence.bench.modules.one"


@attrs.frozen
class Job:
    """A process to run: a variant of a case in a pass."""

    case: str
    variant: str
    number: int

    def record(self, args: argparse.Namespace, caches: Path) -> dict[str, Any]:
        """Run the process: what it measured, or the last line of its error."""
        command = [sys.executable, "-m", _ONE, self.case, self.variant, args.device]
        command += ["small"] * args.small
        command += ["check"] * (self.number == 0 and self.variant != EAGER)
        folder = caches / self.case / self.variant
        variables = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            # JAX takes most of the memory otherwise.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        start = time.perf_counter()
        record: dict[str, Any] = {"case": self.case, "variant": self.variant, "pass": self.number}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            # A session of its own, since compilers start processes, which must end with it.
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            record["problem"] = f"took more than {_SECONDS:.0f} s"
            return record
        record["process_s"] = time.perf_counter() - start
        rows = [line for line in output.splitlines() if line.startswith(MARK)]
        if rows:
            record |= json.loads(rows[-1].removeprefix(MARK))
            return record
        record["problem"] = last_line(errors) or f"ended with {process.returncode}"
        record["stderr"] = errors[-4000:]
        return record


def last_line(errors: str) -> str:
    """The line of a traceback that names the error.

    >>> last_line("Traceback ...\\n  File ...\\nValueError: first line\\n\\nWhile executing f: x\\n")
    'ValueError: first line'
    """
    written = [line for line in errors.splitlines() if line.strip()]
    named = [line for line in written if _ERROR.match(line)]
    return (named or written or [""])[-1][:_MOST_OF_A_LINE]


def jobs_of(args: argparse.Namespace, number: int) -> list[Job]:
    """The processes of a pass."""
    return [
        Job(case, variant, number)
        for case in args.cases
        for variant in args.variants
        if variant in CASES[case].variants
    ]


def run(args: argparse.Namespace, file: Path) -> list[dict[str, Any]]:
    """All passes. A variant that failed is not tried again. Each record is written at once."""
    records = list[dict[str, Any]]()
    failed = set[tuple[str, str]]()
    total = args.passes * len(jobs_of(args, 0))
    with (
        tempfile.TemporaryDirectory() as caches,
        ThreadPoolExecutor(args.jobs) as pool,
        tqdm(total=total, unit="process", disable=None) as progress,
        open(file, "a") as out,
    ):
        for number in range(args.passes):
            jobs = [job for job in jobs_of(args, number) if (job.case, job.variant) not in failed]
            for record in pool.map(lambda job: job.record(args, Path(caches)), jobs):
                records.append(record)
                out.write(json.dumps(record) + "\n")
                out.flush()
                progress.update()
                progress.write(_said(record), file=sys.stderr)
                if "problem" in record:
                    failed.add((record["case"], record["variant"]))
    return records


def _said(record: dict[str, Any]) -> str:
    title = f"pass {record['pass']} {record['case']:<12}{record['variant']:<18}"
    if "problem" in record:
        return f"{title}{record['problem']}"
    return f"{title}{record['opening_s'][0]:8.2f} s, then {record['ms']:.3f} ms"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the passes, write `modules.jsonl` and `modules.txt`, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, required=True, help="a folder for the records")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--passes", type=int, default=3, help="the first has empty caches (3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (1)")
    args = parser.parse_args(argv)
    if args.passes < 1:
        parser.error(f"--passes {args.passes}: pass 1 or more")
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(args, name) for name in ("device", "small", "passes", "jobs")}
    file = args.out / "modules.jsonl"
    head = {"environment": environment(args.device), **settings}
    file.write_text(json.dumps(head) + "\n")
    table = text(run(args, file))
    (args.out / "modules.txt").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
