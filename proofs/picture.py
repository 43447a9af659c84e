"""The README's picture, made from records of serving: output tokens a second by graph mode."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from weft.proofs.records import read, served, speeds

PICTURE = Path(__file__).parent / "pages" / "modes.svg"

# Readable on white and on black: an image does not know the page's background.
_GREY, _BLUE, _WIDTH, _LEFT, _ROW = "#7d7d7d", "#3b8fc4", 720, 150, 24
_PANELS = (
    ("Qwen3-0.6B in bfloat16, one NVIDIA H200", ("h200-serving-dense-modes",)),
    (
        "Qwen3-30B-A3B in FP8, a pipeline over two NVIDIA H200",
        ("h200x2-serving-moe-peer-modes", "h200x2-serving-moe-peer"),
    ),
)
_MODES = {"none": "eager"}


def picture() -> str:
    """Tokens a second in each mode against eager steps, as an SVG: the best run of each."""
    parts, top = [_text(0, 16, "Output tokens a second by graph mode (128 requests, 2 tokens in and 512 out)")], 46.0
    for title, names in _PANELS:
        best: dict[str, float] = {}
        for runs in (served(read(name)) for name in names):
            best |= {mode: max(speeds(rows)) for (workload, mode), rows in runs.items() if workload == "decode"}
        parts += _panel(title, best, top)
        top += 34 + _ROW * len(best)
    height = top - 8
    size = f'viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" height="{height:g}"'
    font = 'font-family="system-ui, sans-serif" font-size="13" role="img" aria-label="tokens a second by mode"'
    return "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>", ""))


def _panel(title: str, best: dict[str, float], top: float) -> Sequence[str]:
    unit = (_WIDTH - _LEFT - 190) / max(best.values())
    found = [_text(0, top, title, bold=True)]
    for index, (mode, speed) in enumerate(best.items()):
        y, wide = top + 12 + index * _ROW, speed * unit
        fill = _GREY if mode == "none" else _BLUE
        found.append(f'<rect x="{_LEFT}" y="{y:g}" width="{wide:.1f}" height="16" rx="2" fill="{fill}"/>')
        found.append(_text(_LEFT - 8, y + 13, _MODES.get(mode, mode), anchor="end"))
        times = "" if mode == "none" else f"  ({speed / best['none']:.1f} times eager)"
        found.append(_text(_LEFT + wide + 8, y + 13, f"{speed:,.0f}{times}"))
    return found


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:g}" fill="{_GREY}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
