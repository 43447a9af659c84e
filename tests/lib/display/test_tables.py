"""Tables and markup: aligned in a terminal, wrapped by rich, escaped in a notebook, and readable in
both themes."""

import io
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from rich.console import Console

from weft import Limits, dispatch_table, graphify, make_ladder, pipeline
from weft.batches.descriptor import BatchDescriptor
from weft.display.tables import Table, bars_over_text, columns, strip
from weft.transforms import Costs, compare, decode_jobs, make_programs, plan_cohorts, simulate
from weft.transforms.engine.generate import Completion
from weft.values.schema import Schema

NASTY = "<script>alert('x')</script> & \"more\""
TABLE = Table(("name", "size"), ((NASTY, "8"), ("b", "1.5 KiB"), ("", "")), f"of {NASTY}")


def captured() -> Any:
    function = graphify(lambda x: torch.sin(x) * 2)
    function(torch.ones(3))
    return function


def drawn() -> dict[str, Any]:
    """An object of each class that a notebook shows."""
    programs = make_programs(2, decode_jobs(2, 5))
    costs = Costs((1e-3, 2e-3))
    schema = Schema.parse("hidden[num_tokens, 4] float32")
    stages = [lambda p, s, batch, x: (s, batch)] * 2
    return {
        "uniform": BatchDescriptor.uniform(3, 2),
        "ragged": BatchDescriptor(3000, 5),
        "empty": BatchDescriptor(0, 0),
        "ladder": make_ladder("full_and_piecewise", Limits(128, 512, (1, 2), (0, 1))),
        "dispatch table": dispatch_table(
            [BatchDescriptor(4, 4)], [BatchDescriptor(3, 2), BatchDescriptor(9, 9)]
        ),
        "graphified": captured(),
        "program": programs[1],
        "pipeline": pipeline(stages, microbatches=3, schema=schema),
        "completion": Completion(NASTY, [1, 2, 3], [-0.1, float("nan"), -9.0], "stop"),
        "aligned": Completion(
            "ab c", [1, 2, 3], [-0.1, -0.5, -9.0], "stop", text_offsets=[0, 1, 2]
        ),
        "ids": Completion(None, [1, 2], [-0.1, -0.2], "length"),
        "cohorts": plan_cohorts(lambda size: [1e-3 * size] * 2, 8, 2),
        "timeline": simulate(programs, costs),
        "comparison": compare(simulate(programs, costs), simulate(programs, Costs((1e-3, 3e-3)))),
        "table": TABLE,
    }


class Balanced(HTMLParser):
    """Every element is closed, in order; only harmless elements occur; text is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.names |= {tag, *(name for name, _ in attrs)}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", drawn())
def test_what_a_notebook_shows_is_small_closed_and_its_own(name: str) -> None:
    html = drawn()[name]._repr_html_()
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert parser.names & {"script", "link", "img", "iframe", "href", "src", "onclick"} == set()
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html) == []
    assert len(html) < 60_000


@pytest.mark.parametrize(
    "name", sorted({*drawn()} - {"timeline", "comparison"})
)  # they bring a background
def test_text_has_the_colour_of_the_page_or_a_background(name: str) -> None:
    html = drawn()[name]._repr_html_()
    for style in re.findall(r'style="([^"]*)"', html):
        assert ("color: #222" in style) == ("background:" in style)
    assert set(re.findall(r'<text[^>]* fill="([^"]*)"', html)) <= {"currentColor"}


def test_text_is_escaped_and_all_there() -> None:
    for value in (TABLE, Completion(NASTY, [1], [-0.1], "stop")):
        parser = Balanced()
        parser.feed(value._repr_html_())
        assert NASTY in parser.text


def test_numbers_are_aligned_to_the_right() -> None:
    assert TABLE.right == (False, True)
    assert str(Table(("a", "n"), (("x", "8"), ("y", "128")))).splitlines() == [
        "a    n",
        "x    8",
        "y  128",
    ]
    assert TABLE._repr_html_().count("text-align: right") == 4


@pytest.mark.parametrize("name", ["ladder", "dispatch table", "cohorts", "table"])
def test_rich_shows_a_table_and_no_colour_in_a_pipe(name: str) -> None:
    value = drawn()[name]
    pipe = io.StringIO()
    screen = io.StringIO()
    Console(file=pipe, width=400).print(value)
    Console(
        file=screen, width=400, force_terminal=True, color_system="standard", _environ={}
    ).print(value)
    table = value if isinstance(value, Table) else value._table()
    assert "\x1b[" not in pipe.getvalue()
    assert "\x1b[" in screen.getvalue()
    for cell in (*table.header, *(cell for row in table.rows for cell in row)):
        assert cell in pipe.getvalue()
    assert "\x1b[" not in str(value)


def test_a_wrapped_cell_begins_at_the_top_and_a_short_name_stands_below() -> None:
    table = Table(
        ("op", "in two\nlines", "why"),
        (("linear", "1", "plain torch; no other"), ("route", "20", "x")),
    )
    pipe = io.StringIO()
    Console(file=pipe, width=32).print(table)
    assert [line.rstrip() for line in pipe.getvalue().splitlines()] == [
        "        in two",
        "op       lines  why",
        "linear       1  plain torch; no",
        "                other",
        "route       20  x",
    ]


def test_graphs_are_a_table_for_rich_too() -> None:
    pipe = io.StringIO()
    Console(file=pipe, width=200).print(captured().graphs())
    assert "float32[3]" in pipe.getvalue()


def test_long_columns_and_strips_are_cut_and_say_so() -> None:
    lines = [(mb, f"run stage 0: {NASTY}") for mb in range(50)]
    html = columns(["one", "two"], [lines, lines[:3]], most=40)
    assert html.count("run stage 0<") == 40 + 3
    assert "… 10 more" in html
    assert strip([(30, 0), (30, 1)]).count("<rect") == 48
    assert "…" in strip([(30, 0), (30, 1)])
    assert "…" not in strip([(30, 0), (18, 1)])
    assert strip([(30, 0)], joined=True).count("<rect") == 1


def test_bars_stand_over_their_text_and_say_what_they_are() -> None:
    html = bars_over_text([(NASTY, 0.5, NASTY), ("b\n", 1.0, "second"), ("", 0.0, "third")])
    assert html.count("<svg") == html.count("title=") == 3
    assert "<script" not in html
    assert html.index("second") < html.index("b↵") < html.index("<br/>") < html.index("third")
    assert "… 2 more" in bars_over_text([("a", 0.1, "a")] * 5, most=3)
