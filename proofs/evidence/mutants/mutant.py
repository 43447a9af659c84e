"""`Mutant`: a planted bug and the law that must catch it; `replace` plants it at a dotted name."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest import mock

import attrs

from weft.proofs.evidence.runs.suite import Law


@attrs.frozen
class Mutant:
    """A planted bug and the law that must catch it.

    Args:
        name: a description of the bug.
        law: the law that breaks.
        plant: a context in which weft has the bug.
    """

    name: str
    law: Law
    plant: Callable[[], AbstractContextManager[Any]]

    def __str__(self) -> str:
        return f"{self.law.number}: {self.name}"


def replace(home: str, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which the attribute `name` of the module `home` is `value`."""
    # By import_module: a package may show a function under the name of the module that defines it.
    return lambda: mock.patch.object(import_module(home), name, value)
