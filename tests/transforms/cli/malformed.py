"""Malformed files and arguments: a small valid checkpoint with one damage at a time, and the
command that reads it. `CASES` holds them by the damaged part."""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file

from weft.stages.checkpoints.formats import load_config
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.reading import tensor_shapes
from weft.stages.layout import split_layers

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "layer_types": ["full_attention"] * 2,
}
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter/adapter_config.json"
LORA_WEIGHTS = "adapter/adapter_model.safetensors"

# The placeholder for the checkpoint's folder in a command.
FOLDER = "<folder>"
GENERATE = (
    "generate",
    "--model",
    FOLDER,
    "--prompt",
    "A list is",
    "--device",
    "cpu",
    "--max-tokens",
    "2",
    "--json",
)
ADAPTED = (*GENERATE, "--adapter", f"{FOLDER}/adapter")
PLAN = ("plan", "--model", FOLDER, "--pp", "2", "--json")
SIZES = (
    "--input-len",
    "4",
    "--output-len",
    "2",
    "--num-prompts",
    "2",
    "--max-num-seqs",
    "2",
    "--max-num-tokens",
    "8",
)
BENCH = ("bench", "--model", FOLDER, "--device", "cpu", "--graph", "none", *SIZES, "--json")
EVAL = (
    "bench",
    "--model",
    FOLDER,
    "--device",
    "cpu",
    "--graph",
    "none",
    "--max-num-seqs",
    "2",
    "--json",
)

Spoil = Callable[[Path], object]


@attrs.frozen
class Case:
    """A damage, and the command that reads it.

    Args:
        argv: the command, with FOLDER for the folder.
        spoil: damages the folder.
        refused: whether the command must refuse it.
    """

    name: str
    argv: tuple[str, ...]
    spoil: Spoil = lambda folder: None
    refused: bool = False


def make(folder: Path) -> Path:
    """A small valid checkpoint in two shards, with a tokenizer, a generation_config.json and a
    LoRA."""
    (folder / "adapter").mkdir(parents=True)
    write(folder / "config.json", CONFIG)
    write(folder / GENERATION, {"eos_token_id": [256]})
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    draw = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(load_config(folder), split_layers(2, 1)[0])
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(shapes)}
    for shard in SHARDS:
        tensors = {
            n: 0.1 * torch.randn(shape, generator=draw)
            for n, shape in shapes.items()
            if weight_map[n] == shard
        }
        save_file(tensors, folder / shard)
    write(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    write(folder / ADAPTER, LORA)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    pairs = {
        name.format(i, ab): torch.ones((2, 16) if ab == "A" else (32, 2))
        for i in range(2)
        for ab in "AB"
    }
    save_file(pairs, folder / LORA_WEIGHTS)
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def edit(name: str, **fields: Any) -> Spoil:
    """Set fields of a JSON file."""
    return lambda folder: write(folder / name, json.loads((folder / name).read_text()) | fields)


def replace(name: str, content: str | bytes) -> Spoil:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(raw)


def cut(name: str, keep: int) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def shard(name: Any) -> Spoil:
    """Add a tensor to the index."""

    def spoil(folder: Path) -> None:
        raw = json.loads((folder / INDEX).read_text())
        raw["weight_map"]["model.norm.weight"] = name
        write(folder / INDEX, raw)

    return spoil


# Values of every type of JSON, and those that naive checks break on.
NUMBERS: dict[str, Any] = {
    "zero": 0,
    "negative": -1,
    "a fraction": 1.5,
    "10**400": 10**400,
    "2**31": 2**31,
    "2**63": 2**63,
    "infinite": math.inf,
    "NaN": math.nan,
    "5e-324": 5e-324,
    "1e308": 1e308,
}
OTHERS: dict[str, Any] = {
    "null": None,
    "true": True,
    "text": "x",
    "long": "y" * 5000,
    "half a letter": "\ud800",
    "list": [],
    "[[]]": [[]],
    "object": {},
}
VALUES = NUMBERS | OTHERS
DEEP = "[" * 100_000 + "]" * 100_000
TEXTS: dict[str, str | bytes] = {
    "nothing": "",
    "half": '{"a": ',
    "no object": "[]",
    "null": "null",
    "deep": DEEP,
    "deep 990": "[" * 990 + "]" * 990,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "other bytes": b"\xff\xfe{}",
    "NUL": b"\0" * 64,
    "5,000 digits": '{"vocab_size": ' + "9" * 5000 + "}",
    "a mark": b"\xef\xbb\xbf{}",
    "twice": '{"r": 1, "peft_type": "LORA", "r": 2}',
}
EXPRESSIONS = {
    "open": "(",
    "endless": "(.*)*(.*)*(.*)*x!",
    "polynomial": ".*" * 30 + "!",
    "names": r"(\w|\w\w|\.)+!",
    "alternatives": "(a|a)" * 40 + "!",
    "too many": "a{99999999999}",
    "many": "(a{0,60000}){0,60000}b",
    "deep": "(" * 50_000 + ")" * 50_000,
    "long": "a*" * 50_000,
    "flags": "(?i)q_proj",
    "back": r"(.)\1+x",
    "ends the group": "a)(b",
}


def config_cases() -> Iterator[Case]:
    for field in CONFIG:
        for kind, value in VALUES.items():
            yield Case(f"{field}: {kind}", PLAN, edit("config.json", **{field: value}))
    for kind, content in TEXTS.items():
        yield Case(f"text: {kind}", PLAN, replace("config.json", content), refused=True)
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    for field in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"):
        for kind, value in VALUES.items():
            yield Case(
                f"{field}: {kind}",
                GENERATE,
                edit("config.json", **moe, **{field: value}),
                refused=True,
            )
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for kind, text in EXPRESSIONS.items():
        block = fp8 | {"modules_to_not_convert": [text]}
        yield Case(
            f"fp8: {kind}", GENERATE, edit("config.json", quantization_config=block), refused=True
        )


def rope_cases() -> Iterator[Case]:
    """Damages that only show when the frequencies are computed, as `generate` does."""
    keys = {
        "default": ("rope_theta",),
        "linear": ("factor",),
        "llama3": ("low_freq_factor", "factor"),
        "yarn": (
            "factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "original_max_position_embeddings",
            "attention_factor",
        ),
    }
    for rope_type, names in keys.items():
        block = {"rope_type": rope_type} | ({} if rope_type == "default" else {"factor": 2.0})
        block |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
        for name in names:
            for kind, value in NUMBERS.items():
                yield Case(
                    f"{name}: {kind}",
                    GENERATE,
                    edit("config.json", rope_parameters=block | {name: value}),
                )


def generation_cases() -> Iterator[Case]:
    for kind, value in VALUES.items():
        yield Case(f"eos: {kind}", GENERATE, edit(GENERATION, eos_token_id=value))
        yield Case(f"eos: [{kind}]", GENERATE, edit(GENERATION, eos_token_id=[value]))
    for kind, content in TEXTS.items():
        yield Case(f"text: {kind}", GENERATE, replace(GENERATION, content), refused=kind != "twice")


OUTSIDE = (
    "../outside/model.safetensors",
    "adapter/../../outside/model.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "/",
    "/dev/zero",
    "..\\outside",
    "C:\\x",
    "~/x",
    "\0",
    "a\0b",
    "x" * 5000,
    "adapter",
    "\ud800",
)


def index_cases() -> Iterator[Case]:
    for kind, value in VALUES.items():
        yield Case(f"map: {kind}", GENERATE, edit(INDEX, weight_map=value), refused=True)
        yield Case(f"shard: {kind}", GENERATE, shard(value), refused=True)
    for name in OUTSIDE:
        yield Case(f"shard: {name[:40]!r}", GENERATE, shard(name), refused=True)
    yield Case(
        "the whole path",
        GENERATE,
        lambda folder: shard(str(folder / SHARDS[0]))(folder),
        refused=True,
    )
    for kind, content in TEXTS.items():
        yield Case(f"text: {kind}", GENERATE, replace(INDEX, content), refused=True)


def file(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    """A safetensors file with a header, and with the length that it declares."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(**fields: Any) -> bytes:
    """A file with one tensor of 64 bytes, and a header that describes it in another way."""
    one = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **fields}
    return file(json.dumps({"model.norm.weight": one}).encode(), data=bytes(64))


ONE = b'"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}'
FILES: dict[str, bytes] = {
    "nothing": b"",
    "4 bytes": bytes(4),
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "no header": file(b""),
    "header of 2**63": file(b"{}", 2**63),
    "header of 2**64 - 1": file(b"{}", 2**64 - 1),
    "cut": file(b"{}", 100),
    "no JSON": file(b"{" * 10),
    "deep": file(DEEP.encode()),
    "a list": file(b"[]"),
    "null": file(b"null"),
    "no tensors": file(b"{}"),
    "metadata": file(b'{"__metadata__": {"a": 3}}'),
    "a strange name": file(b'{"\\u001b[31m":' + ONE[4:] + b"}", data=bytes(64)),
    "twice": file(b"{" + ONE + b"," + ONE.replace(b"[0,64]", b"[64,128]") + b"}", data=bytes(128)),
    "dtype F4": tensor(dtype="F4"),
    "dtype 3": tensor(dtype=3),
    "int32": tensor(dtype="I32"),
    "bool": tensor(dtype="BOOL", shape=[64]),
    "complex": tensor(dtype="C64", shape=[8]),
    "float8": tensor(dtype="F8_E8M0", shape=[64]),
    "uint16": tensor(dtype="U16", shape=[32]),
    "shape 2**126": tensor(shape=[2**63, 2**63]),
    "shape -1": tensor(shape=[-1]),
    "shape x": tensor(shape="x"),
    "no shape": tensor(shape=[]),
    "10,000 dimensions": tensor(shape=[1] * 10_000 + [16]),
    "turned": tensor(data_offsets=[64, 0]),
    "beyond": tensor(data_offsets=[0, 2**63]),
    "gap": tensor(data_offsets=[1, 65]),
    "one offset": tensor(data_offsets=[0]),
    "negative": tensor(data_offsets=[-1, 63]),
}


def tensor_cases() -> Iterator[Case]:
    for name, argv in (
        (SHARDS[0], GENERATE),
        ("model.safetensors", GENERATE),
        (LORA_WEIGHTS, ADAPTED),
    ):
        for kind, content in FILES.items():
            yield Case(f"{name}: {kind}", argv, replace(name, content), refused=True)
    for kind, content in FILES.items():
        yield Case(f"beside: {kind}", GENERATE, replace("other.safetensors", content))
    for name, argv in ((SHARDS[0], GENERATE), (LORA_WEIGHTS, ADAPTED)):
        for keep in (7, 8, 9, 100, 500, -1):
            yield Case(f"{name}[:{keep}]", argv, cut(name, keep), refused=True)


def adapter_cases() -> Iterator[Case]:
    for field in (
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "layers_to_transform",
        "use_rslora",
        "something",
    ):
        for kind, value in VALUES.items():
            yield Case(f"{field}: {kind}", ADAPTED, edit(ADAPTER, **{field: value}))
    for kind, text in EXPRESSIONS.items():
        layers = {"layers_to_transform": [0, 1], "layers_pattern": [text]}
        yield Case(f"targets: {kind}", ADAPTED, edit(ADAPTER, target_modules=text))
        yield Case(f"excluded: {kind}", ADAPTED, edit(ADAPTER, exclude_modules=text))
        yield Case(f"layers_pattern: {kind}", ADAPTED, edit(ADAPTER, **layers), refused=True)
        for name in ("rank_pattern", "alpha_pattern"):
            edited = edit(ADAPTER, **{name: {text: 2}})
            yield Case(f"{name}: {kind}", ADAPTED, edited, refused=True)
    for kind, value in NUMBERS.items():
        yield Case(
            f"rank: {kind}", ADAPTED, edit(ADAPTER, rank_pattern={"q_proj": value}), refused=True
        )
        yield Case(f"alpha: {kind}", ADAPTED, edit(ADAPTER, alpha_pattern={"q_proj": value}))
    for kind, content in TEXTS.items():
        yield Case(f"text: {kind}", ADAPTED, replace(ADAPTER, content), refused=True)


def tokenizer_cases() -> Iterator[Case]:
    raw = json.loads((DEMO / "tokenizer.json").read_text())
    for kind, content in TEXTS.items():
        yield Case(f"text: {kind}", GENERATE, replace("tokenizer.json", content), refused=True)
    models = {
        **{
            f"{field} {kind}": raw["model"] | {field: VALUES[kind]}
            for field in raw["model"]
            for kind in OTHERS
        },
        "ids": raw["model"]
        | {"vocab": {text: 1000 + token for text, token in raw["model"]["vocab"].items()}},
        "no unknown": {"type": "Unigram", "unk_id": None, "vocab": []},
        "words": {"type": "WordLevel", "unk_token": "q", "vocab": {"a": 0}},
    }
    for kind, model in models.items():
        yield Case(f"model: {kind}", GENERATE, edit("tokenizer.json", model=model))
    for text in ("(", "(a+)+$", "a{1000000}"):
        split = {
            "type": "Split",
            "pattern": {"Regex": text},
            "behavior": "Isolated",
            "invert": False,
        }
        argv = (*GENERATE, "--prompt", "a" * 40 + "!")
        yield Case(f"split: {text}", argv, edit("tokenizer.json", pre_tokenizer=split))


PATHS = (
    "",
    ".",
    "..",
    "/",
    "x" * 5000,
    "/dev/null",
    "/dev/zero",
    "~",
    "\udcff",
    "-",
    f"{FOLDER}/config.json",
)
TYPED = (
    "0",
    "-1",
    "99999999999999999999",
    "9" * 400,
    "9" * 5000,
    "nan",
    "inf",
    "1e308",
    "5e-324",
    "x",
    "",
    "\u0663",
)
COUNTED: Mapping[tuple[str, ...], tuple[str, ...]] = {
    GENERATE: ("--max-tokens", "--temperature", "--seed", "--speculate", "--pp", "--prompt-ids"),
    PLAN: (
        "--pp",
        "--cohorts",
        "--steps",
        "--requests",
        "--context",
        "--bandwidth",
        "--link",
        "--latency",
    ),
    BENCH: (
        "--input-len",
        "--num-prompts",
        "--max-num-seqs",
        "--max-num-tokens",
        "--run-ahead",
        "--speculate",
    ),
}


def argument_cases() -> Iterator[Case]:
    for argv, options in COUNTED.items():
        for option in options:
            here = ("--transport", "local") if option == "--pp" and argv is GENERATE else ()
            for value in (*TYPED, *(("1000000",) if option in ("--speculate", "--steps") else ())):
                yield Case(f"{argv[0]} {option} {value[:20]}", (*argv, *here, option, value))
    for option, more in (("--model", ()), ("--adapter", ()), ("--draft", ("--speculate", "2"))):
        for value in PATHS:
            yield Case(
                f"{option} {value[:20]!r}", (*GENERATE, *more, f"{option}={value}"), refused=True
            )
    for value in ("cpu:99", "cuda:99999999999", "cpu:x", "", "meta", "x" * 5000):
        yield Case(f"--device {value[:20]!r}", (*GENERATE, "--device", value))
    for value in ("", ".", "x" * 5000, "/dev/full", "/nowhere/x", "\0"):
        yield Case(f"--out {value[:20]!r}", (*BENCH, "--out", value), refused=True)
        yield Case(f"--svg {value[:20]!r}", (*PLAN, "--svg", value), refused=True)
        yield Case(f"--eval {value[:20]!r}", (*EVAL, "--eval", value), refused=True)
    lines = TEXTS | {
        "half a letter": '{"text": "\\ud800"}',
        "deep text": '{"text": ' + DEEP + "}",
        "a number": '{"text": 1}',
    }
    for kind, content in lines.items():
        yield Case(
            f"task: {kind}",
            (*EVAL, "--eval", f"{FOLDER}/tasks"),
            replace("tasks", content),
            refused=True,
        )


CASES: dict[str, list[Case]] = {
    "config.json": [*config_cases(), *rope_cases()],
    GENERATION: list(generation_cases()),
    INDEX: list(index_cases()),
    "*.safetensors": list(tensor_cases()),
    "adapter_config.json": list(adapter_cases()),
    "tokenizer.json": list(tokenizer_cases()),
    "arguments": list(argument_cases()),
}
