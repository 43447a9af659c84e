"""L25: a nest of transforms means what its parts mean."""

import re
import warnings
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from weft.errors import WeftError
from weft.proofs._laws.captures import Tally, reason_of
from weft.proofs._strategies.compositions.composition import Composition
from weft.proofs._strategies.compositions.occasions import OCCASIONS, Subject
from weft.proofs.checks.difference import LawViolation, find_difference
from weft.proofs.checks.elements import Tolerance
from weft.torchapi.frames import clear_frames
from weft.transforms.graphs import one_at_a_time
from weft.values.trees import tree_leaves

_LAW = "L25 a nest means what its parts mean"


@attrs.frozen(eq=False)
class _Outcome:
    """What a call left behind: its result or error, its argument, the closed-over weight, and the
    state of the random generator."""

    result: Any
    argument: Tensor
    weight: Tensor
    generator: Tensor


def compositions_mean_their_parts(
    composition: Composition, device: str = "cpu", tally: Tally | None = None
) -> None:
    """L25: a nest of public transforms around any function gives, call by call, what the
    definitions of its transforms give in plain torch, or weft refuses it with a `WeftError`.

    A refusal is allowed where a layer does not promise to support what is inside it. Either way,
    torch's modes and hooks are as they were before the call.

    The results, the argument and the closed-over tensor after the call are compared, and the random
    generator where every transform keeps the order of draws.

    Args:
        tally: counts the outcomes.
    """
    tally = Tally() if tally is None else tally
    tally.programs += 1
    devices = ["cuda"] if device == "cuda" else []
    # Some nests capture in a thread that another capture waits for. Such a standstill is refused
    # after `STANDSTILL` seconds; 1 s keeps the law fast.
    short_standstill = mock.patch.object(one_at_a_time, "STANDSTILL", 1.0)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), short_standstill:
        warnings.simplefilter("ignore")
        subject = composition.subject(device)
        meaning = composition.subject_of_meaning(device)
        for call, occasion in enumerate(composition.occasions):
            if not _compare(composition, call, occasion, subject, meaning, device, tally):
                return


def _compare(
    composition: Composition,
    call: int,
    occasion: str,
    subject: Subject,
    meaning: Subject,
    device: str,
    tally: Tally,
) -> bool:
    """Compare one call, and return whether the next one can be compared too."""
    where = f"{_LAW}: {composition}, call {call}"
    tally.calls += 1
    if not composition.is_defined(occasion):
        tally.errors += 1
        return False
    expected = _outcome(composition, call, occasion, meaning, device)
    outcome = _outcome(composition, call, occasion, subject, device)
    if isinstance(outcome.result, WeftError) and not isinstance(expected.result, Exception):
        tally.refused[reason_of(outcome.result)] += 1
        # A CUDA graph cannot hold all that a tape can, so that it may refuse any nest.
        if device == "cpu" and not composition.may_be_refused(occasion):
            raise LawViolation(
                f"{where}: it is refused: {_line(outcome.result)}"
            ) from outcome.result
        return False
    if isinstance(expected.result, Exception):
        # The nest may succeed where its meaning raises for two reasons. Torch lacks an operator's
        # derivative, but weft runs another kernel that has one. Or the meaning needs saved-tensor
        # hooks, which torch.func does not support, while a rank of a shard sets its own.
        is_missing = isinstance(
            expected.result, NotImplementedError
        ) or "support saved tensor hooks" in str(expected.result)
        if not (is_missing or isinstance(outcome.result, Exception)):
            raise LawViolation(
                f"{where}: no error, where its meaning raises {_line(expected.result)}"
            )
        tally.errors += 1
        return False
    if isinstance(outcome.result, Exception):
        # If torch's own transforms raise the same type of error, the error is torch's.
        by_torch = _outcome_of_torch(composition, call, device).result
        if type(by_torch) is type(outcome.result):
            tally.errors += 1
            return False
        text = f"{where}: it raises {_line(outcome.result)}, where its meaning does not"
        raise LawViolation(text) from outcome.result
    keeps_draws = composition.keeps_draws and OCCASIONS[occasion].keeps_draws
    # Other numbers were drawn, or the same ones in another order: there is nothing to compare.
    if "draws random numbers" in composition.body.operations and not keeps_draws:
        return False
    difference = _difference(composition, outcome, expected, keeps_draws)
    if difference is None:
        return True
    if (
        _difference(composition, outcome, _outcome_of_torch(composition, call, device), keeps_draws)
        is None
    ):
        # Torch's own transform differs from its definition too, as `vmap` of a stateful function
        # does.
        tally.errors += 1
        return False
    if _is_ill_conditioned(composition, call, expected, keeps_draws, device):
        tally.errors += 1
        return False
    raise LawViolation(f"{where}: {difference}")


def _difference(
    composition: Composition, outcome: _Outcome, expected: _Outcome, keeps_draws: bool
) -> str | None:
    """The first difference of two outcomes in words, or None."""
    tolerance = Tolerance(composition.tolerance, composition.tolerance)
    compared = ["result", "argument", "weight", *(["generator"] if keeps_draws else [])]
    for name in compared:
        difference = find_difference(getattr(outcome, name), getattr(expected, name), tolerance)
        if difference is not None:
            return f"{name}{difference}"
    return None


def _is_ill_conditioned(
    composition: Composition, call: int, expected: _Outcome, keeps_draws: bool, device: str
) -> bool:
    """Whether the meaning's own result overflows, or moves by more than the tolerance when its
    argument moves by one rounding, as in a loop that magnifies every difference.

    After an overflow, sums that are equal on paper may differ: a rank's share of a gradient is
    0 times infinity, which is NaN.
    """
    if not all(
        bool(leaf.isfinite().all())
        for leaf in tree_leaves(expected.result)
        if isinstance(leaf, Tensor)
    ):
        return True
    subject = composition.subject_of_meaning(device)
    for earlier, occasion in enumerate(composition.occasions[:call]):
        _outcome(composition, earlier, occasion, subject, device)
    # 2**-22 is two units in the last place of float32 at 1.
    nudged = _outcome(
        composition, call, composition.occasions[call], subject, device, nudge=2.0**-22
    )
    if isinstance(nudged.result, Exception):
        return False
    return _difference(composition, nudged, expected, keeps_draws) is not None


def _outcome_of_torch(composition: Composition, call: int, device: str) -> _Outcome:
    """What torch's own transforms give for a call, after replaying the earlier calls."""
    subject = composition.subject_of_torch(device)
    for earlier, occasion in enumerate(composition.occasions[:call]):
        _outcome(composition, earlier, occasion, subject, device)
    return _outcome(composition, call, composition.occasions[call], subject, device)


def _outcome(
    composition: Composition,
    call: int,
    occasion: str,
    subject: Subject,
    device: str,
    nudge: float = 0.0,
) -> _Outcome:
    argument = composition.argument(call, device) * (1 + nudge)
    # The nest and its meaning draw the same numbers.
    torch.manual_seed(call)
    before = _surroundings()
    try:
        result: Any = OCCASIONS[occasion].run(subject, argument)
    except Exception as error:
        result = error
        # Guards in the error's frames, such as the hooks of `checkpoint`, end what they began
        # before the surroundings are compared below.
        clear_frames(error)
    if not subject.is_meaning and (after := _surroundings()) != before:
        raise LawViolation(
            f"{_LAW}: {composition}, call {call}: torch's surroundings are {after}, and were"
            f" {before}"
        )
    if device == "cpu":
        generator = torch.get_rng_state()
    else:
        generator = torch.cuda.get_rng_state()
    weight = subject.built.world.weight.detach().clone()
    return _Outcome(result, argument, weight, generator)


def _surroundings() -> dict[str, Any]:
    """The torch modes that a call could leave set by mistake."""
    # Torch has no query for saved-tensor hooks, but it refuses to disable them while some are set.
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are some"):
            has_hooks = False
    except RuntimeError:
        has_hooks = True
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "saved-tensor hooks": has_hooks,
    }


def _line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r" at /\S+", "", text)[:200]  # without file paths, which differ by machine
