"""`Record`: the outcomes of a run, counted and listed, as JSON and as Markdown."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from weft.proofs.evidence.opinfo.outcome import Outcome, kinds

FAULTS = ("differs", "crash")
"""The kinds of outcome that are faults."""
_LISTED = ("refused", "inline", "torch", "uncompiled", "near")
# The most characters of a detail on the page. The JSON file has it whole.
_LONGEST = 200


@attrs.define
class Record:
    """The outcomes of a run.

    Args:
        settings: the settings of the run, by name.
        of_tasks: the number of tasks, which are operators with a dtype.
        done: the number of them that ended.
        counts: outcomes by transform, dtype and kind.
        listed: for each listed kind and each detail, the transforms of each operator.
        faults: the outcomes that differ or crash.
    """

    settings: dict[str, Any]
    of_tasks: int
    done: int = 0
    seconds: float = 0.0
    counts: Counter[tuple[str, str, str]] = attrs.field(factory=Counter)
    listed: dict[str, dict[str, dict[str, set[str]]]] = attrs.field(
        factory=lambda: defaultdict(dict)
    )
    faults: list[Outcome] = attrs.field(factory=list)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of a task that ended."""
        self.done += 1
        for outcome in outcomes:
            self.counts[outcome.transform, outcome.dtype, outcome.kind] += 1
            if outcome.kind in _LISTED:
                # By the reason and not by the operator: one limit of weft concerns many operators.
                operators = self.listed[outcome.kind].setdefault(_general(outcome.detail), {})
                operators.setdefault(outcome.operator, set()).add(outcome.transform)
            elif outcome.kind in FAULTS:
                self.faults.append(outcome)

    @property
    def compiler(self) -> str | None:
        """The compiler of the graphs."""
        compiler: str | None = self.settings.get("compiler")
        return compiler

    def _listed_kinds(self) -> list[str]:
        return [kind for kind in _LISTED if kind in kinds(self.compiler)]

    def total(self, kind: str) -> int:
        """The number of outcomes of a kind."""
        return sum(
            count for (_, _, outcome_kind), count in self.counts.items() if outcome_kind == kind
        )

    def as_json(self, environment: dict[str, Any]) -> dict[str, Any]:
        """The whole record."""
        counts: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
        # Sorted throughout, as workers end in any order: two records of one build must be equal.
        for (transform, dtype, kind), count in sorted(self.counts.items()):
            counts[transform][dtype][kind] = count
        listed = {
            kind: {
                detail: {
                    operator: sorted(transforms)
                    for operator, transforms in sorted(operators.items())
                }
                for detail, operators in sorted(self.listed[kind].items())
            }
            for kind in self._listed_kinds()
        }
        return {
            "environment": environment,
            "settings": self.settings,
            "tasks": {"done": self.done, "of": self.of_tasks, "seconds": round(self.seconds)},
            "counts": counts,
            **listed,
            "faults": [attrs.asdict(outcome) for outcome in sorted(self.faults, key=_order)],
        }

    def page(self, environment: dict[str, Any]) -> str:
        """The record as Markdown, with faults by operator and beginnings of long details."""
        cases = sum(self.counts.values())
        differ = self.total("differs")
        crash = self.total("crash")
        most = self.settings["samples"] or "all"
        if environment["gpu"] != "none":
            where = environment["gpu"]
        else:
            where = "the tape, on a CPU"
        if self.compiler is not None:
            where += f", compiled by {self.compiler}"
        lines = [
            f"# Torch's operator database: {cases:,} samples, {differ:,} differ, {crash:,} crash",
            "",
            (
                f"On {where}; torch {environment['torch']}; {self.done:,} of {self.of_tasks:,}"
                f" operators with a dtype, in {self.seconds / 60:.0f} minutes; samples of each"
                f" operator, transform and dtype: {most}; seed {self.settings['seed']}. Written by"
                " `python -m weft.proofs.evidence.opinfo --out FOLDER`."
            ),
            "",
            *(f"- **{kind}**: {meaning}." for kind, meaning in kinds(self.compiler).items()),
            "",
            *_table(("transform", "dtype", *kinds(self.compiler)), self._count_rows()),
            "",
            *self._fault_lines(),
        ]
        for kind in self._listed_kinds():
            lines += [
                f"## {kind}",
                "",
                *_table(("reason", "operators"), self._listed_rows(kind)),
                "",
            ]
        return "\n".join(lines).rstrip() + "\n"

    def _count_rows(self) -> Iterator[Sequence[Any]]:
        for transform, dtype in dict.fromkeys((t, d) for t, d, _ in sorted(self.counts)):
            yield (
                transform,
                dtype,
                *(self.counts[transform, dtype, kind] for kind in kinds(self.compiler)),
            )
        yield "all", "", *(self.total(kind) for kind in kinds(self.compiler))

    def _fault_lines(self) -> Iterator[str]:
        yield from ("## differs and crash", "")
        grouped: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
        for outcome in sorted(self.faults, key=_order):
            grouped[outcome.kind, outcome.operator, outcome.transform].append(outcome)
        rows = [
            (
                *key,
                ", ".join(sorted({o.dtype for o in outcomes})),
                len(outcomes),
                # The first sample is enough to run it again by itself.
                outcomes[0].sample,
                outcomes[0].detail[:_LONGEST],
            )
            for key, outcomes in grouped.items()
        ]
        header = (
            "kind",
            "operator",
            "transform",
            "dtypes",
            "samples",
            "first",
            "detail of the first",
        )
        yield from _table(header, rows) if rows else ("None.",)
        yield ""

    def _listed_rows(self, kind: str) -> Iterator[Sequence[Any]]:
        for detail, operators in sorted(self.listed[kind].items()):
            cell = ", ".join(
                f"{name} ({', '.join(sorted(transforms))})"
                for name, transforms in sorted(operators.items())
            )
            yield detail, cell

    def write(self, folder: Path, environment: dict[str, Any]) -> Path:
        """Write `opinfo-DEVICE.json` and `opinfo-DEVICE.md`, and return the path of the latter. With
        a compiler, the names begin with `opinfo-COMPILER`."""
        folder.mkdir(parents=True, exist_ok=True)
        names = ["opinfo", *([self.compiler] if self.compiler else []), self.settings["device"]]
        stem = folder / "-".join(names)
        text = json.dumps(self.as_json(environment), indent=1)
        stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(self.page(environment), encoding="utf-8")
        return stem.with_suffix(".md")


def _order(outcome: Outcome) -> tuple[str, str, str, str, int]:
    return outcome.kind, outcome.operator, outcome.transform, outcome.dtype, outcome.sample


def _general(detail: str) -> str:
    """A detail without shapes and indices, so that samples of one reason are listed together.

    >>> _general("aten.add_.Tensor writes to tensors[0] of shape (5, 5), which it does not own")
    'aten.add_.Tensor writes to tensors[n], which it does not own'
    """
    return re.sub(r"\[\d+\]", "[n]", re.sub(r" of shape \([\d, ]*\)", "", detail))


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(value: Any) -> str:
    text = str(value).replace("|", "\\|").replace("\n", " ")
    if isinstance(value, int):
        return f"{value:,}"
    return text
