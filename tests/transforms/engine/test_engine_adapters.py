"""`Engine(adapters=...)`: each request's tokens are those of `peft` with its adapter, in any
company."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

import weft
from weft.errors import RequestError
from weft.stages.adapters.adapter import Adapter
from weft.stages.model import Model
from weft.transforms.cli.main import main
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.graphs.ladder import MODES

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "r": 4,
        "lora_alpha": 8,
    },
    "all": {"target_modules": "all-linear", "r": 7, "lora_alpha": 4, "use_rslora": True},
    "some": {
        "target_modules": ["v_proj", "down_proj"],
        "r": 2,
        "lora_alpha": 6,
        "layers_to_transform": [0, 2],
    },
}
NAMES = (None, "attention", "all", "attention", None, "some", "all")
PROMPTS = [[7, 3, 9, 1, 4, 4, 2, 8, 5][: 2 + index] for index in range(len(NAMES))]
MAX_TOKENS = 6


def randomize(model: Any, part: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if part in name:
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, and its adapters in subfolders."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": None,
    }
    path = tmp_path_factory.mktemp("model")
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    randomize(model, "", 0)
    model.save_pretrained(path)
    for seed, (name, fields) in enumerate(ADAPTERS.items(), 1):
        adapted = get_peft_model(
            Qwen3ForCausalLM.from_pretrained(path), LoraConfig(task_type="CAUSAL_LM", **fields)
        )
        randomize(adapted, "lora_", seed)
        adapted.save_pretrained(path / name)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """peft's greedy tokens for each prompt, alone, with its adapter."""
    completions = []
    for name, prompt in zip(NAMES, PROMPTS, strict=True):
        model = Qwen3ForCausalLM.from_pretrained(folder).eval()
        if name is not None:
            model = PeftModel.from_pretrained(model, folder / name).eval()
        output_ids = model.generate(
            input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS
        )
        completions.append(output_ids[0, len(prompt) :].tolist())
    return completions


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return weft.load(folder, "cpu")


@pytest.fixture(scope="module")
def adapters(model: Model, folder: Path) -> dict[str, Adapter]:
    return {name: weft.load_adapter(model, folder / name) for name in ADAPTERS}


def serve(engine: Engine, names: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of requests that are all added at the beginning."""
    ids = [
        engine.add(p, max_tokens=MAX_TOKENS, adapter=n) for n, p in zip(names, prompts, strict=True)
    ]
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    for output in engine:
        tokens[output.id] += output.token_ids
    return [tokens[name] for name in ids]


@pytest.mark.one_of(12, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_tokens_are_those_of_peft(
    model: Model, adapters: dict[str, Adapter], expected: list[list[int]], pipeline: int, mode: str
) -> None:
    """Prompts of 2 to 8 tokens in chunks of at most 4, in four rows, with three adapters and
    without one, all mixed."""
    limits = EngineLimits(
        max_num_reqs=4, max_num_tokens=4, max_model_len=32, page_size=4, mixed=pipeline == 2
    )
    engine = Engine(model, limits, pipeline=pipeline, graph=mode, adapters=adapters)
    assert serve(engine, NAMES, PROMPTS) == expected


def test_pages_are_shared_by_requests_of_one_adapter_alone(
    model: Model, adapters: dict[str, Adapter], expected: list[list[int]]
) -> None:
    limits = EngineLimits(max_num_reqs=1, max_num_tokens=16, max_model_len=32, page_size=2)
    engine = Engine(model, limits, graph="none", adapters=adapters)
    prompt = [7, 3, 9, 1, 4, 4, 2]
    served = serve(engine, ["all", None, "some", "all", None], [prompt] * 5)
    alone = [
        serve(Engine(model, limits, graph="none", adapters=adapters), [n], [prompt])[0]
        for n in ("all", None)
    ]
    assert [served[0], served[1], served[3], served[4]] == [*alone, *alone]
    assert served[0] != served[1] != served[2] != served[0]
    # The first three compute 7 tokens of the prompt, the others the last one, after three shared
    # pages.
    assert engine.stats().tokens == 3 * 7 + 2 * 1 + 5 * (MAX_TOKENS - 1)


def test_an_unknown_adapter_is_refused(model: Model, adapters: dict[str, Adapter]) -> None:
    with pytest.raises(
        RequestError, match=r"adapter='other'(.|\n)*one of the engine's: 'attention', 'all', 'some'"
    ):
        Engine(model, adapters=adapters, graph="none").add([1], max_tokens=1, adapter="other")
    with pytest.raises(RequestError, match=r"Engine\(..., adapters=\{name: weft.load_adapter"):
        Engine(model, graph="none").add([1], max_tokens=1, adapter="other")


def test_generate_takes_one_for_all_or_one_a_prompt(
    model: Model, adapters: dict[str, Adapter], expected: list[list[int]]
) -> None:
    each = [None if name is None else adapters[name] for name in NAMES]
    completed = weft.generate(model, PROMPTS, max_tokens=MAX_TOKENS, adapter=each)
    assert [completion.token_ids for completion in completed] == expected
    [same] = weft.generate(
        model, PROMPTS[1:2], max_tokens=MAX_TOKENS, adapter=adapters["attention"], pipeline=2
    )
    assert same.token_ids == expected[1]


@pytest.mark.parametrize("stages", ["1", "2"])
def test_the_command_takes_one(
    folder: Path, expected: list[list[int]], capsys: pytest.CaptureFixture[str], stages: str
) -> None:
    prompt = ",".join(map(str, PROMPTS[2]))
    options = [
        "--prompt-ids",
        prompt,
        "--max-tokens",
        str(MAX_TOKENS),
        "--pp",
        stages,
        "--device",
        "cpu",
        "--json",
    ]
    assert (
        main(["generate", "--model", str(folder), "--adapter", str(folder / "all"), *options]) == 0
    )
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected[2]


@pytest.mark.parametrize("wrong", ["attention", ["attention"], [None], 3], ids=str)
def test_generate_refuses_what_is_no_adapter(model: Model, wrong: Any) -> None:
    with pytest.raises(
        RequestError, match=r"adapter=(.|\n)*weft.load_adapter\(model, folder\), or a list of 2"
    ):
        weft.generate(model, [[1], [2]], max_tokens=1, adapter=wrong)


def test_a_row_goes_to_a_request_of_another_adapter(
    model: Model, adapters: dict[str, Adapter], expected: list[list[int]]
) -> None:
    """With one row: a decode's cached batch is not reused for another number of adapters."""
    limits = EngineLimits(max_num_reqs=1, max_num_tokens=16, max_model_len=32, page_size=4)
    engine = Engine(model, limits, graph="none", adapters=adapters)
    assert serve(engine, NAMES, PROMPTS) == expected


@pytest.mark.one_of(2)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_graphs_of_all_numbers_of_adapters_are_captured_before(
    model: Model, adapters: dict[str, Adapter], expected: list[list[int]], pipeline: int
) -> None:
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=8, max_model_len=32, page_size=4)
    engine = Engine(model, limits, pipeline=pipeline, graph="full_and_piecewise", adapters=adapters)
    before = engine.warm_up()
    assert serve(engine, NAMES, PROMPTS) == expected
    after = engine.stats()
    assert before.captures == after.captures > 0
    assert after.eager == before.eager
    assert "none" not in after.modes
