"""Tokenizers: tokenizer.json, and the errors of the tokenizers library."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from weft.arguments.checks import kind_of
from weft.errors import CheckpointError, RequestError, WeftError

# The number of characters from which a text is long, and takes some milliseconds to encode.
LONG_TEXT = 2000


@contextmanager
def tokenizer_failures(
    kind: type[WeftError], call: str, problem: str, instead: str
) -> Iterator[None]:
    """Turn errors of the tokenizers library into an error of this kind: bare exceptions, and Rust's
    panics, which are not Exceptions."""
    try:
        yield
    except WeftError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(call, f"{problem}: {error!s:.300}", instead) from error
        raise


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """The tokens of a text. Other Python threads can run while a long text is encoded.

    Args:
        special: whether to add the tokenizer's special tokens.
    """
    if len(text) < LONG_TEXT:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    # `encode_batch` releases the GIL; `encode` holds it.
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=special)
    return list(encoding.ids)


def encode(
    tokenizer: Tokenizer | None, text: Any, call: str, path: Path, *, special: bool = True
) -> list[int]:
    """The tokens of a text, by the tokenizer of the checkpoint at `path` (see `token_ids`).

    Raises:
        RequestError: the checkpoint has none, `text` is not a string, or the tokenizer fails.
    """
    if not isinstance(text, str):
        instead = "a string; token ids need no encoding, and model.decode(token_ids) reads them"
        raise RequestError(call, kind_of(text), instead)
    if tokenizer is None:
        raise RequestError(call, lacks_tokenizer(path), "pass token ids")
    with tokenizer_failures(
        RequestError, call, "the tokenizer failed", f"other text, or another {path}"
    ):
        return token_ids(tokenizer, text, special=special)


def lacks_tokenizer(path: Path) -> str:
    """The text for an error about a checkpoint without a tokenizer."""
    if path.suffix == ".gguf":
        missing = "tokenizer that weft knows"
    else:
        missing = "tokenizer.json"
    return f"{path} holds no {missing}"


def read_tokenizer(folder: Path, call: str) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, from tokenizer.json; None if it has none.

    Raises:
        CheckpointError: the file cannot be read.
    """
    file = folder / "tokenizer.json"
    if not os.path.isfile(file):
        return None
    with tokenizer_failures(CheckpointError, call, f"{file} cannot be read", "save it again"):
        tokenizer = Tokenizer.from_file(str(file))
    # A file may switch these on; but prompts are taken whole, and batches are padded elsewhere.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
