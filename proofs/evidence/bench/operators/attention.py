"""The attention back ends by shape: decodes in a graph, and the prompts of one step.

    python -m weft.proofs.evidence.bench.operators.attention [--out FOLDER] [--quick] [--tiles]

Heads of 128 in bfloat16 on pages of 16, in the numbers of three models. A decode's figure is the
share of the H200's copy bandwidth (4.27 TB/s) at which keys and values are read, over replays of a
graph; only back ends that can be in one are timed. A step's figure is TFLOP/s of causal attention.
Neither has the plan, whose microseconds on the host stand beside it. `best` marks the fastest of a
shape. With `--tiles` only steps are timed, by weft's kernel with other numbers of rows, keys, warps
and stages than its own, which comes first. Without a GPU tiny shapes run, only to show that it
runs.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.attention import launch
from weft.ops.attention.backends import BACKENDS, AttentionBackend
from weft.proofs.evidence.bench.graphs import graph_seconds
from weft.proofs.evidence.environment import environment
from weft.proofs.evidence.runs.gpu_run import device_seconds

# Of a large copy, measured, and not the data sheet's.
BANDWIDTH = 4.27e12
HEADS = {"llama-3.1-8b": (32, 8), "qwen3-0.6b": (16, 8), "qwen3-30b-a3b": (32, 4)}
CONTEXTS = (256, 1024, 4096, 16384, 32768)
REQUESTS = (1, 8, 32, 128, 256)
# Decodes whose contexts have more positions than this in all are left out.
MOST_POSITIONS = 2**21
# Contexts of decodes that differ.
UNEVEN = {
    "16 of 500 to 8000": range(500, 8001, 500),
    "32 of 250 to 8000": range(250, 8001, 250),
    # One long context among short ones is the hardest to share out among programs.
    "63 x 300 and 30000": (*(300,) * 63, 30000),
    "127 x 300 and 30000": (*(300,) * 127, 30000),
}
TINY_UNEVEN = {"5, 20 and 9": (5, 20, 9)}
STEPS = {
    "16 x 512": ((0, 512),) * 16,
    "4 x 2048": ((0, 2048),) * 4,
    "8192": ((0, 8192),),
    "8192 after 8192": ((8192, 8192),),
    "2048 after 30720": ((30720, 2048),),
    # As the engine mixes them: prompts of one step with the decodes of all other requests.
    "4 x 480 and 128 decodes at 600": (*((0, 480),) * 4, *((599, 1),) * 128),
}
TINY_STEPS = {"2 x 5": ((0, 5),) * 2}
# The most rows of a program, and the keys of a tile, warps and stages, to be tried for prompts.
TILES = (
    (128, (64, 4, 2)),
    (128, (64, 4, 3)),
    (128, (32, 8, 3)),
    (128, (64, 8, 3)),
    (64, (64, 4, 2)),
    (64, (64, 4, 3)),
    (64, (32, 4, 3)),
    (64, (32, 4, 4)),
)


@attrs.frozen
class Row:
    """A back end's time for a shape.

    Args:
        us: of the device, for one layer.
        rate: TB/s of keys and values for a decode, TFLOP/s for a step.
        share: of the copy bandwidth; None for a step.
        plan_us: of the host, once a step; None: it has no plan.
        error: the greatest difference from the first back end's result.
    """

    model: str
    shape: str
    backend: str
    us: float
    rate: float
    share: float | None
    plan_us: float | None
    error: float
    best: bool = False


@attrs.frozen(eq=False)
class Case:
    """The arguments of a back end's `attend`."""

    q: Tensor
    pages: Tensor
    where: tuple[Any, ...]


def make_case(
    requests: Sequence[tuple[int, int]], heads: tuple[int, int], device: str, size: int = 16
) -> Case:
    """Random requests of `(past, new)` tokens, on pages in random order."""
    lengths = [sum(one) for one in requests]
    counts = [new for _, new in requests]
    used = [-(-length // size) for length in lengths]
    # In random order, as pages are after a while of serving: neighbours in a context are none in
    # memory.
    order = torch.randperm(sum(used)).to(torch.int32)
    table = torch.nn.utils.rnn.pad_sequence(list(order.split(used)), batch_first=True)
    places = [torch.arange(past, past + new) for past, new in requests]
    slots = torch.cat(
        [row[at // size].long() * size + at % size for row, at in zip(table, places, strict=True)]
    )
    starts = torch.tensor([*itertools.accumulate(counts, initial=0)], dtype=torch.int32)
    where = (x.to(device) for x in (slots, table, starts, torch.tensor(lengths, dtype=torch.int32)))
    pages = torch.randn(2, sum(used), size, heads[1], 128, device=device, dtype=torch.bfloat16)
    q = torch.randn(sum(counts), heads[0], 128, device=device, dtype=torch.bfloat16)
    return Case(q, pages, (*where, max(counts) if max(counts) == 1 else len(q), 128**-0.5, 0))


def time_case(
    case: Case,
    model: str,
    shape: str,
    work: float,
    names: Sequence[str],
    device: str,
    *,
    decodes: bool,
) -> list[Row]:
    """The rows of a shape; `work` is its bytes or its operations."""
    rows = list[Row]()
    first = None
    for name in names:
        backend, plan, plan_us = BACKENDS[name], list[Any](), None
        if backend.plan is not None:
            # The first one compiles, or loads
            planned = [_timed(backend, case) for _ in range(2)][1]
            plan = [planned[0]]
            plan_us = planned[1]

        def call(backend: AttentionBackend = backend, plan: list[Any] = plan) -> Tensor:
            return backend.attend(case.q, case.pages, *case.where, *plan)

        out = call()
        # The reference, where there is one, comes first: all others are compared with it.
        first = out if first is None else first
        error = float((out.float() - first.float()).abs().max())
        if decodes:
            # Decodes run in graphs. Steps with prompts are long enough that a launch does not
            # matter.
            seconds = graph_seconds([call], device)
        else:
            seconds = device_seconds(call, 10, device)
        rate = work / seconds / 1e12
        if decodes:
            share = work / seconds / BANDWIDTH
        else:
            share = None
        rows.append(Row(model, shape, name, seconds * 1e6, rate, share, plan_us, error))
    fastest = min(row.us for row in rows)
    return [attrs.evolve(row, best=row.us == fastest) for row in rows]


def _timed(backend: AttentionBackend, case: Case) -> tuple[Any, float]:
    assert backend.plan is not None
    begun = time.perf_counter()
    plan = backend.plan(case.q, case.pages, *case.where)
    return plan, (time.perf_counter() - begun) * 1e6


def time_all(device: str, *, quick: bool) -> Iterator[Row]:
    """The rows of all shapes, as they come."""
    if device == "cpu":
        names = ["reference", "torch"]
    else:
        names = ["triton"]
    names += (
        ["flashinfer"]
        if device == "cuda" and not BACKENDS["flashinfer"].missing(torch.device(device))
        else []
    )
    for model, heads in HEADS.items() if not quick else [("tiny", (4, 2))]:
        decodes: dict[str, Sequence[int]] = dict(TINY_UNEVEN if quick else UNEVEN)
        for context, requests in itertools.product(
            (20,) if quick else CONTEXTS, (2,) if quick else REQUESTS
        ):
            if context * requests <= MOST_POSITIONS:
                decodes[f"{requests} x {context}"] = [context] * requests
        for shape, contexts in decodes.items():
            case = make_case([(context - 1, 1) for context in contexts], heads, device)
            # Bytes: keys and values of 128 elements of two bytes each, for each head of keys.
            work = 512.0 * heads[1] * sum(contexts)
            yield from time_case(case, model, shape, work, names, device, decodes=True)
        for shape, step in (TINY_STEPS if quick else STEPS).items():
            # Causal: a new token meets the past, itself, and the new ones before it.
            pairs = sum(new * past + new * (new + 1) / 2 for past, new in step)
            case = make_case(step, heads, device)
            yield from time_case(
                case, model, shape, 512.0 * heads[0] * pairs, names, device, decodes=False
            )


def time_tiles(device: str, *, quick: bool) -> Iterator[Row]:
    """The rows of steps with each tile, as they come."""
    keys, warps, stages = launch._PROMPT_TILE
    # As heads of 128 have it
    default_tiles = [(launch._PROMPT_ROWS, (min(keys, 64), warps, stages))]
    if device == "cpu":
        back_end = "torch"
    else:
        back_end = "triton"
    for model, heads in HEADS.items() if not quick else [("tiny", (4, 2))]:
        for shape, step in (TINY_STEPS if quick else STEPS).items():
            case = make_case(step, heads, device)
            tile_rows = list[Row]()
            work = 512.0 * heads[0] * sum(new * past + new * (new + 1) / 2 for past, new in step)
            # The package's own first, so that the errors of the others are relative to it.
            for rows, tile in default_tiles + [one for one in TILES if one not in default_tiles]:
                with prompt_tile(rows, tile):
                    name = f"{rows} x {tile[0]}, {tile[1]} warps, {tile[2]} stages"
                    (row,) = time_case(case, model, shape, work, [back_end], device, decodes=False)
                tile_rows.append(attrs.evolve(row, backend=name, best=False))
            fastest = min(row.us for row in tile_rows)
            yield from (attrs.evolve(row, best=row.us == fastest) for row in tile_rows)


@contextmanager
def prompt_tile(rows: int, tile: tuple[int, int, int]) -> Iterator[None]:
    """A context in which prompts have this tile."""
    kept = launch._PROMPT_ROWS, launch._PROMPT_TILE
    launch.plan_launch.cache_clear()
    launch._PROMPT_ROWS = rows
    launch._PROMPT_TILE = tile
    try:
        yield
    finally:
        launch._PROMPT_ROWS, launch._PROMPT_TILE = kept
        launch.plan_launch.cache_clear()


def show(row: Row) -> None:
    """Print a row."""
    if row.share is not None:
        rate = f"{row.rate:>8.2f} TB/s {row.share:>5.0%}"
    else:
        rate = f"{row.rate:>8.0f} TFLOP/s  "
    if row.plan_us is None:
        plan = ""
    else:
        plan = f"  plan {row.plan_us:,.0f} us"
    sign = "*" if row.best else " "
    print(
        f"{row.model:<14}{row.shape:<32}{row.backend:<29}{sign}{row.us:>10.1f} us {rate}{plan}",
        flush=True,
    )


def main() -> None:
    """Time everything, print each row, and write `attention.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--tiles", action="store_true", help="prompts alone, with other tiles")
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    rows = []
    timed = time_tiles if args.tiles else time_all
    for row in timed(device, quick=args.quick or device == "cpu"):
        show(row)
        rows.append(attrs.asdict(row))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        report = {"environment": environment(device), "bandwidth": BANDWIDTH, "rows": rows}
        (args.out / "attention.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
