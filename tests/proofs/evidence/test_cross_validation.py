"""Cross-validation of the model of tiles: no fit sees the shapes that it is judged by; the record
is of this model."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from weft.ops.tiles.formula import Coefficients
from weft.ops.tiles.model import model
from weft.proofs.evidence.bench.tiles import cross_validation
from weft.proofs.evidence.bench.tiles.fit import Case, merged
from weft.proofs.evidence.pages.records import RESULTS, read

pytestmark = pytest.mark.slow
KINDS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@pytest.fixture(scope="module")
def cases() -> dict[bool, list[Case]]:
    return merged([RESULTS / read("h100-tile-losses").data["search"]])[0]


@KINDS
def test_no_fit_sees_the_shapes_that_it_is_judged_by(
    fp8: bool, cases: dict[bool, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted_shapes: list[set[Any]] = []

    def spy(training_cases: Sequence[Case], is_fp8: bool) -> Coefficients:
        fitted_shapes.append({case.shape[1:] for case in training_cases})
        return model(is_fp8).coefficients

    monkeypatch.setattr(cross_validation, "fit", spy)
    shapes = list(dict.fromkeys(case.shape[1:] for case in cases[fp8]))[:9]
    some = [case for case in cases[fp8] if case.shape[1:] in shapes]
    folds = cross_validation.split(shapes, 3)
    results = list(cross_validation.validate(some, folds, fp8))
    for fold, result, training_shapes in zip(folds, results, fitted_shapes, strict=True):
        assert training_shapes == {*shapes} - {*fold}
        assert {tuple(row[1:3]) for row in result["products"]} == {*fold}
    assert sum(len(result["products"]) for result in results) == len(some)


@KINDS
def test_the_record_is_of_this_model_and_this_search(
    fp8: bool, cases: dict[bool, list[Case]]
) -> None:
    """The choices of each fold again, with the recorded coefficients; no fit is repeated, which
    takes half a minute."""
    folds = read("h100-tile-losses").data["models"]["fp8" if fp8 else "bf16"]
    shapes = [[tuple(shape) for shape in fold["shapes"]] for fold in folds]
    assert shapes == cross_validation.split([case.shape[1:] for case in cases[False]], len(folds))
    for fold_shapes, fold in zip(shapes, folds, strict=True):
        by = Coefficients(**fold["coefficients"])
        assert cross_validation.choices(cases[fp8], fold_shapes, by, fp8) == fold["products"]


def test_a_model_that_has_seen_the_shapes_chooses_better(cases: dict[bool, list[Case]]) -> None:
    """So the figures would be others if the shapes of a fold leaked into its fit."""
    fold = read("h100-tile-losses").data["models"]["fp8"][0]
    fold_shapes = [tuple(shape) for shape in fold["shapes"]]
    by = Coefficients(**fold["coefficients"])
    rows = cross_validation.choices(cases[True], fold_shapes, by, True)
    leaked = [case for case in cases[True] if case.shape[1:] in fold_shapes]
    leaky_model = cross_validation.make_model(cases[True], by, True)
    better = sum(case.costs[cross_validation.chosen(leaky_model, case)] * 1e6 for case in leaked)
    assert better < sum(row[3] for row in rows)


def test_json_has_a_line_for_each_product() -> None:
    products = [[1, 64, 128, 2.0, 1.0, "torch", [64, 16, 128, 4, 3, 1]]] * 2
    text = cross_validation.format_json(
        {"models": {"bf16": [{"shapes": [[64, 128]], "products": products}]}}
    )
    assert json.loads(text)["models"]["bf16"][0]["products"] == products
    assert text.count("\n") == 4
