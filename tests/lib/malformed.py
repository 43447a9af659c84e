"""Files and arguments that are malformed, one damage at a time: what a checkpoint's folder and a command line can have
wrong, made from a small sound folder."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import save_file

from weft.stages.config import load_config
from weft.stages.checkpoint import tensor_shapes
from weft.stages.layout import split_layers
from weft.stages.model import DEMO

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 257, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": 256, "torch_dtype": "float32", "hidden_act": "silu", "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**400
RUN = ("--device", "cpu", "--max-tokens", "2", "--json")
TEXT = ("--prompt", "A list is")


@attrs.frozen
class Case:
    """A damage, and the command that meets it.

    Args:
        spoil: damages the folder.
        argv: the command, in which FOLDER stands for it.
    """

    name: str
    spoil: Callable[[Path], object]
    argv: tuple[str, ...]


FOLDER = "<folder>"
GENERATE = ("generate", "--model", FOLDER, *TEXT, *RUN)
ADAPTED = (*GENERATE, "--adapter", f"{FOLDER}/adapter")
PLAN = ("plan", "--model", FOLDER, "--pp", "2", "--json")


def make(folder: Path) -> Path:
    """A small sound checkpoint in two shards, with a tokenizer, a generation_config.json and a LoRA."""
    (folder / "adapter").mkdir(parents=True)
    write(folder / "config.json", CONFIG)
    write(folder / "generation_config.json", {"eos_token_id": [256]})
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    draw = torch.Generator().manual_seed(0)
    config = load_config(folder)
    shapes = tensor_shapes(config, split_layers(2, 1)[0])
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(shapes)}
    for shard in SHARDS:
        own = {n: 0.1 * torch.randn(shape, generator=draw) for n, shape in shapes.items() if weight_map[n] == shard}
        save_file(own, folder / shard)
    write(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    write(folder / "adapter" / "adapter_config.json", LORA)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    pairs = {name.format(i, ab): torch.ones((2, 16) if ab == "A" else (32, 2)) for i in range(2) for ab in "AB"}
    save_file(pairs, folder / "adapter" / "adapter_model.safetensors")
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def edit(name: str, **fields: Any) -> Callable[[Path], object]:
    """Set fields of a JSON file."""
    return lambda folder: write(folder / name, json.loads((folder / name).read_text()) | fields)


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(raw)


# Values of every JSON type, and those on which naive checks break.
VALUES: dict[str, Any] = {
    "null": None, "true": True, "zero": 0, "negative": -1, "huge": HUGE, "fraction": 1.5, "infinite": float("inf"),
    "nan": float("nan"), "text": "x", "list": [], "nested": [[]], "object": {}, "int32": 2**31, "int64": 2**63,
    "tiny": 5e-324, "great": 1e308, "million": 10**6, "long": "y" * 5000, "surrogate": "\ud800",
}  # fmt: skip

JSON_TEXTS: dict[str, str | bytes] = {
    "empty": "", "cut": '{"a": ', "a list": "[]", "deep": DEEP, "deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "no UTF-8": b"\xff\xfe{}", "many digits": '{"vocab_size": ' + "9" * 5000 + "}", "BOM": b"\xef\xbb\xbf{}",
    "NUL": b"\0" * 64, "null": "null", "number": "1e999",
}  # fmt: skip


def config_cases() -> Iterator[Case]:
    for field in CONFIG:
        for kind, value in VALUES.items():
            yield Case(f"config {field} {kind}", edit("config.json", **{field: value}), PLAN)
            yield Case(f"config {field} {kind} generate", edit("config.json", **{field: value}), GENERATE)
    for kind, content in JSON_TEXTS.items():
        yield Case(f"config text {kind}", text("config.json", content), PLAN)
    for kind in ("default", "linear", "llama3", "yarn"):
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "rope_theta",
            "rope_type",
        ):
            for what, value in VALUES.items():
                block = (
                    {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
                    if kind == "llama3"
                    else {"rope_type": kind, "factor": 2.0}
                )
                yield Case(
                    f"rope {kind} {key} {what}", edit("config.json", rope_parameters={**block, key: value}), GENERATE
                )
    for field in (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "mlp_only_layers",
        "num_local_experts",
    ):
        for kind, value in VALUES.items():
            fields = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", field: value}
            yield Case(f"moe {field} {kind}", edit("config.json", **fields), GENERATE)
    for field in ("quant_method", "weight_block_size", "modules_to_not_convert", "fmt"):
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        for kind, value in (
            VALUES
            | {
                "regex": ["("],
                "flags": ["(?i)x"],
                "endless": ["(\\w|\\w\\w|\\.)+!"],
                "deepre": ["(" * 5000 + ")" * 5000],
                "rep": ["a{99999999999}"],
            }
        ).items():
            yield Case(f"fp8 {field} {kind}", edit("config.json", quantization_config={**fp8, field: value}), GENERATE)


def generation_cases() -> Iterator[Case]:
    for kind, value in VALUES.items():
        yield Case(f"generation eos {kind}", edit("generation_config.json", eos_token_id=value), GENERATE)
        yield Case(f"generation eos in list {kind}", edit("generation_config.json", eos_token_id=[value]), GENERATE)
    for kind, content in JSON_TEXTS.items():
        yield Case(f"generation text {kind}", text("generation_config.json", content), GENERATE)


def index_cases() -> Iterator[Case]:
    def shard(value: Any) -> Callable[[Path], object]:
        def spoil(folder: Path) -> None:
            raw = json.loads((folder / INDEX).read_text())
            raw["weight_map"]["model.norm.weight"] = value
            write(folder / INDEX, raw)

        return spoil

    for kind, value in VALUES.items():
        yield Case(f"index map {kind}", edit(INDEX, weight_map=value), GENERATE)
        yield Case(f"index shard {kind}", shard(value), GENERATE)
    for kind, content in JSON_TEXTS.items():
        yield Case(f"index text {kind}", text(INDEX, content), GENERATE)
    for name in (
        "../outside.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/../../outside.safetensors",
        "\0",
        "a\0b",
        "x" * 5000,
        "~/x",
        "..\\x",
        "C:\\x",
        "/dev/zero",
        "adapter/adapter_model.safetensors",
    ):
        yield Case(f"index shard {name[:20]!r}", shard(name), GENERATE)


def header(raw: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(**fields: Any) -> bytes:
    one = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **fields}
    return header(json.dumps({"model.norm.weight": one}).encode(), data=bytes(64))


FILES: dict[str, bytes] = {
    "empty": b"", "short": b"\0" * 4, "zeros": b"\0" * 100, "ones": b"\xff" * 100,
    "no header": header(b""), "long header": header(b"{}", 2**63), "longer header": header(b"{}", 100),
    "huge header": header(b"{}", 2**64 - 1), "not JSON": header(b"{" * 10), "deep": header(b"[" * 100_000 + b"]" * 100_000),
    "deep obj": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "list": header(b"[]"), "null": header(b"null"), "nothing": header(b"{}"),
    "dtype": tensor(dtype="F4"), "dtype2": tensor(dtype=3), "dtype3": tensor(dtype="I32"), "bool": tensor(dtype="BOOL", data_offsets=[0, 16]),
    "f8": tensor(dtype="F8_E4M3", data_offsets=[0, 16]), "f8m0": tensor(dtype="F8_E8M0", data_offsets=[0, 16]), "f4": tensor(dtype="F4", data_offsets=[0, 8]), "u16": tensor(dtype="U16", data_offsets=[0, 32]), "c64": tensor(dtype="C64", shape=[8]),
    "shape": tensor(shape=[2**63, 2**63]), "shape2": tensor(shape=[-1]), "shape3": tensor(shape="x"), "shape4": tensor(shape=[]), "shape5": tensor(shape=[0], data_offsets=[0, 0]),
    "shape6": tensor(shape=[4, 4]), "shape7": tensor(shape=[1] * 10000 + [16]),
    "offsets": tensor(data_offsets=[64, 0]), "offsets2": tensor(data_offsets=[0, 2**63]), "offsets3": tensor(data_offsets=[0]), "offsets4": tensor(data_offsets=[-1, 63]), "offset5": tensor(data_offsets=[1, 65]),
    "twice": header(b'{"model.norm.weight":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"model.norm.weight":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}', data=bytes(64)),
    "metadata": header(b'{"__metadata__": 3}'), "metadata2": header(b'{"__metadata__": {"a": 3}}'), "name": header(b'{"\\u001b[31m":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}', data=bytes(64)),
    "surrogate": header(b'{"\\ud800":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}', data=bytes(64)),
}  # fmt: skip


def tensor_cases() -> Iterator[Case]:
    for kind, content in FILES.items():
        for file, argv in (
            (SHARDS[0], GENERATE),
            ("model.safetensors", GENERATE),
            ("adapter/adapter_model.safetensors", ADAPTED),
        ):
            yield Case(f"{file} {kind}", text(file, content), argv)
    for file, argv in ((SHARDS[0], GENERATE), ("adapter/adapter_model.safetensors", ADAPTED)):
        for keep in (7, 8, 9, 100, 500, -1):
            yield Case(
                f"{file} cut at {keep}",
                lambda folder, file=file, keep=keep: (folder / file).write_bytes((folder / file).read_bytes()[:keep]),
                argv,
            )


def adapter_cases() -> Iterator[Case]:
    name = "adapter/adapter_config.json"
    more = {
        "regex": "(",
        "endless": r"(model|m|\w|\.|\w\w)+!",
        "evil": "(.*)*(.*)*(.*)*x!",
        "poly": ".*" * 30 + "!",
        "repeat": "a{99999999999}",
        "deep expression": "(" * 50_000 + ")" * 50_000,
        "bigrep": "(a{0,60000}){0,60000}b",
        "flags": "(?i)q_proj",
        "backref": r"(.)\1+x",
        "look": "(?!x).*q_proj",
        "reps": "((((.*)*)*)*)*!",
    }
    for field in (
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "bias",
        "init_lora_weights",
        "unknown",
    ):
        for kind, value in (VALUES | more).items():
            yield Case(f"adapter {field} {kind}", edit(name, **{field: value}), ADAPTED)
            if "pattern" in field or "modules" in field:
                yield Case(
                    f"adapter {field} in list {kind}",
                    edit(name, **{field: [value]} | ({"layers_to_transform": [0, 1]} if "layers" in field else {})),
                    ADAPTED,
                )
            if field in ("rank_pattern", "alpha_pattern"):
                if isinstance(value, str):
                    yield Case(f"adapter {field} key {kind}", edit(name, **{field: {value: 2}}), ADAPTED)
                yield Case(f"adapter {field} value {kind}", edit(name, **{field: {"q_proj": value}}), ADAPTED)
    for kind, content in JSON_TEXTS.items():
        yield Case(f"adapter text {kind}", text(name, content), ADAPTED)


def tokenizer_cases() -> Iterator[Case]:
    raw = json.loads((DEMO / "tokenizer.json").read_text())
    for kind, content in JSON_TEXTS.items():
        yield Case(f"tokenizer text {kind}", text("tokenizer.json", content), GENERATE)
    for field in raw:
        for kind, value in VALUES.items():
            yield Case(f"tokenizer {field} {kind}", edit("tokenizer.json", **{field: value}), GENERATE)
    for field in raw["model"]:
        for kind, value in VALUES.items():
            yield Case(
                f"tokenizer model {field} {kind}", edit("tokenizer.json", model=raw["model"] | {field: value}), GENERATE
            )
    yield Case("tokenizer no vocab", edit("tokenizer.json", model=raw["model"] | {"vocab": {}}), GENERATE)
    yield Case(
        "tokenizer big ids",
        edit("tokenizer.json", model=raw["model"] | {"vocab": {k: v + 1000 for k, v in raw["model"]["vocab"].items()}}),
        GENERATE,
    )
    yield Case(
        "tokenizer same ids",
        edit("tokenizer.json", model=raw["model"] | {"vocab": {k: 0 for k, v in raw["model"]["vocab"].items()}}),
        GENERATE,
    )
    for regex in ("(", "(a+)+$", "(\\w|\\w\\w| )+!", "(.*)*x!", "a{1000000}"):
        pre = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        yield Case(
            f"tokenizer regex {regex}",
            edit("tokenizer.json", pre_tokenizer=pre),
            ("generate", "--model", FOLDER, "--prompt", "a" * 50 + "!", *RUN),
        )
        yield Case(
            f"tokenizer norm {regex}",
            edit("tokenizer.json", normalizer={"type": "Replace", "pattern": {"Regex": regex}, "content": ""}),
            ("generate", "--model", FOLDER, "--prompt", "a" * 50 + "!", *RUN),
        )
    yield Case(
        "tokenizer unigram",
        edit("tokenizer.json", model={"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]]}),
        GENERATE,
    )
    yield Case(
        "tokenizer unigram none",
        edit("tokenizer.json", model={"type": "Unigram", "unk_id": None, "vocab": []}),
        GENERATE,
    )
    yield Case(
        "tokenizer unigram nan",
        edit("tokenizer.json", model={"type": "Unigram", "unk_id": None, "vocab": [["A", 1e308], ["b", -1e308]]}),
        GENERATE,
    )
    yield Case(
        "tokenizer wordlevel",
        edit("tokenizer.json", model={"type": "WordLevel", "unk_token": "q", "vocab": {"a": 0}}),
        GENERATE,
    )
    yield Case(
        "tokenizer trunc",
        edit(
            "tokenizer.json",
            truncation={"max_length": 1, "stride": 5, "strategy": "LongestFirst", "direction": "Right"},
        ),
        GENERATE,
    )
    yield Case(
        "tokenizer added",
        edit(
            "tokenizer.json",
            added_tokens=[
                {
                    "id": 2**32 - 1,
                    "content": "A",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
        ),
        GENERATE,
    )


NUMBERS = (
    "0",
    "-1",
    "1000000",
    "99999999999999999999",
    "9" * 400,
    "9" * 5000,
    "nan",
    "inf",
    "1e308",
    "5e-324",
    "1e-310",
    "x",
    "",
    "1_0",
    "\u0663",
    "0x10",
)


def argument_cases() -> Iterator[Case]:
    nothing = lambda folder: None  # noqa: E731
    for option in ("--max-tokens", "--temperature", "--seed", "--speculate", "--pp", "--prompt-ids"):
        for value in NUMBERS:
            more = ("--transport", "local") if option == "--pp" else ()
            yield Case(f"generate {option} {value[:30]}", nothing, (*GENERATE, option, value, *more))
    for option in (
        "--pp",
        "--cohorts",
        "--steps",
        "--requests",
        "--context",
        "--bandwidth",
        "--link",
        "--latency",
        "--capacity",
    ):
        for value in NUMBERS:
            yield Case(f"plan {option} {value[:30]}", nothing, (*PLAN, option, value))
    bench = (
        "bench",
        "--model",
        FOLDER,
        "--device",
        "cpu",
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
        "--json",
    )
    for option in (
        "--input-len",
        "--output-len",
        "--num-prompts",
        "--max-num-seqs",
        "--max-num-tokens",
        "--run-ahead",
        "--temperature",
        "--seed",
        "--speculate",
        "--pp",
    ):
        for value in NUMBERS:
            if (option, value) in (("--num-prompts", "1000000"),):
                continue
            more = ("--transport", "local") if option == "--pp" else ()
            yield Case(f"bench {option} {value[:30]}", nothing, (*bench, option, value, *more))
    for value in ("cpu:99", "cuda:99999999999", "cpu:x", "cuda:-1", "", "meta", "\0", "x" * 5000):
        yield Case(f"generate --device {value[:20]!r}", nothing, (*GENERATE, "--device", value))
    for option in ("--model", "--adapter", "--draft"):
        for value in (
            "",
            ".",
            "..",
            "/",
            "\0",
            "x" * 5000,
            "/dev/null",
            "/dev/zero",
            "/proc/self/mem",
            "~",
            "\udcff",
            "-",
            "--",
            f"{FOLDER}/config.json",
        ):
            more = ("--speculate", "2") if option == "--draft" else ()
            yield Case(f"generate {option} {value[:20]!r}", nothing, (*GENERATE, option, value, *more))
    for value in ("", ".", "/", "\0", "x" * 5000, "/dev/full", "/nonexistent/x"):
        yield Case(f"bench --out {value[:20]!r}", nothing, (*bench, "--out", value))
        yield Case(f"plan --svg {value[:20]!r}", nothing, (*PLAN, "--svg", value))
        yield Case(f"bench --eval {value[:20]!r}", nothing, ("bench", "--model", FOLDER, "--eval", value))
    for kind, content in (
        JSON_TEXTS
        | {
            "big": '{"text": ' + "9" * 5000 + "}",
            "deepl": '{"text": ' + DEEP + "}",
            "surr": '{"text": "\\ud800"}',
            "ok": '{"text": "A"}',
            "nul": '{"text": "\\u0000"}',
        }
    ).items():
        yield Case(
            f"eval text {kind}",
            text("tasks.jsonl", content),
            (
                "bench",
                "--model",
                FOLDER,
                "--eval",
                f"{FOLDER}/tasks.jsonl",
                "--max-num-seqs",
                "2",
                "--graph",
                "none",
                "--device",
                "cpu",
                "--json",
            ),
        )


def cases() -> Iterator[Case]:
    for each in (
        config_cases,
        generation_cases,
        index_cases,
        tensor_cases,
        adapter_cases,
        tokenizer_cases,
        argument_cases,
    ):
        yield from each()
