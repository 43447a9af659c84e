"""The text that `train_demo` trains on: English prose that Python itself ships, as bytes.

The text is the language reference in `pydoc_data`, and the docstrings and comments of the standard
library. Nothing here imports weft.
"""

import ast
import codecs
import contextlib
import inspect
import io
import itertools
import random
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END = 256  # the id of END_TEXT; ids 0 to 255 are the bytes themselves
END_TEXT = "<|endoftext|>"
SKIPPED = {"site-packages", "dist-packages", "__pycache__"}

_COMMON = frozenset(
    re.findall(
        r"\w+",
        """a about after all also an and any are as at be because been before but by can could do does for from had has
    have if in into is it its may more must no not of on only or other should so some such than that the their then
    there these they this to used was we were what when where which while will with would you""",
    )
)
_CODE = re.compile(
    r"[<>=|\\{}@#$%^~+]|::|__|\w\(\w|[a-z]\.[a-z]|\w_\w|/\w+/|\d{3}|[a-z][A-Z]|https?:|\bXXX\b"
)
_WORD = re.compile(r"""["'(]*[A-Za-z]+(?:['-][A-Za-z]+)*(?:\(\))?["')]*[.,;:!?]*["')]*""")
_SENTENCE = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')]))\s+(?=["'(]?[A-Z])""")
_BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d{1,2}[.)])\s)")
_MARKUP = re.compile(r">>>|\.\. |:\w+.*:|[+|]|[=*~^-]{4,}")
_UNITED = (
    (re.compile(r":[\w:+-]+:`[~!]?([^`<]+?)(?:\s*<[^`]*>)?`"), r"\1"),  # :role:`name`
    (re.compile(r"`+([^`']+)[`']+_{0,2}"), r"\1"),  # ``code``, `code', `link`_
    (
        re.compile(r"(?<![\w*])\*{1,2}([^\s*](?:[^*]*[^\s*])?)\*{1,2}(?![\w*])"),
        r"\1",
    ),  # *emphasis*, **strong**
    (re.compile(r"\s*\[(?:\d+|#\w*)\]_?"), ""),  # [1] footnote marks
    (re.compile(r"^(?:[-*o+]|\(?\d{1,2}[.)]|\(?[a-zA-Z][.)])\s+"), ""),  # the mark of a list item
    (re.compile(r"(\w)-{2}(\w)|\s-{2,3}\s"), r"\1 - \2"),
    (re.compile(r'"{2,}'), '"'),
    (re.compile(r"\s+"), " "),
)
_PLAIN = str.maketrans(
    {
        "\u201c": '"',
        "\u201d": '"',
        "\u2018": "'",
        "\u2019": "'",
        "\u2014": " - ",
        "\u2013": "-",
        "\u2026": "...",
    }
)


# ---------------------------------------------------------------------------------------------------------- the text


def reads_as_english(text: str) -> bool:
    """Whether a line of text is whole English sentences, with next to no code in it."""
    words = text.split()
    if (
        len(text) < 40
        or not text.isascii()
        or not re.fullmatch(r"""["'(]?[A-Z].*[.!?][)"']*""", text)
    ):
        return False
    letters = sum(c.isalpha() or c == " " for c in text) / len(text)
    plain = sum(_WORD.fullmatch(word) is not None for word in words)
    common = sum(word.lower() in _COMMON for word in words)
    code = len(_CODE.findall(text))
    return (
        letters >= 0.92
        and plain >= 0.88 * len(words)
        and common >= 0.22 * len(words)
        and code <= len(words) / 15
    )


def paragraphs(text: str) -> Iterator[str]:
    """The English paragraphs of a docstring, a comment or a page of reST, each unwrapped to one
    line.

    A paragraph that is not English all through gives those of its sentences that are.
    """
    for block in _BLOCK.split(text.translate(_PLAIN)):
        lines = [line.strip() for line in block.splitlines()]
        if any(_MARKUP.match(line) for line in lines):
            continue
        joined = " ".join(lines)
        for pattern, by in _UNITED:
            joined = pattern.sub(by, joined).strip()
        if not reads_as_english(joined):
            joined = " ".join(filter(reads_as_english, _SENTENCE.split(joined)))
        if joined:
            yield joined


def docstrings(source: str) -> Iterator[str]:
    """Every docstring of a Python source text, in the order of `ast.walk`; none where it does not
    parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes, in tests of just that
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def comments(source: str) -> Iterator[str]:
    """Every run of whole-line comments of a Python source text, without its hash signs."""
    run: list[str] = []
    for line in [*source.splitlines(), ""]:
        mark = re.match(r"\s*#+ ?(.*)", line)
        if mark:
            run.append(mark[1])
        elif run:
            yield "\n".join(run)
            run = []


def library_texts(root: Path) -> Iterator[str]:
    """One text after another from the Python sources under `root`, in the order of their paths."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).parts):
        if SKIPPED.isdisjoint(path.relative_to(root).parts):
            with (
                contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError),
                tokenize.open(path) as file,
            ):
                source = file.read()
                yield from docstrings(source)
                yield from comments(source)


def built_in_texts() -> Iterator[str]:
    """The docstrings of the modules written in C, and of what they hold."""
    for name in sorted(sys.builtin_module_names):
        try:
            module = import_module(name)
        except ImportError:  # built in, but without the system library that it wraps
            continue
        members = [value for key, value in sorted(vars(module).items()) if not key.startswith("_")]
        inner = [
            v
            for h in members
            if inspect.isclass(h)
            for k, v in sorted(vars(h).items())
            if not k.startswith("_")
        ]
        for value in (module, *members, *inner):
            text = getattr(value, "__doc__", None)
            if isinstance(text, str):
                yield text


def shipped_texts() -> Iterator[str]:
    """All the text that this Python ships, in a fixed order, not yet cleaned."""
    with contextlib.suppress(ImportError):
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in (root / "LICENSE.txt", Path("/usr/share/doc/python3/copyright")):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")
    with contextlib.redirect_stdout(io.StringIO()):
        yield codecs.decode(import_module("this").s, "rot13")
    yield from built_in_texts()
    yield from library_texts(root)


def documents(texts: Iterable[str]) -> list[str]:
    """The cleaned texts: their English paragraphs, each kept where it is first seen, one to a line."""
    keys: set[str] = set()
    kept: list[str] = []
    for text in texts:
        fresh = []
        for paragraph in paragraphs(text):
            key = re.sub(r"[^a-z]+", "", paragraph.lower())
            if key not in keys:
                keys.add(key)
                fresh.append(paragraph)
        if fresh:
            kept.append("\n".join(fresh))
    return kept


# ------------------------------------------------------------------------------------------- the tokenizer and the data


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 257 tokens: id `b` is the byte `b`, and id 256 is the end of a text."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    # Byte-level BPE's stand-ins for unprintable bytes
    shifted = iter(sorted(c for c in alphabet if ord(c) > 255))
    vocab = {chr(b) if chr(b) in alphabet else next(shifted): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TEXT, special=True, normalized=False)])
    return tokenizer


def token_ids(texts: Iterable[str]) -> Tensor:
    """The texts as one stream of ids, `END` before each and after the last: int64 of shape (n,)."""
    parts = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]
    end = np.array([END], dtype=np.int64)
    return torch.from_numpy(
        np.concatenate([end, *itertools.chain.from_iterable((part, end) for part in parts)])
    )


def split_held_out(texts: list[str], part: float = 0.02) -> tuple[list[str], list[str]]:
    """The texts in two: those to train on, and `part` of them, held out. The same split for the
    same texts."""
    order = random.Random(0).sample(range(len(texts)), len(texts))
    eval_indices = set(order[: round(part * len(texts))])
    return [t for i, t in enumerate(texts) if i not in eval_indices], [
        texts[i] for i in sorted(eval_indices)
    ]
