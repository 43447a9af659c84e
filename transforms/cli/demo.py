"""`weft demo`: generate from three prompts in four ways, fast and batch invariant, and compare what
they computed after every step."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from rich.text import Text
from tqdm import tqdm

from weft.display.quantities import error_size
from weft.display.tables import Table
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.stages.params import num_bytes
from weft.transforms.cli.options import Demo
from weft.transforms.cli.printing import heading, printable, show
from weft.transforms.engine.evaluation.comparison import (
    TOLERANCE,
    RunComparison,
    RunTrace,
    Way,
    compare_alone,
    compare_runs,
    trace_run,
)
from weft.transforms.engine.requests.inputs import encode_prompt

PROMPTS = ("The function returns", "A list is", "In Python, ")

EAGER = Way("eager", 1, "none")
GRAPHIFIED = Way("graphified", 1, "full")
PIPELINED = Way("pipelined", 2, "none")
BOTH = Way("both", 2, "full")
WAYS = (EAGER, GRAPHIFIED, PIPELINED, BOTH)

# The ways that are compared. The comparison is bitwise if both have the same number of stages, and
# so of micro-batches, or if the model is batch invariant.
COMPARISONS = ((GRAPHIFIED, EAGER), (PIPELINED, EAGER), (BOTH, EAGER), (BOTH, PIPELINED))


def run(options: Demo) -> int:
    """Run the four ways and each prompt alone, fast and batch invariant, and print the comparisons;
    the exit code is 1 if one fails.

    Raises:
        DeviceError: this machine does not have the device.
        RequestError: `--max-tokens` exceeds the model's positions.
    """
    model = load(DEMO, options.device, "float32")
    max_tokens = options.max_tokens
    prompts = [encode_prompt(model, prompt, "weft demo") for prompt in PROMPTS]
    if max_tokens > (most := model.config.max_position_embeddings - max(map(len, prompts))):
        problem = f"{max_tokens} tokens; after the longest prompt the model has {most} positions"
        options.refuse(f"--max-tokens {max_tokens}", problem, f"a number from 1 to {most}")
    with ExitStack() as stack:
        # With matrices this small, several threads would mostly wait for each other.
        if model.device.type == "cpu":
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        exact = model.with_stages(batch_invariant=True)
        with tqdm(
            total=2 * (len(WAYS) + len(prompts)),
            desc="demo",
            leave=False,
            disable=not _in_terminal(),
        ) as bar:
            fast, comparisons = _run(model, prompts, max_tokens, bar)
            _, found_exact = _run(exact, prompts, max_tokens, bar)
    if model.device.type == "cpu":
        threads = " with 1 thread"
    else:
        threads = ""
    size = f"{model.config.num_layers} layers, {num_bytes(model.params) / 2**20:.1f} MiB in float32"
    show([f"{model.config.architecture}, {size}, on {model.device}{threads}"])
    show([f"{len(PROMPTS)} prompts in one batch, up to {max_tokens} tokens each, greedy\n"])
    show(_texts(model, fast))
    show(_speed(model, fast))
    show(_differences(comparisons, found_exact))
    if any([*c.faults()] for c in (*comparisons, *found_exact)):
        return 1
    return 0


def _in_terminal() -> bool:
    return sys.stderr.isatty()


def _run(
    model: Model, prompts: list[list[int]], max_tokens: int, bar: "tqdm[Any]"
) -> tuple[list[RunTrace], list[RunComparison]]:
    """The runs in the four ways, and how they compare to each other and to each prompt alone."""

    def traced(way: Way, *batch: list[int]) -> RunTrace:
        bar.update()
        return trace_run(model, way, batch, max_tokens)

    traces = {way: traced(way, *prompts) for way in WAYS}
    alone = compare_alone(traces[EAGER], [traced(EAGER, prompt) for prompt in prompts])
    return [*traces.values()], [
        *(compare_runs(traces[way], traces[other]) for way, other in COMPARISONS),
        alone,
    ]


def _texts(model: Model, traces: Sequence[RunTrace]) -> Iterator[Any]:
    """The generated texts, shown only once if all ways agree."""
    agree = all(trace.token_ids == traces[0].token_ids for trace in traces)
    yield heading("texts, the same in all four ways" if agree else "texts")
    for trace in traces[: 1 if agree else None]:
        for number, (prompt, ids) in enumerate(zip(PROMPTS, trace.token_ids, strict=True), 1):
            if agree:
                label = f"{number}  "
            else:
                label = f"{trace.way.name:<10}  "
            yield Text.assemble(
                (label, "dim"), (prompt, "bold"), printable(model.decode(ids) or "")
            )
    yield ""


def _speed(model: Model, traces: Sequence[RunTrace]) -> Iterator[Any]:
    yield Table.of((trace.row for trace in traces), "speed")
    on_tape = (
        "On the CPU, graphs are tapes: they check what a CUDA graph would do, and save no time."
    )
    yield Text(
        "tokens/s: decode steps, without the first of each batch class, timed from the call until"
        " the tokens are on the host. A call is a whole step, or one of 2 pipeline stages on one"
        f" micro-batch. {on_tape if model.device.type == 'cpu' else 'Graphs are CUDA graphs.'}\n",
        style="dim",
    )


def _differences(
    comparisons: Sequence[RunComparison], exact: Sequence[RunComparison]
) -> Iterator[Any]:
    """The differences, and whether all ways are equal."""
    yield Table.of((c.row for c in comparisons), "largest difference after any step")
    yield Text(
        "tables: each stage's requests. KV pages: all layers. alone: each prompt by itself. allowed"
        " 0: both ways compute in the same shapes, so the bits are equal. A pipelined batch runs as"
        " micro-batches, and matrix products of other shapes round differently.\n",
        style="dim",
    )
    yield Table.of(
        (c.row for c in exact), "the same with batch_invariant=True, where nothing may differ"
    )
    yield ""
    broken = [*_broken("", comparisons), *_broken("batch invariant, ", exact)]
    logits, state = (
        error_size(max(c.sizes.get(name, 0.0) for c in comparisons))
        for name in ("logits", "KV pages")
    )
    if broken:
        yield from (
            *broken,
            Text("NOT EQUAL: the four ways did not compute the same.", style="bold red"),
        )
    else:
        yield Text(
            f"EQUAL after each of {comparisons[0].steps} steps: identical tokens; logits within {logits}"
            f" and state within {state} of the eager run's, allowed {error_size(TOLERANCE)}, and 0"
            " in the same shapes. Batch invariant: 0 difference in any way of running.",
            style="bold green",
        )


def _broken(mode: str, comparisons: Sequence[RunComparison]) -> Iterator[Text]:
    for comparison in comparisons:
        if faults := [*comparison.faults()]:
            ways = f"{comparison.way.name} against {comparison.against.name}"
            yield Text(f"{mode}{ways}: {'; '.join(faults)}", style="red")
