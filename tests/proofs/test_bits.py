"""L20 beyond its drawn cases on one process: the kinds of models, stages in processes, and bugs of
the CUDA kernels."""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from weft.ops.requests import EMBEDDED
from weft.proofs import LawViolation
from weft.proofs._laws.engine.bits import bits_are_of_the_request
from weft.proofs._strategies.engine.invariant import (
    INVARIANT_MODELS,
    InvariantLoad,
    invariant_loads,
    invariant_model,
)
from weft.proofs.evidence.mutants.bits import BITS
from weft.proofs.evidence.mutants.mutant import replace
from weft.stages.architectures import ARCHITECTURES
from weft.transforms.engine.requests.prompts import ids_of
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch


def draw_cases(count: int, **options: Any) -> list[InvariantLoad]:
    """The same cases each time, whatever the text of this file is."""
    drawn: list[InvariantLoad] = []

    @seed(0)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(invariant_loads(**options))
    def keep(case: InvariantLoad) -> None:
        drawn.append(case)

    keep()
    return drawn


def has_image(case: InvariantLoad) -> bool:
    return any(prompt is not None and EMBEDDED in ids_of(prompt) for prompt in case.prompts)


def test_the_kinds_are_of_all_architectures() -> None:
    assert {invariant_model(kind).config.architecture for kind in INVARIANT_MODELS} == set(
        ARCHITECTURES
    )


@pytest.mark.nightly
def test_what_is_drawn() -> None:
    """All kinds, modes and numbers of stages, with and without threads, drafts and adapters; and
    images in each way. Most prompts are short, and some longer than a block of attention."""
    cases = draw_cases(800)
    assert {case.kind for case in cases} == set(INVARIANT_MODELS)
    assert {case.load.pipeline for case in cases} == {1, 2, 3, 4}
    longest = [max(len(call.prompt) for call in case.load.calls) for case in cases]
    assert sum(length < 20 for length in longest) > 600
    assert sum(length > 64 for length in longest) > 40
    assert any(length > 512 for length in longest)
    for subset in (cases, list(filter(has_image, cases))):
        assert {case.has_threads for case in subset} == {True, False}
        assert {case.load.drafts is None for case in subset} == {True, False}
        assert {case.load.graph == "none" for case in subset} == {True, False}
        assert {any(call.adapter for call in case.load.calls) for case in subset} == {True, False}


def check_on_ranks(cases: list[InvariantLoad]) -> int:
    """Check the law on this rank, where each request also runs alone."""
    torch.set_num_threads(1)
    transport = Distributed(timeout=60)
    for case in cases:
        bits_are_of_the_request(case, transport=transport)
    transport.close()
    return len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_bits_over_processes_are_of_the_request(num_ranks: int, runs_nightly: bool) -> None:
    """One case of each kind of model; with `--nightly` three."""
    cases = draw_cases(600, stages=(num_ranks, num_ranks))
    each = 3 if runs_nightly else 1
    by_kind = [[case for case in cases if case.kind == kind] for kind in INVARIANT_MODELS]
    chosen = [
        case for cases_of_kind in by_kind for case in sorted(cases_of_kind, key=has_image)[-each:]
    ]
    assert {case.kind for case in chosen} == set(INVARIANT_MODELS)
    assert any(map(has_image, chosen))
    assert launch(check_on_ranks, num_ranks, chosen) == [len(chosen)] * num_ranks


def segments_by_the_tokens() -> AbstractContextManager[Any]:
    """A context in which a float32 product on CUDA adds up its columns in two segments if it has
    more than two tokens, which changes the sums of 256 columns: those of the down projections."""
    home = "weft.ops.products.linear_triton"
    plain = import_module(home).run_tile

    def run_tile(*args: Any) -> Any:
        x, _, _, scale, *_, tile = args
        return plain(
            *args[:-1], attrs.evolve(tile, segments=2) if scale is None and len(x) > 2 else tile
        )

    return replace(home, "run_tile", run_tile)()


# Bugs, and the kinds of models that have them.
PLANTED = {
    "segments by the tokens": (segments_by_the_tokens, "Qwen3"),
    "experts in the order of the batch": (
        next(m.plant for m in BITS if m.name.startswith("experts")),
        "experts",
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANTED)
def test_the_law_catches_bugs_of_the_cuda_kernels(name: str) -> None:
    plant, kind = PLANTED[name]
    cases = [case for case in draw_cases(600) if case.kind == kind]
    with plant():
        assert any(is_caught(case, "cuda") for case in cases)


def is_caught(case: InvariantLoad, device: str) -> bool:
    try:
        bits_are_of_the_request(case, device)
    except LawViolation:
        return True
    return False
