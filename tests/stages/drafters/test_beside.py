"""Models that read beside another one: contrastive decoding as transformers computes it, in every
way to run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.errors import ProgramError, RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.custom.sown import sow
from weft.stages.drafters.beside import readers_beside
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import MODES, Limits
from weft.values.trees import tree_map

PROMPTS = ["The function returns a list of", "The function returns a tuple of", "In Python, "]
WAYS: list[dict[str, Any]] = [
    *({"graph": mode} for mode in MODES),
    {"pipeline": 2},
    {"pipeline": 3},
    {"speculation": Speculation(num_tokens=3)},
    {"pipeline": 2, "speculation": Speculation(num_tokens=3)},
]
LAYERS = 2


def contrast(logits: Tensor, rows: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
    return 1.5 * logits - extras["amateur"]


@pytest.fixture(scope="module")
def expert() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def amateur(expert: Model) -> Model:
    """The expert's first layers."""
    params = attrs.evolve(expert.params, layers=expert.params.layers[:LAYERS])
    (layout,) = split_layers(LAYERS, 1)
    return Model(
        attrs.evolve(expert.config, num_layers=LAYERS), params, None, Path("amateur"), layout=layout
    )


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Any]:
    """Transformers' expert and amateur."""
    transformers = pytest.importorskip("transformers")
    whole, first = (
        transformers.AutoModelForCausalLM.from_pretrained(Path(DEMO), dtype=torch.float32)
        for _ in "12"
    )
    first.model.layers = first.model.layers[:LAYERS]
    return whole, first


class Operators(TorchDispatchMode):
    """The names of the operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(f"{func}")
        return func(*args, **(kwargs or {}))


def operators_of(expert: Model, amateur: Model, logits: Callable[..., Tensor]) -> list[str]:
    """The operators of a step that captures, and has extras and a model beside."""
    options: dict[str, Any] = {"beside": {"amateur": amateur}, "logits": logits}
    zero = torch.zeros(expert.config.hidden_size)
    custom_model = expert.with_stages(
        layers={1: watched}, captures={"early": zero}, extras={"vector": zero}, **options
    )
    runner = make_runner(custom_model, Limits(2, 16), mode="none")
    state = make_state(custom_model, runner.layouts, [8, 8])
    with Operators() as operators, torch.no_grad():
        runner.step(runner.params, state, Batch.ragged([0, 1], [[5, 6], [7]]))
    return operators.names


def watched(layer: Any) -> Any:
    def run(*args: Any) -> Any:
        hidden, pages = layer(*args)
        sow("early", hidden)
        return hidden, pages

    return run


def reading(*names: str) -> Callable[..., Tensor]:
    """A function on logits that reads some of its extras, and changes nothing."""

    def change(logits: Tensor, rows: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        assert {*extras} == {"vector", "early", "amateur"}
        for name in names:
            assert len(extras[name]) == len(logits)
        return logits

    return change


def test_what_logits_do_not_read_is_not_computed(expert: Model, amateur: Model) -> None:
    """What they read is computed once: a capture by one operator, the logits of the model beside by
    several."""
    none, early, other, twice = (
        len(operators_of(expert, amateur, reading(*names)))
        for names in ((), ("early",), ("amateur",), ("amateur", "amateur"))
    )
    assert none == early - 1
    assert early < other == twice


def logits_of(model: Model) -> Tensor:
    """The logits of a step on two prompts."""
    runner = make_runner(model, Limits(2, 16), mode="none", keep_logits=True)
    state = make_state(model, runner.layouts, [8, 8])
    with torch.no_grad():
        _, out = runner.step(runner.params, state, Batch.ragged([0, 1], [[5, 6, 9], [7]]))
    assert out.logits is not None
    return out.logits


def test_a_model_with_positions_in_three_parts_reads_text_beside_another(
    expert: Model, amateur: Model
) -> None:
    pairs = amateur.config.head_dim // 2
    rope = attrs.evolve(amateur.config.rope, mrope_section=(pairs - 2, 1, 1))
    in_parts = attrs.evolve(amateur, config=attrs.evolve(amateur.config, rope=rope))
    with_text, with_parts = (
        logits_of(expert.with_stages(beside={"amateur": one}, logits=contrast))
        for one in (amateur, in_parts)
    )
    torch.testing.assert_close(with_parts, with_text)


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_pages_that_a_model_beside_made_anew_are_in_the_next_state(
    expert: Model, amateur: Model, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(params: Any, pages: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), pages + moved if moved else pages

    monkeypatch.setattr("weft.stages.drafters.beside.reader", lambda *_: read)
    runner = make_runner(expert, Limits(1, 4), mode="none")
    (state,) = make_state(expert, runner.layouts, [8])
    state = attrs.evolve(state, beside={"amateur": torch.zeros(1), "other": torch.zeros(1)})
    models = dict.fromkeys(state.beside, (amateur.config, amateur.params, amateur.functions))
    next_state, _ = readers_beside(models, torch.device("cpu"))(state, None)  # type: ignore[arg-type]
    assert [pages.item() for pages in next_state.beside.values()] == [moved, moved]
    assert (next_state is state) == (not moved)


def contrasted(theirs: tuple[Any, Any], ids: list[int]) -> Tensor:
    whole, first = (model(torch.tensor([ids]), use_cache=False).logits[0] for model in theirs)
    logits: Tensor = 1.5 * whole - first
    return logits


@pytest.fixture(scope="module")
def expected(expert: Model, theirs: tuple[Any, Any]) -> list[list[int]]:
    """Greedy tokens by transformers' two models, each reading everything anew for each token."""
    token_ids = []
    for prompt in PROMPTS:
        ids = expert.encode(prompt)
        start = len(ids)
        while len(ids) < start + 16 and (
            len(ids) == start or ids[-1] not in expert.config.eos_token_ids
        ):
            ids = [*ids, int(contrasted(theirs, ids)[-1].argmax())]
        token_ids.append(ids[start:])
    return token_ids


def tokens(model: Model, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=16, **options)]


@pytest.mark.slow
def test_contrastive_decoding_is_that_of_transformers(
    expert: Model, amateur: Model, expected: list[list[int]]
) -> None:
    contrastive_model = expert.with_stages(beside={"amateur": amateur}, logits=contrast)
    assert tokens(expert) != expected
    for way in WAYS:
        assert tokens(contrastive_model, **way) == expected, way


@pytest.mark.slow
def test_pages_are_shared_preempted_and_forked(
    expert: Model, amateur: Model, expected: list[list[int]]
) -> None:
    contrastive_model = expert.with_stages(beside={"amateur": amateur}, logits=contrast)
    ids = [expert.encode(prompt) for prompt in PROMPTS]
    longest = max(map(len, ids)) + 16
    limits = EngineLimits(
        page_size=4, max_num_reqs=4, max_model_len=longest, max_num_tokens=16, num_pages=24
    )
    engine = Engine(contrastive_model, limits)
    names = {}
    for _ in range(2):  # the second time their prefixes are known
        for prompt, expected_tokens in zip(ids, expected, strict=True):
            names[engine.add(prompt, SamplingParams(temperature=0, n=2), max_tokens=16)] = (
                expected_tokens
            )
        said: dict[tuple[str, int], list[int]] = {}
        for output in engine:
            said.setdefault((output.id, output.index), []).extend(output.token_ids)
        for (name, _), token_ids in said.items():
            assert token_ids == names[name]
    stats = engine.stats()
    assert stats.preempted > 0
    assert stats.prefix_tokens > 0


def test_logprobs_of_prompts_are_of_the_changed_logits(
    expert: Model, amateur: Model, theirs: tuple[Any, Any]
) -> None:
    contrastive_model = expert.with_stages(beside={"amateur": amateur}, logits=contrast)
    ids = expert.encode(PROMPTS[0])
    expected_logprobs = (
        contrasted(theirs, ids).log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    )
    for way in WAYS:
        sampling = SamplingParams(temperature=0, prompt_logprobs=0)
        (completion,) = generate(
            contrastive_model, PROMPTS[:1], max_tokens=1, sampling=sampling, **way
        )
        assert completion.prompt_logprobs == pytest.approx(expected_logprobs, abs=1e-3), way


def test_parameters_of_a_model_beside_that_change_are_noticed(
    expert: Model, amateur: Model
) -> None:
    params = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, amateur.params)
    contrastive_model = expert.with_stages(
        beside={"amateur": attrs.evolve(amateur, params=params)}, logits=contrast
    )
    ids = expert.encode(PROMPTS[0])

    def said(engine: Engine) -> list[int]:
        engine.add(ids, SamplingParams(temperature=0), max_tokens=8)
        return [token for output in engine for token in output.token_ids]

    engine = Engine(contrastive_model, EngineLimits(page_size=4))
    before = said(engine)
    params.layers[0].qkv_proj.neg_()
    assert said(engine) == said(Engine(contrastive_model)) != before


def test_models_that_cannot_are_named(expert: Model, amateur: Model) -> None:
    with pytest.raises(
        ProgramError,
        match=r"models in beside=, but no logits=f to read their logits\n  instead: logits=f, too",
    ):
        expert.with_stages(beside={"amateur": amateur})
    with pytest.raises(ProgramError, match=r"beside={'amateur': \.\.\.}\n  saw: an int"):
        expert.with_stages(beside={"amateur": 3}, logits=contrast)  # type: ignore[dict-item]
    steered = amateur.with_stages(extras={"vector": torch.zeros(2)})
    with pytest.raises(
        ProgramError, match=r"extra vector: \[2\](.|\n)*whose functions read no extras"
    ):
        expert.with_stages(beside={"amateur": steered}, logits=contrast)
    with pytest.raises(ProgramError, match="'x' in extras and in captures"):
        expert.with_stages(extras={"x": torch.zeros(())}, captures={"x": torch.zeros(())})
    other = attrs.evolve(amateur, config=attrs.evolve(amateur.config, vocab_size=7))
    with pytest.raises(ProgramError, match=r"of 7 tokens(.|\n)*a whole model, here, of 257 tokens"):
        expert.with_stages(beside={"amateur": other}, logits=contrast)
    with pytest.raises(
        ProgramError, match=r"beside={'other': \.\.\.}\n  saw: (.|\n)*of 7 tokens\n"
    ):
        expert.with_stages(beside={"amateur": amateur, "other": other}, logits=contrast)
    contrastive_model = expert.with_stages(beside={"amateur": amateur}, logits=contrast)
    with pytest.raises(RequestError, match="a draft model without models beside"):
        Engine(expert, speculation=Speculation(num_tokens=2, model=contrastive_model))
    with pytest.raises(ProgramError, match="'amateur' in extras and in beside"):
        expert.with_stages(
            beside={"amateur": amateur}, logits=contrast, extras={"amateur": torch.zeros(())}
        )
