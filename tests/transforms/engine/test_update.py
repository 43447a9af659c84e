"""Parameters that change while an engine serves: announced or not, no page computed with the old
ones is read (L23)."""

import copy
import functools
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import Phase, find, given, settings, strategies as st

import weft
from weft.batches.sampling import SamplingParams
from weft.errors import EngineError, RequestError
from weft.proofs._strategies.engine.engines import adapters_of, small_adapters, small_model
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import DecoderParams, slice_params
from weft.stages.random_weights import random_adapter
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.weights import Weights
from weft.transforms.pipelines.transports.threads import Threads
from weft.values.trees import tree_leaves, tree_map

LIMITS = EngineLimits(
    max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=2, num_pages=60
)
PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 5, 6), (4, 3))
WAYS: list[dict[str, Any]] = [
    {"graph": "none"},
    {"graph": "full", "run_ahead": 2},
    {"graph": "full_and_piecewise", "speculation": Speculation(2)},
    {"graph": "piecewise", "pipeline": 3},
    {"graph": "full", "pipeline": 2, "transport": "threads"},
]


def own_copy(model: Model) -> Model:
    """A fresh model, not shared with other tests."""
    return attrs.evolve(
        model,
        params=tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, model.params),
    )


def engine_of(model: Model, way: dict[str, Any]) -> Engine:
    options = dict(way)
    if options.get("transport"):
        options["transport"] = Threads()
    return Engine(model, LIMITS, seed=0, **options)


def tokens_of(
    engine: Engine, prompts: tuple[tuple[int, ...], ...] = PROMPTS, most: int = 8
) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(temperature=0.0), max_tokens=most, id=str(index))
    tracks = {output.id: output.track for output in engine}
    return [tracks[str(index)].token_ids for index in range(len(prompts))]


def announced(engine: Engine, new: DecoderParams) -> None:
    engine.update(new)


def in_place_and_said(engine: Engine, new: DecoderParams) -> None:
    for param, other in zip(tree_leaves(engine.model.params), tree_leaves(new), strict=True):
        if param is not None:
            param.data.copy_(other)  # which torch does not count
    engine.update()


def in_place_and_not_said(engine: Engine, new: DecoderParams) -> None:
    for param, other in zip(tree_leaves(engine.model.params), tree_leaves(new), strict=True):
        if param is not None:
            with torch.no_grad():
                param.copy_(other)


CHANGES = (announced, in_place_and_said, in_place_and_not_said)


@pytest.mark.one_of(16, 4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_what_comes_later_is_what_a_fresh_engine_says(
    way: dict[str, Any], change: Callable[[Engine, DecoderParams], None]
) -> None:
    """A prompt is in the cache, computed with the old parameters; and no graph is captured again."""
    old = small_model()
    new = small_model(1)
    expected = tokens_of(engine_of(new, way))
    engine = engine_of(own_copy(old), way)
    engine.warm_up()
    assert tokens_of(engine) == tokens_of(engine) != expected
    num_prefix_tokens = engine.stats().prefix_tokens
    captures = engine.stats().captures
    assert num_prefix_tokens > 0, "of the second time"
    change(engine, new.params)
    assert tokens_of(engine, PROMPTS[:1]) == expected[:1]
    assert engine.stats().prefix_tokens == num_prefix_tokens, (
        "nothing of what the old ones computed"
    )
    assert tokens_of(engine) == expected
    assert engine.stats().prefix_tokens > num_prefix_tokens, "what the new ones computed is found"
    assert engine.stats().captures == captures
    assert engine.stats().pages_held == 0


@pytest.mark.one_of(30, 6)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_under_way_goes_on_as_the_new_parameters_would(
    way: dict[str, Any], change: Callable[[Engine, DecoderParams], None], steps: int
) -> None:
    """Requests go on from their tokens, those of launched steps included; none of their pages is
    read again."""
    engine = engine_of(own_copy(small_model()), way)
    for index, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(temperature=0.0), max_tokens=8, id=str(index))
    for _ in range(steps):
        engine.step()
    launched = {
        name: len(running.tokens) + running.max_unread
        for name, running in engine._host.requests.items()
    }
    change(engine, small_model(1).params)
    tracks = {output.id: output.track for output in engine}
    fresh = engine_of(small_model(1), {"graph": "none"})
    for index, prompt in enumerate(PROMPTS):
        said = (*prompt, *tracks[str(index)].token_ids)
        assert len(said) == len(prompt) + 8
        behind = range(launched[str(index)], len(said))
        for count in behind:
            assert tokens_of(fresh, (said[:count],), 1) == [[said[count]]], (
                f"request {index}, token {count}"
            )
    assert engine.stats().pages_held == 0


def test_tensors_by_transformers_names(tmp_path: Path) -> None:
    """A `state_dict()`, whole or in part; and the file that the parameters were read from stays as
    it was."""
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(DEMO, tmp_path / "demo"))
    before = (folder / "model.safetensors").read_bytes()
    names = load_file(DEMO / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {
        name: x + 0.02 * torch.randn(x.shape, generator=generator).to(x.dtype)
        for name, x in names.items()
    }
    model = weft.load(folder, "cpu", "float32")
    engine = Engine(model, graph="none")
    engine.update({name: changed[name] for name in sorted(changed)[::2]})
    engine.update({name: changed[name] for name in sorted(changed)[1::2]})
    assert (folder / "model.safetensors").read_bytes() == before
    from safetensors.torch import save_file

    save_file(changed, folder / "model.safetensors")
    other = weft.load(folder, "cpu", "float32")
    for param, expected in zip(tree_leaves(model.params), tree_leaves(other.params), strict=True):
        assert (param is None and expected is None) or torch.equal(param, expected)


def test_an_adapter_is_replaced_in_its_slot() -> None:
    adapters = small_adapters()
    names = sorted(adapters["of all"].deltas)
    other = random_adapter(small_model().config, names, rank=2, seed=9, std=0.7)

    def said(engine: Engine) -> list[int]:
        engine.add(PROMPTS[0], SamplingParams(temperature=0.0), max_tokens=6, adapter="of all")
        return [token for output in engine for token in output.token_ids]

    engine, fresh = (
        Engine(small_model(), LIMITS, graph="full", adapters=engine_adapters)
        for engine_adapters in (adapters, adapters | {"of all": other})
    )
    before = said(engine)
    captures = engine.stats().captures
    engine.update(adapters={"of all": other})
    assert said(engine) == said(fresh) != before
    assert engine.stats().captures == captures


@pytest.mark.parametrize("is_counted", [True, False])
def test_an_adapter_that_is_changed_in_place_is_served_as_changed(is_counted: bool) -> None:
    """The next step notices a change that torch counts; `update()` takes over any."""
    adapters = adapters_of(small_model().config)

    def said(name: str | None) -> list[int]:
        engine.add(PROMPTS[0], SamplingParams(temperature=0.0), max_tokens=6, adapter=name)
        return [token for output in engine for token in output.token_ids]

    engine = Engine(own_copy(small_model()), LIMITS, graph="full", adapters=adapters)
    plain = said(None)
    before = said("of all")
    for leaf in tree_leaves(adapters["of all"]):
        (leaf if is_counted else leaf.data).zero_()
    if not is_counted:
        assert said("of all") == before
        engine.update()
    assert said("of all") == plain != before


@pytest.mark.parametrize("first", ["model.embed_tokens.weight", "lm_head.weight"])
def test_two_values_for_one_tensor_are_refused(first: str) -> None:
    model = own_copy(weft.load("demo", "cpu", "float32"))
    engine = Engine(model, graph="none")
    embedding = model.params.embed_tokens
    assert embedding is not None
    before = embedding.clone()
    names = sorted(("model.embed_tokens.weight", "lm_head.weight"), key=lambda name: name != first)
    with pytest.raises(RequestError) as caught:
        engine.update({names[0]: before + 1.0, names[1]: before.bfloat16()})
    assert (
        str(caught.value)
        == "engine.update(params)\n  saw: 'model.embed_tokens.weight' and 'lm_head.weight', which"
        " are one tensor of the model, with different values\n  instead: equal values, or one of"
        " the two names; untied, they need another model"
    )
    assert torch.equal(embedding, before)
    for values in (
        dict.fromkeys(names, before + 1.0),
        {names[0]: torch.full_like(before, torch.nan)},
    ):
        engine.update({name: x.clone() for name, x in values.items()})
        assert torch.equal(embedding.nan_to_num(7.0), next(iter(values.values())).nan_to_num(7.0))
    engine.update(dict.fromkeys(names, torch.full_like(before, torch.nan)))
    shared = attrs.evolve(model.params.layers[0], down_proj=model.params.layers[1].down_proj)
    params = attrs.evolve(model.params, layers=(shared, *model.params.layers[1:]))
    other = weft.clone(params)
    changed = attrs.evolve(other.layers[1], down_proj=other.layers[1].down_proj + 1)
    engine = Engine(attrs.evolve(model, params=params), graph="none")
    with pytest.raises(
        RequestError, match=r"'.layers\[0\].down_proj' and '.layers\[1\].down_proj', which are one"
    ):
        engine.update(attrs.evolve(other, layers=(other.layers[0], changed, *other.layers[2:])))
    engine.update(other)


@functools.cache
def reference() -> Any:
    """transformers' model of the demo, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def names_of_one_tensor() -> list[list[str]]:
    """The names of each tensor of transformers' model, by its address."""
    names = defaultdict[int, list[str]](list)
    for name, tensor in reference().state_dict(keep_vars=True).items():
        names[tensor.data_ptr()].append(name)
    return list(names.values())


@st.composite
def shifts(draw: st.DrawFn) -> dict[str, float]:
    """Numbers to add to some tensors of the model, by name; a tied tensor has several names, which
    may disagree."""
    shift_of = dict[str, float]()
    several = [names for names in names_of_one_tensor() if len(names) > 1]
    for names in draw(
        st.lists(st.sampled_from(names_of_one_tensor()) | st.sampled_from(several), max_size=4)
    ):
        for name in draw(st.sets(st.sampled_from(names), min_size=1)):
            shift_of[name] = draw(st.sampled_from((0.0, 0.01)))
    return shift_of


def contradict(shift_of: dict[str, float]) -> bool:
    """Whether two names of one tensor have different values."""
    values = [
        {shift_of[name] for name in names if name in shift_of} for names in names_of_one_tensor()
    ]
    return any(len(each) > 1 for each in values)


def check_update(shift_of: dict[str, float]) -> None:
    """The engine then says what transformers says after `load_state_dict`, or refuses two values of
    one tensor."""
    tensors = reference().state_dict()
    changed = {name: tensors[name] + shift for name, shift in shift_of.items()}
    model = own_copy(weft.load("demo", "cpu", "float32"))
    theirs = copy.deepcopy(reference())
    if contradict(shift_of):
        with pytest.raises(
            RequestError, match="which are one tensor of the model, with different values"
        ):
            Engine(model, graph="none").update(changed)
    else:
        Engine(model, graph="none").update(changed)
        theirs.load_state_dict(changed, strict=False)
    ids = [5, 6, 7, 8]
    with torch.no_grad():
        logprobs = theirs(torch.tensor([ids])).logits.log_softmax(-1)[0]
    expected = logprobs[torch.arange(3), torch.tensor(ids[1:])]
    torch.testing.assert_close(weft.logprobs(model, [ids])[0], expected, rtol=1e-4, atol=1e-4)


@given(shifts())
@settings(max_examples=15, deadline=None)
def test_an_update_by_names_is_transformers_or_refused(shift_of: dict[str, float]) -> None:
    check_update(shift_of)


def test_an_update_that_takes_the_last_of_two_values_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contradiction = find(
        shifts(), contradict, settings=settings(database=None, phases=[Phase.generate])
    )
    monkeypatch.setattr("weft.transforms.engine.weights._refuse_two_values", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_update(contradiction)


def test_a_stage_without_a_tied_tensor_skips_both_of_its_names_or_refuses_their_contradiction() -> (
    None
):
    """A stage in the middle, of a state_dict() that names the head too, does as the other ranks do."""
    whole = weft.load("demo", "cpu", "float32")
    layout = split_layers(whole.config.num_layers, 3)[1]
    params = slice_params(whole.params, layout)
    weights = Weights(
        attrs.evolve(whole, layout=layout, params=params), [(layout, params)], None, {}
    )
    embedding = whole.params.embed_tokens
    assert embedding is not None
    state_dict = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    assert weights.pairs("engine.update(params)", state_dict) == []
    with pytest.raises(RequestError, match="which are one tensor of the model"):
        weights.pairs("engine.update(params)", state_dict | {"lm_head.weight": embedding + 1})


def test_a_draft_model_that_changes_changes_no_token() -> None:
    model = own_copy(small_model())
    drafts = own_copy(small_model())
    engine = Engine(model, LIMITS, graph="full", speculation=Speculation(2, model=drafts))
    before = tokens_of(engine)
    in_place_and_not_said(Engine(drafts, LIMITS, graph="none"), small_model(1).params)
    num_prefix_tokens = engine.stats().prefix_tokens
    assert tokens_of(engine, PROMPTS[:1]) == before[:1]
    assert engine.stats().prefix_tokens == num_prefix_tokens, "its pages are of the old draft model"


class _Elsewhere(Threads):
    """A transport of a pipeline over processes, as one rank sees it: one stage runs here."""

    def ranks(self, num_ranks: int) -> range:
        return range(min(num_ranks, 1))


def test_a_change_that_other_ranks_do_not_know_is_refused_until_it_is_said() -> None:
    model = own_copy(small_model())
    engine = Engine(model, LIMITS, pipeline=2, graph="none", transport=_Elsewhere())
    model.params.layers[0].qkv_proj.add_(1)
    for _ in range(2):
        with pytest.raises(
            EngineError,
            match=r"this rank's parameters were changed in place, and other ranks were not told\n"
            r"  instead: engine\.update",
        ):
            engine.step()
    engine.update()
    assert engine.step() == []


def test_a_mask_that_changes_parameters_amid_a_step_ends_its_request() -> None:
    engine = Engine(own_copy(small_model()), LIMITS, graph="none")
    engine.add([1], max_tokens=2, mask=lambda said: engine.update())
    [output] = list(engine)
    assert output.error is not None
    assert "a call from within a step" in output.error.problem


WRONG: dict[str, tuple[Any, str]] = {
    "a number": (3, "params=3"),
    "a list in the place of a tensor": (
        {"model.norm.weight": [1.0]},
        "params={'model.norm.weight': [1.0]}",
    ),
    "a name of another architecture": (
        {"transformer.wte.weight": torch.ones(1)},
        "transformer.wte.weight, which the",
    ),
    "another shape": (
        {"model.norm.weight": torch.ones(3)},
        "model.norm.weight of shape [3], torch.float32",
    ),
    "integers": (
        {"model.norm.weight": torch.ones(8, dtype=torch.int8)},
        "model.norm.weight of shape [8], torch.int8",
    ),
    "FP8 without its scales": (
        {"model.norm.weight": torch.ones(8).to(torch.float8_e4m3fn)},
        "model.norm.weight of shape [8], torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_parameters_that_do_not_fit_are_refused_and_change_nothing(case: str) -> None:
    params, problem = WRONG[case]
    engine = Engine(own_copy(small_model()), LIMITS, graph="none")
    before = tokens_of(engine)
    with pytest.raises(RequestError) as error:
        engine.update(params)
    assert error.value.call == "engine.update(params)"
    assert problem in error.value.problem
    num_prefix_tokens = engine.stats().prefix_tokens
    assert tokens_of(engine) == before
    assert engine.stats().prefix_tokens > num_prefix_tokens, "what was computed still holds"


def test_parameters_of_another_structure_are_refused() -> None:
    engine = Engine(own_copy(small_model()), LIMITS, graph="none")
    fewer = attrs.evolve(small_model().params, layers=small_model().params.layers[:2])
    with pytest.raises(RequestError, match="instead: parameters of the structure of <Model"):
        engine.update(fewer)


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [({"other": None}, "adapters={'other': None}"), (3, "adapters=3"), (None, "")],
)
def test_adapters_that_the_engine_does_not_have_are_refused(adapters: Any, problem: str) -> None:
    engine = Engine(own_copy(small_model()), LIMITS, graph="none", adapters=small_adapters())
    new_adapters = adapters if problem else {"other": small_adapters()["of all"]}
    with pytest.raises(RequestError) as error:
        engine.update(adapters=new_adapters)
    assert error.value.problem == (
        problem or "adapters={'other': <Adapter 'random 1', 21 layers, rank 2>}"
    )
