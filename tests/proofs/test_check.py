"""`check` on functions with a planted bug: the law that finds it, the error, and the smallest
calls."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import find, given, settings, strategies as st
from rich.console import Console
from torch import Tensor

import weft
import weft.ops.products.linear
from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.batches.state import advance
from weft.errors import CheckError
from weft.extras import install_command
from weft.proofs._strategies.caches import KEPT, Caching, caching, cachings
from weft.proofs.checks.check import check
from weft.proofs.checks.equivalence import Counterexample
from weft.proofs.checks.fresh import FreshProcesses
from weft.proofs.strategies import Rows, pure_functions, scenarios, tensors
from weft.transforms.pipelines.pipeline import compose
from weft.values.trees import axes, descriptor_field, pytree

ROWS = tensors(st.integers(1, 3), 2)
BATCHES = ROWS.map(lambda x: Rows(BatchDescriptor(len(x), len(x)), x))
LADDER = [BatchDescriptor(8, 8), BatchDescriptor(4, 4)]
EXAMPLES = 4


@pytree
@attrs.frozen(eq=False)
class Masked:
    """A batch that marks its rows of padding."""

    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("num_tokens", None))
    valid: Tensor = attrs.field(metadata=axes("num_tokens", pad=0))


def running(
    params: Tensor, state: dict[str, Tensor], batch: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """A correct step, whose next state is a new tensor."""
    x = torch.tanh(batch @ params + state["h"])
    return {"h": state["h"] + x.sum(0), "n": state["n"] + 1}, x


STEP = {
    "params": tensors(2, 2),
    "state": {"h": torch.zeros(2), "n": torch.tensor(0)},
    "batch": ROWS,
}


def broken(
    f: Callable[..., Any], arguments: Any, max_examples: int = EXAMPLES, **options: Any
) -> tuple[str, Counterexample]:
    """The broken law, and the error."""
    console = Console(file=io.StringIO())
    with pytest.raises(Counterexample) as caught:
        check(f, arguments, max_examples=max_examples, console=console, **options)
    return caught.value.text.split("'")[1], caught.value


def table(f: Callable[..., Any], arguments: Any, **options: Any) -> dict[str, list[str]]:
    """The printed table: for each law, the words of its line."""
    file = io.StringIO()
    with contextlib.suppress(AssertionError):
        check(f, arguments, console=Console(file=file, width=100), **options)
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


@pytest.mark.slow
@pytest.mark.parametrize("f", [Masked, weft.axes], ids=["sums", "means"])
def test_a_batch_with_a_mask_may_be_padded(f: Any) -> None:
    def step(params: Tensor, batch: Masked) -> Masked:
        x = torch.where(batch.valid[:, None], batch.x, 0.0) @ params
        total = x.sum(0) if f is Masked else x.sum(0) / batch.valid.sum()
        return attrs.evolve(batch, x=x + total)

    masked = BATCHES.map(
        lambda rows: Masked(rows.descriptor, rows.x, torch.ones(len(rows.x), dtype=torch.bool))
    )
    rows = table(step, (tensors(2, 2), masked), ladder=LADDER, max_examples=EXAMPLES)
    assert [row[-3] for row in rows.values()] == ["holds"] * 6


@pytest.mark.slow
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


SOME = tensors(st.integers(1, 2))


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(cachings())
def test_a_value_that_the_first_call_keeps(caching: Caching) -> None:
    name, error = broken(caching.fn, [(torch.tensor([1.0, 2.0]),), (torch.tensor([-3.0, 1.0]),)])
    assert name == "pure"
    assert "  after other calls: " in error.text
    assert "  as the first call: " in error.text


@pytest.mark.nightly
def test_the_smallest_calls_that_show_a_kept_value() -> None:
    # Enough that both shapes are drawn: the value of one is kept for the other.
    name, error = broken(caching("the shape", "a tensor", "a closure").fn, (SOME,), max_examples=16)
    assert name == "pure"
    assert "  after other calls: " in error.text
    assert "  as the first call: " in error.text
    assert len(error.values[0][1]) == 2


def test_a_value_that_only_some_calls_keep_raises_later() -> None:
    kept: list[Tensor] = []

    def growing(x: Tensor) -> Tensor:
        if x.sum() > 0:
            kept.append(x)
        return x * len(kept)

    name, error = broken(growing, [(torch.ones(2),), (torch.zeros(2),)])
    assert name == "pure"

    def needing(x: Tensor) -> Tensor:
        if x.sum() > 0 and not kept:
            kept.append(x)
        return x + kept[0]

    kept.clear()
    name, error = broken(needing, [(torch.ones(2),), (torch.zeros(2),)], laws="pure")
    assert error.text.splitlines()[1:] == [
        "  after other calls needing returns, as the first call it raises",
        "  IndexError: list index out of range",
    ]


def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system without fork."""
    monkeypatch.setattr("weft.proofs.checks.fresh.sys.platform", "win32")


@pytest.mark.parametrize("kept", KEPT)
def test_a_value_that_the_first_call_keeps_without_other_processes(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_processes(monkeypatch)
    name, error = broken(caching("the shape", kept, "a closure").fn, (SOME,))
    assert name == "graph"
    assert "graphify(centred) raises CaptureError, and centred does not:\n" in error.text


@pytest.mark.parametrize("has_processes", [True, False])
def test_a_single_call_shows_what_is_kept(
    has_processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_processes:
        _without_processes(monkeypatch)
    for laws in (None, "graph"):
        name, error = broken(
            caching("the shape", "a tensor", "a closure").fn, (torch.zeros(2),), laws=laws
        )
        assert name == "graph"
        assert "saw: a tensor that it made is kept and not returned" in error.text


def test_the_tests_above_find_a_check_that_calls_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_processes(monkeypatch)
    monkeypatch.setattr(
        "weft.proofs.checks.check._FirstCalls.audit", lambda self, calls, refuse: None
    )
    assert (
        table(caching("the shape", "a number", "a closure").fn, (SOME,), max_examples=EXAMPLES)[
            "pure"
        ][-3]
        == "holds"
    )


@pytest.mark.parametrize("has_processes", [True, False])
def test_a_cache_of_constants_is_pure(has_processes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_processes:
        _without_processes(monkeypatch)
    kept: dict[Any, Tensor] = {}

    def shifted(x: Tensor) -> Tensor:
        if x.shape not in kept:
            kept[x.shape] = torch.arange(float(len(x)))
        return x + kept[x.shape]

    rows = table(shifted, (SOME,), max_examples=4)
    assert {name: row[-3] for name, row in rows.items() if name != "pad"} == dict.fromkeys(
        ("pure", "graph", "replay", "trace", "func"), "holds"
    )


def test_calls_that_cannot_be_pickled_are_compared_in_this_process() -> None:
    @pytree
    @attrs.frozen(eq=False)
    class Local:
        x: Tensor

    assert (
        table(lambda local: local.x * 2, (st.builds(Local, SOME),), max_examples=4)["pure"][-3]
        == "holds"
    )


def test_a_process_that_dies_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: Any) -> Any:
        return question if question else os._exit(1)

    with FreshProcesses(answer) as processes:
        assert processes.ask([1]) == [1]
        assert processes.ask([]) is None
        assert processes.ask([2]) == [2]
        assert processes.ask(lambda: None) is None
        assert processes.ask([torch.ones(1)]) == [torch.ones(1)]
        assert processes.ask([torch.ones(1, device="meta")]) is None
        monkeypatch.setattr("weft.proofs.checks.fresh.MOST_BYTES", 3)
        assert processes.ask([torch.ones(1)]) is None
    assert not processes.are_there
    assert processes.ask([1]) is None


def test_each_answer_comes_from_a_process_that_has_seen_no_other_question() -> None:
    questions: list[int] = []

    def answer(question: int) -> list[int]:
        questions.append(question)
        return [*questions]

    with FreshProcesses(answer) as processes:
        assert [processes.ask(index) for index in range(3)] == [[0], [1], [2]]
    assert questions == []


def test_a_write_to_an_argument() -> None:
    def written(x: Tensor) -> Tensor:
        return x.mul_(2)

    name, error = broken(written, {"x": ROWS})
    assert name == "pure"
    assert "at:             ['x'], element [0, " in error.text
    assert "  as passed:      " in error.text
    check(written, {"x": ROWS}, laws="pure", donate_argnames="x", max_examples=EXAMPLES)


@pytest.mark.slow
def test_a_buffer_that_a_function_returns_again() -> None:
    buffer = torch.zeros(3, 2)

    def reused(x: Tensor) -> Tensor:
        return buffer[: len(x)].copy_(x)

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
    """A planted graphify that forgets to fill its inputs: only a second call with other values
    shows it."""
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

    arguments = (None, torch.zeros(1), ROWS)
    assert "microbatch" not in table(centred, arguments, max_examples=2)
    name, error = broken(centred, arguments, laws="microbatch")
    assert name == "microbatch"
    assert "microbatch(centred, 2):" in error.text
    assert len(error.values[0][1][0]["batch"]) == 2


def test_what_the_function_itself_raises() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        check(
            lambda x: x @ x, (tensors(1, 2),), console=Console(file=io.StringIO()), max_examples=3
        )
    (note,) = caught.value.__notes__
    assert note.startswith("f itself raised this, for\n    import torch\n")
    assert "calls = [{'x': torch.zeros(1, 2)}]" in note


@pytest.mark.slow
def test_a_model_keeps_its_laws() -> None:
    """Its state has a scratch row, which padding writes; a list of calls is one example."""
    scenario = find(
        scenarios(max_layers=1, max_steps=1), lambda scenario: sum(map(len, scenario.prompts)) > 2
    )
    step = compose(scenario.stages(1), advance=advance)
    batch = scenario.batches()[0]
    wider = BatchDescriptor(batch.descriptor.num_tokens + 2, batch.descriptor.num_reqs + 1, None, 2)
    assert isinstance(batch, Batch)
    calls: list[Any] = [{"params": scenario.params(1), "state": scenario.state(1), "batch": batch}]
    rows = table(step, calls, ladder=[wider], laws=("pure", "graph", "replay", "trace", "pad"))
    assert [row[-3] for row in rows.values()] == ["holds"] * 5


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (
            (ROWS,),
            {"laws": "grpah"},
            [
                "weft.proofs.check(running, ...)",
                "saw: laws='grpah'",
                "instead: some, by name, of pure, graph",
            ],
        ),
        (
            (ROWS,),
            {"laws": "pad"},
            ["saw: laws='pad', which needs a ladder", "instead: check(running, ..., ladder=[...])"],
        ),
        (
            (ROWS,),
            {},
            [
                "saw: missing a required argument: 'state'",
                "instead: arguments for running(params: ",
            ],
        ),
        ({"x": ROWS}, {}, ["saw: no argument 'x'"]),
        (ROWS, {}, ["saw: args drew a Tensor", "instead: args=(x, y)"]),
        ([], {}, ["saw: args is a list"]),
    ],
    ids=["no such law", "no ladder", "too few", "no such argument", "no tuple", "no calls"],
)
def test_what_cannot_be_checked(arguments: Any, options: Any, said: list[str]) -> None:
    with pytest.raises(CheckError) as caught:
        check(running, arguments, **options)
    assert [part for part in said if part not in str(caught.value)] == []
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.gpu
def test_on_cuda_graphs() -> None:
    check(running, STEP, donate_argnames="state", device="cuda", max_examples=EXAMPLES)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("seed", range(2))
def test_random_pure_functions_keep_their_laws(seed: int) -> None:
    function = find(pure_functions(), lambda f: len(f.code) > 2 + seed and "read state" in f.code)
    arguments = {
        "params": function.params,
        "state": function.state,
        "batch": tensors(st.integers(1, 3), function.params.shape[0]),
    }
    rows = table(function.fn, arguments, max_examples=4, laws=("pure", "graph", "replay", "trace"))
    assert [row[-3] for row in rows.values()] == ["holds"] * 4


_WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import torch, weft.proofs
weft.proofs.check(lambda x: x.tanh(), [(torch.ones(2),)], laws="graph")
try:
    weft.proofs.strategies
except ImportError as error:
    print(type(error).__name__, error)
del sys.modules["hypothesis"]
weft.proofs.engine_machine
"""


@pytest.mark.slow
def test_calls_that_are_given_are_checked_without_hypothesis() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HYPOTHESIS], capture_output=True, text=True, check=True
    )
    assert re.search(r"a graph of it is it, bitwise +holds", done.stdout)
    assert done.stdout.endswith(
        "MissingPackageError weft.proofs.strategies\n  saw: no hypothesis here\n  instead:"
        f" {install_command('proofs')}\n"
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

    arguments = ({"batch": Rows(BatchDescriptor(1, 1), torch.randn(1, 256))},)
    law, error = broken(product, arguments[0], laws=(), batch_invariant=True, ladder=LADDER)
    assert law == "bits"
    assert "padded to" in str(error)
    assert "the first operator that differs is aten::mm at test_check.py:" in str(error)


def test_what_the_law_of_bits_needs_is_said() -> None:
    with pytest.raises(CheckError, match="needs a ladder, or"):
        check(lambda x: x.tanh(), (torch.ones(2),), laws="bits")
