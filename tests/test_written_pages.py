"""The pages: their code runs, and the files, tests and laws that they name exist."""

import importlib.util
import re
from pathlib import Path

import pytest
from pages import (
    ROOT,
    blocks,
    broken_anchors,
    defines,
    links,
    missing_test,
    modules,
    node_ids,
    paths,
    run,
    ways,
)

from weft.proofs.evidence.pages import measured, reference
from weft.proofs.evidence.runs.suite import LAWS

PAGES = sorted((ROOT / "proofs" / "pages").glob("*.md"))
WRITTEN_BY_CODE = {reference.PAGE.name, measured.PAGE.name}
LAW_PAGE = ROOT / "proofs" / "pages" / "laws.md"
SERVERS = ROOT / "proofs" / "pages" / "from_vllm_and_sglang.md"
PULL_REQUESTS = {"vLLM 33960", "vLLM 32771", "vLLM 35162", "SGLang 14547"}
NOTES = ROOT / "proofs" / "evidence" / "NOTES.md"
WRITTEN = [ROOT / "README.md", *sorted((ROOT / ".github").glob("*.md")), *PAGES, NOTES]
CASES = {str(law) for law in LAWS}


def test_there_are_pages() -> None:
    assert {page.name for page in PAGES} >= {"from_jax.md", "from_vllm_and_sglang.md"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in WRITTEN_BY_CODE], ids=lambda page: page.stem
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert blocks(page, "python"), f"{page.name} shows no Python"
    assert {block.language for block in blocks(page)} == {"python"}
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_the_headings_that_a_page_links_to_are_there(page: Path) -> None:
    assert broken_anchors(page) == []


def test_a_heading_that_is_not_there_is_missed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What `f(x)` is, once\n[a](#what-fx-is-once) [b](page.md#nothing)\n")
    assert broken_anchors(page) == ["page.md#nothing"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_the_paths_and_modules_that_a_page_names_exist(page: Path) -> None:
    assert [path for path in paths(page) if not list(ROOT.glob(path))] == []
    assert [name for name in modules(page) if importlib.util.find_spec(name) is None] == []


def test_a_path_that_does_not_exist_is_missed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "See `lib/nothing.py`, `tests/lib/`, `proofs/x.py::test_it` and python -m weft.nothing"
        " --out X"
    )
    assert paths(page) == ["lib/nothing.py", "tests/lib/", "proofs/x.py"]
    assert modules(page) == ["weft.nothing"]


def test_the_ways_go_through_functions_that_exist() -> None:
    steps = ways(ROOT / ".github" / "CONTRIBUTING.md")
    assert len(steps) >= 30
    assert {name for _, name in steps} >= {"Cache.plan", "Server.completions", "schedule"}
    assert [(str(file), name) for file, name in steps if not defines(file, name)] == []


def test_the_recipes_name_what_the_code_has() -> None:
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = {*re.findall(r"`(_[a-z]\w+|_?[A-Z][A-Z_]{3,})`", text)}
    assert names >= {"CHECKS", "ON_HOST", "NEEDS", "_how"}
    folders = ("lib", "stages", "transforms", "proofs", "tests")
    # Without this file: a name that only it has is not the code's.
    files = (
        file
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if file != Path(__file__)
    )
    code = {*re.findall(r"\w+", "\n".join(file.read_text(encoding="utf-8") for file in files))}
    assert sorted(names - code) == []


def test_a_way_through_what_does_not_exist_is_missed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Where (`lib/`; more):\n\n```text\n"
        "a                          batches/batch.py, Batch.split\n"
        "├─ b: 2  ─────────────┐    batches/batch.py, Batch.divide\n"
        "├─ c                  │    ops/norm.py, gate.py  ◄┘\n"
        "```\n"
    )
    names = [(file.name, name, defines(file, name)) for file, name in ways(page)]
    assert names == [
        ("batch.py", "Batch.split", True),
        ("batch.py", "Batch.divide", False),
        ("norm.py", "", True),
        ("gate.py", "", False),
    ]


def test_readme_links_to_each_page() -> None:
    assert {ROOT / link for link in links(ROOT / "README.md")} >= {
        *PAGES,
        ROOT / "tests" / "test_footguns.py",
    }


def test_the_page_of_laws_has_every_law() -> None:
    named = re.findall(r"^\| (L\d+) \|", LAW_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*named} == {law.number for law in LAWS}


def test_each_conclusion_names_records_that_exist() -> None:
    text = NOTES.read_text(encoding="utf-8")
    names = re.findall(r"`((?:cpu|h[12]00(?:x\d)?)-[\w.-]+|builds)`", text)
    assert len({*names}) >= 30
    results = ROOT / "proofs" / "results"
    assert [name for name in names if not list(results.glob(f"????-??-??-{name}.json*"))] == []
    assert text.count("\n") <= 150


def test_each_capability_names_tests_that_exist() -> None:
    named = node_ids(SERVERS)
    assert len(named) >= 30
    assert [why for node in named if (why := missing_test(*node, CASES))] == []


def test_a_test_that_does_not_exist_is_missed() -> None:
    assert (
        missing_test("tests/test_nothing.py", "test_it", "", CASES)
        == "no file tests/test_nothing.py"
    )
    assert (
        missing_test("tests/test_readme.py", "test_it", "", CASES)
        == "no test_it in tests/test_readme.py"
    )
    law = ("tests/proofs/evidence/test_laws.py", "test_law_on_the_tape")
    assert missing_test(*law, "L3 pipeline is composition, on models", CASES) == ""
    assert missing_test(*law, "L99 all is well", CASES) == "no law 'L99 all is well'"


def test_each_row_of_a_pull_request_names_its_test() -> None:
    _, *sections = re.split(r"^### (.*)$", SERVERS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = sections[::2]
    texts = sections[1::2]
    assert {title.partition(":")[0] for title in titles} == PULL_REQUESTS
    for text in texts:
        rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert len(rows) >= 5
        assert [row for row in rows if "`tests/" not in row] == []
