"""The loss of each measured product by a fit that has not seen its shape: k-fold cross-validation
of the tile model.

    python -m weft.proofs.evidence.bench.tiles.cross_validation proofs/results/…-tile-search.json.xz
    --out FILE [--folds 6]

The shapes `[N, K]` are shuffled into folds. For each fold the coefficients are fitted, and what was
measured beyond the formula is kept, from the shapes of the other folds alone; that model then
chooses for the fold's shapes. A loss is the time of its choice over that of the best choice of the
whole search, less one, both with what their parts cost the next kernel. A fit takes about half a
minute of a core, so that the losses are a record: the page of measurements draws it.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from weft.ops.tiles.formula import Coefficients
from weft.ops.tiles.gpus import MEASURED
from weft.ops.tiles.model import Choice, Model
from weft.proofs.evidence.bench.tiles.fit import Case, figures, fit, is_known, make_model, merged

Shape = tuple[int, int]


def split(shapes: Sequence[Shape], folds: int) -> list[list[Shape]]:
    """The shapes in so many folds of almost equal size, shuffled with a fixed seed.

    >>> [len(fold) for fold in split([(n, 64) for n in range(7)], 3)]
    [3, 2, 2]
    """
    # By shape and not by product: another number of tokens of the same shape would tell the answer.
    unique_shapes = sorted(set(shapes))
    random.Random(0).shuffle(unique_shapes)
    return [sorted(unique_shapes[i::folds]) for i in range(folds)]


def chosen(model: Model, case: Case) -> Choice:
    """The model's choice among what was timed."""
    candidates = [choice for choice in case.costs if is_known(choice, model.fp8)]
    return candidates[int(model.costs(*case.shape, candidates, MEASURED).argmin())]


def validate(
    cases: Sequence[Case], folds: Sequence[Sequence[Shape]], fp8: bool
) -> Iterator[dict[str, Any]]:
    """For each fold its shapes, the coefficients fitted without them, and a row for each of its
    products."""
    for fold in folds:
        training = [case for case in cases if case.shape[1:] not in fold]
        rounded = {
            # Rounded as `linear.json` has them, so that what is judged is what would be shipped.
            name: float(f"{value:.4g}")
            for name, value in attrs.asdict(fit(training, fp8)).items()
        }
        yield {
            "shapes": fold,
            "coefficients": rounded,
            "products": choices(cases, fold, Coefficients(**rounded), fp8),
        }


def choices(
    cases: Sequence[Case], fold: Sequence[Shape], by: Coefficients, fp8: bool
) -> list[list[Any]]:
    """For each product of a fold its shape, the microseconds of the choice of a model that has all
    other shapes and of the best choice, and the two choices."""
    model = make_model([case for case in cases if case.shape[1:] not in fold], by, fp8)
    rows = []
    for case in cases:
        if case.shape[1:] in fold:
            one = chosen(model, case)
            # Of all that was timed, also of tiles that the model does not know.
            best = min(case.costs, key=case.costs.__getitem__)
            us = [round(case.costs[choice] * 1e6, 3) for choice in (one, best)]
            rows.append([*case.shape, *us, _fields(one), _fields(best)])
    return rows


def _fields(choice: Choice) -> Any:
    if choice is None:
        return "torch"
    return list(attrs.astuple(choice)[:6])


def main(argv: Sequence[str] | None = None) -> None:
    """Fit every fold, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folds", type=int, default=6)
    args = parser.parse_args(argv)
    cases, facts = merged([args.record])
    folds = split([case.shape[1:] for case in cases[False]], args.folds)
    environment = {name: facts["environment"][name] for name in ("gpu", "torch", "cuda", "time")}
    fields = ["tokens", "rows", "columns", "chosen_us", "best_us", "chosen", "best"]
    written = {
        "search": args.record.name,
        "environment": environment,
        "fields": fields,
        "models": {},
    }
    for name, fp8 in (("bf16", False), ("fp8", True)):
        model_folds = list(validate(cases[fp8], folds, fp8))
        losses = [row[3] / row[4] - 1 for fold in model_folds for row in fold["products"]]
        print(
            name,
            figures(losses),
            {f"over {most:.0%}": sum(x > most for x in losses) for most in (0.05, 0.15)},
        )
        written["models"][name] = model_folds
    args.out.write_text(format_json(written), encoding="utf-8")


def format_json(written: dict[str, Any]) -> str:
    """JSON with a line for each product."""
    folds = [fold for model_folds in written["models"].values() for fold in model_folds]
    # JSON has either no line breaks or too many: marks stand for the products until they are
    # written.
    lines = {json.dumps(f"@{i}"): fold["products"] for i, fold in enumerate(folds)}
    for mark, fold in zip(lines, folds, strict=True):
        fold["products"] = json.loads(mark)
    text = json.dumps(written)
    for mark, rows in lines.items():
        text = text.replace(mark, "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    return text + "\n"


if __name__ == "__main__":
    main()
