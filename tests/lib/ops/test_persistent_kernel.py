"""Programs of instructions: their text, and the persistent kernel, interpreted and on a GPU, against the references."""

from typing import Any

import attrs
import pytest
import torch
from interpreting import interpret
from persistent_cases import CASES, Case, make_program, results
from torch import Tensor

from weft.ops.persistent.instructions import FIELDS, Attend, rows_of
from weft.ops.persistent.program import RUN, Tables, instructions_of, is_one, operands_of

_INTERPRETED = """
import sys, torch
from persistent_cases import make_program, results
from weft.ops.persistent.launch import run
from weft.ops.persistent.program import operands_of
from weft.ops.persistent import launch
found = []
for case, dtype in torch.load(sys.argv[1], weights_only=False):
    launch.processors = lambda _, count=4 + len(found) % 2: count  # an odd number leaves one without a part
    program = make_program(case, dtype)
    given = operands_of(program)
    run(list(given.reads), list(given.writes), given.text)
    found.append(results(program))
torch.save(found, sys.argv[2])
"""
GIVEN = [(case, (torch.float32, torch.float16)[index % 2]) for index, case in enumerate(CASES)]


def close(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Equal up to the order of sums, which roundings between instructions spread."""
    tolerance = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)


def by_references(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    program = make_program(case, dtype, device)
    for each in program:
        each.run()
    return results(program)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return interpret(_INTERPRETED, GIVEN, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("index", range(len(GIVEN)))
def test_the_kernel_interpreted_writes_what_the_references_write(index: int, interpreted: Any) -> None:
    close(interpreted[index], by_references(*GIVEN[index]), GIVEN[index][1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_on_a_gpu_writes_what_the_references_write(case: Case, dtype: torch.dtype) -> None:
    program = make_program(case, dtype, "cuda")
    given = operands_of(program)
    for _ in range(3):  # the counters are zeros after each
        RUN(list(given.reads), list(given.writes), given.text)
    close(results(program), by_references(case, dtype), dtype)


def test_a_program_is_the_same_from_its_text() -> None:
    program = make_program(CASES[2], torch.float32)
    given = operands_of(program)
    again = instructions_of(given.reads, given.writes, given.text)
    assert rows_of(again) == rows_of(program)
    assert {x.data_ptr() for x in given.writes} == {
        x.data_ptr() for each in program for name in each.written if (x := getattr(each, name)) is not None
    }


def test_attention_of_one_program_is_at_one_place_and_has_pages_of_its_own() -> None:
    """It reads keys before the instruction before it has ended; and where they are only once."""
    first, second = (make_program(CASES[1], torch.float32)[1] for _ in range(2))
    assert isinstance(first, Attend)
    assert isinstance(second, Attend)
    assert is_one([first, attrs.evolve(first, kv_pages=second.kv_pages)])
    assert not is_one([first, first])
    for name in ("cos", "sin", "slot_mapping", "block_table", "query_start_loc", "seq_lens"):
        other = attrs.evolve(first, kv_pages=second.kv_pages, **{name: getattr(second, name)})
        assert not is_one([first, other])


def test_the_operator_runs_the_references_on_a_cpu() -> None:
    program = make_program(CASES[1], torch.float32)
    given = operands_of(program)
    RUN(list(given.reads), list(given.writes), given.text)
    for one, other in zip(results(program), by_references(CASES[1], torch.float32), strict=True):
        assert torch.equal(one, other)


def test_tables_give_out_what_they_have() -> None:
    tables = Tables(torch.device("cpu"))
    first, second = tables.take(FIELDS), tables.take(2 * FIELDS)
    tables.fill_later(second, torch.arange(2 * FIELDS))
    assert not second.any()
    tables.fill()
    assert torch.equal(second, torch.arange(2 * FIELDS))
    assert not first.any()
    with pytest.raises(AssertionError, match="numbers of a table"):
        tables.take(tables.left + 1)
