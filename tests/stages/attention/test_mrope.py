"""mRoPE: the decoder of Qwen2-VL against transformers', over a prompt with an image's embeddings
and its decodes."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from gradients import gradients_as_params, joined, next_token_loss, relative, worst
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from weft.batches.batch import Batch
from weft.batches.outputs import IntermediateTensors
from weft.batches.state import State, advance
from weft.errors import DescriptorError
from weft.ops.requests import EMBEDDED
from weft.stages import decoder
from weft.stages.attention import rope
from weft.stages.attention.rope import mrope_position_delta
from weft.stages.checkpoints.loading import load
from weft.stages.decoder import decoder_stage
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import slice_params
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.requests.prompts import EmbedsPrompt
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.transforms.pipelines.pipeline import compose, pipeline

IMAGE = 60
STEPS = 5
IDS = [5, 9, *[IMAGE] * 12, 40, 7, 11]
TEXT = [3, 1, 4, 1, 5]
# Two frames of 4 by 6 patches, merged 2 by 2: 12 tokens.
GRID = torch.tensor([[2, 4, 6]])
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "eos_token_id": None,
            "initializer_range": 0.3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    return Qwen2VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def model(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("qwen2-vl")
    theirs.save_pretrained(folder)
    return load(folder, "cpu")


@pytest.fixture(scope="module")
def embeds(model: Model) -> Tensor:
    return torch.randn(
        len(IDS), model.config.hidden_size, generator=torch.Generator().manual_seed(3)
    )


@pytest.fixture(scope="module")
def positions(theirs: Any) -> Tensor:
    kinds = torch.tensor([[int(token == IMAGE) for token in IDS]])
    position_ids, deltas = theirs.model.get_rope_index(torch.tensor([IDS]), kinds, GRID)
    assert deltas.item() == mrope_position_delta(position_ids[:, 0]) == -9
    return position_ids[:, 0].clone()


def expected(
    theirs: Any, ids: Sequence[int], embeds: Tensor | None, positions: Tensor | None
) -> list[Tensor]:
    """transformers' logits after the prompt, and after each token that it decodes greedily."""
    inputs = theirs.get_input_embeddings()(torch.tensor(ids))
    if embeds is not None:
        inputs = torch.where((torch.tensor(ids) == IMAGE)[:, None], embeds, inputs)
    at = torch.arange(len(ids)).expand(3, -1) if positions is None else positions
    logits = []
    for _ in range(STEPS):
        with torch.no_grad():
            hidden = theirs.model.language_model(
                inputs_embeds=inputs[None], position_ids=at[:, None]
            )
            logits.append(theirs.lm_head(hidden.last_hidden_state)[0, -1])
        inputs = torch.cat([inputs, theirs.get_input_embeddings()(logits[-1].argmax()[None])])
        at = torch.cat([at, at.max() + torch.ones(3, 1, dtype=torch.int64)], dim=1)
    return logits


def prompts(embeds: Tensor, positions: Tensor, sizes: Sequence[int]) -> Iterator[Batch]:
    """The image's prompt in row 0, in chunks; a text prompt in row 1, in the same batch as the
    first chunk."""
    start = 0
    for size in sizes:
        ids = [EMBEDDED if token == IMAGE else token for token in IDS[start : start + size]]
        here = embeds[start : start + size]
        at = positions[:, start : start + size]
        last = start + size == len(IDS)
        if start:
            yield Batch.ragged([0], [ids], samples=[last], inputs_embeds=here, positions=at)
        else:
            here = torch.cat([here, torch.zeros(len(TEXT), embeds.shape[1])])
            at = torch.cat([at, torch.full((3, len(TEXT)), -1)], dim=1)
            yield Batch.ragged(
                [0, 1], [ids, TEXT], samples=[last, True], inputs_embeds=here, positions=at
            )
        start += size


def run(step: Any, params: Any, state: Any, batches: Iterator[Batch]) -> dict[int, list[Tensor]]:
    """The logits of each row, after its prompt and after each token of some decodes of both rows."""
    logits: dict[int, list[Tensor]] = {0: [], 1: []}
    for batch in [*batches, *[Batch.decode([0, 1])] * (STEPS - 1)]:
        state, out = step(params, state, batch)
        for index, row in enumerate(batch.rows.tolist()):
            if batch.samples[index]:
                logits[row].append(out.logits[index].clone())
    return logits


def state_of(model: Model, num_stages: int, positions: Tensor) -> tuple[State, ...]:
    deltas = [mrope_position_delta(positions), 0]
    return make_state(model, split_layers(3, num_stages), [32, 32], mrope_position_deltas=deltas)


def check(logits: dict[int, list[Tensor]], theirs: Any, embeds: Tensor, positions: Tensor) -> None:
    for row, expected_logits in enumerate(
        (expected(theirs, IDS, embeds, positions), expected(theirs, TEXT, None, None))
    ):
        assert len(logits[row]) == STEPS
        for ours, one in zip(logits[row], expected_logits, strict=True):
            torch.testing.assert_close(ours, one, **TOLERANCE)


@pytest.mark.one_of(6, 2)
@pytest.mark.parametrize("sizes", [(17,), (1, 6, 7, 3)], ids=["whole", "chunks"])
@pytest.mark.parametrize("mode", ["none", "full", "piecewise", "full_and_piecewise"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_logits_are_those_of_transformers(
    theirs: Any,
    model: Model,
    embeds: Tensor,
    positions: Tensor,
    num_stages: int,
    mode: str,
    sizes: tuple[int, ...],
) -> None:
    runner = make_runner(model, Limits(2, 24), num_stages=num_stages, mode=mode, keep_logits=True)
    batches = prompts(embeds, positions, sizes)
    logits = run(runner.step, runner.params, state_of(model, num_stages, positions), batches)
    check(logits, theirs, embeds, positions)
    if mode != "none":
        assert sum(graph.cache_info().replays for graph in runner.graphs) > 0


def test_gradients_are_those_of_transformers(
    theirs: Any, model: Model, embeds: Tensor, positions: Tensor, tmp_path: Path
) -> None:
    """Gradients of all the text model's parameters and of the image's embeddings, in two stages."""
    ids = torch.tensor(IDS)
    runner = make_runner(model, Limits(2, 24), num_stages=2, mode="none")
    [batch] = prompts(embeds, positions, [17])
    batch = attrs.evolve(batch, targets=torch.tensor([*IDS[1:], 0, *TEXT[1:], 0]))
    kept = torch.tensor([1.0] * 16 + [0] + [1] * 4 + [0])

    def loss(params: Any, embeds: Tensor) -> Tensor:
        embeds_batch = attrs.evolve(
            batch, inputs_embeds=torch.cat([embeds, torch.zeros(len(TEXT), embeds.shape[1])])
        )
        _, out = runner.step(params, state_of(model, 2, positions), embeds_batch)
        return -(out.prompt_logprobs * kept).sum()

    stages, of_embeds = torch.func.grad(loss, argnums=(0, 1))(runner.params, embeds)
    gradients = joined(stages, model.config.tie_word_embeddings)

    copied = copy.deepcopy(theirs)
    leaf_embeds = embeds.clone().requires_grad_()
    for tokens, at, image in (
        (ids, positions, leaf_embeds),
        (torch.tensor(TEXT), torch.arange(5).expand(3, -1), None),
    ):
        inputs = copied.get_input_embeddings()(tokens)
        if image is not None:
            inputs = torch.where((tokens == IMAGE)[:, None], image, inputs)
        hidden = copied.model.language_model(
            inputs_embeds=inputs[None], position_ids=at[:, None]
        ).last_hidden_state[0]
        next_token_loss(copied.lm_head(hidden), tokens.tolist()).backward()
    expected_gradients = gradients_as_params(copied, tmp_path)
    error, where = worst(gradients, expected_gradients)
    print(f"Qwen2VLForConditionalGeneration: greatest relative error {error:.1e}, at {where}")
    assert error < 2e-5
    assert relative(of_embeds, leaf_embeds.grad) < 2e-5


def test_graph_of_a_pipeline(theirs: Any, model: Model, embeds: Tensor, positions: Tensor) -> None:
    layouts = split_layers(3, 2)
    stages = [decoder_stage(model.config, layout, keep_logits=True) for layout in layouts]
    params = tuple(slice_params(model.params, layout) for layout in layouts)
    step = graphify(
        pipeline(stages, advance=advance),
        ladder=make_ladder("full", Limits(2, 24)),
        split_at="weft::paged_attention",
    )
    check(
        run(step, params, state_of(model, 2, positions), prompts(embeds, positions, [17])),
        theirs,
        embeds,
        positions,
    )


@pytest.mark.one_of(9, 3)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("num_stages", "graph"), [(1, "none"), (2, "full_and_piecewise"), (1, "full"), (3, "full")]
)
def test_an_engine_says_what_transformers_says(
    theirs: Any,
    model: Model,
    embeds: Tensor,
    positions: Tensor,
    num_stages: int,
    graph: str,
    drafts: bool,
) -> None:
    """Chunks of at most 6 tokens, next to a text request; twice, so that the second request finds
    pages. A draft model that takes images for text drafts badly, which does not change the results.
    """
    speculation = Speculation(3, model=model) if drafts else None
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=6, max_model_len=32, page_size=4)
    engine = Engine(model, limits, pipeline=num_stages, graph=graph, speculation=speculation)
    prompt = EmbedsPrompt(
        [EMBEDDED if token == IMAGE else token for token in IDS], embeds, positions
    )
    expected_tokens = [
        [int(logits.argmax()) for logits in expected(theirs, *case)]
        for case in ((IDS, embeds, positions), (TEXT, None, None), (IDS, embeds, positions))
    ]
    tokens = {}
    for again in range(2):
        for index, one in enumerate((prompt, TEXT, prompt)):
            engine.add(one, max_tokens=STEPS, id=str(index))
        tokens = {int(output.id): output.track.token_ids for output in engine}
        assert [tokens[index] for index in range(3)] == expected_tokens
        assert engine.stats().prefix_tokens >= 32 * again
    assert (engine.stats().drafted > 0) == drafts


def test_the_oracle_sees_each_part(
    theirs: Any, model: Model, embeds: Tensor, positions: Tensor
) -> None:
    """Logits differ without the delta, with one row of positions for all three, or without the
    batch's positions."""
    find = rope.mrope_positions

    def without_delta(state: State, batch: Batch, resolved: Any) -> Tensor:
        zeros = torch.zeros_like(state.mrope_position_deltas)
        return find(attrs.evolve(state, mrope_position_deltas=zeros), batch, resolved)

    def of_time_alone(state: State, batch: Batch, resolved: Any) -> Tensor:
        return find(state, batch, resolved)[:, :1].repeat(1, 3)

    def in_order(state: State, batch: Batch, resolved: Any) -> Tensor:
        return find(state, attrs.evolve(batch, positions=None), resolved)

    for mutant, right in ((without_delta, 1), (of_time_alone, 0), (in_order, 0)):
        runner = make_runner(model, Limits(2, 24), num_stages=2, mode="none", keep_logits=True)
        with mock.patch.object(decoder, "mrope_positions", mutant):
            logits = run(
                runner.step,
                runner.params,
                state_of(model, 2, positions),
                prompts(embeds, positions, [17]),
            )
        expected_logits = expected(theirs, IDS, embeds, positions)
        near = [
            torch.allclose(ours, one, **TOLERANCE)
            for ours, one in zip(logits[0], expected_logits, strict=True)
        ]
        assert near == [True] * right + [False] * (STEPS - right), mutant.__name__


def test_text_has_ordinary_positions(model: Model) -> None:
    """For a text request mRoPE equals RoPE bitwise, whether its positions are given or not."""
    plain = attrs.evolve(model.config, rope=attrs.evolve(model.config.rope, mrope_section=None))
    (layout,), said = split_layers(3, 1), torch.arange(len(TEXT)).expand(3, -1)
    outs = []
    for config, position_ids in ((plain, None), (model.config, None), (model.config, said)):
        step = compose([decoder_stage(config, layout, keep_logits=True)], advance=advance)
        state = make_state(model, [layout], [32])
        state, first = step(
            (model.params,), state, Batch.ragged([0], [TEXT], positions=position_ids)
        )
        _, second = step((model.params,), state, Batch.decode([0]))
        outs.append((first.logits, second.logits))
    for out in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(out, outs[0], strict=True))


def test_what_travels_is_declared(model: Model) -> None:
    runner = make_runner(model, Limits(2, 24), num_stages=2, mode="none")
    schema = (
        "send to 1 [mb 0]: hidden_states[num_tokens, 32] float32, positions[num_tokens, 3] int64"
    )
    assert schema in str(runner.step)


def test_later_stages_do_not_see_the_batch_s_positions(
    model: Model, embeds: Tensor, positions: Tensor
) -> None:
    runner = make_runner(model, Limits(2, 24), num_stages=2, mode="none")
    inputs: list[tuple[Any, Any]] = []

    def watched(params: Any, state: Any, batch: Batch, x: Any) -> Any:
        inputs.append((batch.positions, batch.inputs_embeds))
        return runner.stages[1](params, state, batch, x)

    for wrap in (compose, pipeline):
        step = wrap([runner.stages[0], watched], advance=advance)
        step(runner.params, state_of(model, 2, positions), next(prompts(embeds, positions, [17])))
    assert inputs == [(None, None)] * 2


def test_what_does_not_fit_is_named(model: Model, embeds: Tensor, positions: Tensor) -> None:
    with pytest.raises(DescriptorError) as caught:
        Batch.ragged([0], [TEXT], positions=positions)
    assert (
        str(caught.value)
        == "Batch.ragged(rows=[0], token_ids=<1 of lengths [5]>)\n  saw: positions of shape [3,"
        " 17], torch.int64, for 5 tokens\n  instead: rows for time, height and width, [3,"
        " num_tokens] int64, as get_rope_index(...)[0][:, 0]"
    )
    with pytest.raises(
        DescriptorError, match=r"positions of shape \[3, 5\], torch.float32, for 5 tokens"
    ):
        Batch.ragged([0], [TEXT], positions=torch.zeros(3, 5))
    runner = make_runner(model, Limits(2, 24), num_stages=2, mode="none")
    state = state_of(model, 2, positions)
    batch = next(prompts(embeds, positions, [17]))
    x = IntermediateTensors(torch.zeros(22, 32))
    with pytest.raises(DescriptorError) as caught:
        runner.stages[1](runner.params[1], state[1], batch, x)
    assert (
        str(caught.value) == "stage 1 of 2(params, state, batch, x)\n"
        "  saw: batch.positions, which the first stage alone takes\n"
        "  instead: batch.after_first(); what the first stage makes of them comes with x"
    )
    for wrong_batch, problem in (
        (
            attrs.evolve(batch, positions=None),
            r"saw: batch\.inputs_embeds, which the first stage alone takes",
        ),
        (batch.after_first(), r"saw: no x\.positions, in a model with mRoPE"),
    ):
        state = state_of(model, 2, positions)
        with pytest.raises(DescriptorError, match=problem):
            runner.stages[1](runner.params[1], state[1], wrong_batch, x)
    plain = attrs.evolve(model.config, rope=attrs.evolve(model.config.rope, mrope_section=None))
    (layout,) = split_layers(3, 1)
    with pytest.raises(DescriptorError) as caught:
        decoder_stage(plain, layout)(
            model.params, make_state(model, [layout], [32, 32])[0], batch, None
        )
    assert (
        str(caught.value)
        == "stage 0 of 1(params, state, batch, x)\n  saw: batch.positions, and a model without"
        " mRoPE (no mrope_section in its rope_parameters)\n  instead: a batch without positions:"
        " a token stands where it does in its request"
    )
