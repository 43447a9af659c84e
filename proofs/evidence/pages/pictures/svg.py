"""Parts of SVG pictures, in colours that read on a white page and on a black one: an image does not
know its page."""

from collections.abc import Iterable
from html import escape
from typing import Any

GREY = "#7d7d7d"
BLUE = "#3b8fc4"
ORANGE = "#d98a1f"
RED = "#d0413a"


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    bold: bool = False,
    size: int | None = None,
    fill: str = GREY,
) -> str:
    """A line of text from (`start`), around (`middle`) or up to (`end`) x, on the base line y."""
    more = ' font-weight="bold"' if bold else ""
    more += f' font-size="{size}"' if size else ""
    return (
        # Fixed numbers of digits: the file is compared with what the records give, on any machine.
        f'<text x="{x:.1f}" y="{y:g}" fill="{fill}"'
        f' text-anchor="{anchor}"{more}>{escape(words)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, fill: str, **more: Any) -> str:
    """A rectangle from its upper left corner; `more` are attributes of SVG."""
    attributes = "".join(f' {name}="{value}"' for name, value in more.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}"{attributes} fill="{fill}"/>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """A thin, faint grey line."""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{GREY}" stroke-width="1" stroke-opacity="0.4"/>'


def document(parts: Iterable[str], width: float, height: float, label: str) -> str:
    """A picture of these parts; `label` says what it shows to those who do not see it."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    font = (
        'font-family="system-ui, sans-serif" font-size="13" role="img"'
        f' aria-label="{escape(label)}"'
    )
    return "\n".join(
        (f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>", "")
    )
