"""Schemas of the tensors that ranks exchange: names, dimensions and dtypes. They print as text that
parses back.

An edge is a pair of ranks, one of which sends to the other. Both ends compare the schema of each
value that crosses it, and the programs of `weft.effects` show it.
"""

import re
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import ProgramError
from weft.values.trees import TreeSpec, leaf_axes, leaves_with_names, tree_flatten

_DTYPES: dict[str, torch.dtype] = {
    name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)
}
_DIM = r"(?:[0-9]+|[A-Za-z_]\w*(?:\+[0-9]+)?)"
_TENSOR = (
    rf"(.*)\[((?:{_DIM}(?:, *{_DIM})*)?)\] ({'|'.join(_DTYPES)})",
    "name[num_tokens, 64] float32",
)


def read_form(form: tuple[str, str], text: str, call: str, problem: str) -> re.Match[str]:
    """Match a text with a form: a regular expression, and an example for the error.

    Raises:
        ProgramError: the text does not match.
    """
    match = re.fullmatch(form[0], text.strip())
    if match is None:
        raise ProgramError(call, problem, form[1])
    return match


@attrs.frozen
class TensorSchema:
    """The name, dimensions and dtype of one tensor on an edge.

    Args:
        name: the path of the tensor in the value.
        dims: its dimensions: ints, or axis names of the descriptor.
        dtype: its dtype.

    >>> print(TensorSchema("hidden_states", ("num_tokens", 64), torch.float32))
    hidden_states[num_tokens, 64] float32
    """

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.name}[{', '.join(map(str, self.dims))}]"
            f" {str(self.dtype).removeprefix('torch.')}"
        )

    @classmethod
    def parse(cls, text: str) -> "TensorSchema":
        """The inverse of `str`."""
        match = read_form(_TENSOR, text, f"TensorSchema.parse({text!r})", "no tensor's schema")
        dims = [d.strip() for d in match[2].split(",") if d.strip()]
        return cls(match[1], tuple(int(d) if d.isdecimal() else d for d in dims), _DTYPES[match[3]])


@attrs.frozen
class Schema:
    """All tensors of the value on an edge, in flattening order."""

    tensors: tuple[TensorSchema, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.tensors)) or "nothing"

    @classmethod
    def parse(cls, text: str) -> "Schema":
        """The inverse of `str`."""
        if text.strip() not in ("", "nothing"):
            # At commas outside of brackets: those after which no `]` comes before the next `[`.
            parts = re.split(r",\s*(?![^\[]*\])", text)
        else:
            parts = []
        return cls(tuple(TensorSchema.parse(part) for part in parts))

    @classmethod
    def of(cls, value: Any) -> "Schema":
        """The schema of a value. A dimension whose size the descriptor gives is shown by name."""
        leaves, structure = tree_flatten(value)
        kinds = [(*x.shape, x.dtype) if isinstance(x, Tensor) else None for x in leaves]
        # A comparison of symbolic sizes would add guards to the trace, so these are not cached.
        if any(
            isinstance(size, torch.SymInt) for kind in kinds if kind is not None for size in kind
        ):
            return cls._of(value)
        for schema, recent_structure, recent_kinds in _recent:
            if kinds == recent_kinds and structure == recent_structure:
                return schema
        return _remember(cls._of(value), structure, kinds)

    @classmethod
    def _of(cls, value: Any) -> "Schema":
        tensors = []
        for (name, leaf), spec in zip(leaves_with_names(value), leaf_axes(value), strict=True):
            if isinstance(leaf, Tensor):
                dims: list[int | str] = [*leaf.shape]
                if spec is not None:
                    dims = [spec.name(index) or size for index, size in enumerate(dims)]
                tensors.append(TensorSchema(name.removeprefix("."), tuple(dims), leaf.dtype))
        return cls(tuple(tensors))


# Schemas of recent values, with their structure and the shape and dtype of each leaf. A rank asks
# for the schema of each message, but has only few kinds of messages at a time.
_recent: tuple[tuple[Schema, TreeSpec, list[Any]], ...] = ()
_MOST_RECENT = 8


def _remember(schema: Schema, structure: TreeSpec, kinds: list[Any]) -> Schema:
    global _recent
    _recent = ((schema, structure, kinds), *_recent[: _MOST_RECENT - 1])
    return schema
