"""Values as code: the code rebuilds the value, however nested, and remarks on everything that it
leaves out."""

import enum
from collections import OrderedDict, defaultdict, namedtuple
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from weft.batches.descriptor import BatchDescriptor
from weft.effects import Recv
from weft.proofs.checks import code
from weft.proofs.checks.code import MOST_PRINTED, to_code
from weft.proofs.checks.difference import find_difference
from weft.proofs.strategies import Rows, batches, descriptors, limits, tensors
from weft.values.schema import Schema, TensorSchema

Pair = namedtuple("Pair", "left right")  # the kind that people have
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


class Colour(enum.Enum):
    RED = 1


@attrs.frozen
class Held:
    x: Any
    _hidden: int = 3
    n: int = 0


def again(value: Any, folder: Path | None = None) -> Any:
    """The value that the code of a value rebuilds."""
    names: dict[str, Any] = {}
    exec(to_code(value, folder=folder), names)
    return names["value"]


VALUES: dict[str, Any] = {
    "numbers": (1, True, 0.1, -0.0, float("inf"), complex(-0.0, 2), None, "a'b", b"\0"),
    "containers": [{"a": (1,)}, {2, 3}, frozenset({1}), (), [], {}, range(3), slice(1, None)],
    "dicts": (OrderedDict(a=1), defaultdict(list, {"a": [1]})),
    "named": (Pair(1, torch.ones(2)), Colour.RED, Held(1), Held(2, 4, n=5), Held),
    "of torch": (torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.strided),
    "effects": Recv(0, 1, Schema((TensorSchema("h", ("num_tokens", 4), torch.float32),))),
    "arrays": np.arange(3.0),
    "long": [list(range(100)), {"k" * 50: "v" * 60}],
}


def test_names_come_from_public_modules() -> None:
    """Each of which has a list of its names, whichever of them are imported."""
    for face in code._FACES:
        assert import_module(face).__all__, face


@pytest.mark.parametrize("case", VALUES)
def test_the_code_makes_the_value(case: str) -> None:
    assert find_difference(again([VALUES[case]]), [VALUES[case]]) is None


@given(
    st.one_of(
        batches(),
        descriptors(),
        limits(),
        tensors(2, 3),
        tensors(st.integers(0, 3), dtype=torch.int32),
    )
)
def test_the_code_of_what_is_drawn_makes_it(value: Any) -> None:
    assert find_difference(again([value]), [value]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (0, 2)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    kind = dtype if dtype.is_complex else torch.float64
    drawn = torch.randn(shape, dtype=kind, generator=generator) * 3
    x = drawn if dtype.is_complex else drawn.abs().to(dtype)
    assert find_difference(again(x), x) is None


def test_what_code_looks_like() -> None:
    full = "torch.full((2000, 3), 0.5, dtype=torch.float32)"
    assert to_code(torch.full((2000, 3), 0.5)) == f"import torch\nvalue = {full}"
    rows = Rows(BatchDescriptor(1, 1), torch.tensor([2.0]))
    assert (
        to_code(rows, "rows")
        == "import torch\nimport weft\nfrom weft.proofs.strategies import Rows\nrows ="
        " Rows(descriptor=weft.BatchDescriptor(num_tokens=1, num_reqs=1), x=torch.tensor([2.0]))"
    )
    x = torch.arange(6).view(2, 3).t()
    assert (
        to_code(x) == "import torch\nvalue = torch.empty_strided((3, 2), (1, 3),"
        " dtype=torch.int64).copy_(torch.tensor([[0, 3], [1, 4], [2, 5]]))"
    )
    assert again(x).stride() == x.stride()
    assert again(torch.ones(2, requires_grad=True)).requires_grad
    assert again(torch.tensor([1.0, -0.0]))[1].signbit()


def test_large_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    big = torch.randn(MOST_PRINTED + 1)
    code = to_code((big[:4], big), folder=tmp_path)
    assert f"saved = torch.load('{tmp_path / 'saved.pt'}')  # 1 large, saved there" in code
    assert find_difference(again((big[:4], big), tmp_path), (big[:4], big)) is None
    part = to_code(torch.randn(1000, 1000)[:300, 0], folder=tmp_path)
    assert "saved[0]" in part
    assert (
        tmp_path / "saved.pt"
    ).stat().st_size < 10_000  # the copy of the printed elements, not of the whole storage


def test_large_tensors_get_a_folder_of_their_own() -> None:
    value = {"x": torch.randn(300)}
    assert find_difference(again(value), value) is None


def test_what_has_no_code_says_so() -> None:
    module = torch.nn.Linear(1, 1)
    assert (
        to_code((module, 1))
        == "# the `...` stands for Linear(in_features=1, out_features=1, bias=True), of class"
        " Linear: put yours there\nvalue = (..., 1)"
    )

    @attrs.frozen
    class Own:
        n: int

    assert to_code(Own(1)).splitlines()[0].startswith("# Own is of your own code (")
