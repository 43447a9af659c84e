"""Misses: their reasons, their advice, and the warning about endless captures."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import CacheMissError, TooManyCapturesError
from weft.transforms.graphs.calls.key import Key, LeafKey, TreeKey, leaf_key
from weft.transforms.graphs.explain import ENDLESS, changed_between, miss_between, structure_text
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import tree_structure

X = torch.arange(2.0)


def scaled(params: Tensor, x: Tensor, rate: float = 1.0) -> Tensor:
    return params * x * rate


def add(s: Tensor, x: Tensor) -> Tensor:
    return s + x


def second(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, s + x


def fresh() -> Tensor:
    return torch.ones(2)


def swapped(g: Any, kept: list[Tensor]) -> None:
    """A step whose output comes first and takes the state's storage. Outputs are kept, so no state
    gets it back."""
    kept += g(kept[-1] if kept else fresh(), X)


IN_PLACE = (
    "keep params in place (params.copy_(...)), or write donate_argnames='params' if the call"
    " returns its next value, or reference_argnames=() to copy it in"
)
PASS_ON = (
    "pass the s that the call before returned (copy_ a new one into it), and return the next s"
    " before other results of its structure"
)
ENDLESSLY: dict[str, tuple[Callable[[], Graphified[..., Any]], Callable[..., Any], str, str]] = {
    "params made anew": (
        lambda: graphify(scaled),
        lambda g, i, kept: kept.append(fresh()) or g(kept[-1], X),
        "params (captured by reference, and other tensors at each call)",
        IN_PLACE,
    ),
    "a state made anew": (
        lambda: graphify(add, donate_argnames="s"),
        lambda g, i, kept: kept.append(g(fresh(), X)),
        "s (donated, and in other storage at each call)",
        PASS_ON,
    ),
    "an output before the state": (
        lambda: graphify(second, donate_argnames="s"),
        lambda g, i, kept: swapped(g, kept),
        "s (donated, and in other storage at each call)",
        PASS_ON,
    ),
    "a number": (
        lambda: graphify(scaled, reference_argnames=()),
        lambda g, i, kept: g(X, X, 0.5 + i),
        "rate (a Python value, which is part of the key)",
        "pass rate as a 0-dim tensor: torch.tensor(7.5)",
    ),
    "both": (
        lambda: graphify(scaled),
        lambda g, i, kept: kept.append(fresh()) or g(kept[-1], X, 0.5 + i),
        (
            "params (captured by reference, and other tensors at each call), "
            "rate (a Python value, which is part of the key)"
        ),
        f"{IN_PLACE}; pass rate as a 0-dim tensor: torch.tensor(7.5)",
    ),
}


@pytest.mark.parametrize("case", ENDLESSLY)
def test_captures_that_do_not_end_are_said_once(case: str) -> None:
    make, call, fields, remedy = ENDLESSLY[case]
    g = make()
    kept = list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for i in range(ENDLESS - 1):
            call(g, i, kept)
    with pytest.warns(RuntimeWarning) as caught:
        call(g, ENDLESS - 1, kept)
    [warning] = caught
    assert str(warning.message).startswith(
        f"{g.__name__}: each of the last 8 calls captured a graph, and none replayed an existing"
        f" one. They differ only in {fields}. Instead: {remedy}. The last call: {__file__}:"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for i in range(3 * ENDLESS):
            call(g, ENDLESS + i, kept)
    assert g.cache_info().captures == 4 * ENDLESS


def replayed_between(g: Any) -> Iterator[Any]:
    """Each graph is used again before the next one is captured."""
    for i in range(2 * ENDLESS):
        yield g(X, X, float(i))
        yield g(X, X, float(i))


def several_fields(g: Any) -> Iterator[Any]:
    for i in range(2 * ENDLESS):
        yield g(X, torch.ones(2, dtype=torch.float64 if i % 2 else torch.float32), float(i))


def shapes(g: Any) -> Iterator[Any]:
    for i in range(2 * ENDLESS):
        yield g(torch.ones(i + 1), torch.ones(i + 1))


@pytest.mark.parametrize("calls", [replayed_between, several_fields, shapes])
def test_captures_of_use_are_no_reason_to_warn(calls: Callable[[Any], Iterator[Any]]) -> None:
    g = graphify(scaled, reference_argnames=())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        kept = [*calls(g)]
    assert g.cache_info().captures >= ENDLESS
    assert len(kept) >= ENDLESS


def test_static_arguments_are_meant_to_be_part_of_the_key() -> None:
    g = graphify(scaled, reference_argnames=(), static_argnames="rate")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for i in range(2 * ENDLESS):
            g(X, X, float(i))


def test_a_miss_by_address_names_what_avoids_it_wherever_it_is_told() -> None:
    g = graphify(scaled)
    params = fresh()
    other_params = fresh()
    g(params, X)
    problem = "params: another tensor than the captured one (captured by reference)"
    assert str(g.explain(other_params, X)).endswith(f"; {problem}; {IN_PLACE}")
    with pytest.raises(TooManyCapturesError) as limit, weft.assert_max_captures(0):
        g(other_params, X)
    assert limit.value.instead == f"{IN_PLACE}, or allow more captures"
    g.freeze()
    with pytest.raises(CacheMissError) as miss:
        g(other_params, X)
    assert miss.value.problem == f"a miss after freeze(): {problem}"
    assert miss.value.instead.endswith(f"call it with arguments like the captured ones: {IN_PLACE}")


def test_of_many_differences_a_few_are_told() -> None:
    g = graphify(lambda params, x: sum(params) * x)
    g([fresh() for _ in range(9)], X)
    text = str(g.explain([fresh() for _ in range(9)], X))
    assert text.count("another tensor than the captured one") == 4
    assert "; and 5 more; keep params in place" in text


def test_structures_are_told_as_one_would_write_them() -> None:
    g = graphify(lambda x: x)
    g({"a": [X, X], "b": (X,)})
    assert str(g.explain({"a": [X], "b": (X,)})).endswith(
        "; x['a']: structure [*], captured [*, *]"
    )
    assert str(g.explain({"a": [X, X], "b": X})).endswith("; x['b']: structure *, captured (*,)")
    batch = weft.Batch.decode([0])
    assert structure_text(tree_structure(batch)).startswith(
        "Batch(rows=*, input_ids=*, query_start_loc=*, samples=*, token_mask=*, targets=*,"
        " inputs_embeds=*, p"
    )
    assert structure_text(tree_structure(torch.ones(2).max(0))) == "max(*, *)"


def test_keywords_that_were_not_there_are_named() -> None:
    def summed(**more: Tensor) -> Tensor:
        return sum(more.values(), X)

    g = graphify(summed)
    g(a=X)
    assert str(g.explain(a=X, b=X)).endswith(
        "; more: structure {'a': *, 'b': *}, captured {'a': *}"
    )


LAYER, WEIGHT = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
HELD = {"w": torch.ones(2, requires_grad=True)}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by

    def shifted(self, x: Tensor) -> Tensor:
        return x + self.by


def closed_over() -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(nn.Identity(), Scale())
    return lambda x: model(x)


REQUIRES = (
    " from outside, which requires grad, and autograd must see the operators; torch.no_grad()"
    " around the call, or requires_grad_(False) on what is not trained, lets it replay (for"
    " gradients inside the graph: torch.func.grad over parameters that are passed in)"
)
ARGUMENT = (
    " requires grad, and autograd must see the operators; torch.no_grad() around the call lets it"
    " replay"
)
INLINE: dict[str, tuple[Callable[[], Graphified[..., Any]], tuple[Any, ...], str]] = {
    "a module that is closed over": (
        lambda: graphify(closed_over()),
        (X,),
        f"it reads model.1.by{REQUIRES}",
    ),
    "a global module": (
        lambda: graphify(lambda x: LAYER(x)),
        (X,),
        f"it reads LAYER.weight{REQUIRES}",
    ),
    "a global": (lambda: graphify(lambda x: x * WEIGHT), (X,), f"it reads WEIGHT{REQUIRES}"),
    "a tensor in a dict": (
        lambda: graphify(lambda x: x * HELD["w"]),
        (X,),
        f"it reads a tensor of shape (2,){REQUIRES}",
    ),
    "the module itself": (lambda: graphify(Scale()), (X,), f"it reads Scale.by{REQUIRES}"),
    "a method": (lambda: graphify(Scale().shifted), (X,), f"it reads Scale.by{REQUIRES}"),
    "an argument": (
        lambda: graphify(lambda p, x: p[0]["w"] * x),
        ([HELD], X),
        f"p[0]['w']{ARGUMENT}",
    ),
    "params": (lambda: graphify(scaled), (WEIGHT, X), f"params{ARGUMENT}"),
    "a sparse argument": (
        lambda: graphify(lambda x, y: y * 2),
        (X, torch.eye(2).to_sparse()),
        "y is torch.sparse_coo, which has no fixed addresses",
    ),
}


@pytest.mark.parametrize("case", INLINE)
def test_calls_that_always_run_inline_are_said_once(case: str) -> None:
    make, args, reason = INLINE[case]
    g = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(ENDLESS - 1):
            g(*args)
    with pytest.warns(RuntimeWarning) as caught:
        g(*args)
    [warning] = caught
    assert str(warning.message).startswith(
        f"{getattr(g, '__name__', 'Scale')}: the last 8 calls ran the function itself and replayed "
        f"nothing: {reason}. The last call: {__file__}:"
    )
    assert str(g.explain(*args)) == f"runs inline: {reason}"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2 * ENDLESS):
            g(*args)
    assert g.cache_info().replays == 0
    assert g.cache_info().eager == 3 * ENDLESS


def test_calls_inline_between_replays_or_inside_others_are_no_reason_to_warn() -> None:
    g = graphify(scaled, reference_argnames=())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(2 * ENDLESS):
            for _ in range(ENDLESS - 1):
                g(WEIGHT, X)
            g(X, X)
            torch.func.grad(lambda w: g(w, X).sum())(X)
            graphify(lambda x: g(x, x))(X)
    assert g.cache_info().eager == 2 * ENDLESS * (ENDLESS - 1)


OUTSIDE, logits = torch.zeros(2), torch.zeros(2)


def test_what_changes_outside_at_each_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that a global names anew at each call."""
    g = graphify(lambda x: x + OUTSIDE)

    def call(value: float) -> Tensor:
        monkeypatch.setitem(globals(), "OUTSIDE", torch.full((2,), value))
        return g(X)

    assert all(torch.equal(call(value), X + value) for value in range(ENDLESS - 1))
    with pytest.warns(RuntimeWarning, match="each of the last 8 calls captured a graph") as caught:
        call(9.0)
    text = str(caught[0].message)
    assert (
        "what it reads from outside (OUTSIDE, a global of <lambda>, is another object than at the"
        " capture)" in text
    )
    assert "Instead: keep that as it is, or pass it in as an argument" in text


def test_an_attribute_of_the_name_of_a_global_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function reads an attribute; the global of its name is somebody else's."""
    g = graphify(lambda x: Scored(x).logits)
    for value in range(3):
        monkeypatch.setitem(globals(), "logits", torch.full((2,), float(value)))
        assert torch.equal(g(X), X * 2)
    assert g.cache_info().captures == 1


class Scored:
    """The output of a model."""

    def __init__(self, x: Tensor) -> None:
        self.logits = x * 2


LEAF = leaf_key(torch.ones(2, 3), None, True)
# For each field of a leaf's key another value, and what an explanation says of it.
CHANGED: dict[str, tuple[Any, str]] = {
    "kind": (torch.nn.Parameter, f"kind {torch.nn.Parameter}, captured {Tensor}"),
    "shape": ((3, 2), "shape (3, 2), captured (2, 3)"),
    "dtype": (torch.float64, "dtype torch.float64, captured torch.float32"),
    "stride": ((1, 2), "stride (1, 2), captured (3, 1)"),
    "device": (torch.device("meta"), "device meta, captured cpu"),
    "flags": ((True,), f"flags (True,), captured {LEAF.flags}"),
    "address": (1, "another tensor than the captured one (captured by reference)"),
    "offset": (4, "offset 4, captured 0"),
    "attributes": ((("tag", (int, 1)),), "attributes {tag: 1}, captured {}"),
}


def _key_of_a_reference(leaf: LeafKey) -> Key:
    empty = tree_structure({})
    references = TreeKey(tree_structure({"params": 0}), (), (leaf,))
    return Key((), "full", (), None, references, TreeKey(empty, (), ()))


def test_each_field_of_a_leafs_key_is_explained() -> None:
    assert list(CHANGED) == [field.name for field in attrs.fields(LeafKey)]


@pytest.mark.parametrize("field", CHANGED)
@pytest.mark.parametrize("donated", [(), ("params",)])
def test_a_leaf_by_reference_that_differs_in_one_field(
    field: str, donated: tuple[str, ...]
) -> None:
    value, text = CHANGED[field]
    new = _key_of_a_reference(attrs.evolve(LEAF, **{field: value}))
    old = _key_of_a_reference(LEAF)
    miss = miss_between(new, old, ["params"], donated)
    assert miss.differs == f"params: {text}"
    changed = changed_between(new, old, lambda: ["params"], donated)
    moved = ("params",) if field == "address" else ()
    assert (changed.donated, changed.references) == ((moved, ()) if donated else ((), moved))
    assert changed.has_others is (field != "address")
    if field != "address":
        assert miss.remedy == ""
    elif donated:
        assert miss.remedy.startswith(
            "pass the params that the call before returned (copy_ a new one into it)"
        )
    else:
        assert miss.remedy.startswith(
            "keep params in place (params.copy_(...)), or write donate_argnames='params'"
        )


def test_explain_names_the_leaf_by_reference() -> None:
    g = graphify(lambda params, x: params["w"][0] * x)
    first = {"w": [torch.ones(2)]}
    g(first, torch.ones(2))
    assert (
        str(g.explain(first, torch.zeros(2)))
        == "replays: no ladder, so each signature has its own graph"
    )
    explanation = g.explain({"w": [torch.ones(2)]}, torch.ones(2))
    assert not explanation.captured
    assert (
        str(explanation)
        == "captures: no ladder, so each signature has its own graph; params['w'][0]: another"
        " tensor than the captured one (captured by reference); keep params in place"
        " (params.copy_(...)), or write donate_argnames='params' if the call returns its next"
        " value, or reference_argnames=() to copy it in"
    )
