"""Inputs of its own that each token of a prompt has: what transformers computes with patched
activations."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.outputs import PerToken
from weft.errors import DescriptorError, ProgramError, RequestError
from weft.ops.requests import EMBEDDED
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.decoder import decoder_stage
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.requests.prompts import EmbedsPrompt
from weft.transforms.engine.setup import make_state
from weft.transforms.graphs.ladder import MODES

PROMPT = "The function returns a list of"
LAYER = 1
COUNT = 10
WAYS: tuple[dict[str, Any], ...] = (
    *({"graph": mode} for mode in MODES),
    {"pipeline": 2},
    {"pipeline": 3, "graph": "full_and_piecewise"},
    {"speculation": Speculation(num_tokens=2)},
)
TIGHT = EngineLimits(max_num_reqs=3, max_num_tokens=7, num_pages=16, max_model_len=64, page_size=4)


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def patched(model: Model) -> Model:
    """The model with a patch of the input of a layer: added, times a scale of each token."""

    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            scaled_patch = batch.token_extras["patch"] * batch.token_extras["scale"][:, None]
            return layer(params, kv_pages, batch, tables, hidden + scaled_patch)

        return run

    zero = torch.zeros(model.config.hidden_size)
    return model.with_stages(
        layers={LAYER: change}, token_extras={"patch": zero, "scale": torch.tensor(1.0)}
    )


@pytest.fixture(scope="module")
def patches(model: Model) -> list[Mapping[str, Tensor] | None]:
    """No patch; patches from a first, a middle and the last token on; and the second of these with
    another scale."""
    count = len(model.encode(PROMPT))
    generator = torch.Generator().manual_seed(0)
    extras: list[Mapping[str, Tensor] | None] = [None]
    for place in (0, count // 2, count - 1):
        patch = torch.zeros(count, model.config.hidden_size)
        patch[place:] = 4 * torch.randn(
            count - place, model.config.hidden_size, generator=generator
        )
        extras.append({"patch": patch})
    last = extras[2]
    assert last is not None
    return [*extras, {**last, "scale": torch.linspace(0, 3, count)}]


@pytest.fixture(scope="module")
def expected(model: Model, patches: list[Mapping[str, Tensor] | None]) -> list[list[int]]:
    """The greedy tokens of transformers, with the patches added before its layer."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    current: dict[str, Tensor] = {}

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if "patch" in current:
            added = (
                current["patch"] * current.get("scale", torch.ones(len(current["patch"])))[:, None]
            )
            hidden = hidden.clone()
            hidden[0, : len(added)] += added
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    reference.model.layers[LAYER].register_forward_pre_hook(hook, with_kwargs=True)
    completions = []
    with torch.no_grad():
        for patch in patches:
            current.clear()
            current.update(patch or {})
            ids = model.encode(PROMPT)
            start = len(ids)
            while len(ids) < start + COUNT and ids[-1] not in model.config.eos_token_ids:
                ids.append(
                    int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
                )
            completions.append(ids[start:])
    assert len({tuple(tokens) for tokens in completions}) == len(completions)
    return completions


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_patches_are_those_of_transformers(
    patched: Model,
    patches: list[Mapping[str, Tensor] | None],
    expected: list[list[int]],
    way: dict[str, Any],
) -> None:
    completions = generate(
        patched, [PROMPT] * len(patches), max_tokens=COUNT, extras=patches, **way
    )
    assert [c.token_ids for c in completions] == expected


@pytest.mark.one_of(8, 2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_in_chunks_and_preempted(
    patched: Model,
    patches: list[Mapping[str, Tensor] | None],
    expected: list[list[int]],
    way: dict[str, Any],
) -> None:
    engine = Engine(patched, TIGHT, **way)
    for index, patch in enumerate([*patches, *patches]):
        engine.add(PROMPT, max_tokens=COUNT, id=f"{index}", extras=patch)
    said = {int(output.id): output.track.token_ids for output in engine}
    assert [said[index] for index in range(2 * len(patches))] == 2 * expected
    assert engine.stats().preempted > 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_on_a_gpu(
    patched: Model,
    patches: list[Mapping[str, Tensor] | None],
    expected: list[list[int]],
    way: dict[str, Any],
) -> None:
    functions = patched.functions
    gpu_model = load(DEMO, "cuda", "float32").with_stages(
        layers=functions.layers, token_extras=functions.token_extras
    )
    completions = generate(
        gpu_model, [PROMPT] * len(patches), max_tokens=COUNT, extras=patches, **way
    )
    assert [c.token_ids for c in completions] == expected


def found_tokens(
    model: Model, first: Mapping[str, Tensor] | None, second: Mapping[str, Tensor] | None
) -> int:
    """The tokens of the second request that the cache has of the first."""
    engine = Engine(model, EngineLimits(page_size=4, num_pages=100), graph="none")
    for extras in (first, second):
        engine.add(PROMPT, max_tokens=2, extras=extras)
        assert [*engine]
    return engine.stats().prefix_tokens


def test_pages_are_shared_up_to_the_first_token_that_differs(
    patched: Model, patches: list[Mapping[str, Tensor] | None]
) -> None:
    nothing, first, middle, last, _ = patches
    count = len(patched.encode(PROMPT))
    assert found_tokens(patched, nothing, nothing) == found_tokens(patched, middle, middle) > 0
    assert found_tokens(patched, nothing, first) == 0
    assert (
        found_tokens(patched, nothing, middle)
        == found_tokens(patched, last, middle)
        == count // 2 // 4 * 4
    )
    assert found_tokens(patched, nothing, last) == (count - 1) // 4 * 4
    zeros = {"patch": torch.zeros(count, patched.config.hidden_size)}
    # As the default
    assert found_tokens(patched, nothing, zeros) == found_tokens(patched, nothing, nothing)


def test_with_embeddings(
    patched: Model, patches: list[Mapping[str, Tensor] | None], expected: list[list[int]]
) -> None:
    """A prompt has embeddings and inputs of its tokens at once."""
    ids = patched.encode(PROMPT)
    table = patched.params.embed_tokens
    assert table is not None
    prompt = EmbedsPrompt([EMBEDDED, *ids[1:]], table[ids])
    for options in ({}, {"pipeline": 2}):
        completions = generate(
            patched, [prompt] * len(patches), max_tokens=COUNT, extras=patches, **options
        )
        assert [c.token_ids for c in completions] == expected


def test_tensors_may_be_changed_once_they_are_given(
    patched: Model, patches: list[Mapping[str, Tensor] | None], expected: list[list[int]]
) -> None:
    assert patches[1] is not None
    extras = {name: x.clone() for name, x in patches[1].items()}
    engine = Engine(patched)
    engine.add(PROMPT, max_tokens=COUNT, extras=extras)
    extras["patch"].fill_(100.0)
    *_, output = engine
    assert output.track.token_ids == expected[1]


def with_patch(count: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"patch": torch.zeros(count, size, dtype=dtype)}


WRONG: list[tuple[Callable[[Model], Any], type[Exception], str]] = [
    (
        lambda m: m.with_stages(token_extras={"a": 1}),
        ProgramError,
        "a dict of one token's default by name",
    ),
    (
        lambda m: m.with_stages(extras={"patch": torch.zeros(1)}),
        ProgramError,
        r"'patch' in extras and in token_extras[\s\S]*another name",
    ),
    (
        lambda m: generate(m, [PROMPT], max_tokens=1, extras=[with_patch(3, m.config.hidden_size)]),
        RequestError,
        r"for each of the prompt's \d+ tokens",
    ),
    (
        lambda m: generate(
            m,
            [PROMPT],
            max_tokens=1,
            extras=[with_patch(len(m.encode(PROMPT)), m.config.hidden_size, torch.float64)],
        ),
        RequestError,
        "float64",
    ),
    (
        lambda m: generate(m, [PROMPT], max_tokens=1, extras=[{"path": torch.zeros(1)}]),
        RequestError,
        "the model's extras by name: 'patch', 'scale'",
    ),
    (
        lambda m: Engine(
            load(DEMO, "cpu", "float32"), speculation=Speculation(num_tokens=1, model=m)
        ),
        RequestError,
        "takes? no inputs of tokens",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), WRONG)
def test_wrong_inputs_are_named(
    patched: Model, call: Callable[[Model], Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as error:
        call(patched)
    assert "instead" in str(error.value)


def test_a_batch_of_other_names_is_named(patched: Model) -> None:
    (state,) = make_state(patched, [patched.layout], [8])
    batch = Batch.ragged([0], [[1, 2]])
    batch.token_extras["other"] = PerToken(torch.zeros(2))
    stage = decoder_stage(
        patched.config, patched.layout, token_extras=patched.functions.token_extras
    )
    with pytest.raises(
        DescriptorError, match=r"token_extras of \['other'\][\s\S]*'patch', 'scale'"
    ):
        stage(patched.params, state, batch, None)
