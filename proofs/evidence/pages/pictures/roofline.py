"""The picture of decodes as shares of the roofline, by model and batch size: the oldest record and
the newest one."""

from collections.abc import Iterator
from pathlib import Path

from weft.proofs.evidence.pages.pictures.svg import BLUE, GREY, document, line, rect, text
from weft.proofs.evidence.pages.roofline import BANDWIDTHS, MODELS, Served, before_and_after

PICTURE = Path(__file__).parents[3] / "pages" / "roofline.svg"

_WIDTH = 800
_LEFT = 200
_FULL = 260
_BAR = 15
# `_FULL` is the length of 100 %.
_GAP = 12


def picture() -> str:
    """For each GPU, model and number of requests a grey bar for the oldest record and a blue one
    for the newest."""
    parts = [*_legend()]
    top = 68.0
    measured = before_and_after()
    for gpu in BANDWIDTHS:
        gpu_measured = {key[1:]: ends for key, ends in measured.items() if key[0] == gpu}
        parts.append(text(0, top, f"One NVIDIA {gpu}, {BANDWIDTHS[gpu] / 1e12:g} TB/s", bold=True))
        start = top = top + 12
        bars: list[str] = []
        for (model, requests), ends in gpu_measured.items():
            bars += _bars(model, requests, ends, top)
            # Two lines of text stand beside the bars, so that a single bar has room for two.
            top += _BAR * max(2, len(ends)) + _GAP
        parts += [*_axis(start, top - _GAP), *bars]
        top += 34
    return document(parts, _WIDTH, top - 26, "output tokens per second as a share of the roofline")


def _legend() -> Iterator[str]:
    yield text(
        0,
        16,
        "Decodes as a share of the memory roofline (2 tokens in, 256 or 512 out, all requests at"
        " once)",
    )
    yield rect(0, 29, 12, 11, GREY, rx=2)
    yield text(18, 39, "oldest record")
    yield rect(118, 29, 12, 11, BLUE, rx=2)
    yield text(136, 39, "newest record, when it began (UTC); builds and hosts differ")


def _axis(start: float, stop: float) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        x = _LEFT + _FULL * percent / 100
        yield line(x, start, x, stop)
        yield text(x, stop + 13, f"{percent} %", anchor="middle", size=11)


def _bars(model: str, requests: int, ends: tuple[Served, ...], top: float) -> Iterator[str]:
    yield text(_LEFT - 8, top + 12, MODELS[model], anchor="end")
    most = f"{requests} request{'s' * (requests > 1)}; 100 %: {ends[-1].most:,.0f}/s"
    yield text(_LEFT - 8, top + 26, most, anchor="end", size=11)
    if len(ends) == 1:
        more = ", no other record"
    # Two builds of one run: the only bars here whose hosts do not differ.
    elif ends[0].time[0] == ends[1].time[0]:
        more = ", builds in turns"
    else:
        more = ""
    for index, one in enumerate(ends):
        y = top + _BAR * index
        wide = _FULL * one.share
        is_newest = index == len(ends) - 1
        yield rect(_LEFT, y + 1, wide, _BAR - 2, BLUE if is_newest else GREY, rx=2)
        words = f"{one.share:.0%}   {one.speed:,.0f} tokens/s, {one.time[0][5:]}{more}"
        yield text(_LEFT + _FULL + 10, y + 12, words, size=12)
