"""`weft demo`: the four ways of `weft.transforms.cli.demo`, shown."""

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.stages.model import DEMO, Model, load
from weft.stages.params import num_bytes
from weft.transforms.cli.demo import PROMPTS, TOLERANCE, Comparison, Trace, compare_all, few_threads, trace_all
from weft.transforms.cli.files import printable


def demo(
    device: str | None = None, max_tokens: int = 64, *, console: Console | None = None, progress: bool = False
) -> bool:
    """Run the four ways, compare, print, and return whether all comparisons hold.

    Raises:
        DeviceError: this machine has no such device.
        RequestError: `max_tokens` is less than 1, or more than the model has positions for.
    """
    console = console or Console(highlight=False)
    model = load(DEMO, device, "float32")
    traces = trace_all(model, max_tokens, progress=progress)
    with few_threads(model.device):
        found = compare_all(traces)
        _show_model(console, model, max_tokens)
    _show_texts(console, model, traces)
    _show_speed(console, model, traces)
    _show_comparisons(console, found)
    _show_verdict(console, traces, found)
    return all(comparison.holds for comparison in found)


def _show_model(console: Console, model: Model, max_tokens: int) -> None:
    threads = f" with {torch.get_num_threads()} thread" if model.device.type == "cpu" else ""
    size = f"{model.config.num_layers} layers, {num_bytes(model.params) / 2**20:.1f} MiB in float32"
    console.print(f"{model.config.architecture}, {size}, on {model.device}{threads}")
    console.print(f"{len(PROMPTS)} prompts in one batch, up to {max_tokens} tokens each, greedy\n")


def _show_texts(console: Console, model: Model, traces: Sequence[Trace]) -> None:
    """The text once where all ways agree, else that of each."""
    agree = len({trace.token_ids for trace in traces}) == 1
    table = _table("the text, the same in all four ways" if agree else "the texts", "" if agree else "way", "text")
    for trace in traces[: 1 if agree else None]:
        for index, (prompt, ids) in enumerate(zip(PROMPTS, trace.token_ids, strict=True)):
            text = Text.assemble((prompt, "bold"), printable(model.decode(list(ids)) or ""))
            table.add_row(str(index + 1) if agree else trace.way.name, text)
    console.print(table)
    console.print()


def _show_speed(console: Console, model: Model, traces: Sequence[Trace]) -> None:
    numbers = ("tokens/s", "captures", "replays", "eager calls")
    table = _table("speed, and what was captured and replayed", "way", *numbers, right=numbers)
    for t in traces:
        rate = "" if t.tokens_per_second is None else f"{t.tokens_per_second:,.0f}"
        table.add_row(t.way.name, rate, str(t.captures), str(t.replays), str(t.eager))
    console.print(table)
    on_tape = "On the CPU graphs are tapes: they check what a CUDA graph would do, and save no time."
    note = on_tape if model.device.type == "cpu" else "Graphs are CUDA graphs."
    console.print(
        "tokens/s: of decode steps, the first of each batch class left out, timed from the call until the tokens are "
        f"on the host. Calls are of the whole step; pipelined, of each of 2 stages on each micro-batch. {note}\n",
        style="dim",
    )


def _show_comparisons(console: Console, found: Sequence[Comparison]) -> None:
    columns = ("way", "against", "tokens", "tables", "logits", "KV pages", "allowed", "verdict")
    table = _table("largest difference after any step", *columns, right=("logits", "KV pages", "allowed"))
    for c in found:
        tokens, tables = ("equal" if same else "DIFFER" for same in (c.tokens, c.tables))
        sizes, verdict = map(_size, (c.logits, c.kv_pages, c.allowed)), "holds" if c.holds else "BROKEN"
        table.add_row(c.way.name, c.against.name, tokens, tables, *sizes, verdict)
    console.print(table)
    console.print(
        "tables: of requests, of each stage. KV pages: of all layers, the stages' put together. allowed 0: the same "
        "shapes, so the same bits. Pipelined, a batch runs as micro-batches, and matrix products of other shapes round "
        "differently.\n",
        style="dim",
    )


def _show_verdict(console: Console, traces: Sequence[Trace], found: Sequence[Comparison]) -> None:
    broken = [c for c in found if not c.holds]
    for c in broken:
        console.print(f"{c.way.name} against {c.against.name}: {'; '.join(_faults(c))}", style="red")
    if broken:
        console.print("NOT EQUAL: the four ways did not compute the same.", style="bold red")
    else:
        logits, state = max(c.logits for c in found), max(c.kv_pages for c in found)
        console.print(
            f"EQUAL after each of {len(traces[0].steps)} steps: identical tokens; logits within {_size(logits)} and "
            f"state within {_size(state)} of the eager run's, allowed {_size(TOLERANCE)}, and 0 in the same shapes.",
            style="bold green",
        )


def _faults(c: Comparison) -> Iterator[str]:
    """What keeps a comparison from holding, in words."""
    if not c.tokens:
        yield f"the tokens differ in step {c.steps}, the last that was compared"
    if not c.tables:
        yield "a stage's request table differs"
    for name, size in (("logits", c.logits), ("KV pages", c.kv_pages)):
        if not size <= c.allowed:
            yield f"the {name} differ by {_size(size)}, allowed {_size(c.allowed)}"
    if c.exact and not c.bitwise and c.logits == c.kv_pages == 0:
        yield "zeros differ in sign"


def _size(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table
