"""The leaves of params are transformers' trained parameters, and the page's recipe trains as
torch's optimizers do."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from gradients import EXPERTS, SIZES, build, scrambled
from hypothesis import given, settings, strategies as st
from pages import ROOT
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import weft
from weft.errors import ProgramError
from weft.stages.architectures import ARCHITECTURES
from weft.stages.checkpoints.reading import places
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import DecoderParams, num_bytes, slice_params
from weft.transforms.engine.setup import make_runner
from weft.transforms.graphs.ladder import Limits
from weft.transforms.pipelines.pipeline import compose
from weft.values.trees import leaves_with_names, pytree, tree_leaves

PROMPT = "A list is"
STEPS = 10
# The learning rates of the page's two recipes.
RATES = {"SGD": 0.01, "AdamW": 1e-3}
TIES = (True, False)


def section() -> list[str]:
    """The blocks of code of the page's section on gradients."""
    text = (ROOT / "proofs" / "pages" / "tour.md").read_text(encoding="utf-8")
    match = re.search(r"^## Gradients$(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r"^```python\n(.*?)^```$", match[1], re.MULTILINE | re.DOTALL)


def reference_model(architecture: str, is_tied: bool) -> Any:
    """A small transformers model of any architecture in the table, with the demo's vocabulary."""
    sizes = {**SIZES, "vocab_size": 257, "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
    spec = ARCHITECTURES[architecture]
    if not spec.text_types:
        return build(architecture, {**sizes, **(EXPERTS if spec.experts else {})})
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    vision = {
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 24,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
    }
    config = Qwen2VLConfig(
        text_config={**sizes, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=is_tied,
        image_token_id=250,
        video_token_id=251,
        vision_start_token_id=252,
        vision_end_token_id=253,
    )
    return scrambled(Qwen2VLForConditionalGeneration(config).eval())


def loaded(theirs: Any, folder: Path) -> Model:
    """The same model in weft, with the demo's tokenizer."""
    theirs.save_pretrained(folder)
    return attrs.evolve(weft.load(folder, "cpu"), tokenizer=weft.load("demo", "cpu").tokenizer)


def losses_of_the_page(model: Model, block: str, namespace: dict[str, Any]) -> list[float]:
    exec(compile(block, "tour.md", "exec"), namespace)
    losses: list[float] = namespace["losses"]
    return losses


def losses_of_torch(theirs: Any, ids: list[int], optimizer: str) -> list[float]:
    stepping = getattr(torch.optim, optimizer)(theirs.parameters(), lr=RATES[optimizer])
    losses = []
    for _ in range(STEPS):
        stepping.zero_grad()
        x = torch.tensor([ids])
        loss = theirs(input_ids=x, labels=x).loss
        loss.backward()
        stepping.step()
        losses.append(float(loss.detach()))
    return losses


def check_recipe(model: Model, architecture: str, is_tied: bool) -> None:
    """Each recipe of the page has the losses of transformers and `torch.optim`."""
    limits = Limits(max_num_reqs=1, max_num_tokens=64)
    names = {"make_runner": make_runner, "make_state": weft.transforms.make_state, "limits": limits}
    namespace: dict[str, Any] = {
        "torch": torch,
        "weft": weft,
        "attrs": attrs,
        **names,
        "model": model,
    }
    for block, optimizer in zip(section(), RATES, strict=True):
        losses = losses_of_the_page(model, block, namespace)
        expected = losses_of_torch(
            reference_model(architecture, is_tied), model.encode(PROMPT), optimizer
        )
        assert len(losses) == STEPS
        assert losses == pytest.approx(expected, rel=1e-4), optimizer


@pytest.mark.one_of(6, 2)
@pytest.mark.parametrize("is_tied", TIES, ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_page_s_recipe_trains_as_transformers_and_torch_do(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    check_recipe(loaded(reference_model(architecture, is_tied), tmp_path), architecture, is_tied)


def trained_apart(model: Model) -> Model:
    """The planted bug of a head that begins as the embedding, and is another leaf."""
    embedding = model.params.embed_tokens
    assert embedding is not None
    config = attrs.evolve(model.config, tie_word_embeddings=False)
    return attrs.evolve(
        model, config=config, params=attrs.evolve(model.params, lm_head=embedding.clone())
    )


@pytest.mark.slow
def test_a_head_that_is_trained_apart_is_found(tmp_path: Path) -> None:
    model = loaded(reference_model("LlamaForCausalLM", True), tmp_path)
    with pytest.raises(AssertionError):
        check_recipe(trained_apart(model), "LlamaForCausalLM", True)


# The leaves
# ----------------------------------------------------------------------------------------------------------


def stored_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """The names and sizes of the tensors that transformers saved."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            for name in names:
                yield name, opened.get_tensor(name).numel()


def check_leaves(params: DecoderParams, model: Model, theirs: Any, folder: Path) -> None:
    """The leaves are transformers' trained parameters: their names, and all their elements once."""
    other_tensors = ARCHITECTURES[model.config.architecture].other_tensors
    trained = {name: p for name, p in theirs.named_parameters() if ".visual." not in name}
    assert all(p.requires_grad for p in trained.values())
    stored = {
        name: size for name, size in stored_sizes(folder) if not name.startswith(other_tensors)
    }
    assert sum(stored.values()) == sum(p.numel() for p in trained.values()), (
        "buffers are among what was saved"
    )
    named = places(params, model.config, model.layout)
    aliases = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert {
        name: place.view.numel() for name, place in named.items() if name not in aliases
    } == stored
    leaves = tree_leaves(params)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert len({leaf.data_ptr() for leaf in leaves}) == len(leaves)
    assert sum(leaf.numel() for leaf in leaves) == sum(stored.values())
    assert num_bytes(params) == 4 * sum(stored.values())


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_the_leaves_of_gradients_are_transformers_trained_parameters(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """For a drawn architecture; `test_every_architecture_s_leaves` has each once."""
    architecture = data.draw(st.sampled_from(sorted(ARCHITECTURES)))
    check_architecture(
        architecture, data.draw(st.sampled_from(TIES)), tmp_path_factory.mktemp("drawn")
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_s_leaves(architecture: str, tmp_path: Path) -> None:
    for is_tied in TIES:
        check_architecture(architecture, is_tied, tmp_path / str(is_tied))


def check_architecture(architecture: str, is_tied: bool, folder: Path) -> None:
    theirs = reference_model(architecture, is_tied)
    model = loaded(theirs, folder)
    ids = model.encode(PROMPT)

    def loss(params: Any) -> Tensor:
        return weft.logprobs(attrs.evolve(model, params=params), [ids])[0].sum()

    slopes = torch.func.grad(loss)(model.params)
    check_leaves(model.params, model, theirs, folder)
    check_leaves(weft.clone(slopes), model, theirs, folder)


@pytree
@attrs.frozen(eq=False, repr=False)
class _WithConstant(DecoderParams):
    """The planted bug of a constant among the leaves."""

    inv_freq: Tensor | None = None


def _tied_twice(params: DecoderParams) -> DecoderParams:
    return attrs.evolve(params, lm_head=params.embed_tokens)


def _with_constant(params: DecoderParams) -> DecoderParams:
    fields = attrs.asdict(params, recurse=False)
    return _WithConstant(**fields, inv_freq=torch.ones(3))


@pytest.mark.parametrize("planted", [_tied_twice, _with_constant])
def test_planted_leaves_are_found(
    planted: Callable[[DecoderParams], DecoderParams], tmp_path: Path
) -> None:
    theirs = reference_model("Qwen3ForCausalLM", True)
    model = loaded(theirs, tmp_path)
    with pytest.raises(AssertionError):
        check_leaves(planted(model.params), model, theirs, tmp_path)


# The parts of a split
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("is_tied", TIES, ids=["tied", "untied"])
def test_a_gradient_through_a_split_of_the_whole_is_that_of_the_whole(
    num_stages: int, is_tied: bool, tmp_path: Path
) -> None:
    """Stages that take their parts inside of the function have one leaf for a tensor that two of
    them hold."""
    sizes = {**SIZES, "tie_word_embeddings": is_tied}
    theirs = build("Qwen3ForCausalLM", {**sizes, "head_dim": 8})
    model = loaded_plain(theirs, tmp_path)
    slopes = []
    for count in (1, num_stages):
        layouts = split_layers(model.config.num_layers, count)
        step = compose([model.stage(layout) for layout in layouts], advance=weft.advance)
        batch = attrs.evolve(weft.Batch.ragged([0], [[1, 2, 3]]), targets=torch.tensor([2, 3, 4]))

        def loss(
            params: Any, step: Any = step, layouts: Any = layouts, batch: Any = batch
        ) -> Tensor:
            parts = tuple(slice_params(params, layout) for layout in layouts)
            state = weft.transforms.make_state(model, layouts, [8])
            return step(parts, state, batch)[1].prompt_logprobs.sum()

        slopes.append(torch.func.grad(loss)(model.params))
    for (name, one), (_, other) in zip(*map(leaves_with_names, slopes), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def loaded_plain(theirs: Any, folder: Path) -> Model:
    theirs.save_pretrained(folder)
    return weft.load(folder, "cpu")


@pytest.mark.parametrize(
    ("is_tied", "has_head", "problem", "instead"),
    [
        (
            True,
            True,
            "params.lm_head beside an embedding, and tie_word_embeddings=True",
            "lm_head=None: the head is the embedding; or a config with tie_word_embeddings=False",
        ),
        (
            False,
            False,
            "params.lm_head is None, and tie_word_embeddings=False",
            "lm_head: a tensor [vocab, hidden]",
        ),
    ],
)
def test_a_head_that_contradicts_the_configuration_is_refused(
    is_tied: bool, has_head: bool, problem: str, instead: str
) -> None:
    demo = weft.load("demo", "cpu")
    config = attrs.evolve(demo.config, tie_word_embeddings=is_tied)
    head = demo.params.embed_tokens if has_head else None
    model = attrs.evolve(demo, config=config, params=attrs.evolve(demo.params, lm_head=head))
    with pytest.raises(ProgramError) as caught:
        weft.logprobs(model, [[1, 2, 3]])
    assert (
        str(caught.value)
        == f"stage 0 of 1(params, state, batch, x)\n  saw: {problem}\n  instead: {instead}"
    )
    readers = demo.with_stages(
        beside={"other": model}, logits=lambda logits, rows, extras: extras["other"]
    )
    with pytest.raises(ProgramError, match=re.escape(problem)):
        weft.generate(readers, [[1, 2, 3]], max_tokens=1)
