"""Causes in torch itself for which a result of an operator does not repeat: data, each with its reason."""

from collections.abc import Collection
from fnmatch import fnmatchcase

import attrs

from weft.proofs.opinfo.cases import Case


@attrs.frozen
class Cause:
    """Results that torch does not compute twice alike. Their shapes, dtypes and strides are compared all the same.

    Args:
        reason: the reason, one sentence.
        operators: names in torch's database, with `*` for any characters.
        transforms: the transforms that it concerns; empty: all.
        dtypes: the dtypes that it concerns; empty: all.
        devices: the kinds of device that it concerns; empty: all.
    """

    reason: str
    operators: tuple[str, ...]
    transforms: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def concerns(self, case: Case, device: str) -> bool:
        """Whether the cause is one for this case."""
        return (
            any(fnmatchcase(case.operator, pattern) for pattern in self.operators)
            and _among(case.transform, self.transforms)
            and _among(case.dtype, self.dtypes)
            and _among(device, self.devices)
        )


def _among(value: str, values: Collection[str]) -> bool:
    return not values or value in values


CAUSES = (
    Cause(
        "It returns memory that nothing has written.",
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    ),
)


def cause_of(case: Case, device: str) -> Cause | None:
    """The first cause that concerns a case; None if there is none."""
    return next((cause for cause in CAUSES if cause.concerns(case, device)), None)
