"""How the code reads: no vague names, one value a line, and lines that fit a page."""

from pathlib import Path

import pytest

from weft.proofs.evidence.pages.house import (
    FOLDERS,
    ROOT,
    Counts,
    count,
    counts_of,
    main,
    sources,
    vague_names,
)

# Names that read well where they stand, by file.
ALLOWED: dict[str, set[str]] = {}


@pytest.mark.slow
def test_no_name_says_how_its_value_was_come_by() -> None:
    vague = {
        f"{path.relative_to(ROOT)}:{line} {name}"
        for folder in FOLDERS
        for path in sources(folder)
        for line, name in vague_names(path.read_text(encoding="utf-8"))
        if name not in ALLOWED.get(str(path.relative_to(ROOT)), set())
    }
    assert sorted(vague) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_counts_of_a_folder(folder: str) -> None:
    row = counts_of(folder).row
    assert row["tuples"] <= 4
    assert row["ternaries"] <= 15
    assert row["long lines, %"] <= 1
    assert row["fmt: skip"] == 0
    assert row["vague names"] <= 3


def test_counts() -> None:
    text = (
        "a, own = b, 2 if c else 3  # fmt: skip\n"
        "# why\n"
        "def f(_found):\n"
        f"    return [x.seen for x in _found]  # {'long ' * 20}\n"
    )
    assert count(text) == Counts(
        lines=4,
        code=3,
        long=1,
        comments=3,
        skips=1,
        names=9,
        vague=4,
        tuples=1,
        ternaries=1,
        comprehensions=1,
    )
    assert vague_names(text) == [(1, "own"), (3, "_found"), (4, "_found"), (4, "seen")]


def test_given_of_hypothesis_is_no_vague_name() -> None:
    assert vague_names("from hypothesis import given\n@given(x)\ndef f(x): ...\n") == []
    assert vague_names("given = 1\n") == [(1, "given")]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["stages"])
    title, row = capsys.readouterr().out.splitlines()
    assert title.split()[0] == "lines"
    assert row.split()[0] == "stages"
    assert int(row.split()[1].replace(",", "")) == sum(
        path.read_text().count("\n") for path in sources("stages")
    )
    assert Path("stages/model.py") in [path.relative_to(ROOT) for path in sources("stages")]
