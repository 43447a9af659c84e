"""graphify: its repr, its counters, threads, nesting, and functions of every kind."""

import copy
import inspect
import threading
from typing import Any

import attrs
import pytest
import torch
from graphified import LAW, X, agree, counts, twice
from torch import Tensor

from weft.errors import CacheMissError, CaptureError, DeviceError
from weft.proofs import assert_equal
from weft.transforms.graphs.calls.key import CacheInfo
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import pytree


def test_explain_says_what_a_call_would_do_and_does_nothing() -> None:
    g = graphify(twice)
    assert str(g.explain(X)) == (
        "captures: no ladder, so each signature has its own graph; nothing is captured yet"
    )
    assert counts(g) == (0, 0, 0)
    g(X)
    explanation = g.explain(X + 1)
    assert (explanation.captured, str(explanation)) == (
        True,
        "replays: no ladder, so each signature has its own graph",
    )
    assert str(g.explain(X, 2)).endswith(
        "; k: 2, captured 1; pass k as a 0-dim tensor: torch.tensor(2)"
    )
    assert str(g.freeze().explain(X, 2)).startswith("would raise, because it is frozen: ")
    assert counts(g) == (1, 1, 0)
    wants = torch.ones(2, requires_grad=True)
    assert str(g.explain(wants)).startswith("runs inline: x requires grad")


def test_capture_runs_nothing_that_shows() -> None:
    g = graphify(lambda s, x: (s.add_(x), s * 2), donate_argnames=("s",))
    state = torch.ones(4)
    assert g.capture(state, X) == CacheInfo(captures=1, replays=0, eager=0, currsize=1)
    assert state.tolist() == [1.0] * 4
    assert_equal(LAW, g(state, X), (X + 1, 2 * X + 2))
    assert counts(g) == (1, 1, 0)
    g.capture(torch.ones(4), X)  # at another address: a graph of its own
    assert g.cache_info().currsize == 2


def test_cache_clear_starts_anew_and_thaws() -> None:
    g = graphify(twice)
    g(X)
    g.freeze().cache_clear()
    assert g.cache_info() == CacheInfo()
    assert_equal(LAW, g(X[:2]), twice(X[:2]))
    assert repr(g) == "<graphify(twice), 1 graphs>"


def test_it_looks_like_the_function() -> None:
    @graphify
    def plain(x: Tensor) -> Tensor:
        """A docstring."""
        return x + 1

    @graphify(static_argnames=("k",))
    def powered(x: Tensor, k: int = 2) -> Tensor:
        return x**k

    assert (plain.__name__, plain.__doc__) == ("plain", "A docstring.")
    assert_equal(LAW, (plain(X), powered(X), powered(X, 3)), (X + 1, X**2, X**3))
    assert powered.cache_info().captures == 2


def test_static_values_are_constants_that_a_miss_names() -> None:
    g = graphify(
        lambda x, n, how: [x * i if how == "by" else x + i for i in range(n)],
        static_argnames=("n", "how"),
    )
    assert len(g(X, 3, how="by")) == 3
    assert len(g(X, 1, how="by")) == 1
    g.freeze()
    with pytest.raises(CacheMissError, match="static argument how: 'plus', captured 'by'"):
        g(X, 3, how="plus")


def test_backends_by_name() -> None:
    with pytest.raises(DeviceError) as error:
        graphify(twice, backend="tap")(X)
    assert error.value.call == "graphify(..., backend='tap')"
    assert error.value.instead == "backend='tape', 'cuda' or None"
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="this machine has no CUDA device"):
            graphify(twice, backend="cuda")(X)


def test_two_threads_get_their_own_answers() -> None:
    g = graphify(lambda x: (x * 2, x.sum()))
    wrong: list[float] = []

    def work(sign: float) -> None:
        for i in range(60):
            x = torch.full((3 + i % 2,), sign * i)
            if not torch.equal(g(x)[0], x * 2):
                wrong.append(sign * i)

    threads = [threading.Thread(target=work, args=(sign,)) for sign in (1.0, -1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, counts(g)) == ([], (2, 120, 0))


def test_a_capture_in_one_thread_does_not_refuse_reads_in_another() -> None:
    inside, go = threading.Event(), threading.Event()

    def fn(x: Tensor) -> Tensor:
        inside.set()
        assert go.wait(10)
        return x * 2

    thread = threading.Thread(target=graphify(fn), args=(X,))
    thread.start()
    assert inside.wait(10)
    assert X.sum().item() == 6.0
    go.set()
    thread.join()


def test_nested_it_inlines() -> None:
    inner = graphify(lambda s, x: s.add_(x), donate_argnames=("s",))
    outer = graphify(lambda s, x: inner(s, x) * 2, donate_argnames=("s",))
    state = torch.zeros(4)
    for expected in (2 * X, 6 * X):
        state = outer(state, X)
        assert_equal(LAW, state, expected)
    assert (counts(inner), counts(outer)) == ((0, 0, 0), (1, 2, 0))


def test_random_numbers_are_drawn_anew_in_each_replay() -> None:
    g = graphify(lambda x: x + torch.rand(4))
    assert not torch.equal(g(X), g(X))
    torch.manual_seed(3)
    results = [g(X), g(X)]
    torch.manual_seed(3)
    assert_equal(LAW, results, [X + torch.rand(4), X + torch.rand(4)])


def test_a_capture_draws_no_random_numbers() -> None:
    g = graphify(lambda x, generator: x + torch.rand(4, generator=generator) + torch.rand(4))
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    result = g(X, generator)
    generator.manual_seed(3)
    torch.manual_seed(3)
    assert_equal(LAW, result, X + torch.rand(4, generator=generator) + torch.rand(4))


@pytree
@attrs.frozen(eq=False)
class Scale:
    w: Tensor

    @graphify
    def times(self, x: Tensor) -> Tensor:
        """A docstring."""
        return x * self.w


def test_a_method_is_the_graphified_function_of_its_instance() -> None:
    scale = Scale(X + 1)
    Scale.times.cache_clear()
    assert_equal(LAW, scale.times(X), X * (X + 1))
    assert (scale.times.cache_info(), scale.times.__doc__) == (
        Scale.times.cache_info(),
        "A docstring.",
    )
    assert counts(Scale.times) == (1, 1, 0)
    assert [*inspect.signature(scale.times).parameters] == ["x"]
    assert scale.times.explain(X).captured
    assert_equal(LAW, scale.times.lower(X).compile()(scale, X), X * (X + 1))
    scale.times.compile_ahead(torch.ones(1))
    assert scale.times.cache_info().captures == 1
    assert scale.times.capture(torch.ones(1)).captures == 2
    assert repr(scale.times) == f"<<graphify(times), 2 graphs> of {scale!r}>"
    with pytest.raises(AttributeError, match="cach_info"):
        _ = scale.times.cach_info


def test_a_module_in_eval_mode_is_a_function() -> None:
    module = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        .eval()
        .requires_grad_(False)
    )
    before = copy.deepcopy(module.state_dict())
    g = graphify(module)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_equal(LAW, (g(x), g(x + 1)), (module(x), module(x + 1)))
    assert_equal(LAW, dict(module.state_dict()), dict(before))
    assert repr(g) == "<graphify(Sequential), 1 graphs>"


def test_a_tensor_that_the_function_keeps_is_refused() -> None:
    kept: list[Tensor] = []

    def leaks(x: Tensor) -> Tensor:
        y = x * 2
        kept.append(y[:1])
        return y + 1

    g = graphify(leaks)
    with pytest.raises(
        CaptureError,
        match=r"a tensor that it made is kept and not returned \(float32\[4\], float32\[1\]\)",
    ):
        g(X)
    assert counts(g) == (0, 0, 0)
    kept.clear()


def test_a_cache_filled_by_the_warm_up_is_a_constant() -> None:
    cache: dict[str, Tensor] = {}

    def cached(x: Tensor) -> Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(4.0) * 3
        return x + cache["table"]

    agree(cached, (X,), (X + 1,))


def test_a_cycle_of_references_is_no_leak() -> None:
    def cyclic(x: Tensor) -> Tensor:
        y: list[Any] = [x * 2]
        y.append(y)
        return y[0] + 1

    agree(cyclic, (X,), (X + 1,))


def test_a_python_value_is_frozen_at_capture() -> None:
    calls = []
    g = graphify(lambda x: calls.append(1) or x + len(calls))
    first = g(X)
    second = g(X)
    assert torch.equal(first, second)
    assert len(calls) == 2  # the warm-up, and the capture


@pytest.mark.parametrize("split_at", [(), "aten::index_copy_"])
def test_a_capture_runs_again_on_the_state_as_it_was(split_at: Any) -> None:
    """A state that counts, with one free row: a second run on the first one's state would go beyond
    it."""

    def write(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state["rows"].index_copy_(0, state["n"], x)
        return {"n": state["n"] + 1, "rows": state["rows"]}, state["rows"].sum(0)

    graph = graphify(write, donate_argnames="state", split_at=split_at)
    state = {"n": torch.tensor([2]), "rows": torch.zeros(3, 2)}
    state, out = graph(state, torch.ones(1, 2))
    assert state["n"].tolist() == [3]
    assert out.tolist() == [1.0, 1.0]
    # The write, the count, the sum, and the count's copy to its place
    assert graph.graphs().graphs[0].operators == 4
