"""The README's picture, made from records of serving: output tokens a second by graph mode."""

from collections.abc import Sequence
from pathlib import Path

from weft.proofs.evidence.pages.pictures.svg import BLUE, GREY, document, rect, text
from weft.proofs.evidence.pages.records import read, served, speeds

PICTURE = Path(__file__).parents[3] / "pages" / "modes.svg"

_WIDTH = 720
_LEFT = 150
_ROW = 24
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
    parts = [
        text(
            0,
            16,
            "Output tokens a second by graph mode (128 requests, 2 tokens in and 512 out)",
        )
    ]
    top = 46.0
    for title, names in _PANELS:
        best: dict[str, float] = {}
        for runs in (served(read(name)) for name in names):
            # A mode that both records have is that of the later one.
            best |= {
                mode: max(speeds(rows))
                for (workload, mode), rows in runs.items()
                if workload == "decode"
            }
        parts += _panel(title, best, top)
        top += 34 + _ROW * len(best)
    return document(parts, _WIDTH, top - 8, "tokens a second by mode")


def _panel(title: str, best: dict[str, float], top: float) -> Sequence[str]:
    # 190 is room for the figure behind the longest bar. Each panel has a scale of its own, since
    # the models do not compare.
    unit = (_WIDTH - _LEFT - 190) / max(best.values())
    elements = [text(0, top, title, bold=True)]
    for index, (mode, speed) in enumerate(best.items()):
        y = top + 12 + index * _ROW
        wide = speed * unit
        elements.append(rect(_LEFT, y, wide, 16, GREY if mode == "none" else BLUE, rx=2))
        elements.append(text(_LEFT - 8, y + 13, _MODES.get(mode, mode), anchor="end"))
        if mode == "none":
            times = ""
        else:
            times = f"  ({speed / best['none']:.1f} times eager)"
        elements.append(text(_LEFT + wide + 8, y + 13, f"{speed:,.0f}{times}"))
    return elements
