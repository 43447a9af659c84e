"""`weft.load` of damaged folders, or on missing devices: the errors, and that an intact folder
loads afterwards.

`test_checkpoint_errors.py` and `test_config.py` have the whole list of a checkpoint's faults.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusal import BELONG, refused
from safetensors.torch import load_file, save_file
from torch import Tensor

import weft
from weft.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    ConfigWarning,
    DeviceError,
    ProgramError,
    RequestError,
    WeftError,
)
from weft.proofs import assert_equal
from weft.stages.checkpoints.known_models import DEMO


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, for a test to damage."""
    return Path(
        shutil.copytree(
            DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.py", "__pycache__")
        )
    )


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
        (
            f"{UP} in model.safetensors is <any> (7, 128), and config.json makes it (280, 128) of"
            " <any>"
        ),
        BELONG,
    ),
    "an unknown architecture": (
        lambda f: change_config(f, architectures=["GPT2LMHeadModel"]),
        ConfigError,
        "config.json has architectures=['GPT2LMHeadModel']",
        (
            "weft supports the architectures LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,"
            " Qwen3MoeForCausalLM, MistralForCausalLM, Qwen2VLForConditionalGeneration; another"
            " model's module runs by weft.stages.from_module (proofs/pages/your_modules.md)"
        ),
    ),
    "a field that changes the computation": (
        lambda f: change_config(f, logit_softcap=30.0),
        ConfigError,
        "config.json has logit_softcap=30.0",
        "weft supports logit_softcap=None in Qwen3ForCausalLM, or no logit_softcap",
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
def test_a_damaged_checkpoint_is_refused_and_loads_once_it_is_whole(
    damage: str, folder: Path
) -> None:
    spoil, kind, problem, instead = DAMAGES[damage]
    spoil(folder)
    with refused(kind, f"<any>{folder}<any>", problem, instead):
        weft.load(folder, "cpu")
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    assert_equal(
        "the checkpoint made whole", weft.load(folder, "cpu").params, weft.load(DEMO, "cpu").params
    )


def test_a_missing_checkpoint_is_a_missing_file_and_a_damaged_one_a_bad_value(folder: Path) -> None:
    """Code that catches the builtin exceptions catches weft's."""
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        weft.load(folder / "none")
    truncate(folder, 10)
    with pytest.raises(ValueError, match="is damaged"):
        weft.load(folder)


def test_fields_that_weft_does_not_know_are_a_warning_or_an_error(folder: Path) -> None:
    change_config(folder, auto_map={"AutoModel": "modeling.Model"}, my_field=[1, 2])
    unknown = "auto_map={'AutoModel': 'modeling.Model'}, my_field=[1, 2]"
    with pytest.warns(ConfigWarning) as told:
        model = weft.load(folder, "cpu")
    [warning] = told
    said = f"weft does not know these fields of config.json, and ignores them: {unknown}"
    assert str(warning.message) == said
    assert_equal("the parameters", model.params, weft.load(DEMO, "cpu").params)
    call = f"weft.load({str(folder)!r}, device='cpu', dtype=None)"
    problem = f"config.json has {unknown}"
    instead = (
        "weft does not know what that does to Qwen3ForCausalLM; remove what does nothing, or leave"
        " out strict"
    )
    with refused(ConfigError, call, problem, instead):
        weft.load(folder, "cpu", strict=True)
    assert weft.load(DEMO, "cpu", strict=True).config == model.config


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1)]
)
def test_cuda_where_there_is_none(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call = f"weft.load({str(DEMO)!r}, device={device!r}, dtype=None)"
    problem = f"device {str(device)!r}, but torch sees 0 CUDA devices"
    with refused(DeviceError, call, problem, "'cpu', or leave it out"):
        weft.load(DEMO, device=device)
    assert weft.load(DEMO).device.type == "cpu"


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json"])
def test_what_cannot_be_loaded_names_the_call_as_it_was_written(damage: str, folder: Path) -> None:
    (folder / damage).write_text("{")
    with pytest.raises(CheckpointError if damage != "config.json" else ConfigError) as error:
        weft.load(folder, "cpu", "float32")
    assert error.value.call == f"weft.load({str(folder)!r}, device='cpu', dtype='float32')"


def test_no_path_and_arguments_of_transformers() -> None:
    with refused(
        RequestError,
        "weft.load(None, device=None, dtype=None)",
        "path is None",
        "<any>'demo' and 'smollm2'",
    ):
        weft.load(None)  # type: ignore[arg-type]
    with refused(
        ArgumentError,
        "load(..., torch_dtype=...)",
        "'torch_dtype', which is no argument of it",
        "dtype=...",
    ):
        weft.load(DEMO, torch_dtype=torch.float32)  # type: ignore[call-arg]


@pytest.mark.parametrize("stage", [(2, 2), (-1, 2), (0, 0), 3, (0, 1, 2)])
def test_stages_that_do_not_exist(stage: Any) -> None:
    call = f"weft.load({str(DEMO)!r}, device='cpu', dtype=None)"
    with refused(
        ProgramError, call, f"stage={stage!r}", "(index, num_stages), the stages numbered from 0"
    ):
        weft.load(DEMO, "cpu", stage=stage)


def test_devices_and_dtypes_that_do_not_exist() -> None:
    call = f"weft.load({str(DEMO)!r}, device='gpu', dtype=None)"
    with refused(
        DeviceError, call, "device 'gpu', which torch does not know", "'cpu', 'cuda' or 'cuda:N'"
    ):
        weft.load(DEMO, device="gpu")
    for dtype in ("float64", "int8", torch.int8, "f32", np.dtype("float32")):
        call = f"weft.load({str(DEMO)!r}, device='cpu', dtype={dtype!r})"
        with refused(RequestError, call, f"dtype={dtype!r}", "one of float32, bfloat16, float16"):
            weft.load(DEMO, device="cpu", dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_devices_that_weft_has_no_kernels_for(device: str) -> None:
    with pytest.raises(DeviceError, match=device):
        weft.load(DEMO, device=device)


def test_a_dtype_that_no_decoder_computes_in_is_refused_when_it_is_loaded(folder: Path) -> None:
    """The error comes from `load`, not from the first step: attention has no float64."""
    change_config(folder, dtype="float64")
    call = f"weft.load({str(folder)!r}, device='cpu', dtype=None)"
    instead = "dtype='float32' or dtype='bfloat16' or dtype='float16'"
    with refused(RequestError, call, "config.json has dtype torch.float64", instead):
        weft.load(folder, "cpu")
    assert weft.load(folder, "cpu", "float32").dtype == torch.float32


def test_a_text_for_a_checkpoint_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    model = weft.load(folder, "cpu")
    with refused(
        RequestError, "model.encode('An')", f"{folder} holds no tokenizer.json", "pass token ids"
    ):
        weft.generate(model, ["An"], max_tokens=1)
    [completion] = weft.generate(model, [[65, 110]], max_tokens=2)
    assert completion.text is None
    assert len(completion.token_ids) == 2
