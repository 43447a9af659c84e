"""Footguns: what surprises people, the likeliest first, and the way around each.

Read it from the top; `test_more_footguns.py` continues it. The docstring of each test is a
surprise. The test shows that it is real, and then that its workaround works. Some surprises raise
an error that explains them: remember the others.
"""

import random
from typing import Any

import attrs
import pytest
import torch
from own_batches import Length, Signal
from torch import Tensor

import weft
from weft.errors import CaptureError, DonatedError
from weft.transforms import Graphified, make_runner, make_state

ONES = torch.ones(3)


@weft.pytree
@attrs.frozen(eq=False)
class Measured:
    """The same, with the mask that says which of it is real."""

    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps"))
    real: Tensor = attrs.field(metadata=weft.axes("steps", pad=0))


def captures(f: Graphified[..., Any]) -> int:
    return f.cache_info().captures


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, params * (batch if x is None else x)


# In the first hour
# ---------------------------------------------------------------------------------------------------


def test_01_prints_and_counters_run_at_capture_and_never_again() -> None:
    """A replay runs operators alone: what Python does beside them happens while capturing (twice:
    warm-up, capture; a warm-up that reads on the host, as no capture may, is run again as a capture
    would be).

    A number that the function binds and uses is refused.

    Around it: return what you want to see, or `with weft.no_capture(replay=False)`, in which every
    call is Python.
    """
    events: list[str] = []
    count = 0

    @weft.graphify
    def f(x: Tensor) -> Tensor:
        events.append("ran")
        return x + 1

    for _ in range(5):
        f(ONES)
    assert len(events) == 2
    with weft.no_capture(replay=False):
        f(ONES)
    assert len(events) == 3

    @weft.graphify
    def counted(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x + count

    with pytest.raises(CaptureError, match="count, a nonlocal of counted, changes from 1 to 2"):
        counted(ONES)


def test_02_a_python_value_from_outside_is_frozen() -> None:
    """What lies inside an object, a list or a dict and is no tensor, function or module is read
    once, at capture; nobody says that it changed. (Names are compared: a global or a nonlocal that
    is bound to something else leads to a new capture.) So a cache that counts in Python
    (transformers' `StaticCache`, in its layers with a sliding window) is wrong in a graph.

    Around it: make it a tensor, or an argument.
    """
    scale = {"by": 2.0}
    f = weft.graphify(lambda x: x * scale["by"])
    f(ONES)
    scale["by"] = 3.0
    assert f(ONES).tolist() == [2, 2, 2]

    by = torch.tensor(2.0)
    g = weft.graphify(lambda x, by: x * by)
    g(ONES, by)
    assert g(ONES, torch.tensor(3.0)).tolist() == [3, 3, 3]
    assert captures(g) == 1


def test_03_a_python_number_that_changes_is_a_capture_a_value() -> None:
    """A number among the arguments is part of the key: a learning rate that decays captures at
    every step. A warning says so after some; `weft.assert_max_captures(1)` says so at once.

    Around it: a 0-dim tensor.
    """
    f = weft.graphify(lambda x, rate: x * rate)
    for step in range(3):
        f(ONES, 0.1 * step)
    assert captures(f) == 3

    f.cache_clear()
    with weft.assert_max_captures(1):
        for step in range(3):
            f(ONES, torch.tensor(0.1 * step))


def test_04_weights_that_require_grad_never_replay() -> None:
    """Where autograd would record (a module's parameters, grad mode on), the function itself runs:
    right, and slow. A warning says so after some calls.

    Around it: `torch.no_grad()` for inference; for training, put the gradient inside, with
    `torch.func.grad`.
    """
    module = torch.nn.Linear(3, 3)
    f = weft.graphify(module)
    f(ONES)
    f(ONES)
    assert (f.cache_info().replays, f.cache_info().eager) == (0, 2)
    assert "autograd must see the operators" in str(f.explain(ONES))
    with torch.no_grad():
        f(ONES)
        f(ONES)
    assert f.cache_info().replays == 2


def test_05_new_weights_are_a_new_graph() -> None:
    """`params` is captured by address: an optimizer that returns new tensors makes a graph a step.

    Around it: update in place, or donate what is updated.
    """
    f = weft.graphify(lambda params, x: params * x)
    params = [ONES + step for step in range(3)]  # all alive, so that no two have one address
    for each in params:
        f(each, ONES)
    assert captures(f) == 3

    kept = torch.ones(3)
    g = weft.graphify(lambda params, x: params * x)
    for _ in range(3):
        kept.add_(1)  # what an optimizer's step does
        y = g(kept, ONES)
    assert captures(g) == 1
    assert y.tolist() == [4, 4, 4]


def test_06_a_donated_value_is_gone() -> None:
    """`donate_argnames` takes the storage, on every device: weft refuses the old state.

    Around it: go on with what was returned; `weft.clone` what you want to keep.
    """
    f = weft.graphify(lambda state, x: state + x, donate_argnames="state")
    state = torch.zeros(3)
    kept = weft.clone(state)
    new = f(state, ONES)
    with pytest.raises(DonatedError, match=r"was donated to <lambda>\(state\)"):
        f(state, ONES)
    assert (f(new, ONES) - kept).tolist() == [2, 2, 2]


def test_07_a_donated_plain_tensor_still_answers_and_holds_the_new_value() -> None:
    """Only weft refuses a plain tensor that was donated: torch reads it, and finds what the callee
    wrote there.

    Around it: `weft.State`, or a class of your own marked `weft.values.donation.donatable`, refuses
    everywhere.
    """
    f = weft.graphify(lambda state, x: state + x, donate_argnames="state")
    state = torch.zeros(3)
    f(state, ONES)
    assert state.tolist() == [1, 1, 1]

    model = weft.load(weft.stages.DEMO, "cpu")
    runner = make_runner(model, weft.Limits(1, 8), mode="none")
    (state,) = make_state(model, runner.layouts, lengths=[16])
    runner.stages[0](runner.params[0], state, weft.Batch.ragged([0], [[5, 6]]), None)
    with pytest.raises(DonatedError, match="this State was donated to stage 0 of 1"):
        _ = state.kv_pages


def test_08_a_branch_a_mask_or_an_item_on_data_is_refused() -> None:
    """A graph cannot branch on values, nor have a size that depends on them.

    Around it: `torch.where`, and sizes that are arguments.
    """
    for f in (lambda x: x if x.sum() > 0 else -x, lambda x: x[x > 0], lambda x: x * x.max().item()):
        with pytest.raises(CaptureError, match=r"at .*test_footguns\.py"):
            weft.graphify(f)(ONES)
    assert weft.graphify(lambda x: torch.where(x > 0, x, 0) * x.max())(-ONES).tolist() == [0, 0, 0]


def test_09_a_module_that_a_function_calls_is_captured_at_each_change_of_its_mode() -> None:
    """Modes of modules that a function closes over are compared, and are no part of the key:
    whoever alternates `train()` and `eval()` captures each time.

    Around it: graphify the module itself, its method, or its stage (`weft.stages.from_module`),
    whose mode is part of the key (its own; not that of a part alone).
    """
    module = torch.nn.Dropout(0.5)
    f = weft.graphify(lambda x: module(x))
    g = weft.graphify(module)
    for graphified in (f, g):
        assert graphified(torch.ones(64)).min() == 0
    for mode in (False, True, False):
        module.train(mode)
        for graphified in (f, g):
            assert bool(graphified(torch.ones(64)).min() == 0) is mode
    assert captures(f) == 4
    assert captures(g) == 2


def test_10_random_numbers_that_are_not_torchs_are_frozen() -> None:
    """`random` and numpy draw once, at capture. torch's generators are registered, and draw anew in
    each replay.

    Around it: draw with torch, or pass the numbers in. A stage of `weft.stages.from_module` that
    does so is refused.
    """
    f = weft.graphify(lambda x: x + random.random())
    assert f(ONES).tolist() == f(ONES).tolist()
    g = weft.graphify(lambda x: x + torch.rand(3))
    assert g(ONES).tolist() != g(ONES).tolist()


# With ladders and batches
# --------------------------------------------------------------------------------------------


def test_11_a_mean_over_a_padded_batch_counts_the_padding() -> None:
    """Under a ladder the function sees the padded batch: a reduction over it takes the padding in.

    Around it: a field that says what is real, padded with 0 (`weft.proofs.check(f, ..., laws="pad",
    ladder=...)` finds who forgets it).
    """

    def centred(s: Any) -> Any:
        return attrs.evolve(s, x=s.x - s.x.mean())

    def masked(s: Any) -> Any:
        return attrs.evolve(s, x=s.x - (s.x * s.real).sum() / s.real.sum())

    x = torch.tensor([1.0, 2.0, 3.0])
    f = weft.graphify(centred, ladder=[Length(4)])
    assert f(Signal(Length(3), x)).x.tolist() == [-0.5, 0.5, 1.5]
    g = weft.graphify(masked, ladder=[Length(4)])
    assert g(Measured(Length(3), x, torch.ones(3))).x.tolist() == [-1, 0, 1]


def test_12_a_batch_beyond_the_ladder_runs_eagerly_and_says_nothing() -> None:
    """No class covers it: the function itself runs, frozen or not. Right, and slow.

    Around it: look at `cache_info().eager`, `explain`, or `weft.dispatch_table` of the batches you
    expect.
    """
    f = weft.graphify(lambda s: attrs.evolve(s, x=s.x + 1), ladder=[Length(4)])
    large = Signal(Length(5), torch.zeros(5))
    f.capture(large)
    f.freeze()
    assert f(large).x.tolist() == [1] * 5
    assert f.cache_info().eager == 1
    assert "no captured class covers" in str(f.explain(large))


def test_13_a_size_that_grows_is_a_capture_a_size() -> None:
    """Without a ladder each shape has a graph: of a sequence that grows by one, as many as it has
    lengths.

    Around it: a ladder of a few lengths, and a batch with a descriptor.
    """
    f = weft.graphify(lambda x: x + 1)
    for steps in range(1, 9):
        f(torch.zeros(steps))
    assert captures(f) == 8
    g = weft.graphify(lambda s: attrs.evolve(s, x=s.x + 1), ladder=[Length(4), Length(8)])
    for steps in range(1, 9):
        g(Signal(Length(steps), torch.zeros(steps)))
    assert captures(g) == 2


def test_14_a_result_without_axes_cannot_be_cut() -> None:
    """A plain tensor does not say which dimension was padded, so under a ladder it may not be
    returned.

    Around it: return a class with `weft.axes`; or donate the argument whose new value it is, if it
    is a state.
    """
    with pytest.raises(
        CaptureError, match="does not declare which of its dimensions follow the batch"
    ) as error:
        weft.graphify(lambda s: s.x + 1, ladder=[Length(4)])(Signal(Length(3), ONES))
    assert 'such as a state: donate_argnames=["state"]' in error.value.instead
    step = weft.graphify(
        lambda state, s: (state + s.x.sum(), s), ladder=[Length(4)], donate_argnames=["state"]
    )
    state, _ = step(torch.zeros(3), Signal(Length(3), ONES))
    assert state.tolist() == [3, 3, 3]
    f = weft.graphify(lambda s: Signal(s.length, s.x + 1), ladder=[Length(4)])
    assert f(Signal(Length(3), ONES)).x.tolist() == [2, 2, 2]


def test_15_a_prompt_of_one_token_is_no_decode() -> None:
    """Equal shape is not equal class: a batch is a uniform decode only where its maker says that
    all are past prefill.

    Around it: `Batch.decode` for decodes; a mode with ragged classes for all else.
    """
    prompt = weft.Batch.ragged([0], [[5]]).descriptor
    decode = weft.Batch.decode([0]).descriptor
    limits = weft.Limits(4, 8)
    assert (prompt.num_tokens, prompt.num_reqs) == (decode.num_tokens, decode.num_reqs)
    assert weft.dispatch(decode, weft.make_ladder("full_decode_only", limits)).mode == "full"
    assert weft.dispatch(prompt, weft.make_ladder("full_decode_only", limits)).mode == "none"
    assert weft.dispatch(prompt, weft.make_ladder("full", limits)).mode == "full"


def test_16_rows_beyond_the_state_are_found_on_the_device() -> None:
    """A batch names rows; nothing on the host knows how many the state has. On a CPU it is an
    IndexError with a note.

    Around it: rows that were admitted, within the lengths that `make_state` was given.
    """
    model = weft.load(weft.stages.DEMO, "cpu")
    runner = make_runner(model, weft.Limits(1, 8), mode="none")
    (state,) = make_state(model, runner.layouts, lengths=[16])
    with pytest.raises(IndexError) as error:
        runner.stages[0](runner.params[0], state, weft.Batch.ragged([3], [[5, 6]]), None)
    assert any(
        "which has rows 0 to 0 of at most 16 tokens" in note for note in error.value.__notes__
    )
    (state,) = make_state(model, runner.layouts, lengths=[16])
    _, out = runner.stages[0](runner.params[0], state, weft.Batch.ragged([0], [[5, 6]]), None)
    assert out.token_ids.shape == (1,)
