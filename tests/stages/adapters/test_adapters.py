"""`load_adapter` against PEFT: the logits of a model with one adapter, of any targets, ranks and
scalings."""

import copy
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from theirs import CLASSES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams, for_request
from weft.batches.state import State, admit, advance, resolve
from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, RequestError
from weft.ops.products.gate import silu_mul
from weft.stages.adapters.adapter import Adapter
from weft.stages.adapters.slots import reserve_slots, stage_params, with_adapters, write_slot
from weft.stages.config import parse_config
from weft.stages.custom.functions import Normed
from weft.stages.decoder import decoder_stage, feed_forward, project
from weft.stages.layout import empty_states, split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_adapter, random_params
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, lora_rungs, make_ladder
from weft.transforms.pipelines.pipeline import compose
from weft.values.donation import clone

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:The following:RuntimeWarning"
)

# The tolerance of logits relative to the greatest, in float32: weft sums in another order, and
# scales earlier.
TOLERANCE = 1e-5

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"head_dim": 8, **EXPERTS}),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def build(name: str) -> Any:
    """A transformers model with large random values in all weights."""
    architecture, more = MODELS[name]
    config_class, model_class = CLASSES[architecture]
    model = model_class(config_class(**SIZES, **more)).eval()
    if name == "qwen3-moe":  # its grouped product asks for multiples of 16 bytes
        model.set_experts_implementation("eager")
    return randomized(model, 0, 0.25)


def randomized(model: Any, seed: int, std: float) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if seed == 0 or "lora_" in name:
                tensor.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return model


def save_adapter(folder: Path, base: str, seed: int = 1, **fields: Any) -> Any:
    """Have PEFT make an adapter, give it weights, and write it. Returns PEFT's model."""
    peft_model = get_peft_model(
        build(base), LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, **fields})
    )
    randomized(peft_model, seed, 0.3).save_pretrained(folder)
    return peft_model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The saved base models."""
    paths = {}
    for name in MODELS:
        paths[name] = tmp_path_factory.mktemp(name)
        build(name).save_pretrained(paths[name])
    return paths


def empty_state(model: Model, layouts: Any, num_reqs: int = 1) -> tuple[State, ...]:
    sizes = {"max_num_reqs": num_reqs, "num_pages": 4 * num_reqs, "max_pages": 4, "page_size": 4}
    return empty_states(model.config, layouts, **sizes)


def logits(model: Model, adapters: list[Adapter], slot: int, num_stages: int = 1) -> Tensor:
    """The logits [vocab_size] after the prompt, for a request with the adapter in that slot."""
    layouts = split_layers(model.config.num_layers, num_stages)
    step = compose(
        [decoder_stage(model.config, layout, keep_logits=True) for layout in layouts],
        advance=advance,
    )
    greedy = for_request(SamplingParams(temperature=0.0), (), 0)
    states = tuple(
        admit(s, [0], [range(4)], [greedy], [PROMPT], adapters=[slot])
        for s in empty_state(model, layouts)
    )
    batch = Batch.ragged([0], [PROMPT], num_active_loras=int(slot >= 0))
    _, out = step(stage_params(model, layouts, adapters), states, batch)
    assert out.logits is not None
    return out.logits[0]


@torch.no_grad()
def theirs(model: Any) -> Tensor:
    last_logits: Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return last_logits


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert float((actual - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def assert_near_to_peft(actual: Tensor, model: Any) -> None:
    """As near to PEFT's logits in float64 as to other float32 logits, or as PEFT's own in float32:
    a large scaling makes the sums inside much larger than the logits."""
    exact = theirs(copy.deepcopy(model).double())
    error, error_of_peft = (
        float((logits - exact).abs().max()) for logits in (actual, theirs(model))
    )
    assert error <= max(TOLERANCE * float(exact.abs().max()), 4 * error_of_peft)


@st.composite
def lora_fields(draw: st.DrawFn, dense: bool = True) -> dict[str, Any]:
    """Fields of PEFT's LoraConfig: any targets, ranks, scalings and layers. For a model with
    experts, only targets in attention, since PEFT takes the other names for those of experts."""
    names = ALL if dense else ALL[:4]
    whole = [
        r".*\.(1|2)\.self_attn\.[qv]_proj",
        *([r".*mlp\.down_proj", "all-linear"] if dense else []),
    ]
    some = st.lists(st.sampled_from(names), min_size=1, unique=True)
    targets: Any = draw(st.one_of(some, some, st.sampled_from(whole)))
    fields: dict[str, Any] = {
        "target_modules": targets,
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(st.integers(1, 20)),
        "use_rslora": draw(st.booleans()),
        "lora_dropout": 0.1,
    }
    keys = st.sampled_from(["q_proj", "mlp.down_proj", "layers.1.self_attn.o_proj", "v_proj"])
    for name in (
        "rank_pattern",
        "alpha_pattern",
    ):  # the first that matches counts, and PEFT sorts them in the file
        fields[name] = dict(
            sorted(draw(st.dictionaries(keys, st.integers(1, 12), max_size=2)).items())
        )
    if isinstance(targets, list):
        fields["layers_to_transform"] = draw(st.sampled_from([None, [0, 2], 1, [1]]))
        fields["exclude_modules"] = draw(
            st.sampled_from([None, ["layers.2.mlp.up_proj", "k_proj"], r".*\.2\..*"])
        )
    return fields


@pytest.mark.one_of(6, 2)
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_logits_are_those_of_peft(
    name: str,
    data: st.DataObject,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    fields = data.draw(lora_fields(dense=name != "qwen3-moe"))
    num_stages = data.draw(st.integers(1, 3))
    folder = tmp_path_factory.mktemp("adapter")
    try:
        peft_model = save_adapter(folder, name, **fields)
    except ValueError as error:  # PEFT refuses targets if the model has none of them
        assume("arget" not in str(error) and "xclude" not in str(error))
        raise
    model = weft.load(folders[name], "cpu")
    adapter = weft.load_adapter(model, folder)
    actual = logits(model, [adapter], 0, num_stages)
    assert_near_to_peft(actual, peft_model)
    with peft_model.disable_adapter():
        base = theirs(peft_model)
    assert_near(logits(model, [adapter], -1, num_stages), base)
    assert not torch.allclose(actual, base, rtol=1e-3)


def test_of_a_stage_only_its_layers_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(tmp_path, "qwen3", target_modules=ALL)
    whole = weft.load_adapter(weft.load(folders["qwen3"], "cpu"), tmp_path)
    assert (len(whole.deltas), whole.rank) == (21, 4)
    assert repr(whole) == f"<Adapter {str(tmp_path)!r}, 21 layers, rank 4>"
    for index in range(3):
        stage = weft.load(folders["qwen3"], "cpu", stage=(index, 3))
        part = weft.load_adapter(stage, tmp_path)
        assert part.deltas.keys() == {name for name in whole.deltas if f".{index}." in name}
        assert stage_params(stage, [stage.layout], [part])[0].layers[0].lora.qkv is not None


def test_a_slot_is_written_anew_without_a_capture(folders: dict[str, Path], tmp_path: Path) -> None:
    """A graph reads its params in place: a write to them takes effect at the next replay."""
    model = weft.load(folders["qwen3"], "cpu")
    layouts = split_layers(3, 1)
    expected = []
    adapters = []
    for seed, rank in ((1, 4), (2, 2)):
        expected.append(
            theirs(save_adapter(tmp_path / str(seed), "qwen3", seed, target_modules=ALL, r=rank))
        )
        adapters.append(weft.load_adapter(model, tmp_path / str(seed)))
    params = (reserve_slots(model.params, model.config, layouts[0], num_slots=2, rank=4),)
    step = graphify(
        compose([decoder_stage(model.config, layouts[0], keep_logits=True)], advance=advance)
    )
    state = empty_state(model, layouts)
    greedy = for_request(SamplingParams(temperature=0.0), (), 0)
    base = logits(model, [], -1)
    for adapter, expected_logits in (
        (None, base),
        (adapters[0], expected[0]),
        (adapters[1], expected[1]),
        (None, base),
    ):
        write_slot(params[0], model.config, layouts[0], 1, adapter)
        state = tuple(admit(s, [0], [range(4)], [greedy], [PROMPT], adapters=[1]) for s in state)
        state, out = step(params, state, Batch.ragged([0], [PROMPT], num_active_loras=1))
        assert_near(out.logits[0], expected_logits)
    assert step.cache_info().captures == 1


def test_a_slot_refuses_what_does_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    model, (layout,) = weft.load(folders["qwen3"], "cpu"), split_layers(3, 1)
    save_adapter(tmp_path, "qwen3", target_modules=["q_proj", "up_proj"])
    adapter = weft.load_adapter(model, tmp_path)
    for rank, names, slot, problem in (
        (3, None, 0, r"q_proj of rank 4, and slots of rank 3"),
        (
            4,
            {"model.layers.0.self_attn.v_proj"},
            0,
            r"up_proj of rank 4, and slots of model.layers.0.self_attn.q_proj",
        ),
        (4, None, 2, r"2 slots(.|\n)*a slot from 0 to 1"),
        (4, None, -1, r"2 slots"),
    ):
        params = reserve_slots(
            model.params, model.config, layout, num_slots=2, rank=rank, names=names
        )
        with pytest.raises(RequestError, match=problem):
            write_slot(params, model.config, layout, slot, adapter)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, r"peft_type='IA3'(.|\n)*peft_type='LORA'"),
    "bias": ({"bias": "lora_only"}, r"bias='lora_only'(.|\n)*bias='none'; merge"),
    "modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    "dora": ({"use_dora": True}, r"use_dora=True(.|\n)*LoRA without use_dora"),
    "pissa": ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa'"),
    "experts": (
        {"target_parameters": ["mlp.experts.down_proj"]},
        r"target_parameters=\['mlp.experts.down_proj'\]",
    ),
    "new": ({"use_something_new": 3}, r"use_something_new=3"),
    "rank": ({"r": 0}, r"r=0(.|\n)*a whole number, 1 or more"),
    "ranks": ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern.q_proj=-1"),
    "alphas": ({"alpha_pattern": 3}, r"alpha_pattern=3(.|\n)*an object of numbers"),
    "rank by an expression": (
        {"rank_pattern": {".*q_proj": 4}},
        r"rank_pattern\..\*q_proj=4(.|\n)*rank_pattern has names, not regular expressions",
    ),
    "alpha by an expression": ({"alpha_pattern": {"(": 4}}, r"alpha_pattern has names, not"),
    "lists by an expression": (
        {"layers_to_transform": [1], "layers_pattern": [".*"]},
        r"layers_pattern=\['\.\*'\](.|\n)*layers_pattern is a list of names",
    ),
    "lists": ({"layers_to_transform": [1], "layers_pattern": "blocks"}, r"names no layer"),
    "targets": ({"target_modules": 3}, r"target_modules=3(.|\n)*a list of names"),
    "layers": ({"layers_to_transform": ["1"]}, r"layers_to_transform=\['1'\]"),
    "nothing": (
        {"target_modules": ["c_attn"]},
        r"names no layer of the model that can be adapted",
    ),
    "more": (
        {"target_modules": ["q_proj", "v_proj"]},
        r"has no base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight, ",
    ),
    "less": (
        {"layers_to_transform": [1]},
        r"has base_model.model.model.layers.0.self_attn.q_proj.lora_A",
    ),
    "other rank": ({"r": 5}, r"lora_A.weight in .* is F32 \(4, 16\).*\(5, 16\)"),
}


@attrs.frozen
class Saved:
    """An adapter for q_proj alone, and its base model."""

    model: Model
    folder: Path


@pytest.fixture
def saved(folders: dict[str, Path], tmp_path: Path) -> Saved:
    save_adapter(tmp_path, "qwen3", target_modules=["q_proj"])
    return Saved(weft.load(folders["qwen3"], "cpu"), tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, saved: Saved) -> None:
    fields, problem = REFUSED[name]
    file = saved.folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(
        (ConfigError, CheckpointError), match=rf"weft.load_adapter\(<Model Qwen3(.|\n)*{problem}"
    ):
        weft.load_adapter(saved.model, saved.folder)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_expressions_are_not_read_and_the_file_says_which_layers(field: str, saved: Saved) -> None:
    """Python's `re` would be busy with this one for years."""
    file = saved.folder / "adapter_config.json"
    raw = json.loads(file.read_text())
    expected = weft.load_adapter(saved.model, saved.folder)
    file.write_text(json.dumps(raw | {field: r"(\w|\w\w|\.)+!"}))
    adapter = weft.load_adapter(saved.model, saved.folder)
    assert adapter.deltas.keys() == expected.deltas.keys()
    tensors = load_file(saved.folder / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, saved.folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no .*layers.0.self_attn.q_proj.lora_B"):
        weft.load_adapter(saved.model, saved.folder)


def test_an_adapter_of_no_layer_is_refused(saved: Saved) -> None:
    file = saved.folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["c_attn"]}))
    save_file({}, saved.folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="names no layer of the model"):
        weft.load_adapter(saved.model, saved.folder)


def test_files_that_are_missing_or_damaged(saved: Saved) -> None:
    weights = saved.folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    for changed, problem in (
        (
            {name: tensors[name].T.contiguous()},
            r"lora_B.weight in .* is F32 \(4, 32\).*\(32, 4\) of F16",
        ),
        ({name: tensors[name].int()}, r"lora_B.weight in .* is I32"),
        (
            {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 16)},
            r"has base_model.model.lm_head",
        ),
        (
            {name.replace("_B.weight", "_magnitude_vector"): torch.ones(4)},
            r"lora_magnitude_vector, and no field",
        ),
    ):
        save_file(tensors | changed, weights)
        with pytest.raises(CheckpointError, match=problem):
            weft.load_adapter(saved.model, saved.folder)
    weights.write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors .20 bytes. is damaged"):
        weft.load_adapter(saved.model, saved.folder)
    weights.rename(saved.folder / "adapter_model.bin")
    with pytest.raises(
        CheckpointNotFoundError, match=r"but adapter_model.bin(.|\n)*as safetensors"
    ):
        weft.load_adapter(saved.model, saved.folder)
    with pytest.raises(
        CheckpointNotFoundError, match=r"there is no folder '.*nowhere'(.|\n)*a local folder"
    ):
        weft.load_adapter(saved.model, saved.folder / "nowhere")


class _Names(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_graphs_differ_by_the_number_of_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    """A batch with 3 adapters runs under the class of 4; one without any, under a class without
    LoRA operators."""
    model = weft.load(folders["qwen3"], "cpu")
    layouts = split_layers(3, 1)
    adapters = []
    for seed in range(5):
        save_adapter(tmp_path / str(seed), "qwen3", seed + 1, target_modules=ALL)
        adapters.append(weft.load_adapter(model, tmp_path / str(seed)))
    params = stage_params(model, layouts, adapters)
    plain = compose([decoder_stage(model.config, layouts[0], keep_logits=True)], advance=advance)
    greedy = for_request(SamplingParams(temperature=0.0), (), 0)

    slots = [0, 1, 2, 3, 4, -1]
    pages = [range(4 * i, 4 * i + 4) for i in range(6)]
    state = tuple(
        admit(s, range(6), pages, [greedy] * 6, [[i] for i in range(6)], adapters=slots)
        for s in empty_state(model, layouts, 6)
    )
    ladder = make_ladder("full_decode_only", Limits(8, 8, active_loras=lora_rungs(5)), sizes=[8])
    step = graphify(plain, ladder=ladder)
    for rows in ([5], [0], [0, 5], [2, 1], [2, 5, 3, 1], [0, 1, 2, 3, 4, 5]):
        loras = len([row for row in rows if slots[row] >= 0])
        batch = Batch.decode(rows, num_active_loras=loras)
        decision = step.explain(params, state, batch).decision
        assert decision.descriptor.num_active_loras == (0, 1, 2, 4, 4, 5)[loras]
        before = clone(state)
        state, replayed = step(params, state, batch)
        with _Names() as operators:
            plain(params, clone(before), batch)
        assert operators.names.count("weft::add_lora") == (3 * 4 if loras else 0)
        for row, row_logits in zip(rows, replayed.logits, strict=True):
            _, out = plain(
                params, clone(before), Batch.decode([row], num_active_loras=int(slots[row] >= 0))
            )
            assert_near(row_logits, out.logits[0])
    assert step.cache_info().captures == 4 + 1  # of 0, 1, 2, 4 and 5


def test_layers_in_fp8_have_plain_adapters() -> None:
    """An adapter of a feed-forward block whose matrices start at multiples of 128 rows, with gaps
    and extra columns."""
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "quantization_config": quantization,
        "head_dim": 8,
        **SIZES,
    }
    config = parse_config(
        {**raw, "intermediate_size": 130, "num_hidden_layers": 1}, source="a test"
    )
    (layout,) = split_layers(1, 1)
    names = [f"model.layers.0.mlp.{name}" for name in ALL[4:]]
    adapter = random_adapter(config, names, rank=3, seed=5, std=0.3)
    params = with_adapters(
        random_params(config, layout, seed=3, std=0.3), config, layout, [adapter]
    )
    layer = params.layers[0]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    assert (layer.down_scale is not None, layer.gate_up_proj.shape, layer.down_proj.shape) == (
        True,
        (512, 16),
        (16, 256),
    )

    def added(name: str, x: Tensor) -> Tensor:
        a, b = adapter.deltas[f"model.layers.0.mlp.{name}"]
        return x @ a.T @ b.T

    gate_up = project(Normed(x), layer.gate_up_proj, layer.gate_up_scale, None)
    for start, name, row_indices in ((0, "gate_proj", [0, 1, 3]), (256, "up_proj", [0, 1, 3])):
        gate_up[row_indices, start : start + 130] += added(name, x[row_indices])
    inner = silu_mul(gate_up, x.dtype)
    expected = project(Normed(inner), layer.down_proj, layer.down_scale, None)
    expected[[0, 1, 3]] += added("down_proj", inner[[0, 1, 3], :130])
    batch = resolve(
        empty_state(Model(config, params, None, Path()), (layout,))[0], Batch.ragged([0], [[1] * 4])
    )
    slots = torch.tensor([0, 0, -1, 0]).int()
    active = torch.tensor([0, -1]).int()
    output = feed_forward(
        config, layer, attrs.evolve(batch, adapters=slots, active_adapters=active), Normed(x)
    )
    assert torch.allclose(output, expected, atol=1e-5, rtol=1e-5)
