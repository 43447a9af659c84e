"""`check` on functions with a planted bug: the law that finds it, the error, and the smallest calls."""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import find, strategies as st
from rich.console import Console
from torch import Tensor

import weft
import weft.ops.products.linear
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.errors import CheckError
from weft.proofs.checks.check import check
from weft.proofs.checks.equivalence import Counterexample
from weft.proofs.strategies import Rows, pure_functions, scenarios, tensors
from weft.state import advance
from weft.transforms.pipelines.pipeline import compose
from weft.trees import axes, descriptor_field, pytree

ROWS = tensors(st.integers(1, 3), 2)
BATCHES = ROWS.map(lambda x: Rows(BatchDescriptor(len(x), len(x)), x))
LADDER = [BatchDescriptor(8, 8), BatchDescriptor(4, 4)]
EXAMPLES = 8


@pytree
@attrs.frozen(eq=False)
class Masked:
    """A batch that marks its rows of padding."""

    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("num_tokens", None))
    valid: Tensor = attrs.field(metadata=axes("num_tokens", pad=0))


def running(params: Tensor, state: dict[str, Tensor], batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A correct step, whose next state is a new tensor."""
    x = torch.tanh(batch @ params + state["h"])
    return {"h": state["h"] + x.sum(0), "n": state["n"] + 1}, x


STEP = {
    "params": tensors(2, 2),
    "state": {"h": torch.zeros(2), "n": torch.tensor(0)},
    "batch": ROWS,
}


def broken(f: Callable[..., Any], given: Any, **options: Any) -> tuple[str, Counterexample]:
    """The broken law, and the error."""
    with pytest.raises(Counterexample) as caught:
        check(f, given, max_examples=EXAMPLES, console=Console(file=io.StringIO()), **options)
    return caught.value.text.split("'")[1], caught.value


def table(f: Callable[..., Any], given: Any, **options: Any) -> dict[str, list[str]]:
    """The printed table: for each law, the words of its line."""
    file = io.StringIO()
    with contextlib.suppress(AssertionError):
        check(f, given, console=Console(file=file, width=100), **options)
    lines = [line.split() for line in file.getvalue().splitlines()[2:]]
    return {line[0]: line[1:] for line in lines}


def test_a_right_step_keeps_all_laws() -> None:
    rows = table(running, STEP, donate_argnames="state", max_examples=EXAMPLES)
    assert list(rows) == ["pure", "graph", "replay", "trace", "pad", "func"]
    for name, row in rows.items():
        if name != "pad":
            assert row[-3:-1] == ["holds", str(EXAMPLES)]
            assert int(row[-1].replace(",", "")) >= EXAMPLES
    assert rows["pad"][-5:] == ["needs", "a", "ladder", "0", "0"]


def test_what_graphify_made_is_checked_with_its_options() -> None:
    graphed = weft.graphify(running, donate_argnames="state")
    assert table(graphed, STEP, laws="graph", max_examples=EXAMPLES)["graph"][-3] == "holds"
    assert graphed.cache_info().captures == 0
    with pytest.raises(CheckError, match="a graphified function, and donate_argnames"):
        check(graphed, STEP, donate_argnames="state")


@pytest.mark.parametrize("f", [Masked, weft.axes], ids=["sums", "means"])
def test_a_batch_with_a_mask_may_be_padded(f: Any) -> None:
    def step(params: Tensor, batch: Masked) -> Masked:
        x = torch.where(batch.valid[:, None], batch.x, 0.0) @ params
        total = x.sum(0) if f is Masked else x.sum(0) / batch.valid.sum()
        return attrs.evolve(batch, x=x + total)

    masked = BATCHES.map(lambda rows: Masked(rows.descriptor, rows.x, torch.ones(len(rows.x), dtype=torch.bool)))
    rows = table(step, (tensors(2, 2), masked), ladder=LADDER, max_examples=EXAMPLES)
    assert [row[-3] for row in rows.values()] == ["holds"] * 6


def test_the_mean_over_padding() -> None:
    def centred(batch: Rows) -> Rows:
        return attrs.evolve(batch, x=batch.x - batch.x.mean(0))

    name, error = broken(centred, (BATCHES,), ladder=LADDER)
    assert name == "pad"
    assert error.values[0][1][0]["batch"].x.shape == (1, 2)
    assert "padded to 'ragged 8 tokens, 8 reqs':" in error.text
    with pytest.raises(Counterexample) as again:
        exec(error.code(), {"centred": centred})
    assert again.value.text == error.text


def test_a_result_without_axes_cannot_be_cut() -> None:
    name, error = broken(lambda batch: batch.x * 2, (BATCHES,), ladder=LADDER)
    assert name == "graph"
    assert "of shape (4, 2) does not declare which of its dimensions follow the batch" in error.text
    name, error = broken(lambda batch: batch.x * 2, (BATCHES,), ladder=LADDER, laws="pad")
    assert "the result\n" in error.text
    assert "float32 [8, 2] on cpu" in error.text


def test_a_count_of_calls() -> None:
    calls: list[Tensor] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return x + len(calls)

    name, error = broken(counted, (ROWS,))
    assert name == "pure"
    assert "the second time:" in error.text
    assert table(counted, (ROWS,), max_examples=3)["graph"][-4:] == ["not", "checked", "0", "0"]


def test_a_write_to_an_argument() -> None:
    def written(x: Tensor) -> Tensor:
        return x.mul_(2)

    name, error = broken(written, {"x": ROWS})
    assert name == "pure"
    assert "at:             ['x'], element [0, " in error.text
    assert "  as passed:      " in error.text
    check(written, {"x": ROWS}, laws="pure", donate_argnames="x", max_examples=EXAMPLES)


def test_a_buffer_that_a_function_returns_again() -> None:
    held = torch.zeros(3, 2)

    def reused(x: Tensor) -> Tensor:
        return held[: len(x)].copy_(x)

    name, error = broken(reused, (ROWS,))
    assert name == "pure"
    assert "when returned:" in error.text
    assert len(error.values[0][1]) == 2  # a second call overwrote the first one's result


def test_a_branch_on_data() -> None:
    def branched(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    name, error = broken(branched, (ROWS,))
    assert name == "graph"
    assert "graphify(branched) raises CaptureError, and branched does not:" in error.text
    assert "a branch on a tensor's value" in error.text
    assert len(error.values[0][1]) == 1


def test_the_graph_law_sees_replays_of_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted graphify that forgets to fill its inputs: only a second call with other values shows it."""
    monkeypatch.setattr("weft.transforms.graphs.cache.plan_copies", lambda *args: None)
    name, error = broken(lambda x: x * 2, (tensors(1),), laws="graph")
    assert name == "graph"
    calls = error.values[0][1]
    assert len(calls) == 1 or not torch.equal(calls[0]["x"], calls[1]["x"])


def test_a_result_that_a_replay_overwrites() -> None:
    lent = weft.graphify(lambda x: x * 2, outputs="borrow")
    assert table(lent, (ROWS,), max_examples=2)["replay"][-4:] == ["lends", "results", "0", "0"]


def test_microbatches_are_asked_for() -> None:
    def centred(params: None, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state, batch - batch.mean(0)

    given = (None, torch.zeros(1), ROWS)
    assert "microbatch" not in table(centred, given, max_examples=2)
    name, error = broken(centred, given, laws="microbatch")
    assert name == "microbatch"
    assert "microbatch(centred, 2):" in error.text
    assert len(error.values[0][1][0]["batch"]) == 2


def test_what_the_function_itself_raises() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        check(lambda x: x @ x, (tensors(1, 2),), console=Console(file=io.StringIO()), max_examples=3)
    (note,) = caught.value.__notes__
    assert note.startswith("f itself raised this, for\n    import torch\n")
    assert "calls = [{'x': torch.zeros(1, 2)}]" in note


def test_a_model_keeps_its_laws() -> None:
    """Its state has a scratch row, which padding writes; a list of calls is one example."""
    scenario = find(scenarios(max_layers=1, max_steps=1), lambda scenario: sum(map(len, scenario.prompts)) > 2)
    step = compose(scenario.stages(1), advance=advance)
    batch = scenario.batches()[0]
    wider = BatchDescriptor(batch.descriptor.num_tokens + 2, batch.descriptor.num_reqs + 1, None, 2)
    assert isinstance(batch, Batch)
    calls: list[Any] = [{"params": scenario.params(1), "state": scenario.state(1), "batch": batch}]
    rows = table(step, calls, ladder=[wider], laws=("pure", "graph", "replay", "trace", "pad"))
    assert [row[-3] for row in rows.values()] == ["holds"] * 5


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (
            (ROWS,),
            {"laws": "grpah"},
            ["weft.proofs.check(running, ...)", "saw: laws='grpah'", "instead: some, by name, of pure, graph"],
        ),
        (
            (ROWS,),
            {"laws": "pad"},
            ["saw: laws='pad', which needs a ladder", "instead: check(running, ..., ladder=[...])"],
        ),
        ((ROWS,), {}, ["saw: missing a required argument: 'state'", "instead: arguments for running(params: "]),
        ({"x": ROWS}, {}, ["saw: no argument 'x'"]),
        (ROWS, {}, ["saw: given drew a Tensor", "instead: given=(x, y)"]),
        ([], {}, ["saw: given is a list"]),
    ],
    ids=["no such law", "no ladder", "too few", "no such argument", "no tuple", "no calls"],
)
def test_what_cannot_be_checked(given: Any, options: Any, said: list[str]) -> None:
    with pytest.raises(CheckError) as caught:
        check(running, given, **options)
    assert [part for part in said if part not in str(caught.value)] == []
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.gpu
def test_on_cuda_graphs() -> None:
    check(running, STEP, donate_argnames="state", device="cuda", max_examples=EXAMPLES)


@pytest.mark.parametrize("seed", range(2))
def test_random_pure_functions_keep_their_laws(seed: int) -> None:
    function = find(pure_functions(), lambda f: len(f.code) > 2 + seed and "read state" in f.code)
    given = {
        "params": function.params,
        "state": function.state,
        "batch": tensors(st.integers(1, 3), function.params.shape[0]),
    }
    rows = table(function.fn, given, max_examples=4, laws=("pure", "graph", "replay", "trace"))
    assert [row[-3] for row in rows.values()] == ["holds"] * 4


_WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import torch, weft.proofs
weft.proofs.check(lambda x: x.tanh(), [(torch.ones(2),)], laws="graph")
try:
    weft.proofs.laws
except ImportError as error:
    print(type(error).__name__, error)
del sys.modules["hypothesis"]
weft.proofs.engine_machine
"""


def test_calls_that_are_given_are_checked_without_hypothesis() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_HYPOTHESIS], capture_output=True, text=True, check=True)
    assert re.search(r"a graph of it is it, bitwise +holds", done.stdout)
    assert done.stdout.endswith(
        "MissingPackageError weft.proofs.laws\n  saw: no hypothesis here\n  instead: pip install 'weft[proofs]'\n"
    )


def exact(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    return state, torch.relu(weft.ops.products.linear.linear(batch, params))


def by_the_batch(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    hidden = weft.ops.products.linear.linear(batch, params)
    return state, torch.relu(hidden @ params)


# One of three parts has one row.
# All CPUs seen multiply it by other code than five rows; not all, by other code than three.
WIDE = {"params": torch.randn(256, 256), "state": torch.zeros(()), "batch": torch.randn(5, 256)}


def test_a_batch_invariant_step_has_the_same_bits_in_parts() -> None:
    rows = table(exact, WIDE, laws=(), batch_invariant=True)
    assert rows["bits"][0] == "L20"
    assert rows["bits"][-3:] == ["holds", "1", "2"]


def test_bits_without_a_ladder_leave_out_the_law_of_padding() -> None:
    rows = table(exact, WIDE, batch_invariant=True)
    assert rows["bits"][-3:] == ["holds", "1", "2"]
    assert "needs a ladder" in " ".join(rows["pad"])
    with pytest.raises(CheckError, match="laws='pad', which needs a ladder"):
        check(exact, WIDE, laws="pad", batch_invariant=True)


def test_the_first_operator_that_is_not_batch_invariant_is_named() -> None:
    law, error = broken(by_the_batch, WIDE, laws=(), batch_invariant=True)
    assert law == "bits"
    assert "the first operator that differs is aten::mm at test_check.py:" in str(error)


def test_padding_may_change_a_bit_too() -> None:
    def product(batch: Rows) -> Tensor:
        return batch.x @ WIDE["params"]

    given = ({"batch": Rows(BatchDescriptor(1, 1), torch.randn(1, 256))},)
    law, error = broken(product, given[0], laws=(), batch_invariant=True, ladder=LADDER)
    assert law == "bits"
    assert "padded to" in str(error)
    assert "the first operator that differs is aten::mm at test_check.py:" in str(error)


def test_what_the_law_of_bits_needs_is_said() -> None:
    with pytest.raises(CheckError, match="needs a ladder, or"):
        check(lambda x: x.tanh(), (torch.ones(2),), laws="bits")
