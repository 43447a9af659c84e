"""Bad input through the Python API: what each error is and says, and that nothing half done is left behind.

`tests/stages/test_checkpoint.py` and `test_config.py` hold the whole list of what a checkpoint can have wrong; here is
what a user of `weft.load` sees.
"""

import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import weft
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.donation import clone, donates
from weft.errors import (
    CaptureError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    DescriptorError,
    DeviceError,
    DonatedError,
    ProgramError,
    RequestError,
    WeftError,
)
from weft.proofs.laws import assert_equal
from weft.stages.config import parse_config
from weft.stages.decoder import decoder_stage
from weft.stages.layout import split_layers
from weft.stages.model import DEMO, Model
from weft.stages.module import from_module
from weft.stages.params import slice_params
from weft.stages.random_weights import random_params
from weft.state import advance
from weft.transforms.graphify import graphify
from weft.transforms.ladder import Limits, make_ladder
from weft.transforms.memo import CacheInfo
from weft.transforms.microbatch import microbatch
from weft.transforms.pipeline import compose, pipeline
from weft.transforms.runner import make_runner, make_state

ANY = "<any>"
REMEDY = "compute it with tensor operations (torch.where), pass it as a static argument, or move it out of the function"
USE_THE_NEW = "use the value that it returned, or pass a copy (weft.clone) to keep the old one"
BELONG = "check that config.json and the weights belong together"


@contextmanager
def refused(kind: type[WeftError], call: str, seen: str, instead: str) -> Iterator[None]:
    """The body raises exactly `kind`, of this text; `<any>` stands for anything on one line."""
    with pytest.raises(WeftError) as caught:
        yield
    assert type(caught.value) is kind
    wanted, seen_text = f"{call}\n  saw: {seen}\n  instead: {instead}", str(caught.value)
    if not re.fullmatch(re.escape(wanted).replace(re.escape(ANY), ".*"), seen_text):
        pytest.fail(f"the error says\n{seen_text}\nand not\n{wanted}", pytrace=False)


# weft.load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, to be damaged."""
    return Path(shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


UP = "model.layers.3.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], type[WeftError], str, str]] = {
    "no folder": (
        shutil.rmtree,
        CheckpointNotFoundError,
        "there is no folder '<any>'",
        "pass a local folder; `hf download <name> --local-dir <folder>` makes one",
    ),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        CheckpointNotFoundError,
        "'<any>' has no config.json",
        "pass a folder that save_pretrained wrote, or that `hf download` filled",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        CheckpointNotFoundError,
        "'<any>' has no model.safetensors and no model.safetensors.index.json",
        "pass a folder that save_pretrained wrote",
    ),
    "truncated weights": (
        lambda f: truncate(f, 100_000),
        CheckpointError,
        "model.safetensors (100000 bytes) is damaged: <any>",
        "copy model.safetensors again from where it came from",
    ),
    "empty weights": (
        lambda f: truncate(f, 0),
        CheckpointError,
        "model.safetensors (0 bytes) is damaged: <any>",
        "copy model.safetensors again from where it came from",
    ),
    "a missing tensor": (
        lambda f: change_tensors(f, lambda tensors: tensors.pop(UP)),
        CheckpointError,
        f"the checkpoint has no {UP}",
        BELONG,
    ),
    "a wrong shape": (
        lambda f: change_tensors(f, lambda tensors: tensors.update({UP: tensors[UP][:7].clone()})),
        CheckpointError,
        f"{UP} in model.safetensors is (7, 128), and config.json makes it (280, 128)",
        BELONG,
    ),
    "an unknown architecture": (
        lambda f: change_config(f, architectures=["GPT2LMHeadModel"]),
        ConfigError,
        "config.json has architectures=['GPT2LMHeadModel']",
        "weft supports the architectures LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, "
        "Qwen2VLForConditionalGeneration",
    ),
    "an unknown field": (
        lambda f: change_config(f, logit_softcap=30.0),
        ConfigError,
        "config.json has logit_softcap=30.0",
        "weft does not know what logit_softcap does to Qwen3ForCausalLM; remove it if it does nothing",
    ),
    "a damaged config": (
        lambda f: (f / "config.json").write_text("{"),
        ConfigError,
        "config.json is not JSON: <any>",
        "copy config.json again from where the checkpoint came from",
    ),
    "a damaged tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        CheckpointError,
        "<any>tokenizer.json cannot be read: <any>",
        "save it again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_loads_once_it_is_whole(damage: str, folder: Path) -> None:
    spoil, kind, seen, instead = DAMAGES[damage]
    spoil(folder)
    with refused(kind, f"<any>{folder}<any>", seen, instead):
        weft.load(folder, "cpu")
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    assert_equal("the checkpoint made whole", weft.load(folder, "cpu").params, weft.load(DEMO, "cpu").params)


def test_a_missing_checkpoint_is_a_missing_file_and_a_damaged_one_a_bad_value(folder: Path) -> None:
    """Who catches the builtin exceptions catches ours."""
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        weft.load(folder / "none")
    truncate(folder, 10)
    with pytest.raises(ValueError, match="is damaged"):
        weft.load(folder)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1)])
def test_cuda_where_there_is_none(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call = f"weft.load({str(DEMO)!r}, device={device!r}, dtype=None)"
    seen = f"device {str(device)!r}, but torch sees 0 CUDA devices"
    with refused(DeviceError, call, seen, "'cpu', or leave it out"):
        weft.load(DEMO, device=device)
    assert weft.load(DEMO).device.type == "cpu"


def test_devices_and_dtypes_that_do_not_exist() -> None:
    call = f"weft.load({str(DEMO)!r}, device='gpu', dtype=None)"
    with refused(DeviceError, call, "device 'gpu', which torch does not know", "'cpu', 'cuda' or 'cuda:N'"):
        weft.load(DEMO, device="gpu")
    for dtype in ("float64", "int8", torch.int8, "f32"):
        call = f"weft.load({str(DEMO)!r}, device='cpu', dtype={dtype!r})"
        with refused(RequestError, call, f"dtype {dtype!r}", "one of float32, bfloat16, float16"):
            weft.load(DEMO, device="cpu", dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_devices_that_weft_has_no_kernels_for(device: str) -> None:
    with pytest.raises(DeviceError, match=device):
        weft.load(DEMO, device=device)


def test_a_dtype_that_no_decoder_computes_in_is_refused_when_it_is_loaded(folder: Path) -> None:
    """Not at the first step: attention has no float64."""
    change_config(folder, dtype="float64")
    with pytest.raises(WeftError, match="float64"):
        weft.load(folder, "cpu")
    assert weft.load(folder, "cpu", "float32").dtype == torch.float32


# weft.generate


@pytest.fixture(scope="module")
def demo() -> Model:
    return weft.load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def usual(demo: Model) -> tuple[list[weft.Completion], Any]:
    """What the demo says, and its weights, before anything went wrong."""
    return weft.generate(demo, ["The function"], max_tokens=2), clone(demo.params)


def assert_unharmed(demo: Model, usual: tuple[list[weft.Completion], Any]) -> None:
    completions, params = usual
    assert_equal("the weights after an error", demo.params, params)
    assert weft.generate(demo, ["The function"], max_tokens=2) == completions
    assert torch.is_grad_enabled()


LISTS = "pass a list of prompts, each a string or a list of token ids"
IDS = "token ids are ints from 0 to 256"
GO_ON = "give at least one token to go on from"
FINITE = "a finite number >= 0; 0 is greedy"
MODES = "one of none, piecewise, full_decode_only, full, full_and_piecewise"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an empty text": ({"prompts": ["An", ""]}, "prompt 1 is empty ('')", GO_ON),
    "an empty list of ids": ({"prompts": [[65], [66], []]}, "prompt 2 is empty ([])", GO_ON),
    "no prompts": ({"prompts": []}, "prompts=[]", LISTS),
    "a text, not a list": ({"prompts": "An"}, "prompts='An'", LISTS),
    "ids, not a list of them": ({"prompts": [65, 66]}, "prompts=[65, 66]", LISTS),
    "an id beyond the vocabulary": ({"prompts": [[65, 257]]}, "prompt 0 holds 257", IDS),
    "a negative id": ({"prompts": [[65], [-1]]}, "prompt 1 holds -1", IDS),
    "a float for an id": ({"prompts": [[65.0]]}, "prompt 0 holds 65.0", IDS),
    "a bool for an id": ({"prompts": [[True]]}, "prompt 0 holds True", IDS),
    "too many ids": (
        {"prompts": [[65], [65] * 512]},
        "prompt 1 has 512 tokens; the model's limit is 512, one of them to be generated",
        "shorten it to 511 tokens",
    ),
    "too long a text": (
        {"prompts": ["x" * 600]},
        "prompt 0 has 600 tokens; the model's limit is 512, one of them to be generated",
        "shorten it to 511 tokens",
    ),
    "no tokens": ({"max_tokens": 0}, "max_tokens=0", "a whole number >= 1"),
    "a fraction of tokens": ({"max_tokens": 1.5}, "max_tokens=1.5", "a whole number >= 1"),
    "a negative temperature": ({"temperature": -0.5}, "temperature=-0.5", FINITE),
    "an infinite temperature": ({"temperature": float("inf")}, "temperature=inf", FINITE),
    "no number for a temperature": ({"temperature": float("nan")}, "temperature=nan", FINITE),
    "the name of a transport": (
        {"transport": "threads"},
        "transport='threads'",
        "Local(), Threads() or Distributed(), of weft.transforms",
    ),
    "an unknown mode": ({"graph": "fast"}, "graph='fast'", MODES),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_generate_refuses(case: str, demo: Model, usual: tuple[list[weft.Completion], Any]) -> None:
    changes, seen, instead = REFUSED[case]
    options: dict[str, Any] = {"prompts": ["An"], "max_tokens": 3, "temperature": 0.0, **changes}
    numbers = f"max_tokens={options['max_tokens']}, temperature={options['temperature']}"
    call = f"weft.generate(model, prompts, {numbers}, pipeline=1)"
    with refused(RequestError, call, seen, instead):
        weft.generate(demo, **options)
    assert_unharmed(demo, usual)


@pytest.mark.parametrize("stages", [7, 0, -1])
def test_more_pipeline_stages_than_layers(stages: int, demo: Model, usual: tuple[list[weft.Completion], Any]) -> None:
    call = f"weft.generate(model, prompts, max_tokens=3, temperature=0.0, pipeline={stages})"
    seen = f"pipeline={stages}; the model has 6 layers"
    with refused(RequestError, call, seen, "from 1 stage to one a layer"):
        weft.generate(demo, ["An"], max_tokens=3, pipeline=stages)
    assert_unharmed(demo, usual)


def test_more_stages_than_layers_in_a_split_by_hand() -> None:
    instead = "use 1 to 6 stages, so that each owns a layer"
    with refused(ProgramError, "split_layers(6, 7)", "6 layers for 7 stages", instead):
        split_layers(6, 7)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "1"}, "temperature='1'"),
    ({"temperature": None}, "temperature=None"),
    ({"temperature": 1e39}, "temperature=1e\\+39"),
    ({"seed": 1.5}, "1\\.5"),
    ({"seed": "3"}, "'3'"),
    ({"pipeline": 1.5}, "1\\.5"),
    ({"pipeline": "2"}, "'2'"),
    ({"prompts": None}, "None"),
    ({"prompts": [None]}, "None"),
    ({"prompts": ["An", 65]}, "65"),
    ({"prompts": [b"An"]}, "b'An'"),
    ({"prompts": torch.tensor([[65, 66]])}, "prompt"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG_TYPES, ids=[str(changes) for changes, _ in WRONG_TYPES])
def test_arguments_of_a_wrong_type_or_size_are_named(changes: dict[str, Any], text: str, demo: Model) -> None:
    """Never cut to what fits, and never an error from somewhere below."""
    options: dict[str, Any] = {"prompts": ["An"], "max_tokens": 1, "temperature": 1.0, "graph": "none", **changes}
    with pytest.raises(WeftError, match=text):
        weft.generate(demo, **options)


def test_a_text_for_a_checkpoint_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    model = weft.load(folder, "cpu")
    with refused(RequestError, "model.encode('An')", f"{folder} holds no tokenizer.json", "pass token ids"):
        weft.generate(model, ["An"], max_tokens=1)
    [made] = weft.generate(model, [[65, 110]], max_tokens=2)
    assert made.text is None
    assert len(made.token_ids) == 2


# graphify: a data-dependent branch, and .item(); `test_graphify.py` has the table of all that is refused


def at(fn: Callable[..., Any], text: str) -> str:
    """The line of `fn` that holds `text`, as errors print it."""
    lines, first = inspect.getsourcelines(fn)
    index = next(i for i, line in enumerate(lines) if text in line)
    return f"\n       at {__file__}:{first + index}: {lines[index].strip()}"


def branches(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        return y
    return -y


def loops(x: Tensor) -> Tensor:
    while (x < 100).all():
        x = x * 2
    return x


def reads_an_item(x: Tensor) -> Tensor:
    scale = x.max().item()
    return x * scale


def asks_a_helper(x: Tensor) -> Tensor:
    return branches(x + 1)


UNFIT: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (branches, "a branch on a tensor's value", at(branches, "if y.sum()")),
    (loops, "a branch on a tensor's value", at(loops, "while")),
    (reads_an_item, "Tensor.item reads a tensor on the host", at(reads_an_item, ".item()")),
    (asks_a_helper, "a branch on a tensor's value", at(branches, "if y.sum()")),
]


@pytest.mark.parametrize(("fn", "seen", "line"), UNFIT, ids=[fn.__name__ for fn, *_ in UNFIT])
def test_a_function_that_cannot_be_captured_names_its_line(
    fn: Callable[[Tensor], Tensor], seen: str, line: str
) -> None:
    """The innermost line of the user's own; and nothing is kept, so that a second call says it again."""
    x, graph = torch.tensor([1.0, 2.0]), graphify(fn)
    for _ in range(2):
        with refused(CaptureError, f"graphify({fn.__name__})", seen + line, REMEDY):
            graph(x)
    assert graph.cache_info() == CacheInfo()
    assert x.tolist() == [1.0, 2.0]
    assert bool(x.sum() == 3), "outside a capture the host may read again"


class Gate(nn.Module):
    """A module that branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:
            return y
        return x


def test_a_modules_line_is_named() -> None:
    """Of a stage alone, of a whole step, and of a stage in a pipeline."""
    made, batch = from_module(Gate()), torch.ones(1, 2)
    whole, spanned = graphify(compose([made.stage])), pipeline([graphify(made.stage)])
    seen = "a branch on a tensor's value" + at(Gate.forward, "if y.sum()")
    with refused(CaptureError, "graphify(stage Gate)", seen, REMEDY):
        graphify(made.stage)(made.params, made.state, batch, None)
    with refused(CaptureError, "graphify(step)", seen, REMEDY):
        whole((made.params,), (made.state,), batch)
    with refused(CaptureError, "graphify(stage Gate)", seen, REMEDY):
        spanned((made.params,), (made.state,), batch)


# graphify: what a failed capture leaves


class Flaw:
    """A step over {"sum": …, "steps": …} that works in place and, while `kind` is set, fails once it has begun."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def step(self, params: Tensor, state: dict[str, Tensor], batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state["sum"].add_(batch.sum(0))
        state["steps"].add_(1)
        y = batch @ params
        if self.kind == "item":
            y = y * state["sum"].sum().item()
        if self.kind == "branch" and (y > 0).any():
            y = -y
        if self.kind == "own":
            raise KeyError("the user's own error")
        if self.kind == "write":
            params.zero_()
        return state, y


@pytest.mark.parametrize("call", ["call", "capture"])
@pytest.mark.parametrize(
    ("kind", "error"),
    [("item", CaptureError), ("branch", CaptureError), ("write", CaptureError), ("own", KeyError)],
)
def test_a_failed_capture_leaves_the_state_and_the_next_call_works(
    kind: str, error: type[Exception], call: str
) -> None:
    flaw, params, batch = Flaw(kind), torch.randn(2, 3), torch.randn(4, 2)
    state = {"sum": torch.randn(2), "steps": torch.tensor(7)}
    before = clone((params, state, batch))
    graph = graphify(flaw.step, donate_argnames=["state"])
    with pytest.raises(error):
        (graph if call == "call" else graph.capture)(params, state, batch)
    assert_equal("after a failed capture", (params, state, batch), before)
    assert graph.cache_info() == CacheInfo()

    flaw.kind = None
    expected, wanted = Flaw(None).step(params, clone(state), batch)
    state, y = graph(params, state, batch)
    assert_equal("after the next call", (state, y), (expected, wanted))
    assert graph.cache_info() == CacheInfo(captures=1, replays=1, currsize=1)


def test_a_failed_capture_harms_no_graph_captured_before() -> None:
    flaw, params = Flaw(None), torch.randn(2, 3)
    state = {"sum": torch.zeros(2), "steps": torch.tensor(0)}
    graph = graphify(flaw.step, donate_argnames=["state"])
    state, _ = graph(params, state, torch.ones(4, 2))
    flaw.kind = "item"
    with pytest.raises(CaptureError):
        graph(params, state, torch.ones(5, 2))
    state, y = graph(params, state, torch.ones(4, 2))
    assert torch.equal(y, torch.ones(4, 2) @ params)
    assert (state["sum"].tolist(), int(state["steps"])) == ([8.0, 8.0], 2)
    assert graph.cache_info() == CacheInfo(captures=1, replays=2, currsize=1)


# A decoder of two layers: donation, and failures of one of its stages


@pytest.fixture(scope="module")
def tiny() -> Model:
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    config = parse_config(fields, source="a test")
    params = random_params(config, split_layers(2, 1)[0], seed=0, dtype=torch.float32, std=0.3)
    return Model(config, params, None, Path("nowhere"))


LADDER = make_ladder("full", Limits(2, 64))
WIDE = (BatchDescriptor(8, 3),)


class Decoder:
    """The tiny model over so many stages: its parameters, fresh states, and its stages, which can be made to fail."""

    def __init__(self, model: Model, num_stages: int) -> None:
        self.model, self.layouts = model, split_layers(2, num_stages)
        self.params = tuple(slice_params(model.params, layout) for layout in self.layouts)
        self.stages = [decoder_stage(model.config, layout) for layout in self.layouts]
        self.broken = False

    def state(self) -> Any:
        return make_state(self.model, self.layouts, [20, 20])

    def failing_last(self) -> list[Callable[..., Any]]:
        """The stages, the last of which branches on its result while `broken`."""
        last = self.stages[-1]

        @donates("state")
        def failing(params: Any, state: Any, batch: Batch, x: Any) -> Any:
            state, out = last(params, state, batch, x)
            if self.broken and bool((out.token_ids > 5).any()):  # type: ignore[union-attr]
                return state, out
            return state, out

        self.line = at(failing, "bool(")
        return [*self.stages[:-1], failing]


def prefill() -> Batch:
    return Batch.ragged([0, 1], [[1, 2, 3], [4]])


def test_a_failed_capture_of_a_decoder_leaves_its_state_and_the_next_call_works(tiny: Model) -> None:
    decoder = Decoder(tiny, 2)
    plain = compose(decoder.stages, advance=advance)
    graph = graphify(compose(decoder.failing_last(), advance=advance), ladder=LADDER)
    state, _ = plain(decoder.params, decoder.state(), prefill())
    before, decode, decoder.broken = clone(state), Batch.decode([0, 1]), True
    for fails in (graph, graph.capture):
        with refused(CaptureError, "graphify(step)", "a branch on a tensor's value" + decoder.line, REMEDY):
            fails(decoder.params, state, decode)
        assert_equal("after a failed capture", state, before)
    decoder.broken = False
    expected = plain(decoder.params, before, decode)
    assert_equal("after the next call", graph(decoder.params, state, decode), expected)


def test_a_failed_capture_of_one_stage_leaves_that_stages_state(tiny: Model) -> None:
    """In a pipeline the stages before it have run by then and own their state: they say so, and a copy kept by
    `weft.clone` starts the step again."""
    decoder = Decoder(tiny, 2)
    step = pipeline([graphify(stage, ladder=LADDER) for stage in decoder.failing_last()], advance=advance)
    plain = compose(decoder.stages, advance=advance)
    state, _ = plain(decoder.params, decoder.state(), prefill())
    before, kept, decode, decoder.broken = clone(state), clone(state), Batch.decode([0, 1]), True
    with refused(CaptureError, "graphify(<any>)", "a branch on a tensor's value" + decoder.line, REMEDY):
        step(decoder.params, state, decode)
    assert_equal("the failed stage's state", state[1], before[1])
    with pytest.raises(DonatedError, match=r"donated to stage 0 of 2\(state\)"):
        _ = state[0].positions
    decoder.broken = False
    assert_equal("after the next call", step(decoder.params, kept, decode), plain(decoder.params, before, decode))


TAKERS: dict[str, tuple[int, Callable[[Decoder], Callable[..., Any]], str]] = {
    "stage": (1, lambda d: lambda p, s, b: _bare(d, p, s, b), "stage 0 of 1(state)"),
    "compose": (1, lambda d: compose(d.stages, advance=advance), "stage 0 of 1(state)"),
    "compose of two": (2, lambda d: compose(d.stages, advance=advance), "stage 0 of 2(state)"),
    "graphify": (1, lambda d: graphify(compose(d.stages, advance=advance)), "step(state)"),
    "graphify, a ladder": (2, lambda d: graphify(compose(d.stages, advance=advance), ladder=WIDE), "step(state)"),
    "pipeline": (2, lambda d: pipeline(d.stages, microbatches=2, advance=advance), "stage 0 of 2(state)"),
    "pipeline of graphs": (
        2,
        lambda d: pipeline([graphify(s) for s in d.stages], microbatches=2, advance=advance),
        "stage 0 of 2(state)",
    ),
    "graph of a pipeline": (2, lambda d: graphify(pipeline(d.stages, advance=advance)), "pipeline of 2 stages(state)"),
    "micro-batches": (1, lambda d: microbatch(compose(d.stages, advance=advance), 2), "stage 0 of 1(state)"),
}


def _bare(decoder: Decoder, params: Any, state: Any, batch: Batch) -> Any:
    """One stage called by hand, as a step."""
    new, out = decoder.stages[0](params[0], state[0], batch, None)
    return (advance(new, batch, out),), out  # type: ignore[arg-type]


@pytest.mark.parametrize("taker", TAKERS)
def test_a_donated_state_used_twice_names_who_took_it(taker: str, tiny: Model) -> None:
    """By a second step and by a mere look; the state that the step returned is whole all the same."""
    num_stages, make, name = TAKERS[taker]
    decoder = Decoder(tiny, num_stages)
    step, old = make(decoder), decoder.state()
    state, _ = step(decoder.params, old, prefill())
    with refused(DonatedError, "State.kv_pages", f"this State was donated to {name}", USE_THE_NEW):
        step(decoder.params, old, prefill())
    with refused(DonatedError, "State.positions", f"this State was donated to {name}", USE_THE_NEW):
        _ = old[0].positions

    plain = compose(decoder.stages, advance=advance)
    expected, _ = plain(decoder.params, decoder.state(), prefill())
    decode = Batch.decode([0, 1])
    for _ in range(2):
        state, out = step(decoder.params, state, decode)
        expected, wanted = plain(decoder.params, expected, decode)
        assert_equal("tokens after a refused call", out.token_ids, wanted.token_ids)
        assert_equal("state after a refused call", state, expected, exact=False)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_each_stage_names_itself(num_stages: int, tiny: Model) -> None:
    decoder, old = Decoder(tiny, num_stages), Decoder(tiny, num_stages).state()
    compose(decoder.stages)(decoder.params, old, prefill())
    for index, state in enumerate(old):
        seen = f"this State was donated to stage {index} of {num_stages}(state)"
        with refused(DonatedError, "State.block_table", seen, USE_THE_NEW):
            _ = state.block_table


def test_a_copy_may_be_donated_as_often_as_wanted(tiny: Model) -> None:
    decoder = Decoder(tiny, 2)
    step = graphify(compose(decoder.stages, advance=advance))
    state = decoder.state()
    first = step(decoder.params, clone(state), prefill())
    assert_equal("from a copy of one state", step(decoder.params, clone(state), prefill()), first)
    assert_equal("the state of which copies were donated", state, decoder.state())


def test_a_donated_tensor_used_twice_names_who_took_it() -> None:
    """Tensors of research code: marked, and refused by every transform, whoever took them."""

    @donates("state")
    def count(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return state.add_(batch.sum()), batch * params

    params, batch = torch.ones(2), torch.ones(3, 2)
    for first in (count, graphify(count), pipeline([_as_stage(count)])):
        alone = first.__name__ == "count"
        old = torch.zeros(5)
        first(*((params, old, batch) if alone else ((params,), (old,), batch)))
        seen = "a tensor of shape (5,) that was donated to count(state)"
        with refused(DonatedError, "count(state)", seen, USE_THE_NEW):
            count(params, old, batch)
        with refused(DonatedError, "count(...)", seen, USE_THE_NEW):
            graphify(count)(params, old, batch)
        with refused(DonatedError, "pipeline(<1 stages>)(params, state, batch)", seen, USE_THE_NEW):
            pipeline([_as_stage(count)])((params,), (old,), batch)


def _as_stage(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, state, batch, x: step(params, state, batch if x is None else x)


def test_one_state_for_two_stages_is_refused(tiny: Model) -> None:
    decoder = Decoder(tiny, 2)
    for step in (compose(decoder.stages), pipeline(decoder.stages)):
        state = decoder.state()[0]
        seen = "this State was donated to stage 0 of 2(state)"
        with refused(DonatedError, "State.kv_pages", seen, USE_THE_NEW):
            step(decoder.params, (state, state), prefill())


# pipeline


@pytest.mark.parametrize("transform", [compose, pipeline])
def test_no_stage(transform: Callable[..., Any]) -> None:
    instead = "at least one function (params, state, batch, x) -> (state, y)"
    with refused(ProgramError, f"{transform.__name__}([])", "no stage", instead):
        transform([])


@pytest.mark.parametrize("microbatches", [0, -1, 1.5])
def test_no_number_of_micro_batches(microbatches: Any, tiny: Model) -> None:
    call = f"pipeline(<2 stages>, microbatches={microbatches})"
    with refused(ProgramError, call, "no number of parts", "an int >= 1"):
        pipeline(Decoder(tiny, 2).stages, microbatches=microbatches)


@pytest.mark.parametrize("transform", [compose, pipeline])
def test_params_and_states_are_one_a_stage(transform: Callable[..., Any], tiny: Model) -> None:
    """Seen before the first stage runs, so that the state is still there."""
    decoder, call = Decoder(tiny, 2), f"{transform.__name__}(<2 stages>)(params, state, batch)"
    step, state = transform(decoder.stages, advance=advance), decoder.state()
    instead = "pass a tuple or list with one entry a stage"
    with refused(ProgramError, call, "params has 1 entries", instead):
        step(decoder.params[:1], state, prefill())
    with refused(ProgramError, call, "state has 3 entries", instead):
        step(decoder.params, (*state, state[0]), prefill())
    with refused(ProgramError, call, "state is a State", instead):
        step(decoder.params, state[0], prefill())
    assert_equal("the state after a refused call", state, decoder.state())


def test_the_name_of_a_transport_is_none_of_them(tiny: Model) -> None:
    limits, call = Limits(max_num_reqs=1, max_num_tokens=4), "make_runner(model, limits, num_stages=2, transport=...)"
    with refused(ProgramError, call, "transport='local'", "Local(), Threads() or Distributed(), of weft.transforms"):
        make_runner(tiny, limits, num_stages=2, transport="local")  # type: ignore[arg-type]


def test_a_value_of_another_schema_is_named() -> None:
    schema = weft.Schema.parse("[3, 2] float32")
    stages = [lambda p, s, batch, x: (s, batch.double()), lambda p, s, batch, x: (s, x)]
    step = pipeline(stages, schema=schema)
    call, seen = f"rank 0: 'send to 1 [mb 0]: {schema}'", "a value of schema [3, 2] float64"
    with refused(ProgramError, call, seen, f"return {schema} from the stage"):
        step((None, None), (None, None), torch.ones(3, 2))


# graphify: what it is given


def two(x: Tensor, y: Any) -> Tensor:
    return x + y


class Opaque:
    def __init__(self, x: Any) -> None:
        self.x = x


STATIC = "register its class (weft.pytree), pass its tensors, or name it in static_argnames if it never changes"
FOREIGN: dict[str, tuple[Any, str, str]] = {
    "an array": (np.ones(2), "y is no tensor and cannot be hashed (<any>)", "torch.from_numpy(array)"),
    "a numpy number": (np.float32(3), "y is a float32, <any>", "float(...) or int(...) of it"),
    "a module": (nn.Linear(2, 2), "y is a Linear, <any>", "its parameters, with torch.func.functional_call, <any>"),
    "an object": (Opaque(1), "y is a Opaque, which is neither a tensor, a plain value nor a pytree", STATIC),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_arguments_that_are_no_tensors(case: str) -> None:
    value, seen, instead = FOREIGN[case]
    with refused(CaptureError, "two(...)", seen, instead):
        graphify(two)(torch.ones(2), value)


@pytest.mark.parametrize("value", [torch.ones(2), (torch.ones(2), 1)])
def test_a_static_argument_that_holds_a_tensor(value: Any) -> None:
    instead = "take y out of static_argnames: tensors are read at each call"
    with refused(CaptureError, "two(...)", "y, a static argument, holds a tensor", instead):
        graphify(two, static_argnames="y")(torch.ones(2), value)


def yields(x: Tensor) -> Iterator[Tensor]:
    yield x


async def awaits(x: Tensor) -> Tensor:
    return x


def test_what_is_no_function_of_results() -> None:
    seen, instead = "a function that yields or awaits, of which a call runs nothing", "a function that returns <any>"
    for fn in (yields, awaits):
        with refused(CaptureError, f"graphify({fn.__name__}, ...)", seen, instead):
            graphify(fn)
    with refused(CaptureError, "graphify(3, ...)", "3, which is no function", "a function over tensors"):
        graphify(3)  # type: ignore[call-overload]


def chooses(x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    return found


def prints(x: Tensor) -> Tensor:
    print(x)
    return x + 1


def returns_an_object(x: Tensor) -> Opaque:
    return Opaque(x + 1)


def test_what_a_function_does_that_a_graph_cannot() -> None:
    x = torch.ones(2)
    seen = "torch.cond chooses what runs, which a graph cannot" + at(chooses, "torch.cond")
    instead = "torch.where, with both branches computed; or call torch.cond outside the function"
    with refused(CaptureError, "graphify(chooses)", seen, instead):
        graphify(chooses)(x)
    seen = "Tensor.__repr__ reads a tensor on the host" + at(prints, "print(")
    show = "call it inside weft.no_capture(replay=False), where it may print; or "
    with refused(CaptureError, "graphify(prints)", seen, show + REMEDY):
        graphify(prints)(x)
    with weft.no_capture(replay=False):
        assert graphify(prints)(x).tolist() == [2, 2]
    seen = "its result is of class Opaque, neither tensor, plain value nor pytree"
    instead = "return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
    with refused(CaptureError, "graphify(returns_an_object)", seen, instead):
        graphify(returns_an_object)(x)


def test_a_write_to_what_a_function_closes_over() -> None:
    norm, linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss: Tensor = linear(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    instead = (
        "return a new tensor, or pass it in (a module's: weft.stages.from_module) and donate the argument "
        "(donate_argnames=...)"
    )
    before = clone(dict(norm.state_dict()))
    for fn in (train, norm):
        with pytest.raises(CaptureError, match="writes to a tensor from outside it") as error:
            graphify(fn)(torch.ones(3, 2))
        assert error.value.instead == instead
    assert_equal("a refused capture leaves no trace", dict(norm.state_dict()), before)


@pytest.mark.parametrize("most", ["1", -1, True, None])
def test_a_number_of_captures_that_is_none(most: Any) -> None:
    call = f"weft.assert_max_captures({most!r})"
    with refused(CaptureError, call, "no number of captures", "an int >= 0"), weft.assert_max_captures(most):
        pass


# piecewise


def sorts(x: Tensor) -> Tensor:
    return torch.sort(x * 2).values + 1


OPERATORS = "operators by name, as in 'weft::paged_attention' or 'aten::sort', or as torch.ops.aten.sort"


def test_operators_that_are_none() -> None:
    for given in (torch.sort, "torch.sort", "sort", 3):
        with refused(CaptureError, "graphify(sorts, ...)", f"split_at={given!r}", OPERATORS):
            weft.piecewise(sorts, split_at=given)
    instead = "the operators to cut at, as in split_at='aten::sort'; or weft.graphify, for one graph"
    with refused(CaptureError, "weft.piecewise(sorts)", "split_at=()", instead):
        weft.piecewise(sorts, split_at=())


def test_operators_that_are_not_called_are_told_beside_those_that_are() -> None:
    seen = "no call of aten::linear, where it was to be cut into pieces"
    with refused(
        CaptureError, "graphify(sorts)", seen, "name an operator that it calls: aten::add, aten::mul, aten::sort"
    ):
        weft.piecewise(sorts, split_at="aten::linear")(torch.ones(2))

    def many(x: Tensor) -> Tensor:
        for name in ("sin", "cos", "tan", "exp", "log", "abs", "neg", "sqrt", "tanh", "erf", "sinh", "cosh"):
            x = getattr(torch, name)(x)
        return x

    with pytest.raises(CaptureError) as error:
        weft.piecewise(many, split_at="aten::sort")(torch.ones(2))
    assert error.value.instead.endswith(", ...")
    assert error.value.instead.count("aten::") == 10


@pytest.mark.parametrize(
    "given", [torch.ops.aten.sort, torch.ops.aten.sort.default, "aten::sort.default", ["aten::sort", "aten::topk"]]
)
def test_operators_in_every_way_to_name_them(given: Any) -> None:
    @weft.piecewise(split_at=given)
    def decorated(x: Tensor) -> Tensor:
        return sorts(x)

    assert decorated(torch.tensor([3.0, 1.0])).tolist() == [3, 7]
    assert decorated.num_pieces() == (2,)
    assert decorated.__name__ == "decorated"


# Descriptors of one's own


@attrs.frozen
class Length:
    steps: int

    def covers(self, other: "Length") -> bool:
        return self.steps >= other.steps


@attrs.frozen
class Width:
    columns: int

    def covers(self, other: "Width") -> bool:
        return self.columns >= other.columns


@attrs.frozen
class Vague:
    steps: int

    def covers(self, other: "Vague") -> None:
        pass


@weft.pytree
@attrs.frozen(eq=False)
class Signal:
    length: Any = attrs.field(metadata=weft.descriptor_field())
    x: Any = attrs.field(metadata=weft.axes("steps"))


def whole(signal: Signal) -> Signal:
    return Signal(signal.length, signal.x.cumsum(0))


def test_a_descriptor_without_the_attribute_of_an_axis() -> None:
    seen = "a descriptor Width(columns=2), with no attribute 'steps'"
    instead = "an int attribute 'steps' of Width, or in axes(...) the name of one that it has"
    with refused(DescriptorError, "weft.axes('steps')", seen, instead):
        graphify(whole, ladder=[Width(4)])(Signal(Width(2), torch.ones(2)))


def test_a_descriptor_that_is_none() -> None:
    instead = "a hashable value with a method covers(other): a weft.BatchDescriptor, or an @attrs.frozen class"
    with refused(DescriptorError, "whole(...)", "3 where a descriptor should be", instead):
        graphify(whole, ladder=[Length(4)])(Signal(3, torch.ones(3)))
    with refused(DescriptorError, "weft.pad(Signal, Length(steps=4))", "3 where a descriptor should be", instead):
        weft.pad(Signal(3, torch.ones(3)), Length(4))


def test_a_leaf_that_is_no_tensor() -> None:
    seen, instead = "a list in a field with axes('steps')", "a tensor (torch.tensor), or a field without axes"
    for use in (graphify(whole, ladder=[Length(4)]), lambda s: weft.pad(s, Length(4))):
        with refused(DescriptorError, "Signal(x=[1.0, 2.0])", seen, instead):
            use(Signal(Length(2), [1.0, 2.0]))


def test_tensors_of_another_size_than_their_descriptor_says() -> None:
    seen = "signal.x of shape (5,) in a batch of class 'Length(steps=3)', which says (3,)"
    with refused(DescriptorError, "whole(...)", seen, "give the batch the descriptor of its tensors"):
        graphify(whole, ladder=[Length(8)])(Signal(Length(3), torch.ones(5)))


def test_covers_that_says_nothing() -> None:
    seen, instead = "Vague(steps=4).covers(itself) is None", "a covers(other) that returns True or False"
    with refused(CaptureError, "graphify(whole, ...)", seen, instead):
        graphify(whole, ladder=[Vague(4)])


def test_advice_names_the_users_own_axes() -> None:
    with pytest.raises(CaptureError, match=r"weft\.axes\('steps'\)"):
        graphify(lambda signal: signal.x * 2, ladder=[Length(4)])(Signal(Length(2), torch.ones(2)))
    with pytest.raises(DescriptorError, match=r"weft\.axes\('steps'\)"):
        weft.pad(torch.ones(2), Length(4))
    with pytest.raises(CaptureError, match=r"with a weft\.descriptor_field\(\)"):
        graphify(whole, ladder=[Length(4)])(torch.ones(2))


def test_the_cuda_back_end_without_a_device_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    graph = graphify(Flaw(None).step, donate_argnames=["state"], backend="cuda")
    state = {"sum": torch.ones(2), "steps": torch.tensor(1)}
    seen, instead = "this machine has no CUDA device", "move the arguments there, or write backend='tape'"
    with refused(DeviceError, "graphify(..., backend='cuda')", seen, instead):
        graph(torch.ones(2, 3), state, torch.ones(4, 2))
    assert (state["sum"].tolist(), int(state["steps"])) == ([1.0, 1.0], 1)
    assert graph.cache_info() == CacheInfo()
