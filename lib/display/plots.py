"""Plots by matplotlib, which is imported at the first plot, in colours that can be read on a light
page and on a dark one."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from statistics import median
from typing import Any

from weft.errors import MissingPackageError
from weft.extras import install_command

GREY = "#808080"
# If the longest bar is more than this many times the median, the axis is logarithmic.
_FAR = 8.0


def pyplot(call: str) -> Any:
    """`matplotlib.pyplot`.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingPackageError(
            call, f"no matplotlib here ({error})", install_command("notebook")
        ) from error


def new_axes(call: str, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A new figure, `width` by `height` inches, and its axes, styled by `neutral`. `options` go to
    `subplots`."""
    figure, axes = pyplot(call).subplots(figsize=(width, height), layout="constrained", **options)
    return neutral(figure), axes


def neutral(figure: Any) -> Any:
    """The figure, made transparent, with text and lines in a grey that can be read on white and on
    black."""
    # Not by `rc_context`: if a notebook's backend is first loaded inside it, its end undoes what
    # the backend has set.
    figure.patch.set_alpha(0)
    for ax in figure.axes:
        ax.patch.set_alpha(0)
        ax.tick_params(colors=GREY)
        for part in (*ax.spines.values(), ax.title, ax.xaxis.label, ax.yaxis.label):
            part.set_color(GREY)
    return figure


def axes_for(call: str, ax: Any, width: float, height: float) -> Any:
    """`ax`, or new axes of `width` by `height` inches if it is None."""
    if ax is None:
        return new_axes(call, width, height)[1]
    return ax


def rows(
    ax: Any, *parts: tuple[Sequence[float], Any, str], names: Sequence[str] | None = None
) -> None:
    """Draw horizontal bars from the top down, each a row of parts.

    The axis is logarithmic if one bar would squash the others.

    Args:
        parts: for each part, its length in each bar, its colour (one for all bars, or one for
            each), and its label.
        names: the names of the bars; None: the axis keeps its ticks.
    """
    ends = [0.0] * len(parts[0][0])
    for lengths, colours, label in parts:
        ax.barh(
            range(len(ends)),
            lengths,
            left=ends,
            color=colours,
            label=label,
            edgecolor="#555",
            linewidth=0.4,
        )
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    if names is not None:
        ax.set_yticks(range(len(ends)), names)
    ax.set_ylim(len(ends) - 0.4, -0.6)
    shown = [end for end in ends if end > 0]
    if shown and max(shown) > _FAR * median(shown):
        ax.set_xscale("log")
        ax.set_xlim(left=min(shown) / 2)
        ax.xaxis.set_major_formatter("{x:g}")


def legend(ax: Any, colours: Mapping[str, str]) -> None:
    """A legend to the right of the axes: what each colour is."""
    patch = import_module("matplotlib.patches").Patch
    patches = [
        patch(facecolor=colour, edgecolor="#555", label=label) for label, colour in colours.items()
    ]
    ax.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        labelcolor=ax.title.get_color(),
    )
