"""The host's time for a step is measured on every rank, of requests that all come to their end."""

import json
from pathlib import Path

import pytest

from weft.proofs.evidence.bench.host import main


@pytest.mark.parametrize("split", ["1x1", "2x1"])
def test_a_step_has_a_time_on_each_rank(
    split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--requests", "3", "--splits", split, "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "host.json").read_text())["rows"]
    pp, tp = map(int, split.split("x"))
    assert (row["pp"], row["tp"], row["requests"], len(row["seconds"])) == (pp, tp, 3, pp * tp)
    assert all(0 < seconds < 1 for seconds in row["seconds"])
    assert capsys.readouterr().out.startswith(f"pp {pp} tp {tp}: ")
