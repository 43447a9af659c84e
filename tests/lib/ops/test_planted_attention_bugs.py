"""Bugs planted in the Triton kernels of attention, each of which breaks one of the fixed cases,
interpreted.

A bug replaces some text of a module. The cases are those of `test_paged_attention_triton`, which
its kernels pass without a bug.
"""

from pathlib import Path

import attrs
import pytest
from interpreting import run_interpreted
from paged_cases import FIXED, Request, Shape

_BROKEN = """
import sys
from importlib import util
from pathlib import Path

import torch
from paged_cases import FIXED, assert_matches, draw_case

module, old, new, folder, batch_invariant, *cases = sys.argv[1:]
source = Path(util.find_spec(module).origin).read_text()
assert source.count(old) == 1, f"{source.count(old)} times: {old}"
path = Path(folder, "broken.py")
path.write_text(source.replace(old, new))
spec = util.spec_from_file_location(module, path)
sys.modules[module] = broken = util.module_from_spec(spec)
spec.loader.exec_module(broken)
from weft.ops.attention.paged_triton import attend

torch.set_deterministic_debug_mode("error")  # NaN in all memory that nothing has written yet
for index in map(int, cases):
    case = draw_case(FIXED[index])
    try:
        assert_matches(case, attend(*case.args, batch_invariant=batch_invariant == "True"), case.args[3])
    except Exception as error:
        print("caught:", index, type(error).__name__)
        break
"""


@attrs.frozen
class Bug:
    """A text of one of the modules, and what takes its place.

    Args:
        cases: the ones that run, until one fails.
    """

    name: str
    module: str
    old: str
    new: str
    cases: tuple[Shape, ...]
    batch_invariant: bool = False

    def __str__(self) -> str:
        return self.name


_MIXED = next(shape for shape in FIXED if Request(70, 90) in shape.requests)
_FEW = tuple(
    next(shape for shape in FIXED if request in shape.requests)
    for request in (
        Request(662, 3),
        Request(150, 1),
        Request(1100, 3),
        Request(1400, 1),
        Request(2100, 1),
    )
)
_ALL = _MIXED, next(shape for shape in FIXED if Request(0, 23) in shape.requests), *_FEW
_BUGS = (
    Bug(
        "both shares of a part have one place",
        "shares",
        "2 * part + tl.where(begins, 1, 0)",
        "2 * part",
        _ALL,
    ),
    Bug("no part has a tile more", "shares", " + tl.minimum(part, total % parts)", "", _ALL),
    Bug(
        "a tile is in the part of the next",
        "shares",
        "larger + (tile - edge)",
        "larger + (tile - edge + 1)",
        _ALL,
    ),
    Bug("few tiles are split evenly", "shares", "few = tiles < SPLITS", "few = tiles < 0", _FEW),
    Bug("a window begins a tile late", "shares", "0) // UNIT\n", "0) // UNIT + 1\n", _FEW),
    Bug(
        "one query fewer counts as few",
        "shares",
        "(query_len <= QUERIES)",
        "(query_len < QUERIES)",
        _ALL,
    ),
    Bug(
        "no request of a part is passed",
        "block",
        "before = before, before + count",
        "before = before, before",
        _ALL,
    ),
    Bug(
        "the last split has a tile",
        "block",
        "index + tl.minimum(count, SPLITS) - 1",
        "index + SPLITS - 1",
        _FEW,
    ),
    Bug(
        "the last part is that of the tile before",
        "block",
        "earlier + count - 1",
        "earlier + count - 2",
        _ALL,
    ),
    Bug("all contexts are taken for equal", "block", "tl.cast(even, tl.int32)", "1", _ALL),
    Bug(
        "decodes have the programs of requests alone",
        "paged",
        "tl.maximum(num_reqs, parts)",
        "num_reqs",
        _ALL,
    ),
    Bug("padding among prompts stays", "paged", "// GROUP) & (seq_len > 0)", "// GROUP)", _ALL),
    Bug("the tail is left to more programs", "paged", "programs - few", "programs", _ALL),
    Bug(
        "only the first shares are combined",
        "output",
        "last + 1, SHARES)",
        "first + 1, SHARES)",
        _ALL,
    ),
    Bug(
        "nothing is zeroed without a tile", "output", "if shared | (own <= 0):", "if shared:", _ALL
    ),
    Bug(
        "dead tokens have the mean of shares",
        "output",
        "tl.where(live[:, None]",
        "tl.where(inside[:, None]",
        _ALL,
    ),
    Bug(
        "only the first rows are combined",
        "output",
        "query_len * GROUP, step):",
        "EACH, step):",
        _ALL,
    ),
    Bug(
        "prompts are combined",
        "output",
        "tl.where(end - start <= QUERIES, end - start, 0)",
        "end - start",
        _ALL,
    ),
    Bug("splits that are empty count", "output", "(first + share <= last)", "(share >= 0)", _FEW),
    Bug("the tail stays", "output", "tokens if plan.one_block else 0", "0", _FEW),
    Bug(
        "a query's own segment is left out",
        "output",
        "tl.cdiv(position + 1, UNIT)",
        "position // UNIT",
        _FEW,
        True,
    ),
)


@pytest.mark.slow
@pytest.mark.one_of(1, 4)
@pytest.mark.parametrize("bug", _BUGS, ids=str)
def test_a_planted_bug_breaks_a_case(bug: Bug, tmp_path: Path) -> None:
    module = f"weft.ops.attention.{bug.module}_triton"
    cases = [FIXED.index(shape) for shape in bug.cases]
    output = run_interpreted(
        _BROKEN, tmp_path, module, bug.old, bug.new, tmp_path, bug.batch_invariant, *cases
    )
    assert "caught:" in output, output


@pytest.mark.nightly
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_without_a_bug_no_case_breaks(batch_invariant: bool, tmp_path: Path) -> None:
    module = "weft.ops.attention.shares_triton"
    cases = [FIXED.index(shape) for shape in _ALL]
    same = "@triton.jit\ndef place_of("
    output = run_interpreted(
        _BROKEN, tmp_path, module, same, same, tmp_path, batch_invariant, *cases
    )
    assert "caught:" not in output, output
