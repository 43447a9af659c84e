"""Digests of programs: changes of custom functions, and of what they read, that a certificate
notices."""

import functools
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import weft
from weft.errors import RequestError
from weft.proofs._strategies.engine.invariant import invariant_model
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import slice_params
from weft.transforms.engine.evaluation.facts import digest_program
from weft.transforms.engine.generate import generate
from weft.transforms.graphs.graphify import graphify

scale = 2.0
table = {"by": torch.ones(3)}


@pytest.fixture(scope="module")
def model() -> Model:
    return invariant_model("Qwen3")


def of(model: Model, logits: Callable[..., Tensor]) -> str:
    digest = digest_program(
        attrs.evolve(model, functions=attrs.evolve(model.functions, logits=logits))
    )
    assert digest == digest_program(
        attrs.evolve(model, functions=attrs.evolve(model.functions, logits=logits))
    )
    return digest


class Scaled:
    """A stage's function that is an object with a state of its own."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, logits: Tensor, _rows: Any, _extras: Any) -> Tensor:
        return self.by * logits

    def method(self, logits: Tensor, _rows: Any, _extras: Any) -> Tensor:
        return self.helped(logits)

    def helped(self, logits: Tensor) -> Tensor:
        return self.by * logits


class Slotted:
    """The same with slots."""

    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, logits: Tensor, _rows: Any, _extras: Any) -> Tensor:
        return self.by * logits


@attrs.frozen
class Frozen:
    """The same by attrs."""

    by: float

    def __call__(self, logits: Tensor, _rows: Any, _extras: Any) -> Tensor:
        return self.by * logits


class Linear(torch.nn.Module):
    """The same as a module."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), by))

    def forward(self, logits: Tensor, _rows: Any, _extras: Any) -> Tensor:
        return logits * self.weight[0]


class Helping(Scaled):
    """One whose method takes the place of another class's."""

    def helped(self, logits: Tensor) -> Tensor:
        return logits - self.by


def closing_over(value: Any) -> Callable[..., Any]:
    return lambda logits, rows, extras: (logits, value)


def marked(by: float) -> Callable[..., Any]:
    def run(logits: Tensor, rows: Any, extras: Any) -> Tensor:
        return logits

    vars(run)["by"] = by
    return run


def itself(by: float) -> Callable[..., Any]:
    """A function that closes over itself, and a list that holds itself."""
    values: list[Any] = [by]
    values.append(values)

    def run(logits: Tensor, rows: Any, extras: Any) -> Any:
        return run, values

    return run


def reading(value: Any) -> Callable[..., Any]:
    """A function that reads a variable of its module."""
    names: dict[str, Any] = {"value": value}
    exec("def run(logits, rows, extras):\n    return [value for _ in rows]", names)
    function: Callable[..., Any] = names["run"]
    return function


def reading_module(by: float) -> Callable[..., Any]:
    """A function that reads an attribute of another module."""
    helpers = types.ModuleType("helpers")
    vars(helpers)["by"] = by
    names: dict[str, Any] = {"helpers": helpers}
    exec("def run(logits, rows, extras):\n    return helpers.by * logits", names)
    function: Callable[..., Any] = names["run"]
    return function


MAKERS: dict[str, Callable[[Any], Any]] = {
    "an object": Scaled,
    "an object with slots": Slotted,
    "a class of attrs": Frozen,
    "a module": Linear,
    "a bound method": lambda by: Scaled(by).method,
    "a partial": lambda by: functools.partial(closing_over(0), by),
    "a wrapped function": lambda by: functools.lru_cache(closing_over(by)),
    "a graph": lambda by: graphify(closing_over(by)),
    "an attribute of a function": marked,
    "itself": itself,
    "a variable": reading,
    "a module's attribute": reading_module,
    "a tensor": lambda by: closing_over(torch.tensor([1.0, by])),
    "a tensor in a variable": lambda by: reading({"tensors": [torch.tensor(by)]}),
    "a function in a variable": lambda by: reading(closing_over(by)),
    "an object in a variable": lambda by: reading(types.SimpleNamespace(by=by)),
    "a pattern": lambda by: closing_over(re.compile(f"{by}")),
    "an array": lambda by: closing_over(np.full(3, by)),
    "a transform": lambda by: torch.no_grad()(closing_over(by)),
    "a compiled function": lambda by: torch.compile(closing_over(by)),
    "a conjugate": lambda by: closing_over(torch.tensor([1j * by]).conj()),
    "a set": lambda by: closing_over({"a", "b", by}),
}


@pytest.mark.parametrize("what", MAKERS)
def test_a_value_that_it_reads_changes_it(model: Model, what: str) -> None:
    make = MAKERS[what]
    assert of(model, make(2.0)) == of(model, make(2.0)) != of(model, make(3.0))
    assert "without" not in of(model, make(2.0))


def test_code_changes_it(model: Model) -> None:
    functions = (
        *(
            lambda x, rows, extras: x + 1,
            lambda x, rows, extras: x - 1,
            lambda x, rows, extras: x + 2,
        ),
        *(Scaled(2.0), Slotted(2.0), Frozen(2.0), Scaled(2.0).method, Helping(2.0).method),
    )
    assert len({of(model, function) for function in functions}) == len(functions)


def reads_scale(logits: Tensor, rows: Any, extras: Any) -> Tensor:
    return scale * logits + table["by"][0]


def test_lower_case_variables_of_a_module_count(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [of(model, reads_scale)]
    monkeypatch.setitem(globals(), "scale", 3.0)
    digests.append(of(model, reads_scale))
    table["by"] += 1
    digests.append(of(model, reads_scale))
    table["by"] -= 1
    assert len({*digests}) == 3


def test_devices_and_the_model_s_own_weights_do_not(model: Model) -> None:
    assert of(model, closing_over(torch.device("cpu"))) == of(
        model, closing_over(torch.device("meta"))
    )
    lens = closing_over(model)
    digests = []
    for layout in split_layers(model.config.num_layers, 2):
        rank = attrs.evolve(
            model, params=slice_params(model.params, layout), layout=layout, path=Path("elsewhere")
        )
        digests.append(of(rank, closing_over(rank)))
    assert digests == [of(model, lens)] * 2


def test_a_value_without_a_digest_is_named(model: Model) -> None:
    digest = of(model, closing_over([threading.Lock(), 1]))
    assert digest.endswith(", without _thread.lock")
    assert digest != of(model, closing_over([threading.Lock(), 2]))
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert "recursion limit" in of(model, closing_over(deep))


def test_what_changes_before_the_certificate_is_refused(model: Model) -> None:
    scaled = Scaled(2.0)
    scaled_model = model.with_stages(logits=scaled)
    [one] = generate(scaled_model, [[1, 2]], max_tokens=2)
    one.certificate()
    scaled.by = 3.0
    with pytest.raises(
        RequestError, match="functions, or values that they read, which were changed since"
    ):
        one.certificate()


_PROGRAM = """
import weft
from weft.transforms.engine.evaluation.facts import digest_program
from weft.transforms.pipelines.transports.agreement import source_digest
factor, names, other = 2, {"a", "b", "c", "d"}, (lambda x: x + 1, lambda x: x + 2)

class Scaled:
    def __init__(self): self.by = {"x": 1.5, "names": frozenset("abcdefgh")}
    def __call__(self, logits, rows, extras):
        assert "z" not in names
        return factor * self.by["x"] * other[0](logits)

model = weft.load("demo", "cpu", batch_invariant=True).with_stages(logits=Scaled())
print(digest_program(model), source_digest("stage 0", other[0]))
"""


@pytest.mark.nightly
def test_it_is_the_same_in_every_process_and_without_debug_ranges(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM)
    said = {
        subprocess.run(
            [sys.executable, *flags, str(file)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for flags in ((), ("-X", "no_debug_ranges"), ("-X", "no_debug_ranges"))
    }
    assert len(said) == 1
    assert "without" not in said.pop()


def test_weft_s_own_stages_have_no_more_than_their_configuration() -> None:
    for kind in ("Qwen3", "experts"):
        assert digest_program(invariant_model(kind)).startswith("sha256:")
    assert "without" not in digest_program(weft.load("demo", "cpu", attention="torch"))
