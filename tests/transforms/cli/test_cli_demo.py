"""`weft demo`: all four ways agree, a planted difference is found, and bad arguments are refused."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from cli_calls import Weft, assert_refused

from weft.ops.sampling.logits import SEED
from weft.transforms.cli import demo as demo_module
from weft.transforms.cli.demo import BOTH, GRAPHIFIED, PIPELINED
from weft.transforms.engine.evaluation import comparison
from weft.transforms.engine.evaluation.comparison import Way
from weft.transforms.engine.setup import Runner, make_runner


def test_demo_shows_that_all_four_ways_are_equal(run: Weft) -> None:
    code, out, err = run("demo", "--device", "cpu", "--max-tokens", "5")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    for prompt in demo_module.PROMPTS:
        assert out.count(prompt.strip()) == 1
    counts = {
        row[0]: row[2:]
        for row in rows
        if len(row) == 5 and row[0] in {way.name for way in demo_module.WAYS}
    }
    assert counts == {
        "eager": ["0", "0", "5"],
        "graphified": ["1", "4", "1"],
        "pipelined": ["0", "0", "20"],
        "both": ["4", "16", "4"],
    }
    compared = [row for row in rows if row[-1:] == ["holds"]]
    assert len(compared) == 10
    assert [row[2:] for row in compared[5:9]] == [["equal", "equal", "0", "0", "0", "holds"]] * 4
    assert compared[9] == ["eager", "alone", "equal", "0", "0", "holds"]
    assert "Batch invariant: 0 difference in any way of running." in " ".join(out.split())
    assert "EQUAL after each of 5 steps: identical tokens" in " ".join(out.split())


def _plant(
    monkeypatch: pytest.MonkeyPatch, victim: Way, damage: Callable[[Any, Any], None]
) -> None:
    """Make `damage` change the state or the output of the third step that `victim` runs."""

    def planted(model: Any, limits: Any, **options: Any) -> Runner:
        runner = make_runner(model, limits, **options)
        calls: list[Any] = []
        if (options["num_stages"], options["mode"]) != (victim.num_stages, victim.mode):
            return runner

        def step(params: Any, state: Any, batch: Any) -> Any:
            state, out = runner.step(params, state, batch)
            calls.append(batch)
            if len(calls) == 3:
                damage(state, out)
            return state, out

        return attrs.evolve(runner, step=step)

    monkeypatch.setattr(comparison, "make_runner", planted)


def _damage_pages(state: Any, _: Any) -> None:
    state[-1].kv_pages[-1, 0, -1] += (
        1e-3  # a page that no later step reads: no token shows the damage
    )


def _damage_table(state: Any, _: Any) -> None:
    state[-1].sampling.ints[0, SEED] += 1  # greedy sampling does not read it


def _damage_token(state: Any, _: Any) -> None:
    for stage in state:
        stage.last_tokens[0] = 0


def _damage_logits(_: Any, out: Any) -> None:
    out.logits[0, 0] = float("nan")


PLANTED: dict[str, tuple[Way, Callable[[Any, Any], None], str]] = {
    "pages": (
        GRAPHIFIED,
        _damage_pages,
        "graphified against eager: the KV pages differ by 1.0e-03, allowed 0",
    ),
    "pages of stage 1": (
        BOTH,
        _damage_pages,
        "both against pipelined: the KV pages differ by 1.0e-03, allowed 0",
    ),
    "table of stage 1": (
        PIPELINED,
        _damage_table,
        "pipelined against eager: a stage's request table differs",
    ),
    "token": (
        GRAPHIFIED,
        _damage_token,
        "graphified against eager: the tokens differ in step 4, the last",
    ),
    "NaN": (
        GRAPHIFIED,
        _damage_logits,
        "graphified against eager: the logits differ by nan, allowed 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED)
def test_demo_finds_a_planted_difference(
    run: Weft, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    victim, damage, text = PLANTED[case]
    _plant(monkeypatch, victim, damage)
    code, out, err = run("demo", "--device", "cpu", "--max-tokens", "6")
    assert (code, err) == (1, "")
    shown = " ".join(out.split())
    assert text in shown
    assert "NOT EQUAL: the four ways did not compute the same." in shown
    assert "EQUAL after each" not in shown


@pytest.mark.slow
def test_demo_finds_a_bit_that_depends_on_the_batch(
    run: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_the_number_of_tokens(x: Any, weight: Any, bias: Any, batch_invariant: bool) -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr("weft.ops.products.linear.multiply", by_the_number_of_tokens)
    code, out, _ = run("demo", "--device", "cpu", "--max-tokens", "4")
    assert code == 1
    shown = " ".join(out.split())
    assert "batch invariant, eager against alone: the logits differ by" in shown
    assert "NOT EQUAL" in shown


def test_demo_refuses_more_tokens_than_the_model_has_positions(run: Weft) -> None:
    most = 512 - len("The function returns")
    result = run("demo", "--device", "cpu", "--max-tokens", str(most + 1))
    assert_refused(
        result, f"error: weft demo --max-tokens {most + 1}", f"instead: a number from 1 to {most}"
    )
    assert_refused(
        run("demo", "--max-tokens", "0"), "argument --max-tokens: '0': write a whole number from 1"
    )


def test_demo_leaves_the_number_of_threads_as_it_was(run: Weft) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert run("demo", "--device", "cpu", "--max-tokens", "1")[0] == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
