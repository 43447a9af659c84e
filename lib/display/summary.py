"""`Summarized`: a base class for values with many tensors. They print in one line, and as a table
in a notebook."""

import re
from typing import Any

import attrs
from torch import Tensor

from weft.display.tables import Table
from weft.values.trees import leaves_with_names

# The most characters of a value that is not a tensor.
_MOST = 100


class Summarized:
    """A base class for attrs classes (`repr=False`) whose tensors are too many or too large to
    print: `repr` shows their dtypes and shapes. It reads no values, so it never waits for a device.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        fields = ((name, value) for name, value in _fields(self).items() if value is not None)
        return f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in fields)})"

    def table(self, title: str = "") -> Table:
        """One row for each tensor. Tensors whose names differ only by a number, such as a layer's,
        share a row."""
        rows: dict[tuple[str, ...], list[str]] = {}
        sizes: dict[int, int] = {}
        for field, value in _fields(self).items():
            for path, leaf in leaves_with_names(value):
                if isinstance(leaf, Tensor):
                    name = f"{field}{path}"
                    rows.setdefault(
                        (re.sub(r"\d+", "*", name), _kind(leaf), str(leaf.device)), []
                    ).append(name)
                    sizes[id(leaf)] = leaf.nbytes
        table_rows = [
            (names[0] if len(names) == 1 else pattern, f"{len(names)}", kind, device)
            for (pattern, kind, device), names in rows.items()
        ]
        size = f"{len(sizes)} tensors, {sum(sizes.values()) / 2**20:,.1f} MiB"
        return Table(
            ("name", "tensors", "each", "device"),
            tuple(table_rows),
            title or f"{type(self).__name__}: {size}",
        )

    def _repr_html_(self) -> str | None:
        if getattr(self, "_taken_by", ""):
            return None  # it was donated, which its `repr` says
        return self.table()._repr_html_()


def _fields(value: Any) -> dict[str, Any]:
    """The fields to show, without those that are optional and empty."""
    shown = {field: getattr(value, field.name) for field in attrs.fields(type(value)) if field.repr}
    optional: Any = attrs.Factory(dict)
    return {
        field.name: field_value
        for field, field_value in shown.items()
        if not (field.default == optional and field_value == {})
    }


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"


def _short(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        return _kind(value)
    if isinstance(value, Summarized):
        return f"{type(value).__name__}(...)"
    count = sum(isinstance(leaf, Tensor) for _, leaf in leaves_with_names(value))
    if count:
        return f"<{count} tensors>"
    if callable(value):
        text = getattr(value, "__name__", None)
    else:
        text = None
    text = " ".join((text or repr(value)).split())
    if len(text) <= _MOST:
        return text
    return f"{text[: _MOST - 1]}…"
