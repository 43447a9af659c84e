"""L26's strategies: each compiler is drawn or named, a case is drawn of each kind, and errors of
rounding are told from others."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from weft.proofs import LawViolation
from weft.proofs._laws.captures import Tally
from weft.proofs._laws.compiler import compiled_graphs_are_their_functions
from weft.proofs._strategies.captures.functions import OPERATIONS
from weft.proofs._strategies.captures.tensor_programs import TensorProgram
from weft.proofs._strategies.compiled import CompiledCase, compiled_cases
from weft.proofs._strategies.compilers import INDUCTOR, NOT_DRAWN, QUICK
from weft.proofs._strategies.sized_functions import (
    SIZED,
    UPDATES,
    Extent,
    SizedFunction,
    sized_functions,
)
from weft.proofs.checks.rounding import RoundingViolation, assert_rounded, errors
from weft.torchapi.inductor import compilers
from weft.transforms.graphs.compiler import program


def test_each_compiler_is_drawn_or_has_a_reason() -> None:
    drawn = {*QUICK, INDUCTOR}
    assert drawn <= {*compilers()}
    assert {*compilers()} - drawn <= {*NOT_DRAWN}
    assert not drawn & {*NOT_DRAWN}


@pytest.mark.nightly
def test_each_kind_of_case_and_operation_is_drawn() -> None:
    counts: Counter[object] = Counter()
    quiet = settings(
        max_examples=1000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(0)
    @quiet
    @given(compiled_cases())
    def draw(case: CompiledCase) -> None:
        counts.update((type(case).__name__, case.compiler))

    @seed(0)
    @quiet
    @given(sized_functions())
    def draw_sized(function: SizedFunction) -> None:
        counts.update((*function.names, function.update))

    draw()
    draw_sized()
    kinds = {"TensorProgram", "SizedFunction", "CompiledMapping", "CompiledModel"}
    assert {*counts} == {*kinds, *QUICK, INDUCTOR, *SIZED, *OPERATIONS, *UPDATES}


def test_a_function_that_is_not_compiled_is_counted_and_a_failed_compiler_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import contextlib\nimport torch\n"
        "rows = torch.eye(2).to_sparse()\n"
        "def arguments(call):\n    return (torch.ones(2, 3),)\n"
        "def f(x):\n    return torch.sparse.mm(rows, x)\n"
        "def around(call):\n    return contextlib.nullcontext()\n"
        "def before(call):\n    pass\n"
    )
    tally = Tally()
    compiled_graphs_are_their_functions(TensorProgram(code, 2, compiler="aot_eager"), tally=tally)
    assert dict(tally.uncompiled) == {"a tensor of class Tensor, torch.sparse_coo": 1}

    def fail(*args: object, **options: object) -> None:
        raise NotImplementedError("an operator")

    monkeypatch.setattr(program, "compile_graph", fail)
    extent = Extent(2, 3)
    function = SizedFunction(("tanh",), "state: unchanged", (extent,), (extent,), "aot_eager")
    with pytest.raises(LawViolation, match=r"L26 .* failed: NotImplementedError: an operator"):
        compiled_graphs_are_their_functions(function)


def test_the_record_has_no_difference() -> None:
    results = Path(__file__).parents[2] / "proofs" / "results"
    stored = json.loads((results / "compiled-cpu.json").read_text(encoding="utf-8"))
    assert (stored["law"], stored["differences"]) == ("L26", [])
    assert stored["tally"]["programs"] >= 2000
    assert stored["refused_share"] < 0.01
    assert sum(stored["tally"]["uncompiled"].values()) < 0.05 * stored["tally"]["programs"]


def test_rounding_is_told_from_other_errors() -> None:
    one = torch.tensor([1.0, 2.0])
    assert_rounded("a sum", [one * (1 + 1e-7), 3], [one, 3])
    with pytest.raises(RoundingViolation, match=r"a sum: \[0\]: 1\.1.* against 1\.0"):
        assert_rounded("a sum", one * 1.1, one)
    with pytest.raises(LawViolation) as error:
        assert_rounded("a sum", one.double(), one)
    assert not isinstance(error.value, RoundingViolation)
    nan = torch.tensor([torch.nan, 2.0])
    assert errors([one * 1.5, nan, nan], [one, nan, one]) == [0.5, 0.0, torch.inf]
