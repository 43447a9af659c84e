"""`weft bench` over graph modes and workloads in one run, and a check that all modes give the same
tokens.

    python -m weft.proofs.evidence.bench.serving --preset qwen3-0.6b --modes none piecewise full
    --out FOLDER python -m weft.proofs.evidence.bench.serving --preset qwen3-30b-a3b-fp8 --pp 2
    --transport peer --modes full_decode_only

Random weights of the preset's dimensions are drawn once. Each mode has its own engine, which serves
the workloads one after another, each `--repeats` times. With `--check` it then completes prompts of
each workload's length greedily, four per request and at most 64. An engine without graphs does so
first. All tokens must be the same; otherwise the command exits with 1. If graphs pad and eager
steps do not, sums may be formed in another order, so completions go on for tokens that are not
compared, while requests end one after another. (The last chunk of prompts may still be padded.)

With `--batch-invariant` all of it is done twice with the same weights, in the fast mode and then
with the same bits in any batch: the difference is what the bits cost.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.proofs.evidence.environment import environment
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS
from weft.transforms.cli.bench import start_engine, workload_of
from weft.transforms.cli.options import WORKLOADS, Bench
from weft.transforms.cli.ranks import Here, in_ranks, open_model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.evaluation.serving import measure
from weft.transforms.graphs.ladder import MODES

_PROMPTS = 64
# Tokens that are not compared: while they are made, requests end one after another, and steps that
# are smaller than a graph's class are padded.
_MORE = 64

# Completions by the length of their prompts.
Said = dict[int, list[list[int]]]


@attrs.frozen
class Plan:
    """The plan of a run.

    Args:
        modes, workloads: names, in order.
        requests: their number; all are there from the start, and run at once.
        lengths: the lengths of prompts and completions in each workload.
        repeats: of each workload, in each mode.
        check: the tokens of each completion that is compared with mode `none`; 0: no comparison.
        batch_invariant: also with the same bits in any batch.
    """

    modes: Sequence[str]
    workloads: Sequence[str]
    requests: int
    lengths: dict[str, tuple[int, int]]
    repeats: int
    check: int
    batch_invariant: bool

    def input_lens(self) -> list[int]:
        """The distinct lengths of prompts."""
        return list(dict.fromkeys(self.lengths[name][0] for name in self.workloads))

    def options(self, options: Bench, mode: str, input_len: int, output_len: int) -> Bench:
        """The corresponding options of `weft bench`."""
        count = self.requests
        return attrs.evolve(
            options,
            graph=mode,
            input_len=input_len,
            output_len=output_len,
            num_prompts=count,
            max_num_seqs=count,
        )


def run(here: Here, options: Bench, plan: Plan) -> list[dict[str, Any]]:
    """Run, and return this process's rows; the first rank prints them as they come."""
    fast = open_model(options, here)
    rows = list[dict[str, Any]]()
    for invariant in (False, True) if plan.batch_invariant else (False,):
        if invariant:
            model = fast.with_stages(batch_invariant=True)
        else:
            model = fast
        rows += [{"batch_invariant": invariant, **row} for row in _run(here, options, plan, model)]
    return rows


def _run(here: Here, options: Bench, plan: Plan, model: Model) -> list[dict[str, Any]]:
    """Run with one model."""
    rows = list[dict[str, Any]]()
    said = dict[str, Said]()
    checked = [(length, plan.check + _MORE) for length in plan.input_lens() if plan.check]
    # One engine for all workloads of a mode, which needs room for the longest of them.
    longest = max((*(plan.lengths[name] for name in plan.workloads), *checked), key=sum)
    # Mode `none` first, even where it is not measured: the others are compared with it.
    for mode in dict.fromkeys((*(["none"] if plan.check else []), *plan.modes)):
        engine, started = start_engine(here, plan.options(options, mode, *longest), model)
        for name in plan.workloads if mode in plan.modes else ():
            workload_options = plan.options(options, mode, *plan.lengths[name])
            for index, row in enumerate(
                measure(engine, workload_of(workload_options), started, repeats=plan.repeats)
            ):
                rows.append({"workload": name, "mode": mode, "repeat": index, **row})
                if here.first:
                    print(show(rows[-1], model.functions.batch_invariant), flush=True)
        if plan.check:
            said[mode] = {length: complete(engine, plan, length) for length in plan.input_lens()}
        # Before the next one is made: two caches would not fit.
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return [*rows, *compared(said)]


def complete(engine: Engine, plan: Plan, input_len: int) -> list[list[int]]:
    """Greedy completions of prompts, as many at once as fit; the last tokens of each are left out."""
    # The same prompts in each mode, and others than those that were measured, which the prefix
    # cache has.
    draw = random.Random(1)
    vocabulary = range(engine.model.config.vocab_size)
    # Greedy, since a drawn token would differ at the first logit that rounds in another way.
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    said: dict[str, list[int]] = {}
    for _ in range(min(_PROMPTS, 4 * plan.requests)):
        said[
            engine.add(
                draw.choices(vocabulary, k=input_len), sampling, max_tokens=plan.check + _MORE
            )
        ] = []
    for output in engine:
        said[output.id] += output.token_ids
    return [tokens[: plan.check] for tokens in said.values()]


def compared(said: dict[str, Said]) -> list[dict[str, Any]]:
    """For each mode, the number of completions equal to those of `none`, and the number of tokens
    before they differ.

    >>> compared({"none": {2: [[1, 2], [3, 4]]}, "full": {2: [[1, 2], [3, 5]]}})
    [{'mode': 'full', 'against': 'none', 'input_len': 2, 'prompts': 2, 'equal': 1, 'tokens': 4, 'same': 3}]
    """
    names = "mode", "against", "input_len", "prompts", "equal", "tokens", "same"
    return [
        dict(
            zip(
                names,
                (
                    mode,
                    "none",
                    length,
                    len(token_lists),
                    *_agreement(token_lists, said["none"][length]),
                ),
                strict=True,
            )
        )
        for mode, completions in said.items()
        for length, token_lists in completions.items()
        if mode != "none"
    ]


def _agreement(completions: list[list[int]], eager: list[list[int]]) -> tuple[int, int, int]:
    """The number of equal completions, of all tokens, and of tokens before completions differ."""
    return (
        sum(map(list.__eq__, completions, eager)),
        sum(map(len, eager)),
        # Tokens up to the first that differs: after it the contexts are not the same.
        sum(map(_agreeing, completions, eager)),
    )


def _agreeing(tokens: list[int], other: list[int]) -> int:
    """The length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
        min(len(tokens), len(other)),
    )


def show(row: dict[str, Any], invariant: bool) -> str:
    """The printed line of a measured row."""
    tpot = row["tpot"] or {"p50": 0.0}
    ttft = row["ttft"] or {"p50": 0.0}
    use = row["graphs"]
    shares = ", ".join(f"{mode} {share:.0%}" for mode, share in use["shares"].items() if share)
    parts = (
        (
            f"{'invariant ' if invariant else ''}{row['workload']:<8} {row['mode']:<19}"
            f" {row['num_requests']:>4} requests"
        ),
        f"{row['output_tokens_per_s']:>9,.0f} out/s {row['total_tokens_per_s']:>9,.0f} all/s",
        f"TTFT {ttft['p50']:>8.2f} ms  TPOT {tpot['p50']:>7.3f} ms",
        (
            f"{shares}; padding {use['padding']:.1%}; captured in"
            f" {row['ranks'][0]['capture_seconds']:.1f} s"
        ),
    )
    return "  ".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the plan, print the rows, and write `serving-NAME.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m weft.proofs.evidence.bench.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="qwen3-0.6b", help="of `weft bench` (qwen3-0.6b)"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES, help="of graphs, one by one (all)"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS], help="one by one (all)"
    )
    parser.add_argument(
        "--requests", type=int, default=128, metavar="N", help="all there from the start (128)"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="of each workload, in each mode (1)"
    )
    parser.add_argument(
        "--check",
        type=int,
        nargs="?",
        const=128,
        default=0,
        metavar="TOKENS",
        help="compare the modes' completions",
    )
    parser.add_argument(
        "--scale",
        type=int,
        default=1,
        metavar="N",
        help="divide the lengths of the workloads by it",
    )
    parser.add_argument(
        "--pp", type=int, metavar="N", help="pipeline stages, a process for each (1)"
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="ranks that share each layer (1)"
    )
    parser.add_argument(
        "--transport", help="what carries messages between stages, as in `weft bench`"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="also with the same bits in any batch"
    )
    parser.add_argument("--out", type=Path, help="a folder for the record")
    args = parser.parse_args(argv)
    if args.check and {*args.modes} == {"none"}:
        parser.error("--modes none leaves nothing for --check to compare: name another mode")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)  # an error here comes before the long run
    options = Bench(preset=args.preset, pp=args.pp, tp=args.tp, transport=args.transport)
    lengths = {
        name: (max(1, a // args.scale), max(1, b // args.scale))
        for name, (a, b) in WORKLOADS.items()
    }
    often = args.repeats, args.check, args.batch_invariant
    plan = Plan(args.modes, args.workloads, args.requests, lengths, *often)
    rows = in_ranks(run, options, options, plan)
    compared_rows = [row for row in rows if "equal" in row]
    for row in compared_rows:
        agreement = (
            f"{row['equal']} of {row['prompts']} greedy completions are those of {row['against']}"
        )
        tokens = f"{row['same']:,} of {row['tokens']:,} tokens before they differ"
        print(f"{row['mode']}, prompts of {row['input_len']}: {agreement}; {tokens}")
    if args.out is not None:
        source = {
            "preset": args.preset,
            "stages": args.pp or 1,
            "shares": args.tp,
            "transport": args.transport,
        }
        record = {
            **source,
            "plan": attrs.asdict(plan),
            "rows": rows,
            "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        }
        name = f"serving-{args.preset}-{args.requests}-pp{args.pp or 1}-tp{args.tp}{args.transport or ''}"
        (args.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(row["equal"] != row["prompts"] for row in compared_rows))


if __name__ == "__main__":
    main()
