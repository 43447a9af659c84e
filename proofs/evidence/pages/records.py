"""The records of measurements, files of `proofs/results/`, and the figures in those of serving."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

RESULTS = Path(__file__).parents[2] / "results"


@attrs.frozen
class Record:
    """A file of `proofs/results/`: its name and what it holds."""

    file: str
    data: dict[str, Any]

    @property
    def build(self) -> str:
        """When the run began, to the minute; the day of the file where the record does not say."""
        runs = self.data.get("runs") or [{}]
        time = self.data.get("environment", runs[0].get("environment", {})).get("time")
        return time[:16].replace("T", " ") if time else self.file[:10]

    def of_run(self, run: dict[str, Any]) -> "Record":
        """This record in the environment of one of its runs, as far as that is known."""
        environment = run.get("weft", run).get("environment", {})
        return attrs.evolve(
            self,
            data={**self.data, "environment": {**self.data.get("environment", {}), **environment}},
        )

    def row(self, what: str, figure: str, against: str, machine: str) -> tuple[str, ...]:
        """A row of the table."""
        return what, figure, against, self.build, machine, f"`{self.file}`"


def read(name: str) -> Record:
    """The newest record of a name: its file is `DATE-name.json`."""
    # Dates as ISO has them sort as texts. Exactly ten characters before the name, or a longer name
    # that ends like this one would match.
    path = max(RESULTS.glob(f"????-??-??-{name}.json"))
    return Record(path.name, json.loads(path.read_text(encoding="utf-8")))


def span(values: Iterable[float], form: str) -> str:
    """The least and the greatest, or one number where both read alike.

    >>> span([2.0, 1.26, 1.5], "{:.1f}"), span([1.01, 1.02], "{:.1f}")
    ('1.3 to 2.0', '1.0')
    """
    ordered = sorted(values)
    # Compared as they read: two numbers that differ only in digits that are not shown are one.
    return " to ".join(dict.fromkeys((form.format(ordered[0]), form.format(ordered[-1]))))


def served(record: Record) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs of a serving record, by workload and mode."""
    runs = defaultdict(list)
    for row in record.data["rows"]:
        if "workload" in row:
            runs[row["workload"], row["mode"]].append(row)
    return runs


def speeds(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Output tokens a second."""
    return [row["output_tokens_per_s"] for row in rows]
