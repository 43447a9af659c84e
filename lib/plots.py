"""matplotlib, where a plot is asked for, and not before."""

from collections.abc import Mapping
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


def legend(ax: Any, colours: Mapping[str, str]) -> None:
    """A legend to the right of the axes: what each colour is."""
    patch = import_module("matplotlib.patches").Patch
    patches = [patch(facecolor=colour, edgecolor="#555", label=label) for label, colour in colours.items()]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
