"""Each figure of the README that was measured is that of a file in `proofs/results/` which the README names."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import product
from typing import Any

from pages import ROOT

RESULTS = ROOT / "proofs" / "results"
DAY = r"\d{4}-\d\d-\d\d"
TEXT = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def is_named(stem: str) -> bool:
    """Whether the README names a record: by its file, by a pattern, or as another one's file and an ending."""
    named = [name.removesuffix(".json") for name in re.findall(rf"`({DAY}[^`]*\.json)`", TEXT)]
    endings = (name for name in named if stem.startswith(f"{name}-") and f"`{stem.removeprefix(name)}`" in TEXT)
    return any(fnmatch(stem, name) for name in named) or any(endings)


@cache
def read(name: str) -> Any:
    newest = max(RESULTS.glob(f"????-??-??-{name}.json"))
    assert is_named(newest.stem), f"README.md does not name {newest.name}"
    return json.loads(newest.read_text(encoding="utf-8"))


def said(text: str) -> None:
    assert text in TEXT, f"README.md does not say: {text}"


def ends(values: Iterable[float], form: str) -> str:
    """The least and the greatest, `a to b`; one where both read alike."""
    found = sorted(values)
    return " to ".join(dict.fromkeys((form.format(found[0]), form.format(found[-1]))))


def served(*names: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of serving, by mode and workload."""
    found = defaultdict(list)
    for row in (row for name in names for row in read(name)["rows"] if "workload" in row):
        found[row["mode"], row["workload"]].append(row)
    return found


def serving_rows(*names: str, without: str = "") -> Iterator[str]:
    rows = served(*names)
    for mode in dict.fromkeys(mode for mode, _ in rows if mode != without):
        decode = rows[mode, "decode"]
        cells = [f"`{mode}`", ends((row["output_tokens_per_s"] for row in decode), "{:,.0f}")]
        digits = {True: "{:.2f}", False: "{:.1f}"}[min(row["tpot"]["p50"] for row in decode) < 10]
        cells.append(f"{ends((row['tpot']['p50'] for row in decode), digits)} ms")
        for workload in ("mixed", "prefill"):
            cells.append(ends([row["output_tokens_per_s"] for row in rows.get((mode, workload), ())] or [0], "{:,.0f}"))
        yield f"| {' | '.join(cells)} |".replace("| 0 |", "| |").replace("| 0 |", "| |")


def test_a_record_that_is_not_named_is_found_out() -> None:
    assert is_named("2026-11-22-h200-serving-dense-1")
    assert not is_named("2026-11-22-h200-serving-dense-2")
    assert not is_named("2026-11-20-h200-serving-dense")


def test_files_that_are_named_are_there() -> None:
    named = re.findall(rf"`({DAY}[^`]*\.json)`", TEXT)
    assert len(named) >= 8
    assert [name for name in named if not list(RESULTS.glob(name))] == []


def test_serving() -> None:
    dense, moe, peer = "h200-serving-dense", "h200-serving-moe", "h200x2-serving-moe-peer"
    rows = [*serving_rows(f"{dense}-modes", without="full_and_piecewise"), *serving_rows(dense)]
    rows += [*serving_rows(f"{dense}-slow-host"), *serving_rows(f"{dense}-1"), *serving_rows(moe)]
    rows += [*serving_rows(f"{moe}-1"), *serving_rows(f"{peer}-modes", f"{peer}-eager"), *serving_rows(peer)]
    rows += [*serving_rows(f"{peer}-256"), *serving_rows("h200x4-serving-moe-peer-512")]
    assert len(rows) == 4 + 1 + 1 + 1 + 1 + 1 + 2 + 1 + 1 + 1
    for row in rows:
        said(row)


def test_completions_that_are_equal() -> None:
    dense, moe, peer = "h200-serving-dense", "h200-serving-moe", "h200x2-serving-moe-peer"
    both, decode = (dense, moe, peer), (f"{dense}-1", f"{moe}-1", f"{peer}-modes")
    for name, lengths in (*((name, [2, 512]) for name in both), *((name, [2]) for name in decode)):
        rows = [row for row in read(name)["rows"] if "equal" in row]
        assert [row["input_len"] for row in rows] == lengths
        prompts = 4 if name.endswith("-1") else 64
        found = {(row["prompts"], row["equal"], row["tokens"], row["same"], row["against"]) for row in rows}
        assert found == {(prompts, prompts, 128 * prompts, 128 * prompts, "none")}
    (row,) = (row for row in read(f"{moe}-ends")["rows"] if row.get("input_len") == 512)
    said(f"{row['equal']} of {row['prompts']} of the MoE on one GPU were equal, behind prompts of 512")
    said(f"and {row['same']:,} of {row['tokens']:,} tokens up to where they differ")
    said("Of 64 greedy completions of 128 tokens, of prompts of 2 and of 512 tokens, all are those of `none`")
    step = read("h200-step-profile-dense")["profiles"][0]
    said(f"a decode step of {step['requests']} requests of Qwen3-0.6B was {step['ms']:.2f} ms by the clock")
    said(f"and {step['busy_ms']:.2f} ms of kernels")


def test_the_capture_of_a_ladder() -> None:
    first, second = read("h200-ladder-capture")["runs"]
    said(f"A ladder of {first['graphs']} classes")
    said(f"is captured in {first['seconds']:.1f} s, and takes {first['bytes'] / 2**30:.3f} GiB")
    said(f"the second time in {second['seconds']:.1f} s and {second['bytes'] / 2**30:.3f} GiB")


def test_the_start() -> None:
    cold, warm = (read("h200x2-start-moe-peer")[which]["ranks"] for which in ("cold", "warm"))
    seconds = [max(rank["first_token_seconds"] for rank in ranks) for ranks in (cold, warm)]
    said(f"{seconds[0]:.1f} s with no kernel compiled before, {seconds[1]:.1f} s with all of them")
    one, other = (f"{rank['graph_bytes'] / 2**30:.3f} GiB" for rank in warm)
    said(f"its {warm[0]['num_graphs']} graphs take {one} on the one and {other} on the other")


def test_kernels() -> None:
    rows = [row for row in read("h200-kernels")["rows"] if row["model"] == "Qwen3-30B-A3B"]
    for tokens in (8, 64, 128, 256):
        layer = [row for row in rows if row["tokens"] == tokens]
        parts = ([row for row in layer if row["kernel"] == "run_experts"], layer)
        cells = [sum(row[key] for row in part) for part, key in product(parts, ("us", "floor_us"))]
        said(f"| {tokens} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")


def test_the_host_time_of_a_call() -> None:
    rows = {
        (r["what"], r["given"], r["captures"], r["leaves"]): r["us"] for r in read("h200-graphify-overhead")["rows"]
    }

    def cell(what: str, given: str, captures: int = 1, digits: tuple[int, ...] = (1, 0, 0)) -> str:
        sizes = zip((3, 30, 300), digits, strict=True)
        return ", ".join(f"{rows[what, given, captures, leaves]:.{places}f}" for leaves, places in sizes)

    fast, slow, lent = "reference, borrowed", "fresh, safe", "fresh, borrowed"
    graphed = "make_graphed_callables"
    said(f"| `graphify` | {cell('graphify', fast)} | {cell('graphify', slow)} |")
    said(f"1,000 graphs held | {cell('graphify', fast, 1000)} | {cell('graphify', slow, 1000)} |")
    turn = "graphify, in turn"
    said(f"these called in turn | {cell(turn, fast, 1000)} | {cell(turn, slow, 1000)} |")
    said(f"`torch.cuda.{graphed}` | {cell(graphed, fast)} | {cell(graphed, lent)} (borrowed) |")
    said(f"| | {cell('reduce-overhead', lent)} (borrowed; `graphify`'s borrowed: {cell('graphify', lent)}) |")
    said(f"| a bare replay | {cell('bare replay', 'nothing', digits=(1, 1, 1))} | |")


def test_transfers() -> None:
    rows = [row for run in read("h200x2-transfers")["runs"] for row in run["rows"]]
    nccl, peer = ([row["graph_us"] for row in rows if row["backend"] == name] for name in ("nccl", "peer"))
    floor = ends((row["floor_us"] for row in rows), "{:.1f}")
    said(f"NCCL {ends(nccl, '{:.1f}')} µs, `peer` {ends(peer, '{:.1f}')}; the bytes alone take {floor}.")


def test_timelines() -> None:
    def rows(names: Iterable[str]) -> list[dict[str, Any]]:
        return [row for name in names for row in read(name)["rows"]]

    def off(found: list[dict[str, Any]]) -> str:
        return ends((100 * (row["simulated"] / row["measured"] - 1) for row in found), "{:+.1f}")

    gpus = rows(f"h200x{ranks}-timelines-{way}" for ranks, way in product((2, 4), ("nccl", "peer")))
    said(f"loops of {ends((1e3 * row['measured'] for row in gpus), '{:.0f}')} ms: 2 and 4 H200s")
    said(f"NCCL and `peer`, {off(gpus)} % of the time")
    said(f"whose stages wait as for a device, {off(rows(['cpu-timelines-3-gloo']))} %")
