"""`weft demo`: generate from three prompts in four ways, and compare what they computed after every step."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from weft.display.quantities import error_size
from weft.stages.model import DEMO, Model, load
from weft.stages.params import num_bytes
from weft.transforms.cli.options import Demo
from weft.transforms.cli.printing import console, printable, table
from weft.transforms.engine.evaluation.comparison import (
    TOLERANCE,
    RunComparison,
    RunTrace,
    Way,
    compare_runs,
    trace_run,
)
from weft.transforms.engine.inputs import encode_prompt

PROMPTS = ("The function returns", "A list is", "In Python, ")

EAGER = Way("eager", 1, "none")
GRAPHIFIED = Way("graphified", 1, "full")
PIPELINED = Way("pipelined", 2, "none")
BOTH = Way("both", 2, "full")
WAYS = (EAGER, GRAPHIFIED, PIPELINED, BOTH)

COMPARISONS = ((GRAPHIFIED, EAGER), (PIPELINED, EAGER), (BOTH, EAGER), (BOTH, PIPELINED))
"""The ways that are compared; bitwise if they have the same number of stages, and so of micro-batches."""


def run(options: Demo) -> int:
    """Run the four ways, compare them and print the result; the exit code is 1 if a comparison does not hold.

    Raises:
        DeviceError: this machine does not have the device.
        RequestError: more tokens than the model has positions for.
    """
    model, max_tokens, out = load(DEMO, options.device, "float32"), options.max_tokens, console()
    prompts = [encode_prompt(model, prompt, "weft demo") for prompt in PROMPTS]
    if max_tokens > (most := model.config.max_position_embeddings - max(map(len, prompts))):
        seen = f"{max_tokens} tokens; after the longest prompt the model has {most} positions"
        options.refuse(f"--max-tokens {max_tokens}", seen, f"a number from 1 to {most}")
    with few_threads(model.device):
        bar = tqdm(WAYS, "demo", leave=False, disable=not sys.stderr.isatty())
        traces = {way: trace_run(model, way, prompts, max_tokens) for way in bar}
        found = [compare_runs(traces[way], traces[against]) for way, against in COMPARISONS]
        threads = f" with {torch.get_num_threads()} thread" if model.device.type == "cpu" else ""
    size = f"{model.config.num_layers} layers, {num_bytes(model.params) / 2**20:.1f} MiB in float32"
    out.print(f"{model.config.architecture}, {size}, on {model.device}{threads}")
    out.print(f"{len(PROMPTS)} prompts in one batch, up to {max_tokens} tokens each, greedy\n")
    _show_texts(out, model, [*traces.values()])
    _show_speed(out, model, [*traces.values()])
    _show_comparisons(out, found)
    return _show_verdict(out, found)


@contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """Within, torch computes with one thread on the CPU: with matrices this small, more threads wait for each other."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show_texts(out: Console, model: Model, traces: Sequence[RunTrace]) -> None:
    """The texts, once if all ways agree."""
    agree = all(trace.token_ids == traces[0].token_ids for trace in traces)
    out.print(Text("texts, the same in all four ways" if agree else "texts", style="bold"))
    for trace in traces[: 1 if agree else None]:
        for index, (prompt, ids) in enumerate(zip(PROMPTS, trace.token_ids, strict=True)):
            label = f"{index + 1}  " if agree else f"{trace.way.name:<10}  "
            out.print(Text.assemble((label, "dim"), (prompt, "bold"), printable(model.decode(ids) or "")))
    out.print()


def _show_speed(out: Console, model: Model, traces: Sequence[RunTrace]) -> None:
    rates = ("" if trace.tokens_per_second is None else f"{trace.tokens_per_second:,.0f}" for trace in traces)
    rows = [{"way": trace.way.name, "tokens/s": rate, **trace.calls} for trace, rate in zip(traces, rates, strict=True)]
    out.print(table("speed", rows))
    on_tape = "On the CPU, graphs are tapes: they check what a CUDA graph would do, and save no time."
    out.print(
        "tokens/s: decode steps, without the first of each batch class, timed from the call until the tokens are on "
        "the host. A call is a whole step, or one of 2 pipeline stages on one micro-batch. "
        f"{on_tape if model.device.type == 'cpu' else 'Graphs are CUDA graphs.'}\n",
        style="dim",
    )


def _show_comparisons(out: Console, found: Sequence[RunComparison]) -> None:
    rows = []
    for c in found:
        row = {"way": c.way.name, "against": c.against.name}
        row |= {"tokens": "equal" if c.tokens else "DIFFER", "tables": "equal" if c.tables else "DIFFER"}
        row |= {name: error_size(size) for name, size in c.sizes.items()}
        rows.append({**row, "allowed": error_size(c.allowed), "verdict": "BROKEN" if [*c.faults()] else "holds"})
    out.print(table("largest difference after any step", rows))
    out.print(
        "tables: each stage's requests. KV pages: all layers. allowed 0: both ways compute in the same shapes, so the "
        "bits are equal. A pipelined batch runs as micro-batches, and matrix products of other shapes round "
        "differently.\n",
        style="dim",
    )


def _show_verdict(out: Console, found: Sequence[RunComparison]) -> int:
    """Print whether all ways are equal; returns the exit code."""
    broken = [c for c in found if [*c.faults()]]
    for c in broken:
        out.print(f"{c.way.name} against {c.against.name}: {'; '.join(c.faults())}", style="red")
    if broken:
        out.print("NOT EQUAL: the four ways did not compute the same.", style="bold red")
        return 1
    logits, state = (error_size(max(c.sizes[name] for c in found)) for name in ("logits", "KV pages"))
    out.print(
        f"EQUAL after each of {found[0].steps} steps: identical tokens; logits within {logits} and state within "
        f"{state} of the eager run's, allowed {error_size(TOLERANCE)}, and 0 in the same shapes.",
        style="bold green",
    )
    return 0
