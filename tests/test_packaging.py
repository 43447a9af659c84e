"""The house: its top level, its packages, which way its imports point, and what `import weft` gives
and costs."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

import weft

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "lib": "weft",
    "stages": "weft.stages",
    "transforms": "weft.transforms",
    "proofs": "weft.proofs",
}
FOLDERS = tuple(PACKAGES)
# The rooms of a package, from the ground up: none imports from one that comes later. A module that
# lies directly in the package is a room too.
ROOMS = {
    "weft": (
        "tracebacks",
        "errors",
        "extras",
        "blocks",
        "arguments",
        "torchapi",
        "settings",
        "values",
        "display",
        "meshes",
        "effects",
        "ops",
        "batches",
    ),
    "weft.transforms": ("graphs", "pipelines", "engine", "server", "cli"),
}
LOOK_DOWN = {"weft", "weft.__main__"}
OPTIONAL = {
    "triton",
    "flashinfer",
    "gguf",
    "transformers",
    "peft",
    "hypothesis",
    "matplotlib",
    "pytest",
    "rich",
    "z3",
    "IPython",
    "nbclient",
}
DEMO_BYTES = 2_000_000


@attrs.frozen(eq=False)
class Source:
    """A module of weft, as text."""

    name: str
    folder: str
    tree: ast.Module = attrs.field(repr=False)
    is_stub: bool = False


@attrs.frozen
class Import:
    """`import module`, or `from module import name`, in module `at`, on a line; `bound` is the name
    it has there."""

    at: str
    line: int
    module: str
    name: str | None
    bound: str

    def __str__(self) -> str:
        what = (
            f"import {self.module}"
            if self.name is None
            else f"from {self.module} import {self.name}"
        )
        return f"{self.at}, line {self.line}: {what}"


def tracked() -> list[Path]:
    """The files that git has, or would take, relative to the root."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).exists()]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join((PACKAGES[parts[0]], *parts[1:])).removesuffix(".__init__")


def read(path: Path) -> Source:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return Source(module_name(path), path.parts[0], tree, path.suffix == ".pyi")


def imports_of(source: Source) -> Iterator[Import]:
    """Every import of a module, those in functions and under TYPE_CHECKING included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (
                Import(source.name, node.lineno, a.name, None, a.asname or a.name)
                for a in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            home = source.name if source.is_stub and node.level == 1 else "." * node.level
            module = ".".join(part for part in (home, node.module) if part)
            yield from (
                Import(source.name, node.lineno, module, a.name, a.asname or a.name)
                for a in node.names
            )


@functools.cache
def sources() -> dict[str, Source]:
    """The modules by name; a stub stands for the package that reads it."""
    paths = [
        path
        for path in sorted(tracked())
        if path.parts[0] in FOLDERS and path.suffix in (".py", ".pyi")
    ]
    return {source.name: source for source in map(read, paths)}


@functools.cache
def all_imports() -> list[Import]:
    return [record for source in sources().values() for record in imports_of(source)]


@functools.cache
def own_imports() -> list[Import]:
    """The imports of weft's own modules."""
    return [record for record in all_imports() if record.module.split(".")[0] == "weft"]


def target(record: Import) -> str:
    """The module that an import of weft's reaches: `from weft.proofs import strategies` reaches
    `weft.proofs.strategies`."""
    inner = f"{record.module}.{record.name}"
    return inner if inner in sources() else record.module


def listed(violations: list[Import]) -> str:
    return "\n".join(map(str, violations))


def test_the_top_level_is_what_was_agreed() -> None:
    top = {path.parts[0] for path in tracked()}
    free = {name for name in top if name.startswith(".") or fnmatch(name, "LICENSE*")}
    assert top - free == {*FOLDERS, "tests", "pyproject.toml", "README.md"}


def setuptools_table() -> dict[str, Any]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]
    assert isinstance(table, dict)
    return table


EVIDENCE = Path("proofs", "evidence")


def test_the_wheel_has_every_package_but_the_evidence() -> None:
    folders = {
        path.parent for path in tracked() if path.parts[0] in FOLDERS and path.suffix == ".py"
    }
    assert [
        folder for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()
    ] == []
    table = setuptools_table()
    assert table["package-dir"] == {"": ".src"}
    # Every folder with an `__init__.py` is found.
    assert table["packages"] == {
        "find": {"where": [".src"], "exclude": [module_name(EVIDENCE / "__init__.py") + "*"]}
    }


@pytest.mark.slow
def test_nothing_in_the_wheel_imports_the_evidence() -> None:
    evidence = module_name(EVIDENCE / "__init__.py")
    inward = [
        record
        for record in own_imports()
        if target(record).startswith(evidence) and not record.at.startswith(evidence)
    ]
    assert listed(inward) == ""


# Symbolic links and their targets, so that an editable install is a path that tools can follow.
LINKS = {".src/weft": "../lib", **{f"lib/{folder}": f"../{folder}" for folder in FOLDERS[1:]}}


def broken_links(root: Path) -> str:
    """The links that are not links, and the way to mend them; empty if all are right."""
    wrong = [
        link
        for link, to in LINKS.items()
        if not (root / link).is_symlink() or (root / link).readlink() != Path(to)
    ]
    if not wrong:
        return ""
    mend = (
        f"git config core.symlinks true && git checkout -- {' '.join(wrong)} (on Windows in"
        " Developer Mode)"
    )
    return f"{', '.join(wrong)}: not the symbolic links that git has; to make them: {mend}"


def test_the_links_of_an_editable_install_are_links() -> None:
    assert broken_links(ROOT) == ""
    for folder, package in PACKAGES.items():
        assert (ROOT / ".src" / Path(*package.split("."))).resolve() == ROOT / folder


def test_links_that_git_wrote_as_files_are_named(tmp_path: Path) -> None:
    """As git does with `core.symlinks=false`, the default of many a Windows."""
    for link, to in LINKS.items():
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (
            (tmp_path / link).write_text(to)
            if link == "lib/proofs"
            else (tmp_path / link).symlink_to(to)
        )
    assert broken_links(tmp_path).startswith("lib/proofs: not the symbolic links that git has")
    assert "git config core.symlinks true && git checkout -- lib/proofs" in broken_links(tmp_path)


def test_every_other_file_of_a_package_is_listed_as_its_data() -> None:
    data = setuptools_table()["package-data"]
    files = [path for path in tracked() if path.parts[0] in FOLDERS and path.suffix != ".py"]
    files = [path for path in files if not (ROOT / path).is_symlink()]
    files = [path for path in files if not path.is_relative_to(EVIDENCE)]
    inside = [path for path in files if (ROOT / path.parent / "__init__.py").exists()]
    assert Path("lib/py.typed") in inside
    assert Path("stages/demo/model.safetensors") in inside
    unlisted = [
        path
        for path in inside
        if not any(
            fnmatch(path.name, pattern)
            for pattern in data.get(module_name(path.parent / "__init__.py"), [])
        )
    ]
    assert unlisted == []


def test_the_demo_checkpoint_is_small() -> None:
    files = [ROOT / path for path in tracked() if path.is_relative_to("stages/demo")]
    assert sum(file.stat().st_size for file in files) <= DEMO_BYTES


@pytest.mark.slow
def test_imports_point_one_way() -> None:
    def looks_down(record: Import) -> bool:
        return FOLDERS.index(sources()[record.at].folder) < FOLDERS.index(
            sources()[target(record)].folder
        )

    assert (
        listed(
            [
                record
                for record in own_imports()
                if record.at not in LOOK_DOWN and looks_down(record)
            ]
        )
        == ""
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", ROOMS)
def test_rooms_stand_one_on_the_other(package: str) -> None:
    rooms = ROOMS[package]

    def floor(name: str) -> int:
        room = name.removeprefix(f"{package}.").partition(".")[0]
        return rooms.index(room) if room in rooms else -1

    upwards = [record for record in own_imports() if 0 <= floor(record.at) < floor(target(record))]
    assert listed(upwards) == ""


def test_every_room_of_lib_has_its_place() -> None:
    rooms = {
        source.name.split(".")[1]
        for source in sources().values()
        if source.folder == "lib" and "." in source.name
    }
    assert rooms == {*ROOMS["weft"], "__main__"}


def test_imports_do_not_run_in_circles() -> None:
    # Strip the modules that import none of the rest until none is left. Imports in functions and of
    # types count too.
    edges = {
        name: {target(record) for record in own_imports() if record.at == name} - {"weft", name}
        for name in sources()
    }
    while leaves := {name for name, reached in edges.items() if not reached & edges.keys()}:
        edges = {name: reached for name, reached in edges.items() if name not in leaves}
    assert edges.keys() <= LOOK_DOWN, f"in a circle, or importing one: {sorted(edges)}"


def reexports(name: str) -> set[str]:
    """The names that a module imports from other modules of weft."""
    return {
        record.bound
        for record in own_imports()
        if record.at == name and target(record) == record.module
    }


@pytest.mark.slow
def test_imports_name_the_defining_module() -> None:
    def indirect(record: Import) -> bool:
        return target(record) == record.module and record.name in reexports(record.module)

    assert listed([record for record in own_imports() if indirect(record)]) == ""
    assert [record for record in all_imports() if record.module.startswith(".")] == []


def test_nothing_inside_imports_from_the_face() -> None:
    # The face defines one name of its own.
    face = [
        record
        for record in own_imports()
        if record.module == "weft" != record.at and record.name != "__version__"
    ]
    assert listed(face) == ""


def is_private(path: str) -> bool:
    parts = path.split(".")
    return parts[0] == "torch" and any(
        part.startswith("_") and not part.endswith("__") for part in parts
    )


def dotted(node: ast.AST) -> str:
    """The trailing `a.b.c` of an expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


MAY_USE_PRIVATE_TORCH = "weft.torchapi."


def test_only_the_room_of_torch_uses_its_private_names() -> None:
    imported = [
        record for record in all_imports() if is_private(f"{record.module}.{record.name or ''}")
    ]
    assert (
        listed([record for record in imported if not record.at.startswith(MAY_USE_PRIVATE_TORCH)])
        == ""
    )
    used = [
        f"{source.name}, line {node.lineno}: {dotted(node)}"
        for source in sources().values()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and is_private(dotted(node))
        if not source.name.startswith(MAY_USE_PRIVATE_TORCH)
    ]
    assert used == []


def test_the_face_gives_type_checkers_what_it_gives_python() -> None:
    typed = {record.bound: record.module for record in own_imports() if record.at == "weft"}
    assert sorted(typed) == sorted(weft.__all__)
    exported = {name: getattr(weft, name) for name in weft.__all__}
    assert {name: getattr(import_module(home), name) for name, home in typed.items()} == exported
    assert set(weft.__all__) <= set(dir(weft))


def test_the_face_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'graphfy'"):
        _ = weft.graphfy


def loaded_by(*uses: str) -> list[set[str]]:
    """The top-level modules that a Python process has loaded after each line of code."""
    says = "print('loaded:', *{name.partition('.')[0] for name in sys.modules})"
    code = "\n".join(f"{use}; import sys; {says}" for use in uses)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return [
        set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("loaded:")
    ]


USES = (
    "import weft; [getattr(weft, name) for name in weft.__all__]",
    "import weft.transforms, weft.transforms.engine, weft.stages, weft.effects",
    "import torch; f = weft.graphify(lambda x: x + 1); f(torch.ones(2)); f(torch.ones(2))",
    "print(weft.pipeline([lambda p, s, b, x: (s, b)]))",
)


@pytest.mark.slow
def test_no_optional_package_is_imported_before_it_is_used() -> None:
    for use, loaded in zip(USES, loaded_by(*USES), strict=True):
        assert "weft" in loaded
        assert loaded & OPTIONAL == set(), use


def test_the_process_that_compiles_grammars_does_without_torch() -> None:
    # Else the first structured answer of a server waits two seconds more.
    (loaded,) = loaded_by("import weft.transforms.server.grammars.compiling")
    assert "weft" in loaded
    assert "torch" not in loaded


def test_importing_weft_imports_nothing_else() -> None:
    # So that it costs what the first use of a name costs, which is the import of torch.
    alone, more = loaded_by("import ast, importlib, lazy_loader, types, typing", "import weft")
    assert more - alone == {"weft"}
