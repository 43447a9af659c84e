"""More footguns: graphs that are almost alike, pipelines, models. The first are in
`test_footguns.py`; as there, each function is a surprise (its docstring), shown to be real, and
then its workaround, shown to work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.errors import CacheMissError, DescriptorError
from weft.transforms import Graphified

ONES = torch.ones(3)


def captures(f: Graphified[..., Any]) -> int:
    return f.cache_info().captures


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, params * (batch if x is None else x)


# With graphs that are almost alike
# -----------------------------------------------------------------------------------


def test_17_the_order_of_a_dict_and_the_layout_of_a_tensor_are_part_of_the_key() -> None:
    """So are strides, and 1, 1.0 and True: what is equal may have several graphs.

    Around it: make arguments in one place; `.contiguous()`; `explain` names the difference.
    """
    f = weft.graphify(lambda d: d["a"] + d["b"])
    f({"a": ONES, "b": ONES})
    f({"b": ONES, "a": ONES})
    assert captures(f) == 2
    g = weft.graphify(lambda x: x + 1)
    g(torch.zeros(2, 3))
    turned = torch.zeros(3, 2).T
    assert "stride" in str(g.explain(turned))
    g(turned.contiguous())
    assert captures(g) == 1


def test_18_grad_mode_is_part_of_the_key() -> None:
    """What was captured and frozen outside `no_grad` is missed inside it.

    Around it: capture in the mode that you run in.
    """
    f = weft.graphify(lambda x: x + 1)
    f(ONES)
    f.freeze()
    with torch.no_grad(), pytest.raises(CacheMissError, match="grad mode: False, captured True"):
        f(ONES)
    f.cache_clear()
    with torch.no_grad():
        f(ONES)
        f.freeze()
        f(ONES)


def test_19_the_next_state_comes_first_among_results_of_its_shape() -> None:
    """A donated argument stays in place as the first result of its structure: behind another one
    the state moves, and each call is a capture.

    Around it: return the state first.
    """

    def advance(f: Graphified[..., Any], state_of: Callable[[Any], Any]) -> int:
        # memory that is freed may come back as the next state
        state = torch.zeros(3)
        alive = []
        for _ in range(3):
            alive.append(state)
            state = state_of(f(state, ONES))
        assert state.tolist() == [3, 3, 3]
        return captures(f)

    last = weft.graphify(lambda state, x: (x * 2, state + x), donate_argnames="state")
    first = weft.graphify(lambda state, x: (state + x, x * 2), donate_argnames="state")
    assert advance(last, lambda result: result[1]) == 3
    assert advance(first, lambda result: result[0]) == 1


def test_20_a_borrowed_result_is_overwritten() -> None:
    """`outputs="borrow"` returns the graph's own buffers: the next replay writes there.

    Around it: `weft.clone` what is kept, or leave `outputs="safe"`, the default;
    `weft.check_borrowed()` finds it.
    """
    f = weft.graphify(lambda x: x + 1, outputs="borrow")
    f(ONES)
    first = f(ONES)
    kept = weft.clone(first)
    f(ONES * 9)
    assert first.tolist() == [10, 10, 10]
    assert kept.tolist() == [2, 2, 2]


# With pipelines
# ------------------------------------------------------------------------------------------------------


def test_21_a_sum_over_the_batch_may_pass_for_rows() -> None:
    """Micro-batches are joined by rows; sizes are checked, meaning cannot be: `sum(0)` of as many
    columns as a part has rows is joined, and wrong.

    Around it: stages that are separable by rows; reduce what the step returns.
    """

    def total(params: Any, state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        return state, batch.sum(0)

    batch = torch.arange(8.0).reshape(4, 2)
    _, whole = total(None, None, batch)
    _, wrong = weft.microbatch(total, 2)(None, None, batch)
    assert (whole.shape, wrong.shape) == ((2,), (4,))
    _, rows = weft.microbatch(lambda params, state, batch: (state, batch * 1), 2)(None, None, batch)
    assert rows.sum(0).tolist() == whole.tolist()


def test_22_a_scalar_of_a_micro_batch_is_refused() -> None:
    """A loss is one number a part, and nobody knows how to join two.

    Around it: return it for each row, and take the mean outside.
    """

    def loss(params: Any, state: Any, batch: Tensor) -> tuple[Any, Tensor]:
        return state, (batch**2).mean()

    with pytest.raises(DescriptorError, match="not one entry a request or a token of its part"):
        weft.microbatch(loss, 2)(None, None, torch.arange(4.0))
    _, rows = weft.microbatch(lambda params, state, batch: (state, batch**2), 2)(
        None, None, torch.arange(4.0)
    )
    assert rows.mean() == 3.5


def test_23_fewer_micro_batches_than_asked_for() -> None:
    """`microbatches=4` is the most: a batch of three requests goes in three, and other programs
    run.

    Around it: `programs(m)` prints those of any number; batch as many requests as there are parts.
    """
    step = weft.pipeline([stage, stage], microbatches=4)
    assert "[mb 3]" in str(step)
    _, y = step([torch.ones(())] * 2, (None, None), ONES)
    assert y.tolist() == [1, 1, 1]
    assert "[mb 3]" not in str(step.programs(3)[0])


def test_24_scan_unrolls_and_does_not_stack() -> None:
    """`weft.scan(step, k)` returns a list of k outputs, and a graph of it holds the step k times.

    Around it: `torch.stack` where all outputs are of one shape; graphify the step, and scan that.
    """
    step = weft.scan(lambda params, state, batch: (state + batch, state * 2), 3)
    f = weft.graphify(step)
    _, outs = f(None, torch.zeros(3), ONES)
    assert isinstance(outs, list)
    assert torch.stack(outs).shape == (3, 3)
    assert str(f.lower(None, torch.zeros(3), ONES)).count("aten::add") == 3


# With models
# ---------------------------------------------------------------------------------------------------------


def test_25_a_stop_text_is_in_the_tokens_and_not_in_the_text() -> None:
    """The text of a completion ends before what stopped it; its tokens, logprobs and usage count
    the tokens that said it, and a token may hold more than the stop text.

    Around it: `include_stop_str_in_output=True`; `stop_reason` says what it was.
    """
    model = weft.load(weft.stages.DEMO, "cpu")
    [whole] = weft.generate(model, ["A list"], max_tokens=12, graph="none")
    assert whole.text
    stop = whole.text[5:8]

    def completed(**options: bool) -> weft.Completion:
        params = weft.SamplingParams(stop=stop, **options)
        [completion] = weft.generate(
            model, ["A list"], max_tokens=12, sampling=params, graph="none"
        )
        return completion

    assert completed().text == whole.text[: whole.text.index(stop)]
    assert stop in (model.decode(completed().token_ids) or "")
    assert completed(include_stop_str_in_output=True).text == f"{completed().text}{stop}"
    assert (completed().finish_reason, completed().stop_reason) == ("stop", stop)


def test_26_a_seed_of_generate_goes_with_a_prompts_place() -> None:
    """With `seed=` a prompt's completion is fixed by the seed and its place in the list: moved, it
    draws anew.

    Around it: `SamplingParams(seed=...)`, which is that prompt's wherever it stands.
    """
    model = weft.load(weft.stages.DEMO, "cpu")
    hot = weft.SamplingParams(temperature=2.0)
    seeded = weft.SamplingParams(temperature=2.0, seed=5)

    def tokens(prompts: list[str], sampling: weft.SamplingParams) -> list[int]:
        completions = weft.generate(
            model, prompts, max_tokens=8, sampling=sampling, seed=3, graph="none"
        )
        return completions[prompts.index("A list")].token_ids

    assert tokens(["A list", "B"], hot) != tokens(["B", "A list"], hot)
    assert tokens(["A list", "B"], seeded) == tokens(["B", "A list"], seeded)


def test_27_an_engine_of_default_limits_captures_many_graphs() -> None:
    """64 requests and graphs of up to 2,048 tokens, in 35 classes: `warm_up()` captures for seconds
    on a GPU, and for long on a CPU, where large tapes take memory too.

    Around it: limits of what you serve; `graph="none"` on a CPU, where graphs save no time.
    """
    default = weft.EngineLimits()
    many = weft.make_ladder("full_and_piecewise", weft.Limits(default.max_num_reqs, 2048))
    few = weft.make_ladder("full_and_piecewise", weft.Limits(4, 64))
    assert len(many) > 30
    assert len(few) < 12
    assert len(weft.make_ladder("none", weft.Limits(64, 2048))) == 0


def test_28_a_change_of_parameters_that_torch_does_not_count_is_not_seen() -> None:
    """An engine finds out that its parameters were changed in place by torch's own count, which
    leaves out what is done to `tensor.data`, `fused=True` optimizers, and what writes through an
    array or a custom kernel.

    Around it: `engine.update()` after such a change, or `engine.update(params)` in its place.
    """
    model = weft.load(weft.stages.DEMO, "cpu")
    engine = weft.Engine(model, weft.EngineLimits(max_num_reqs=1, max_model_len=64), graph="none")
    prompt = [5, 6, 7, 8] * 8

    def num_prefix_hits() -> int:
        before = engine.stats().prefix_tokens
        engine.add(prompt, max_tokens=1)
        list(engine)
        return engine.stats().prefix_tokens - before

    assert (num_prefix_hits(), num_prefix_hits()) == (0, 31)
    model.params.layers[0].o_proj.mul_(1.5)
    assert num_prefix_hits() == 0
    model.params.layers[0].o_proj.data.mul_(1.5)
    assert num_prefix_hits() == 31, "pages that the old parameters computed"
    engine.update()
    assert num_prefix_hits() == 0
