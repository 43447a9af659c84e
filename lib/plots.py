"""matplotlib, where a plot is asked for, and not before."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from weft.errors import MissingPackageError


def pyplot(call: str) -> Any:
    """`matplotlib.pyplot`.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingPackageError(call, f"no matplotlib here ({error})", "pip install 'weft[notebook]'") from error


def axes_for(call: str, ax: Any, width: float, height: float) -> Any:
    """The axes that were given, or new ones of so many inches."""
    return pyplot(call).subplots(figsize=(width, height), layout="constrained")[1] if ax is None else ax


def rows(ax: Any, *parts: tuple[Sequence[float], Any, str], names: Sequence[str] | None = None) -> None:
    """Horizontal bars from the top down, of parts side by side.

    Args:
        parts: for each the lengths, the colour or one a bar, and the label.
        names: of the bars; None: the axis keeps its ticks.
    """
    ends = [0.0] * len(parts[0][0])
    for lengths, colours, label in parts:
        ax.barh(range(len(ends)), lengths, left=ends, color=colours, label=label, edgecolor="#555", linewidth=0.4)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    if names is not None:
        ax.set_yticks(range(len(ends)), names)
    ax.set_ylim(len(ends) - 0.4, -0.6)


def legend(ax: Any, colours: Mapping[str, str]) -> None:
    """A legend to the right of the axes: what each colour is."""
    patch = import_module("matplotlib.patches").Patch
    patches = [patch(facecolor=colour, edgecolor="#555", label=label) for label, colour in colours.items()]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
