"""Damaged and hostile GGUFs are errors of weft's, in little time and memory; and what a sound file
holds is what the package `gguf` reads from it."""

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import weft
from weft.errors import CheckpointError, ConfigError
from weft.stages.checkpoints.gguf.file import GgufFile, open_gguf

pytest.importorskip("gguf")

import gguf
from gguf_files import metadata_of, quantized, scrambled, stored_tensors, write_file, write_model

from weft.stages.model import describe_weights

Q = gguf.GGMLQuantizationType
MOST = 64 * 2**20
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TOKENS = ["<s>", *"abcdefghijklm", "ab", "abc"]
TEXTS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] + [1] * (len(TOKENS) - 1),
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("sound") / "a.gguf"
    write_model(file, "llama", scrambled("llama", **SMALL), quantized(Q.Q8_0), **TEXTS)
    return file.read_bytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "a.gguf"


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def refused(file: Path, data: bytes) -> str | None:
    """The error of loading these bytes; None if they load."""
    file.write_bytes(data)
    with little_memory():
        try:
            model = weft.load(file, "cpu", "float32", strict=True)
        except (CheckpointError, ConfigError) as error:
            return str(error)
    assert all(x.shape for x in (model.params.embed_tokens, model.params.norm) if x is not None)
    return None


def test_it_loads(sound: bytes, file: Path) -> None:
    assert refused(file, sound) is None
    model = weft.load(file, "cpu")
    assert model.encode("abcab") == [15, 14]
    assert model.encode_chat([{"role": "user", "content": "ab"}]) == [0, 14]


@given(st.binary(max_size=400))
def test_random_bytes(file: Path, data: bytes) -> None:
    assert refused(file, data)
    assert refused(file, b"GGUF\3\0\0\0" + data)


@given(st.data())
def test_a_file_that_is_cut_off(sound: bytes, file: Path, data: st.DataObject) -> None:
    assert refused(file, sound[: data.draw(st.integers(0, len(sound) - 1), "bytes")])


@given(st.data())
def test_changed_bytes(sound: bytes, file: Path, data: st.DataObject) -> None:
    """In what stands before the tensors: the file loads all the same, or is refused."""
    changed = bytearray(sound)
    start = len(sound) - sum(tensor.size for tensor in opened(file, sound).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        new = data.draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([struct.pack("<Q", 2**60), b"\xff" * 8])
        )
        at = data.draw(st.integers(4, start - len(new)), "place")
        changed[at : at + len(new)] = new
    refused(file, bytes(changed))


def opened(file: Path, data: bytes) -> GgufFile:
    file.write_bytes(data)
    return open_gguf(file, "open")


def head(tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARRAY = struct.pack("<II", 9, 0)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "cannot mmap an empty file"),
    "another format": (b"PK\3\4" + bytes(64), r"it begins with b'PK\\x03\\x04'"),
    "an old version": (head(version=1), "it has version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    "2**60 tensors": (
        head(2**60) + bytes(64),
        r"1152921504606846976 tensors, but only \d+ bytes are left",
    ),
    "2**60 values": (head(0, 2**60) + bytes(64), "1152921504606846976 values of metadata"),
    "a key of 2**60 letters": (
        head(0, 1) + struct.pack("<Q", 2**60) + bytes(64),
        r"the header goes on for 1152921504606846976 bytes, but the file ends at byte \d+",
    ),
    "an array of 2**60": (
        head(0, 1) + text("a") + ARRAY + struct.pack("<Q", 2**60),
        "1152921504606846976 values",
    ),
    "an array of 2**23": (
        head(0, 1) + text("a") + ARRAY + struct.pack("<Q", 2**23) + bytes(2**23),
        "an array of 8388608 values; weft reads at most 4194304",
    ),
    "an array of arrays": (
        head(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        "an array of type 9, which weft does not read",
    ),
    "a value of type 13": (
        head(0, 1) + text("a") + struct.pack("<I", 13) + bytes(64),
        "a value of type 13, which the format does not have",
    ),
    "a key that is no text": (
        head(0, 1) + struct.pack("<Q", 1) + b"\xff" + bytes(64),
        "can't decode byte 0xff",
    ),
    "a key twice": (
        head(0, 2) + (text("a") + struct.pack("<II", 4, 1)) * 2 + bytes(64),
        "two entries have the name 'a'",
    ),
    "a tensor twice": (
        head(2) + info("a", [8]) * 2 + bytes(128),
        "two entries have the name 'a'",
    ),
    "no dimensions": (
        head(1) + info("a", []) + bytes(64),
        "a has 0 dimensions; it has to have 1 to 4",
    ),
    "2**32 - 1 dimensions": (head(1) + text("a") + b"\xff" * 64, "a has 4294967295 dimensions"),
    "a dimension of 0": (
        head(1) + info("a", [0, 8]) + bytes(64),
        r"a has the shape \[8, 0\]; every size has to be 1 or more",
    ),
    "2**60 by 2**60": (
        head(1) + info("a", [2**60, 2**60]) + bytes(64),
        r"a ends at byte \d+, but the file ends at byte \d+",
    ),
    "an offset of 2**60": (head(1) + info("a", [8], 0, 2**60) + bytes(64), "a ends at byte"),
    "half a block": (
        head(1) + info("a", [16], 8) + bytes(64),
        "a has rows of 16 values, which is no multiple of the block of 32",
    ),
    "an odd place": (
        head(1) + info("a", [8], 0, 4) + bytes(128),
        "a does not start at a multiple of 32 bytes",
    ),
    "an alignment of 0": (
        head(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0) + bytes(64),
        "general.alignment=0; it has to be a multiple of 8, from 8 to 65536",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_says_what_is_wrong_with_it(case: str, file: Path) -> None:
    data, problem = HOSTILE[case]
    file.write_bytes(data)
    with (
        little_memory(),
        pytest.raises(
            CheckpointError, match=rf"saw: a.gguf is not a GGUF file that .*: .*{problem}"
        ),
    ):
        weft.load(file, "cpu")


def test_tensors_that_are_missing_of_another_shape_or_unknown(tmp_path: Path) -> None:
    theirs = scrambled("llama", **SMALL)
    tensors = {
        name: quantized(Q.F32)(values) for name, values in stored_tensors(theirs, "llama").items()
    }
    metadata = metadata_of(theirs, "llama")
    name = "blk.1.attn_k.weight"
    whole = tensors.pop(name)
    write_file(tmp_path / "a.gguf", "llama", metadata, tensors)
    with pytest.raises(CheckpointError, match=r"saw: a.gguf has no blk.1.attn_k.weight\n"):
        weft.load(tmp_path, "cpu")
    write_file(
        tmp_path / "a.gguf", "llama", metadata, tensors | {name: (whole[0][:8].copy(), whole[1])}
    )
    with pytest.raises(
        CheckpointError,
        match=r"blk.1.attn_k.weight in a.gguf is \(8, 32\), but its metadata says \(16, 32\)",
    ):
        weft.load(tmp_path, "cpu")
    write_file(
        tmp_path / "a.gguf", "llama", metadata, tensors | {name: whole, "blk.1.attn_sinks": whole}
    )
    with pytest.raises(
        CheckpointError, match=r"a.gguf has blk.1.attn_sinks, and no field of its metadata explains"
    ):
        weft.load(tmp_path, "cpu")


def test_it_reads_what_the_package_reads(sound: bytes, file: Path) -> None:
    ours = opened(file, sound)
    theirs = gguf.GGUFReader(file)
    fields = {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.")
    }
    assert ours.metadata == fields
    assert [*ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        layout = stored.shape[::-1], stored.kind, stored.start, stored.size
        assert layout == (
            tuple(tensor.shape.tolist()),
            int(tensor.tensor_type),
            tensor.data_offset,
            tensor.n_bytes,
        )
    assert ours.start == theirs.data_offset


def test_another_alignment(tmp_path: Path) -> None:
    theirs = scrambled("llama", **SMALL)
    for alignment in (8, 32, 256):
        write_model(
            tmp_path / "a.gguf",
            "llama",
            theirs,
            quantized(Q.F32),
            **{"general.alignment": alignment},
        )
        norm = weft.load(tmp_path, "cpu").params.norm
        assert norm is not None
        assert torch.equal(norm, theirs.model.norm.weight)


def test_two_files_and_a_changed_one_have_other_digests(tmp_path: Path) -> None:
    theirs = scrambled("llama", **SMALL)
    write_model(tmp_path / "a.gguf", "llama", theirs, quantized(Q.F32))
    first = describe_weights(weft.load(tmp_path, "cpu"))
    assert describe_weights(weft.load(tmp_path / "a.gguf", "cpu")) == first
    with torch.no_grad():
        theirs.model.norm.weight.mul_(2)
    write_model(tmp_path / "a.gguf", "llama", theirs, quantized(Q.F32))
    assert describe_weights(weft.load(tmp_path, "cpu")) != first
