"""Mistakes with custom laws: what is checked, on what, and how near."""

import torch
from answers import Mistake, X, f

from weft.errors import CheckError, DeviceError
from weft.proofs import assert_equivalent, check, strategies

MISTAKES = {
    "laws: no examples": Mistake(
        lambda: check(f, (strategies.tensors(3),), max_examples=0),
        CheckError,
        "weft.proofs.check(f, ...)",
        "max_examples=0, which compares nothing",
        "a whole number >= 1, or None",
    ),
    "laws: a law by its number": Mistake(
        lambda: check(f, (X,), laws="L1"),
        CheckError,
        "weft.proofs.check(f, ...)",
        "laws='L1'",
        "some, by name, of pure, graph (L1), replay (L9), <any>",
    ),
    "laws: laws on no device": Mistake(
        lambda: check(f, (X,), device="gpu"),
        DeviceError,
        "weft.proofs.check(f, ...)",
        "device 'gpu', which torch does not know",
        "'cpu', 'cuda' or 'cuda:N'",
    ),
    "laws: a tolerance below zero": Mistake(
        lambda: assert_equivalent(torch.exp, torch.sin, (X,), atol=-1),
        CheckError,
        "assert_equivalent(exp, sin, args=...)",
        "atol=-1",
        "a number >= 0; 0 is bitwise",
    ),
    "laws: an exception by its name": Mistake(
        lambda: assert_equivalent(torch.exp, torch.sin, (X,), raises="ValueError"),
        CheckError,
        "assert_equivalent(exp, sin, args=...)",
        "raises='ValueError'",
        "a type of exceptions: raises=ValueError, or a tuple of such",
    ),
    "laws: a shape as one": Mistake(
        lambda: strategies.tensors((2, 3)),
        CheckError,
        "tensors((2, 3), dtype=torch.float32)",
        "(2, 3), a tuple",
        "each dimension by itself, a whole number or a strategy: tensors(2, 3)",
    ),
    "laws: a dtype by its name": Mistake(
        lambda: strategies.tensors(2, dtype="float32"),
        CheckError,
        "tensors(2, dtype='float32')",
        "dtype is a str",
        "a dtype of torch: dtype=torch.float32",
    ),
}
