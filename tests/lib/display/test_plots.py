"""Plots: their lines and axes, and the error without matplotlib."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import matplotlib as mpl
import pytest
import torch
from matplotlib import pyplot
from matplotlib.patches import Rectangle

from weft import Limits, dispatch_table, graphify, make_ladder
from weft.batches.descriptor import BatchDescriptor as B
from weft.display.plots import GREY
from weft.effects import Run
from weft.errors import MissingPackageError
from weft.extras import install_command
from weft.transforms import Costs, simulate
from weft.transforms.pipelines.schedule import streaming
from weft.transforms.pipelines.timing.timeline import compare

mpl.use("agg")
FAST, SLOW = (
    simulate(streaming(2, 3), Costs(stages, advance=1e-4))
    for stages in ((1e-3, 2e-3), (2e-3, 2e-3))
)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def captured() -> Any:
    function = graphify(lambda x: x * 2)
    for size in (2, 300):
        function(torch.ones(size))
    return function.graphs()


def widths(ax: Any) -> list[float]:
    return [patch.get_width() for patch in ax.patches if isinstance(patch, Rectangle)]


PLOTS: dict[str, Callable[[], Any]] = {
    "timeline": lambda: FAST.plot().figure,
    "comparison": lambda: compare(FAST, SLOW).plot(),
    "padding": lambda: dispatch_table([B(4, 4)], [B(3, 2), B(1, 1)] * 20).plot().figure,
    "nothing": lambda: dispatch_table([], []).plot().figure,
    "graphs": lambda: captured().plot(),
}


@pytest.mark.parametrize("plot", PLOTS)
def test_labels_are_inside_and_do_not_touch(plot: str) -> None:
    figure = PLOTS[plot]()
    figure.canvas.draw()
    for ax in figure.axes:
        (left, right), (low, high) = ax.get_xlim(), sorted(ax.get_ylim())
        across = [t.label1 for t in ax.xaxis.get_major_ticks() if left <= t.get_loc() <= right]
        up = [t.label1 for t in ax.yaxis.get_major_ticks() if low <= t.get_loc() <= high]
        boxes = [
            [label.get_window_extent() for label in labels if label.get_visible()]
            for labels in (across, up)
        ]
        for before, after in itertools.pairwise(sorted(boxes[0], key=lambda box: box.x0)):
            assert before.x1 < after.x0
        for below, above in itertools.pairwise(sorted(boxes[1], key=lambda box: box.y0)):
            assert below.y1 < above.y0 + 2
        title = ax.title.get_window_extent()
        label = ax.xaxis.label.get_window_extent()
        for box in (*boxes[0], *boxes[1], title, *([label] if ax.get_xlabel() else [])):
            assert figure.bbox.padded(2).contains(box.x0, box.y0)
            assert figure.bbox.padded(2).contains(box.x1, box.y1)
        assert not any(label.overlaps(box) for box in (*boxes[0], title) if ax.get_xlabel())


def test_a_timeline_has_a_row_a_rank_and_a_number_a_run() -> None:
    ax = FAST.plot()
    assert [label.get_text().splitlines()[0] for label in ax.get_yticklabels()] == [
        "rank 0",
        "rank 1",
    ]
    runs = [e for e in FAST.events if isinstance(e.effect, Run) and e.effect.what != "advance"]
    assert [text.get_text() for text in ax.texts] == [str(e.effect.microbatch) for e in runs]
    assert ax.get_xlim() == pytest.approx((0, FAST.step_time * 1e3))
    assert ax.get_xlabel().startswith("ms ")


def test_timelines_that_are_compared_have_one_scale() -> None:
    figure = compare(FAST, SLOW).plot()
    assert [ax.get_xlim()[1] for ax in figure.axes] == pytest.approx([SLOW.step_time * 1e3] * 2)
    assert FAST.step_time < SLOW.step_time
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == [
        "simulated (-12.5%)",
        "measured",
    ]


def test_padding_is_counted_for_each_batch() -> None:
    ladder = make_ladder("full", Limits(8, 8))
    table = dispatch_table(ladder, [B.uniform(3), B.uniform(8), B(5, 2), B(100, 2)])
    _, axes = pyplot.subplots()
    ax = table.plot(ax=axes)
    assert ax is axes
    assert widths(ax) == [3, 8, 5, 100, 1, 0, 3, 0]
    assert ax.get_title() == "3% of what is computed is padding"
    assert widths(table.plot("num_reqs")) == [3, 8, 2, 2, 1, 0, 6, 0]


def test_one_long_bar_does_not_squash_the_others() -> None:
    ladder = make_ladder("full", Limits(8, 8))
    near, far = ([B.uniform(3), B.uniform(8), B(size, 2)] for size in (16, 400))
    assert dispatch_table(ladder, near).plot().get_xscale() == "linear"
    ax = dispatch_table(ladder, far).plot()
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "tokens (logarithmic)")
    assert 0 < ax.get_xlim()[0] < 3


@pytest.mark.parametrize("plot", PLOTS)
def test_pictures_have_no_background_and_text_that_reads_on_white_and_on_black(plot: str) -> None:
    figure = PLOTS[plot]()
    figure.canvas.draw()
    assert mpl.colors.to_rgba(figure.get_facecolor())[3] == 0
    for ax in figure.axes:
        assert mpl.colors.to_rgba(ax.get_facecolor())[3] == 0
        for text in (ax.title, ax.xaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()):
            assert mpl.colors.to_hex(text.get_color()) == GREY


def test_a_batch_of_ones_own_is_counted_by_its_own_size() -> None:
    @attrs.frozen
    class Length:
        steps: int

        def covers(self, other: Any) -> bool:
            return bool(self.steps >= other.steps)

    ax = dispatch_table([Length(8)], [Length(5), Length(8)]).plot()
    assert widths(ax) == [5, 8, 3, 0]
    assert ax.get_xlabel() == "steps"


def test_graphs_show_what_each_capture_took() -> None:
    graphs = captured()
    left, right = graphs.plot().axes
    assert widths(left) == pytest.approx([graph.seconds * 1e3 for graph in graphs.graphs])
    sizes = [*(g.buffer_bytes for g in graphs.graphs), *(g.graph_bytes for g in graphs.graphs)]
    assert widths(right) == pytest.approx([size / 1024 for size in sizes])
    assert [label.get_text() for label in left.get_yticklabels()] == [
        "float32[2], full",
        "float32[300], full",
    ]


@pytest.mark.parametrize("plot", sorted(set(PLOTS) - {"nothing"}))
def test_without_matplotlib_it_says_what_to_install(
    plot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingPackageError) as error:
        PLOTS[plot]()
    assert isinstance(error.value, ImportError)
    assert ".plot()" in error.value.call
    assert error.value.instead == install_command("notebook")
    assert "'matplotlib>=3.8'" in error.value.instead


def test_a_picture_in_a_notebook_needs_nothing_optional() -> None:
    code = "import sys, weft; weft.make_ladder('full', weft.Limits(2, 2))._repr_html_(); "
    code += (
        "print(*{name.partition('.')[0] for name in sys.modules} & {'matplotlib', 'rich',"
        " 'IPython'})"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
