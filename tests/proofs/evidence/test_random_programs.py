"""Random programs: few are refused, differences are found and made small, and a record has the
counts."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, find, settings
from refusal import refused

from weft.errors import DeviceError
from weft.proofs._laws.captures import Tally, graph_is_eager_on_tensor_programs
from weft.proofs._strategies.captures.hazards import HAZARDS, hazards
from weft.proofs._strategies.captures.operations import OPERATIONS
from weft.proofs._strategies.captures.tensor_programs import TensorProgram, tensor_programs
from weft.proofs.evidence.mutants import MUTANTS
from weft.proofs.evidence.runs import random_programs as module
from weft.proofs.evidence.runs.random_programs import Run, main, run

# It ends with the first that is looked for
# With these, `find` gives the first case that it draws, and does not make it smaller.
FIRST = settings(phases=[Phase.generate], max_examples=2_000)


@pytest.mark.slow
def test_few_programs_are_refused_and_most_calls_replay(runs_nightly: bool) -> None:
    count = 100 if runs_nightly else 40
    report = run(count)
    assert report.differences == []
    assert report.tally.programs >= count
    assert report.refused_share < 0.05
    assert report.tally.errors < 0.1 * report.tally.programs
    assert report.tally.replays > 1.5 * report.tally.captures


@pytest.mark.slow
def test_a_record_has_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "20", "--seed", "3", "--out", str(tmp_path)]) == 0
    assert " 0 differences" in capsys.readouterr().out
    stored = json.loads((tmp_path / "random-programs-cpu.json").read_text())
    assert stored["tally"]["programs"] >= 20
    assert stored["seed"] == 3
    assert stored["differences"] == []


def test_nests_of_transforms_are_drawn_for_l25(tmp_path: Path) -> None:
    assert main(["--law", "L25", "--programs", "1", "--minutes", "0", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "compositions-cpu.json").read_text())
    assert (stored["law"], stored["tally"]["programs"]) == ("L25", 0)


def test_compiled_functions_are_drawn_for_l26(tmp_path: Path) -> None:
    assert main(["--law", "L26", "--programs", "1", "--minutes", "0", "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "compiled-cpu.json").read_text())
    assert (stored["law"], stored["tally"]["programs"]) == ("L26", 0)


def test_a_run_ends_when_its_time_is_over() -> None:
    assert run(1000, minutes=0.0).tally.programs <= module._AT_ONCE


@pytest.mark.nightly
def test_processes_share_the_programs_of_one_run() -> None:
    shared = run(100, seed=4, workers=2)
    alone = run(100, seed=4)
    assert shared.tally == alone.tally
    assert shared.differences == alone.differences == []


@pytest.mark.nightly
def test_a_difference_is_made_small_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    [bug] = [mutant for mutant in MUTANTS if f"{mutant}" == "L24: nothing outside is compared"]
    with bug.plant():
        assert main(["--programs", "50"]) == 1
    out = capsys.readouterr().out
    assert "L24 graph is eager, call " in out
    assert "graph = weft.graphify(f" in out


def test_a_program_prints_as_a_script_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = find(tensor_programs(), lambda program: "torch.func" in program.code, settings=FIRST)
    exec(compile(repr(program), "<a script>", "exec"), {"__name__": "a script"})
    printed = capsys.readouterr().out.splitlines()
    lines = len(printed) // (2 * program.calls)  # of one result
    for start in range(0, len(printed), 2 * lines):
        assert printed[start : start + lines] == printed[start + lines : start + 2 * lines]


def test_every_operation_is_drawn_as_code_that_compiles() -> None:
    for operation in (operation for kind in OPERATIONS.values() for operation in kind):
        text = operation.text.format(out="y", a="x0", b="x1")
        compile(text, "<an operation>", "exec")


def test_what_is_refused_and_what_raises_is_counted() -> None:
    ends = "def around(call):\n    return torch.no_grad()\n\ndef before(call):\n    pass\n"
    start = (
        "import torch\n\ndef arguments(call):\n    return torch.ones(2) + call,\n\ndef f(x):\n   "
        " return "
    )
    tally = Tally()
    for body in ("x * float(x[0])", "x * x.missing", "x + 1"):
        graph_is_eager_on_tensor_programs(TensorProgram(f"{start}{body}\n\n{ends}", 2), tally=tally)
    assert (tally.programs, tally.errors, tally.replays, tally.captures) == (3, 1, 2, 1)
    assert dict(tally.refused) == {"CaptureError: Tensor.__float__ reads a tensor on the host": 1}
    assert "1 differences" not in str(Run("cpu", 0, tally))


@pytest.mark.slow
def test_each_kind_of_hazard_is_drawn() -> None:
    for kind in HAZARDS:
        hazard = find(hazards(), lambda hazard, kind=kind: hazard.kind == kind, settings=FIRST)
        assert "$" not in hazard.program.code
        assert repr(hazard).startswith(f"# {kind}, which weft ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    call = "weft.proofs.evidence.runs.random_programs --device cuda"
    with refused(DeviceError, call, "this machine has no CUDA device", "--device cpu"):
        main(["--device", "cuda"])
