"""Torch's operator database: for each of its operators, the dtypes that it supports and sample
arguments."""

import importlib
from collections.abc import Callable
from typing import Any

from weft.errors import MissingPackageError
from weft.extras import install_command


def operator_database() -> tuple[Any, ...]:
    """The entries of `op_db`, with which torch tests its own operators.

    They do not set the seed before each random operator, as torch's do, because no function that
    sets a seed can be captured.

    Raises:
        MissingPackageError: a package that torch's tests import is not installed.
    """
    try:
        database: Any = importlib.import_module(
            "torch.testing._internal.common_methods_invocations"
        )
    except ModuleNotFoundError as error:
        problem = f"no {error.name} here, which torch's operator database imports"
        raise MissingPackageError(
            "weft.proofs.evidence.opinfo", problem, install_command("proofs")
        ) from error
    # The lambdas in `op_db` look this name up in their module in each call.
    database.wrapper_set_seed = _call
    return tuple(database.op_db)


def _call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)
