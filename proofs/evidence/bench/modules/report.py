"""The table of the benchmark."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from weft.proofs.evidence.bench.modules.cases import CASES
from weft.proofs.evidence.bench.modules.variants import GRAPHIFY_INDUCTOR, REDUCE_OVERHEAD

Records = Sequence[Mapping[str, Any]]


@attrs.frozen
class Line:
    """A variant of a case over all passes.

    Args:
        cold_s: the first call with empty caches of compilers.
        warm_s: the first call of a later process.
        ms: the median over passes of the time of later calls.
        problem: the last line of the first error; empty if there was none.
    """

    case: str
    variant: str
    cold_s: float | None = None
    warm_s: float | None = None
    ms: float | None = None
    allocated_gb: float | None = None
    reserved_gb: float | None = None
    kernels: int | None = None
    error: float | None = None
    problem: str = ""


def lines(records: Records) -> Iterator[Line]:
    """A line for each variant of each case, in the order of the records."""
    for case, variant in dict.fromkeys((r["case"], r["variant"]) for r in records):
        ours = [r for r in records if (r["case"], r["variant"]) == (case, variant)]
        problems = [r["problem"] for r in ours if "problem" in r]
        if problems:
            yield Line(case, variant, problem=problems[0])
            continue
        warm = [r["opening_s"][0] for r in ours if r["pass"] > 0]
        cold = [r for r in ours if r["pass"] == 0]
        yield Line(
            case,
            variant,
            cold_s=cold[0]["opening_s"][0],
            warm_s=statistics.median(warm) if warm else None,
            ms=statistics.median(r["ms"] for r in ours),
            **{name: cold[0][name] for name in ("allocated_gb", "reserved_gb", "kernels", "error")},
        )


RATIOS: dict[str, Callable[[Line], float | None]] = {
    "later calls": lambda line: line.ms,
    "cold": lambda line: line.cold_s,
    "warm": lambda line: line.warm_s,
    "allocated": lambda line: line.allocated_gb,
    "reserved": lambda line: line.reserved_gb,
}


def ratios(rows: Sequence[Line]) -> dict[str, list[float | None]]:
    """For each case, the figures of `reduce-overhead` over those of `graphify-inductor`: above 1,
    weft is better."""
    by_key = {(line.case, line.variant): line for line in rows}
    table = dict[str, list[float | None]]()
    for case in dict.fromkeys(line.case for line in rows):
        peer = by_key.get((CASES[case].peers or case, REDUCE_OVERHEAD))
        ours = by_key.get((case, GRAPHIFY_INDUCTOR))
        if peer is None or ours is None or peer.problem or ours.problem:
            continue
        table[case] = [_ratio(figure(peer), figure(ours)) for figure in RATIOS.values()]
    return table


def _ratio(peer: float | None, ours: float | None) -> float | None:
    if peer is None or ours is None:
        return None
    return peer / ours


def geometric_means(table: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """The geometric mean of each column."""
    means = list[float | None]()
    for column in zip(*table.values(), strict=True):
        values = [x for x in column if x is not None]
        if values:
            means.append(math.exp(statistics.fmean(map(math.log, values))))
        else:
            means.append(None)
    return means


def text(records: Records) -> str:
    """All lines, and then the ratios."""
    rows = list(lines(records))
    printed = [
        f"{'case':<12}{'variant':<18}{'cold s':>8}{'warm s':>8}{'ms':>10}"
        f"{'alloc. GB':>10}{'res. GB':>9}{'kernels':>9}{'error':>10}"
    ]
    for line in rows:
        title = f"{line.case:<12}{line.variant:<18}"
        if line.problem:
            printed.append(f"{title}  {line.problem}")
            continue
        printed.append(
            f"{title}{_cell(line.cold_s, '8.2f')}{_cell(line.warm_s, '8.2f')}"
            f"{_cell(line.ms, '10.3f')}{_cell(line.allocated_gb, '10.2f')}"
            f"{_cell(line.reserved_gb, '9.2f')}{_cell(line.kernels, '9')}"
            f"{_cell(line.error, '10.1e')}"
        )
    table = ratios(rows)
    if table:
        printed += ["", f"{REDUCE_OVERHEAD} over {GRAPHIFY_INDUCTOR}: above 1, weft is better"]
        printed.append(f"{'case':<16}" + "".join(f"{name:>12}" for name in RATIOS))
        table = {**table, "geometric mean": geometric_means(table)}
        for case, values in table.items():
            printed.append(f"{case:<16}" + "".join(_cell(value, "12.2f") for value in values))
    return "\n".join(printed)


def _cell(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    if value is None:
        return " " * (width - 1) + "-"
    return format(value, form)
