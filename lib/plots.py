"""matplotlib, where a plot is asked for, and not before."""

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
