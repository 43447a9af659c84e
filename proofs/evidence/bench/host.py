"""The host's time for a decode step where the stages compute nothing: a device that is faster than
this waits for it.

    python -m weft.proofs.evidence.bench.host [--requests 128] [--splits 1x1 1x2 2x1 4x1] [--out
    FOLDER]

An engine of random weights decodes requests. Its stages are replaced by functions that return the
same tokens at once, so that what is left is Python: scheduling, the effects of each rank, and
reading the tokens. The time is that of the main thread's processor, without waiting, for a step of
so many requests: with P stages they are P cohorts of as many requests, and a rank runs its stage
once for each. Messages travel by gloo, whose copies count too; on a GPU they are launches of
kernels. The calls of graphs are not in it (`weft.proofs.evidence.bench.graphify_overhead`).
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weft.batches.outputs import IntermediateTensors, Output
from weft.batches.sampling import SamplingParams
from weft.proofs.evidence.environment import environment
from weft.transforms.cli.bench import start_engine
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, in_ranks
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.steps.executor import PipelineExecutor, StepExecutor
from weft.transforms.engine.steps.step import with_edits
from weft.values.donation import declare_donated

_SPLITS = "1x1", "1x2", "2x1", "4x1"
_STEPS = 60
_ROUNDS = 5
# Steps that are not timed: prompts are read, and the pipeline fills.
_FIRST = 4
_PROMPT = [1, 2]


def compute_nothing(engine: Engine) -> None:
    """Replace an engine's stages by functions that return made-up values at once."""
    executor: Any = engine._executor
    size = engine.limits.budget.max_num_tokens
    hidden = torch.zeros(size, engine.model.config.hidden_size, dtype=engine.model.dtype)
    # Made once: a tensor for each step would be time of the host's as well.
    ids, logprobs = torch.full((size,), 5), torch.zeros(size)

    def output(batch: Any) -> Output:
        count = batch.descriptor.num_reqs
        return Output(token_ids=ids[:count], logprobs=logprobs[:count])

    def stage(_: Any, state: Any, batch: Any, __: Any) -> tuple[Any, Any]:
        return state, IntermediateTensors(hidden[: batch.descriptor.num_tokens])

    def last(_: Any, state: Any, batch: Any, __: Any) -> tuple[Any, Any]:
        return state, output(batch)

    if isinstance(executor, StepExecutor):
        executor.step = lambda _, state, batch: (state, output(batch))
    elif isinstance(executor, PipelineExecutor):
        count = len(executor.pipelined.stages)
        stages = [
            # Declared like the stages that they replace, which donate their state.
            declare_donated(last if i == count - 1 else stage, ("state",))
            for i in range(count)
        ]
        executor.pipelined.stages = tuple(with_edits(one) for one in stages)


def decode(engine: Engine, requests: int) -> float:
    """The seconds of the main thread for a decode step of `requests` requests."""
    # Texts are made by another part of the host, which is not in the figure.
    sampling = SamplingParams(ignore_eos=True, detokenize=False)
    for _ in range(engine.limits.budget.max_num_reqs):
        # More than the timed steps, so that none ends while the clock runs.
        engine.add(_PROMPT, sampling, max_tokens=_STEPS + 3 * _FIRST)
    for _ in range(_FIRST):
        engine.step()
    # The time of this thread's processor: waiting for messages of other ranks is not the host's
    # work.
    began = time.thread_time()
    for _ in range(_STEPS):
        engine.step()
    seconds = time.thread_time() - began
    # To the end, or the next round would start with requests of this one.
    for _ in engine:
        pass
    return seconds / _STEPS / (engine.limits.budget.max_num_reqs // requests)


def run(here: Here, options: Bench, requests: int) -> list[float]:
    """The least seconds of several rounds, of each rank."""
    torch.set_num_threads(1)
    engine, _ = start_engine(here, options)
    compute_nothing(engine)
    # The least, since other processes only ever add to it.
    seconds = min(decode(engine, requests) for _ in range(_ROUNDS))
    collect = getattr(here.transport, "collect", lambda value: [value])
    return [float(one) for one in collect(seconds)]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each split, and print a line for it."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=128, metavar="N", help="of a step (128)")
    parser.add_argument(
        "--splits", nargs="+", default=_SPLITS, metavar="PPxTP", help=f"({' '.join(_SPLITS)})"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    rows = []
    for split in args.splits:
        pp, tp = map(int, split.split("x"))
        # With P stages P cohorts are under way, each with so many requests.
        count = args.requests * pp
        workload = {
            "input_len": len(_PROMPT),
            "output_len": _STEPS + 3 * _FIRST,
            "num_prompts": count,
        }
        split_by: dict[str, Any] = {"pp": pp if pp > 1 else None, "tp": tp, "max_num_seqs": count}
        options = Bench(preset="tiny", graph="none", device="cpu", **workload, **split_by)
        seconds = in_ranks(run, options, options, args.requests)
        rows.append({"pp": pp, "tp": tp, "requests": args.requests, "seconds": seconds})
        figures = ", ".join(f"{1e6 * one:,.0f}" for one in seconds)
        print(
            f"pp {pp} tp {tp}: {figures} us of the host for a step of {args.requests} requests",
            flush=True,
        )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"rows": rows, "environment": environment("cpu")}
        (args.out / "host.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
