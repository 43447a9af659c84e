"""Tokenizers: tokenizer.json, and what the tokenizers library raises."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from weft.errors import CheckpointError, WeftError

LONG_TEXT = 2000
"""Characters from which on a text is long: it takes some milliseconds."""


@contextmanager
def tokenizer_failures(kind: type[WeftError], call: str, seen: str, instead: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into an error of this kind: bare exceptions, and Rust's panics, which
    are not Exceptions."""
    try:
        yield
    except WeftError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(call, f"{seen}: {error!s:.300}", instead) from error
        raise


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """The tokens of a text. Other threads of Python run while a long one is encoded.

    Args:
        special: with the special tokens that the tokenizer adds.
    """
    if len(text) < LONG_TEXT:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)
    [found] = tokenizer.encode_batch([text], add_special_tokens=special)  # `encode` keeps the interpreter's lock
    return list(found.ids)


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
    # A file may ask for either; but prompts are taken whole, and descriptors pad batches.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
