"""The bits of completions, served in many ways by a batch-invariant model, and by the fast one next
to it.

    python -m weft.proofs.evidence.bench.bits --preset qwen3-30b-a3b-fp8 --out FOLDER
    python -m weft.proofs.evidence.bench.bits --preset qwen3-0.6b --out FOLDER --pp 2

Random weights of the preset's dimensions are drawn once. Requests have prompts and completions of
different lengths, so that they end one by one, and are drawn at temperature 1. Each way of serving
is compared with the requests alone, one after another: tokens and logprobs are to be equal, bit for
bit. The last way reads each prompt and its completion in one pass (teacher forcing), and compares
the logprobs of the completion's tokens. Exits with 1 if a bit of the batch-invariant model differs.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.proofs.evidence.environment import environment
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS
from weft.transforms.cli.options import Bench
from weft.transforms.cli.ranks import Here, in_ranks, open_model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation

# The tokens and logprobs of each request's completion.
Said = dict[int, tuple[list[int], list[float]]]


@attrs.frozen
class Way:
    """A way to serve requests: the graph mode, the engine's limits, and how many requests are there
    at once."""

    graph: str
    limits: dict[str, Any] = attrs.field(factory=dict)
    at_once: int = 1_000
    speculation: Speculation | None = None
    prefix_caching: bool = True


# The shortest and the longest prompt.
_LENGTHS = 2, 700
_MOST = 1_024
WAYS = {
    # First, since all other ways are compared with it.
    "alone": Way("full", {"max_num_reqs": 1}, at_once=1),
    "none": Way("none"),
    "piecewise": Way("piecewise"),
    "full": Way("full"),
    "full_decode_only": Way("full_decode_only"),
    "full_and_piecewise": Way("full_and_piecewise"),
    "three at once": Way("full_and_piecewise", {"max_num_reqs": 4}),
    "in chunks of 100": Way("full_and_piecewise", {"max_num_tokens": 100}),
    "unmixed": Way("full_and_piecewise", {"mixed": False}),
    # Pages for five of the longest requests, where 64 run at once. Without the cache, what was
    # computed before a preemption is computed again.
    "preempted": Way("full_and_piecewise", {"num_pages": 5 * _MOST // 16}, prefix_caching=False),
    "speculated": Way("full_and_piecewise", speculation=Speculation(3)),
}


def requests(
    vocab_size: int, count: int, output_len: int
) -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts, some with the same beginning, and how many tokens each is to be followed by."""
    draw = random.Random(0)
    shared = list[int]()
    workload = []
    for index in range(count):
        prompt = draw.choices(range(vocab_size), k=draw.randint(*_LENGTHS))
        # Eight in a row begin alike, so that most find pages which another request wrote.
        shared = prompt if index % 8 == 0 else shared
        prompt = [*shared[: len(shared) // 2], *prompt][: _LENGTHS[1]]
        # Drawn and not greedy: a smaller difference of the logits changes a drawn token than the
        # likeliest one.
        sampling = SamplingParams(temperature=1.0, seed=index, ignore_eos=True)
        workload.append((prompt, sampling, draw.randint(output_len // 4, output_len)))
    return workload


def serve(here: Here, model: Model, way: Way, workload: Sequence[Any]) -> Said:
    """Serve requests in one way."""
    limits = EngineLimits(**{"max_num_reqs": 64, "max_model_len": _MOST, **way.limits})
    options: dict[str, Any] = {"speculation": way.speculation, "prefix_caching": way.prefix_caching}
    engine = Engine(
        model,
        limits,
        pipeline=here.num_stages,
        graph=way.graph,
        transport=here.transport,
        **options,
    )
    tracks: dict[int, Any] = {}
    for start in range(0, len(workload), way.at_once):
        for index, (prompt, sampling, length) in enumerate(
            workload[start : start + way.at_once], start
        ):
            engine.add(prompt, sampling, max_tokens=length, id=str(index))
        for output in engine:
            tracks[int(output.id)] = output.track
    return {index: (track.token_ids, track.logprobs) for index, track in tracks.items()}


def forced(here: Here, model: Model, workload: Sequence[Any], said: Said) -> Said:
    """The logprobs of completions whose tokens are read in one pass with their prompts."""
    limits = EngineLimits(max_num_reqs=4, max_model_len=2 * _MOST)
    engine = Engine(model, limits, pipeline=here.num_stages, graph="none", transport=here.transport)
    # The logprobs of the prompt alone, without those of other likely tokens.
    told = SamplingParams(temperature=0.0, prompt_logprobs=0)
    completions = Said()
    for index, (prompt, *_) in enumerate(workload):
        engine.add([*prompt, *said[index][0]], told, max_tokens=1, id=str(index))
    for output in engine:
        index = int(output.id)
        completions[index] = (
            said[index][0],
            # The first token of a prompt has no logprob, so that all places are one lower.
            output.track.prompt_logprobs[len(workload[index][0]) - 1 :],
        )
    return completions


def compared(said: Said, expected: Said) -> dict[str, Any]:
    """The number of completions that are equal bit for bit, and the largest difference of a logprob
    before the tokens differ."""
    pairs = [(said[index], expected[index]) for index in expected]
    most = 0.0
    tokens = 0
    for (ids, logprobs), (own_ids, own_logprobs) in pairs:
        same = next(
            (i for i, (a, b) in enumerate(zip(ids, own_ids, strict=False)) if a != b), len(own_ids)
        )
        tokens += same
        # After the first token that differs the contexts differ, and logprobs no longer compare.
        most = max(
            [most, *(abs(a - b) for a, b in zip(logprobs[:same], own_logprobs[:same], strict=True))]
        )
    equal = sum(one == other for one, other in pairs)
    every = sum(len(ids) for _, (ids, _) in pairs)
    return {
        "completions": len(pairs),
        "equal": equal,
        "tokens": every,
        "same_tokens": tokens,
        "difference": most,
    }


def run(
    here: Here, options: Bench, names: Sequence[str], count: int, output_len: int, with_fast: bool
) -> list[dict[str, Any]]:
    """Serve, and return the rows; the first rank prints them as they come."""
    fast = open_model(options, here)
    rows = list[dict[str, Any]]()
    workload = requests(fast.config.vocab_size, count, output_len)
    # The fast mode is next to it to show that these ways do change bits where nothing prevents it.
    models = (True, fast.with_stages(batch_invariant=True)), (False, fast)
    for invariant, model in models[: 1 + with_fast]:
        if invariant:
            kept = names
        else:
            kept = [name for name in names if name in ("alone", "full_and_piecewise")]
        expected: Said = {}
        for name in ["alone", *(name for name in kept if name != "alone"), "teacher-forced"]:
            began = time.perf_counter()
            if name not in WAYS:
                said = forced(here, model, workload, expected)
            else:
                said = serve(here, model, WAYS[name], workload)
            expected = expected or said
            rows.append(
                {"way": name, "batch_invariant": invariant, "seconds": time.perf_counter() - began}
            )
            rows[-1] |= compared(said, expected)
            if here.first:
                print(show(rows[-1]), flush=True)
            if torch.cuda.is_available():
                # The next way's engine has graphs and a cache of its own, and both must fit beside
                # the weights.
                torch.cuda.empty_cache()
    return rows


def show(row: dict[str, Any]) -> str:
    """The printed line of a row."""
    return (
        f"{'batch invariant' if row['batch_invariant'] else 'fast':<16} {row['way']:<19}"
        f" {row['equal']:>3} of {row['completions']} completions equal, {row['same_tokens']:>6,} of"
        f" {row['tokens']:,} tokens before they differ, logprobs of these by"
        f" {row['difference']:.3g} at most; {row['seconds']:.1f} s"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, print the rows, and write `bits-NAME.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="qwen3-0.6b", help="of `weft bench` (qwen3-0.6b)"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="one by one (all)")
    parser.add_argument(
        "--requests", type=int, default=64, metavar="N", help="all there from the start (64)"
    )
    parser.add_argument(
        "--output-len", type=int, default=256, metavar="N", help="of the longest completion (256)"
    )
    parser.add_argument(
        "--pp", type=int, metavar="N", help="pipeline stages, a process for each (1)"
    )
    parser.add_argument(
        "--transport", help="what carries messages between stages, as in `weft bench`"
    )
    parser.add_argument(
        "--fast", action=argparse.BooleanOptionalAction, default=True, help="the fast mode, too"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    options = Bench(preset=args.preset, pp=args.pp, transport=args.transport)
    rows = in_ranks(run, options, options, args.ways, args.requests, args.output_len, args.fast)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        source = {
            "preset": args.preset,
            "stages": args.pp or 1,
            "transport": args.transport,
            "rows": rows,
        }
        record = {
            **source,
            "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        }
        name = f"bits-{args.preset}-pp{args.pp or 1}{args.transport or ''}.json"
        (args.out / name).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(row["batch_invariant"] and row["equal"] != row["completions"] for row in rows))


if __name__ == "__main__":
    main()
