"""The public names, as a page and as a list of signatures: `python -m
weft.proofs.evidence.pages.reference` writes both.

`proofs/pages/reference.md` has each name with the first sentence of its docstring;
`proofs/pages/surface.txt` has one line per name or method, with its arguments and their defaults, and
one per flag of each command. A test compares both files with the code. A name is listed below the
first module that has it; a method that a class takes over from a public base class or protocol is
listed there.
"""

import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs

from weft.transforms.cli.fields import Options, flag_of, flagged
from weft.transforms.cli.main import COMMANDS

# The modules whose names are public: those in `__all__`, or, of errors, all that are defined there.
# Their order counts: a name is listed below the first that has it.
FACES = (
    "weft",
    "weft.transforms",
    "weft.stages",
    "weft.effects",
    "weft.errors",
    "weft.proofs",
    "weft.proofs.strategies",
)
# Classes that are used by their methods, which the page lists too.
USED = (
    "Batch",
    "BatchDescriptor",
    "Engine",
    "Model",
    "ResolvedBatch",
    "State",
    "Compiled",
    "Graphified",
    "Pipelined",
    "Session",
    "Timeline",
)
PAGE = Path(__file__).parents[2] / "pages" / "reference.md"
SURFACE = PAGE.with_name("surface.txt")
_TITLE = """# Reference

Every public name, the methods of those that are used by them, and the first sentence of what `help(name)` says of each:
it goes on with shapes, dtypes, units, errors and an example.
Written by `python -m weft.proofs.evidence.pages.reference`.
"""


def names_of(face: str) -> list[str]:
    """The public names of a module, in order."""
    module = import_module(face)
    if face != "weft.errors":
        names = getattr(module, "__all__", ())
        return [name for name in names if not inspect.ismodule(getattr(module, name))]
    return [
        # Errors are found and not listed: one that somebody adds is public at once.
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == face
    ]


def first_sentence(doc: str | None) -> str:
    """The first sentence of a docstring, on one line; empty where it has none.

    >>> first_sentence("Pad a batch\\n    of any kind. And more.")
    'Pad a batch of any kind.'
    """
    paragraph = " ".join((doc or "").strip().partition("\n\n")[0].split())
    # A full stop inside a name, as in `weft.proofs`, ends no sentence.
    match = re.match(r".*?\.(?=\s|$)|.*:$", paragraph)
    if match:
        return match[0]
    return ""


def call_of(name: str, value: Any) -> str:
    """How it is called: its name and those of its arguments.

    >>> call_of("pad", lambda tree, descriptor: tree)
    'pad(tree, descriptor)'
    """
    made_by_hand = callable(value) and not (isinstance(value, type) and _is_made(value))
    if not made_by_hand:
        return name
    marks: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    parameters = list(inspect.signature(value).parameters.values())
    names = [marks.get(p.kind, "") + p.name for p in parameters]
    # A lone star stands for the beginning of the keyword arguments, unless `*args` is there
    # already.
    keyword = next(
        (i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.KEYWORD_ONLY), None
    )
    if keyword is not None and not any(
        p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters
    ):
        names.insert(keyword, "*")
    return f"{name}({', '.join(names)})"


def listed_names() -> Iterator[tuple[str, str, Any]]:
    """Each public module, name and value, where it is listed: below the first module that has
    it."""
    values = list[Any]()
    for face in FACES:
        for name in names_of(face):
            value = getattr(import_module(face), name)
            if callable(value):
                # By identity, as values of some classes do not compare, or compare equal.
                if any(value is other for other in values):
                    continue
                values.append(value)
            yield face, name, value


@functools.cache
def _listed_classes() -> tuple[type, ...]:
    return tuple(value for _, _, value in listed_names() if isinstance(value, type))


def _members(cls: type) -> dict[str, Any]:
    """The public methods and properties that the class itself defines, in order."""
    return {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (
            inspect.isfunction(member) or isinstance(member, classmethod | staticmethod | property)
        )
    }


def _follows(cls: type, base: type) -> bool:
    """Whether a class inherits from another one, or has all members of a protocol."""
    if base is cls:
        return False
    # `issubclass` refuses protocols that have properties.
    if getattr(base, "_is_protocol", False):
        return all(hasattr(cls, name) for name in _members(base))
    return issubclass(cls, base)


def new_members(cls: type) -> dict[str, Any]:
    """The public methods and properties that a class does not take over from a public base class
    or protocol.

    >>> from weft.batches.descriptor import BatchDescriptor
    >>> [*new_members(BatchDescriptor)]
    ['uniform', 'is_uniform']
    """
    taken_over = {
        name for base in _listed_classes() if _follows(cls, base) for name in _members(base)
    }
    return {name: member for name, member in _members(cls).items() if name not in taken_over}


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The new members of a class, each with how it is called.

    >>> from weft.batches.descriptor import BatchDescriptor
    >>> [call for call, _ in methods_of(BatchDescriptor)]
    ['uniform(num_reqs, query_len, num_active_loras)', 'is_uniform']
    """
    for name, member in new_members(cls).items():
        call = call_of(name, getattr(cls, name)).replace("(self, ", "(").replace("(self)", "()")
        yield call, member


def _constant(value: Any) -> str:
    """What a value is that is no function and no class."""
    plain = isinstance(value, int) or (
        isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    )
    if plain:
        return f"`{value!r}`"
    return f"of class `{type(value).__name__}`"


def _is_made(cls: type) -> bool:
    """Whether a class's signature says nothing: protocols, and exceptions, which all take the same."""
    return issubclass(cls, BaseException) or bool(getattr(cls, "_is_protocol", False))


def _row(call: str, said: str) -> str:
    return f"| `{call}` | {said.replace('|', '&#124;')} |"


def lines() -> Iterator[str]:
    """The page."""
    yield _TITLE
    for face, names in itertools.groupby(listed_names(), lambda listed: listed[0]):
        rows = []
        for _, name, value in names:
            if callable(value):
                said = first_sentence(value.__doc__)
            else:
                said = _constant(value)
            rows.append(_row(call_of(name, value), said))
            members = methods_of(value) if name in USED else ()
            rows += [
                _row(f"{name}.{call}", first_sentence(member.__doc__)) for call, member in members
            ]
        yield "\n".join((f"## {face}\n", "| | |", "|---|---|", *rows, ""))


def page() -> str:
    """The text of the page."""
    return "\n".join(lines())


def surface() -> str:
    """Every public name and method with its arguments and their defaults, one to a line; then the
    flags of each command.

    Annotations are left out: versions of Python write them differently.
    """
    names = (line for listed in listed_names() for line in _surface_of(*listed))
    flags = (line for command in COMMANDS.values() for line in _flags_of(command))
    return "\n".join((*names, *flags)) + "\n"


def _flags_of(command: type[Options]) -> Iterator[str]:
    """A command's flags, each with its default where it has one."""
    for field in flagged(command):
        if "positional" in field.metadata["kind"]:
            flag = field.metadata["kind"]["metavar"]
        else:
            flag = ", ".join((flag_of(field.name), *field.metadata["also"]))
        if field.default is attrs.NOTHING:
            yield f"weft {command.command} {flag}"
        else:
            yield f"weft {command.command} {flag}={field.default!r}"


def _surface_of(face: str, name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield f"{face}.{name}: {type(value).__name__}"
        return
    if isinstance(value, type) and _is_made(value):
        yield f"{face}.{name}"
    else:
        yield f"{face}.{name}{_signature(value)}"
    if isinstance(value, type):
        # Sorted here, so that a method that moves within its class changes no line.
        for key, member in sorted(new_members(value).items()):
            if isinstance(member, property):
                yield f"{face}.{name}.{key}"
            else:
                yield f"{face}.{name}.{key}{_signature(getattr(value, key))}"


def _signature(fn: Any) -> str:
    """The arguments of a function and their defaults.

    >>> _signature(lambda x, *, key=0, otherwise=print: x)
    '(x, *, key=0, otherwise=...)'
    """
    signature = inspect.signature(fn)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_written(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _written(default: Any) -> Any:
    """A default that is written the same on every machine."""
    # Anything else may print an address, which differs from run to run.
    plain = isinstance(default, str | int | float | bool | None) or default in (
        (),
        inspect.Parameter.empty,
    )
    if plain:
        return default
    return _Elided()


class _Elided:
    def __repr__(self) -> str:
        return "..."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SURFACE.write_text(surface(), encoding="utf-8")
    print(PAGE, SURFACE)
