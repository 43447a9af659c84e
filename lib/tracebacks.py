"""Tracebacks of weft's errors in IPython, without the frames that are not the user's.

An error's text says what is wrong, and a notebook would show some hundred lines of weft before it.
The error itself keeps its whole traceback, for `%debug` and for Python's own text. Nothing runs
until an error is shown, so calls cost the same.
"""

import os
import sys
from types import TracebackType

# If this environment variable is set, the whole traceback is shown.
_SHOWS_ALL = "WEFT_FULL_TRACEBACKS"
# Packages whose frames, below a first one of weft, say nothing about the user's mistake. Generated
# code has no name.
_HIDDEN = sys.stdlib_module_names | {"", "weft", "attr", "torch", "tqdm"}


def render(error: BaseException) -> list[str]:
    """The lines that IPython shows of an error: the user's frames, the text, and how many frames
    are hidden."""
    whole = error.__traceback__
    if os.environ.get(_SHOWS_ALL):
        shown = whole
    else:
        shown = of_user(whole)
    format_traceback = sys.modules["IPython"].get_ipython().InteractiveTB.structured_traceback
    lines: list[str] = format_traceback(type(error), error, shown)
    if num_hidden := len(_links(whole)) - len(_links(shown)):
        frames = f"{num_hidden} frame{'s' * (num_hidden != 1)} inside weft"
        lines.append(f"(hidden: {frames}; {_SHOWS_ALL}=1 shows all)")
    return lines


def of_user(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without weft's frames, and without those of `_HIDDEN` below them."""
    links = _links(traceback)
    packages = [
        str(link.tb_frame.f_globals.get("__name__", "")).partition(".")[0] for link in links
    ]
    if "weft" not in packages:
        return traceback
    first = packages.index("weft")
    kept = links[:first] + [
        link
        for link, package in zip(links[first:], packages[first:], strict=True)
        if package not in _HIDDEN
    ]
    shown: TracebackType | None = None
    for link in reversed(kept):
        shown = TracebackType(shown, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return shown


def _links(traceback: TracebackType | None) -> list[TracebackType]:
    """The links of a traceback, one for each frame, the outermost first."""
    links = list[TracebackType]()
    while traceback is not None:
        links.append(traceback)
        traceback = traceback.tb_next
    return links
