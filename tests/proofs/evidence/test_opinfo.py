"""Operators of torch's database, graphified and compared with eager; the outcomes, causes and
record of such runs."""

import fnmatch
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusal import refused

import weft
import weft.proofs
from weft.errors import DeviceError, MissingPackageError
from weft.extras import install_command
from weft.proofs._strategies.operator_samples import (
    DTYPES,
    TRANSFORMS,
    Case,
    cases,
    copies,
    full_name,
)
from weft.proofs.evidence.opinfo import outcome
from weft.proofs.evidence.opinfo.__main__ import settings_of
from weft.proofs.evidence.opinfo.causes import CAUSES, causes_of
from weft.proofs.evidence.opinfo.outcome import KINDS, Outcome, kinds, outcomes, run
from weft.proofs.evidence.opinfo.record import Record
from weft.proofs.evidence.opinfo.workers import Settings, Task, Worker, run_all, tasks
from weft.torchapi.operator_database import operator_database
from weft.transforms.graphs.backends.tape import TapeRecording

# The distance of the sampled operators in the database, which has some 700.
EVERY = 12


@pytest.fixture(scope="module")
def database() -> tuple[Any, ...]:
    """Torch's operator database."""
    try:
        return operator_database()
    except MissingPackageError as error:
        pytest.skip(str(error))


def faults(entry: Any, dtype: str, samples: int) -> list[Outcome]:
    """The outcomes of one operator that are faults of weft."""
    return [
        o
        for o in outcomes(entry, [*TRANSFORMS], dtype, "cpu", samples, 0)
        if o.kind in ("differs", "crash")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_are_eager(database: tuple[Any, ...], dtype: str) -> None:
    start = [*DTYPES].index(dtype) * EVERY // len(DTYPES)
    assert [
        fault for entry in database[start :: EVERY * 4] for fault in faults(entry, dtype, 1)
    ] == []


@pytest.mark.one_of(3, 3)
@pytest.mark.parametrize(
    "name", ["addmm", "amax", "nn.functional.dropout", "cumprod", "gather", "svd"]
)
def test_a_few_operators_are_eager(database: tuple[Any, ...], name: str) -> None:
    entry = next(entry for entry in database if full_name(entry) == name)
    assert faults(entry, "float32", 2) == []


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", ["addmm", "nn.functional.dropout", "cumsum"])
def test_a_few_compiled_operators_are_eager(database: tuple[Any, ...], name: str) -> None:
    entry = next(entry for entry in database if full_name(entry) == name)
    results = [*outcomes(entry, [*TRANSFORMS], "float32", "cpu", 1, 0, "aot_eager")]
    assert {result.kind for result in results} <= {"same", "raises"}


@pytest.mark.slow
def test_compiled_operators_are_eager(database: tuple[Any, ...]) -> None:
    results = [
        result
        for entry in database[: EVERY * 60 : 60]
        for result in outcomes(entry, [*TRANSFORMS], "float32", "cpu", 1, 0, "aot_eager")
        if result.kind in ("differs", "crash")
    ]
    assert results == []


def make_case(
    fn: Callable[..., Any],
    *tensors: torch.Tensor,
    operator: str = "mine",
    other_tensors: Any = None,
) -> Case:
    """A case of a function."""
    return Case(
        operator, "forward", "float32", 0, fn, tensors or (torch.arange(3.0),), other_tensors
    )


def keeps_a_number() -> Callable[..., Any]:
    """A function that adds the number of its calls, which a replay does not count."""
    count = [0]

    def fn(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x + count[0]

    return fn


def raises_later() -> Callable[..., Any]:
    """A function that raises when it is called a second time, which is for the capture."""
    calls: list[None] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) > 1:
            raise LookupError("again")
        return x

    return fn


@pytest.mark.parametrize(
    ("fn", "kind", "detail"),
    [
        (lambda x: x.sin(), "same", ""),
        (
            lambda x: x[x > 0],
            "refused",
            "indexing with a boolean mask, whose shape or work depends on data",
        ),
        (
            lambda x: x.reshape(2, 2),
            "raises",
            "RuntimeError: shape '[2, 2]' is invalid for input of size 3",
        ),
        (raises_later(), "crash", "LookupError: again"),
    ],
)
def test_the_kinds_of_outcome(fn: Callable[..., Any], kind: str, detail: str) -> None:
    result = run(make_case(fn), "cpu")
    assert (result.kind, result.detail) == (kind, detail)


SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: x.sin(), "same"),
        (lambda x: torch.mv(SPARSE, x), "uncompiled"),
        (lambda x: x[x > 0], "refused"),
    ],
)
def test_the_kinds_of_outcome_of_compiled_functions(fn: Callable[..., Any], kind: str) -> None:
    assert run(make_case(fn), "cpu", "aot_eager").kind == kind
    assert kind in kinds("aot_eager")


def test_a_compiler_may_round_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, kind in ((1e-7, "near"), (1e-3, "differs")):

        def graphify(fn: Any, error: float = error, **options: Any) -> Any:
            return lambda x: fn(x) * (1 + error)

        monkeypatch.setattr(outcome, "graphify", graphify)
        assert run(make_case(lambda x: x + 0.3), "cpu", "inductor").kind == kind
        assert run(make_case(lambda x: x + 0.3), "cpu").kind == "differs"


def test_a_sparse_argument_runs_inline() -> None:
    result = run(make_case(lambda x: x * 2, torch.eye(2).to_sparse()), "cpu")
    assert result.kind == "inline"
    assert "sparse" in result.detail


def test_a_difference_says_when_and_whether_eager_repeats() -> None:
    result = run(make_case(keeps_a_number()), "cpu")
    assert result.kind == "differs"
    assert result.detail.startswith("capture: [0][0]: ")
    assert result.detail.endswith(" (eager differs from itself)")
    assert result.arguments == "forward of mine, float32, sample 0: float32[3]"


def test_new_values_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(lambda x: x + 1, other_tensors=(torch.ones(3),))
    assert run(case, "cpu").kind == "same"
    monkeypatch.setattr(outcome, "graphify", lambda fn, **options: lambda x: fn(case.tensors[0]))
    assert run(case, "cpu").detail == "new values: [0][0]: 1.0 against 2.0"


def test_strides_and_written_arguments_are_compared() -> None:
    calls: list[None] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        y = x.reshape(2, 3).clone()
        return y.t().contiguous().t() if len(calls) > 1 else y

    result = run(make_case(fn, torch.arange(6.0)), "cpu")
    assert result.kind == "differs"
    assert result.detail.startswith("capture: [0]: strides (1, 2) against (3, 1) of shape [2, 3]")
    assert run(make_case(lambda x: x.add_(1)), "cpu").kind == "refused"


def test_a_planted_bug_is_found(database: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(entry for entry in database if full_name(entry) == "sin")
    monkeypatch.setattr(TapeRecording, "replay", lambda self: None)
    results = faults(entry, "float32", 1)
    assert [fault.transform for fault in results] == [*TRANSFORMS]
    assert all(fault.detail.startswith("new values: ") for fault in results)


def test_memory_that_nothing_wrote_is_a_cause_in_torch() -> None:
    result = run(make_case(keeps_a_number(), operator="empty_like"), "cpu")
    assert (result.kind, result.detail) == ("torch", CAUSES[0].reason)
    assert causes_of(make_case(torch.sin, operator="empties"), "cpu") == []


def test_sums_in_any_order_are_compared_within_a_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    for more, kind in ((1e-6, "torch"), (1.0, "differs")):
        case = make_case(lambda x: x * 1.5, operator="scatter_add", other_tensors=(torch.ones(3),))
        other = functools.partial(torch.add, other=more)
        monkeypatch.setattr(
            outcome, "graphify", lambda fn, other=other, **options: lambda x: other(fn(x))
        )
        assert run(case, "cuda").kind == kind
    assert run(make_case(lambda x: x * 1.5, operator="scatter_add"), "cpu").kind == "differs"


def test_each_cause_concerns_operators_of_torch(database: tuple[Any, ...]) -> None:
    names = [full_name(entry) for entry in database]
    for cause in CAUSES:
        assert cause.reason.endswith(".")
        assert {*cause.transforms} <= {*TRANSFORMS}
        for pattern in cause.operators:
            assert fnmatch.filter(names, pattern), pattern


def test_an_operator_that_loses_the_device_ends_there(
    database: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(fn: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(outcome, "graphify", lose)
    entry = next(entry for entry in database if full_name(entry) == "sin")
    results = list(outcomes(entry, ["forward"], "float32", "cpu", 3, 0))
    assert [(o.kind, o.device_lost) for o in results] == [("crash", True), ("torch", False)]
    assert results[1].detail.endswith("further samples did not run.")
    capturing = "CUDA error: operation not permitted when stream is capturing"
    assert not run_with(monkeypatch, RuntimeError(capturing)).device_lost


def run_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Outcome:
    """The outcome where `graphify` raises an error."""

    def fail(fn: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(outcome, "graphify", fail)
    return run(make_case(torch.sin), "cpu")


def test_copies_share_and_stride_as_their_originals_do() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    a, b, c, d = copies(
        (x[:, 1:3], x.t(), torch.ones(2, dtype=torch.complex64).conj(), x.to_sparse())
    )
    assert (a.stride(), a.storage_offset(), b.stride()) == ((4, 1), 1, (1, 4))
    assert a.untyped_storage()._cdata == b.untyped_storage()._cdata != x.untyped_storage()._cdata
    assert torch.equal(a, x[:, 1:3])
    assert c.is_conj()
    assert d.layout is torch.sparse_coo


def test_a_case_has_other_values_of_the_same_shapes(database: tuple[Any, ...]) -> None:
    entry = next(entry for entry in database if full_name(entry) == "addmm")
    for transform in TRANSFORMS:
        (case,) = cases(entry, transform, "float32", "cpu", 1, 0)
        assert case.other_tensors is not None
        assert [x.shape for x in case.other_tensors] == [x.shape for x in case.tensors]
        assert not torch.equal(case.other_tensors[0], case.tensors[0])
    assert [*cases(entry, "backward", "int64", "cpu", 1, 0)] == []


def test_a_record_counts_and_lists(tmp_path: Path) -> None:
    record = Record({"device": "cpu", "samples": 1, "seed": 0}, of_tasks=3, seconds=60.0)
    record.add(
        [
            Outcome("same", "sin", "forward", "float32", 0),
            Outcome("same", "sin", "vmap", "float32", 0),
        ]
    )
    detail = "writes to tensors[1] of shape (5, 5)"
    record.add([Outcome("refused", "add_", "forward", "float32", 0, detail)])
    record.add(
        [Outcome("differs", "cos", "jvp", "int64", 4, "replay: [0]: 1|2 against 3", "float32[2]")]
    )
    environment = {"gpu": "none", "torch": "2.13"}
    page = record.write(tmp_path, environment).read_text()
    stored = json.loads((tmp_path / "opinfo-cpu.json").read_text())
    assert stored["counts"]["forward"]["float32"] == {"refused": 1, "same": 1}
    assert stored["refused"] == {"writes to tensors[n]": {"add_": ["forward"]}}
    assert stored["faults"][0]["operator"] == "cos"
    assert stored["tasks"] == {"done": 3, "of": 3, "seconds": 60}
    assert page.startswith("# Torch's operator database: 4 samples, 1 differ, 0 crash\n")
    assert "| differs | cos | jvp | int64 | 1 | 4 | replay: [0]: 1\\|2 against 3 |" in page
    assert all(f"- **{kind}**: " in page for kind in KINDS)


def test_the_stored_record_has_no_fault() -> None:
    folder = Path(weft.proofs.__path__[0]) / "results"
    stored = json.loads((folder / "opinfo-cpu.json").read_text(encoding="utf-8"))
    assert stored["faults"] == []
    assert stored["tasks"]["done"] == stored["tasks"]["of"] > 2000
    assert {*stored["torch"]} <= {cause.reason for cause in CAUSES}
    assert {*stored["counts"]} == {*TRANSFORMS}
    counts = [
        count
        for dtypes in stored["counts"].values()
        for kinds in dtypes.values()
        for count in kinds.values()
    ]
    page = (folder / "opinfo-cpu.md").read_text(encoding="utf-8")
    assert page.startswith(
        f"# Torch's operator database: {sum(counts):,} samples, 0 differ, 0 crash\n"
    )


def test_the_order_of_tasks_depends_on_the_seed_alone(database: tuple[Any, ...]) -> None:
    settings = Settings(operators="linalg", dtypes=("float32", "int64"))
    task_list = tasks(settings)
    assert (
        task_list
        == tasks(settings)
        != tasks(Settings(operators="linalg", dtypes=("float32", "int64"), seed=1))
    )
    assert {task.dtype for task in task_list} == {"float32", "int64"}
    assert all("linalg" in task.operator for task in task_list)


@pytest.mark.nightly
def test_processes_run_the_tasks_and_one_that_dies_is_a_crash(database: tuple[Any, ...]) -> None:
    settings = Settings(transforms=("forward",), samples=1, jobs=1)
    index = next(i for i, entry in enumerate(database) if full_name(entry) == "sin")
    todo = [
        Task(index, "sin", "float32"),
        Task(len(database), "none", "float32"),
        Task(index, "sin", "int64"),
    ]
    results = list(run_all(settings, todo))
    assert [[outcome.kind for outcome in part] for part in results] == [
        ["same"],
        ["crash"],
        ["same"],
    ]
    assert "IndexError" in results[1][0].detail
    assert list(run_all(Settings(minutes=0.0, jobs=1), todo)) == []
    worker = Worker(settings)
    worker.give(todo[0])
    worker.process.kill()
    died = worker.outcomes(ready=True)
    assert died is not None
    assert died[0].detail == "the process ended with code -9"
    worker.stop()


def test_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder = settings_of(
        ["--out", "x", "--dtypes", "int64", "--samples", "2", "--minutes", "1.5"]
    )
    assert settings == Settings(dtypes=("int64",), samples=2, minutes=1.5)
    assert folder == Path("x")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(
        DeviceError,
        "weft.proofs.evidence.opinfo --device cuda",
        "this machine has no CUDA device",
        "--device cpu",
    ):
        settings_of(["--out", "x", "--device", "cuda"])
    for wrong, text in (
        ("--dtypes=int8", "--dtypes int8: write some of float32"),
        ("--jobs=0", "are at least 1"),
    ):
        with pytest.raises(SystemExit):
            settings_of(["--out", "x", wrong])
        assert text in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name="expecttest")

    monkeypatch.setattr("weft.torchapi.operator_database.importlib.import_module", missing)
    problem = "no expecttest here, which torch's operator database imports"
    with refused(
        MissingPackageError, "weft.proofs.evidence.opinfo", problem, install_command("proofs")
    ):
        operator_database()
