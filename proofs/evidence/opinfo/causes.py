"""Causes in torch itself for which an operator's values do not repeat: data, each with its reason."""

from fnmatch import fnmatchcase
from typing import Any

import attrs

from weft.proofs._strategies.operator_samples import Case
from weft.proofs.checks.difference import find_difference
from weft.proofs.checks.elements import Tolerance

# The relative and absolute tolerance of sums whose order varies.
# Other dtypes have none: sums of integers do not depend on their order.
_TOLERANCES = {"float32": 1e-3, "complex64": 1e-3, "bfloat16": 2e-1}


@attrs.frozen
class Cause:
    """Values that torch does not compute twice alike. Their shapes, dtypes and strides are compared
    all the same.

    Args:
        reason: the reason, one sentence.
        operators: names in torch's database, with `*` for any characters.
        transforms: the transforms that it concerns; empty: all.
        devices: the kinds of device that it concerns; empty: all.
        nearly: whether the values are compared within a tolerance; otherwise they are not compared.
        elsewhere: whether some results have another device in a graph.
    """

    reason: str
    operators: tuple[str, ...]
    transforms: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    nearly: bool = False
    elsewhere: bool = False

    def concerns(self, case: Case, device: str) -> bool:
        """Whether the cause is one for this case."""
        return (
            # By case, since names in the database differ by it; `fnmatch` asks the system.
            any(fnmatchcase(case.operator, pattern) for pattern in self.operators)
            and (not self.transforms or case.transform in self.transforms)
            and (not self.devices or device in self.devices)
        )

    def allows(self, case: Case, result: Any, expected: Any) -> bool:
        """Whether values that differ in their bits may be results of the case."""
        limit = _TOLERANCES.get(case.dtype, 0.0)
        # Without `nearly` any values are allowed: a cause is a hole in the test, and is kept to the
        # transforms and devices that it concerns.
        return not self.nearly or find_difference(result, expected, Tolerance(limit, limit)) is None


_DERIVATIVES = ("backward", "jvp")

CAUSES = (
    Cause(
        "It returns memory that nothing has written.",
        (
            "empty",
            "empty_like",
            "empty_permuted",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ),
    ),
    # The others are those that torch.use_deterministic_algorithms lists.
    Cause(
        "It adds with atomic operations, whose order varies (torch.use_deterministic_algorithms).",
        (
            *(
                "bincount",
                "cumsum",
                "histc",
                "index_add",
                "index_put",
                "index_reduce.*",
                "put",
                "scatter_add",
            ),
            *("scatter_reduce.*", "nn.functional.nll_loss", "nn.functional.cross_entropy"),
        ),
        devices=("cuda",),
        nearly=True,
    ),
    Cause(
        "Its derivative adds with atomic operations, whose order varies"
        " (torch.use_deterministic_algorithms).",
        (
            *(
                "gather",
                "index_select",
                "take",
                "take_along_dim",
                "repeat_interleave",
                "grid_sampler_*",
            ),
            *("nn.functional.*pool*d", "nn.functional.pad.reflect", "nn.functional.pad.replicate"),
            *("nn.functional.interpolate.*", "*upsample_*", "nn.functional.grid_sample"),
            *("nn.functional.ctc_loss", "nn.functional.embedding", "nn.functional.embedding_bag"),
            *(
                "_unsafe_masked_index",
                "_unsafe_masked_index_put_accumulate",
                "__getitem__",
                "cumsum",
            ),
            *("cummax", "cummin", "stft"),
        ),
        transforms=_DERIVATIVES,
        devices=("cuda",),
        nearly=True,
    ),
    Cause(
        "Its convolution's derivative adds in an order that varies"
        " (torch.use_deterministic_algorithms).",
        ("nn.functional.conv*",),
        transforms=("backward",),
        devices=("cuda",),
        nearly=True,
    ),
    Cause(
        "Its convolution adds in an order that varies (torch.use_deterministic_algorithms).",
        ("nn.functional.conv_transpose*",),
        devices=("cuda",),
        nearly=True,
    ),
    Cause(
        "Without dropout it returns memory that nothing has written as the generator's state.",
        ("torch.ops.aten._flash_attention_forward",),
        devices=("cuda",),
    ),
    Cause(
        "It returns the generator's state in memory of the CPU, which nothing has written; in a"
        " graph, of the GPU.",
        ("torch.ops.aten._efficient_attention_forward",),
        devices=("cuda",),
        elsewhere=True,
    ),
    Cause(
        "Of several values for one place it writes any (torch.use_deterministic_algorithms).",
        ("index_copy", "index_put", "put", "scatter", "nn.functional.max_unpool*"),
        devices=("cuda",),
    ),
    Cause(
        "Of several equal medians it returns the index of any"
        " (torch.use_deterministic_algorithms).",
        ("median", "nanmedian", "kthvalue", "mode", "masked.median"),
        devices=("cuda",),
    ),
)


def causes_of(case: Case, device: str) -> list[Cause]:
    """The causes that concern a case."""
    return [cause for cause in CAUSES if cause.concerns(case, device)]
