"""Tokenizers: tokenizer.json, and what the tokenizers library raises."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from weft.errors import CheckpointError, WeftError


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
