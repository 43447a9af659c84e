"""A KV cache in FP8: the tokens of a model whose keys and values are rounded, in half the memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.errors import DerivativeError, ProgramError, RequestError
from weft.ops.attention.backends import BACKENDS, AttentionBackend
from weft.ops.rotary import rotate_and_keep
from weft.stages import decoder
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.layout import split_layers
from weft.stages.model import Model, model_facts
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.setup import make_state

FP8 = torch.float8_e4m3fn
PROMPTS = ["The function returns a list of", "A list is", "In Python, "]


@pytest.fixture(scope="module")
def plain() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32", kv_dtype="float8_e4m3fn")


def tokens(model: Model, **options: Any) -> list[list[int]]:
    return [c.token_ids for c in generate(model, PROMPTS, max_tokens=16, **options)]


def rounded(*args: Any) -> tuple[Tensor, Tensor]:
    """`rotate_and_keep` for a cache in float32, whose values are then those that FP8 has."""
    q, pages = rotate_and_keep(*args)
    pages.copy_(pages.clamp(-448, 448).to(FP8).float())
    return q, pages


@pytest.fixture(scope="module")
def expected(plain: Model) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "rotate_and_keep", rounded)
        return tokens(plain, graph="none")


WAYS: list[dict[str, Any]] = [
    {"graph": "none"},
    {"graph": "full"},
    {"graph": "full_and_piecewise", "pipeline": 2},
    {"speculation": Speculation(2)},
]


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_tokens_are_those_of_rounded_keys_and_values(
    model: Model, plain: Model, expected: list[list[int]], options: dict[str, Any]
) -> None:
    assert tokens(model, **options) == expected
    assert expected != tokens(plain), "rounding shows"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_on_a_gpu(expected: list[list[int]], name: str, options: dict[str, Any]) -> None:
    on_gpu = load(DEMO, "cuda", "float32", attention=name, kv_dtype=FP8)
    assert tokens(on_gpu, **{**options, "pipeline": 1}) == expected


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_back_ends_read_it(expected: list[list[int]], name: str) -> None:
    assert tokens(load(DEMO, "cpu", "float32", attention=name, kv_dtype=FP8)) == expected


def test_pages_are_shared_and_preempted_requests_go_on(
    model: Model, expected: list[list[int]]
) -> None:
    limits = EngineLimits(
        max_num_reqs=3, max_num_tokens=7, num_pages=14, max_model_len=56, page_size=4
    )
    engine = Engine(model, limits)
    tokens = dict[str, list[int]]()
    for index, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        engine.add(
            prompt, SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=16, id=f"{index}"
        )
    for output in engine:
        tokens.setdefault(output.id, []).extend(output.token_ids)
    assert [tokens[f"{index}"] for index in range(4)] == [*expected, expected[0]]
    assert engine.stats().preempted > 0


def test_it_takes_half_the_memory(model: Model, plain: Model) -> None:
    layouts = split_layers(model.config.num_layers, 1)
    kept, whole = (
        make_state(variant, layouts, lengths=[9])[0].kv_pages for variant in (model, plain)
    )
    assert (kept.dtype, kept.shape) == (FP8, whole.shape)
    assert 4 * kept.nbytes == whole.nbytes
    assert model_facts(model)["kv_dtype"] != model_facts(plain)["kv_dtype"]


def test_what_cannot_have_it_is_refused(model: Model) -> None:
    with pytest.raises(RequestError, match=r"kv_dtype='int8'(.|\n)*float8_e4m3fn, or None"):
        load(DEMO, "cpu", kv_dtype="int8")
    mine = AttentionBackend("mine", BACKENDS["torch"].attend)
    with pytest.raises(ProgramError, match=r"'mine', which reads no cache in torch\.float8_e4m3fn"):
        model.with_stages(attend=mine)
    qkv = torch.zeros(1, 3 * 8, requires_grad=True)
    pages = torch.zeros(2, 1, 4, 1, 8).to(FP8)
    with pytest.raises(DerivativeError, match="rounded to FP8"):
        rotate_and_keep(
            qkv,
            None,
            None,
            1e-6,
            torch.ones(1, 4),
            torch.ones(1, 4),
            torch.tensor([0]),
            pages,
            1,
            (8, 16),
        )
