"""The model of `weft.ops.tiles.model`, fitted to what `weft.proofs.evidence.bench.tiles.search`
measured.

    python -m weft.proofs.evidence.bench.tiles.fit proofs/results/…-tile-search.json.xz [MORE …]
    [--write]

It fits the model to the training shapes, and prints how far its choices are from the best of all
that was timed: on the shapes held out, whose numbers of tokens are others too, and for each shape
by a model that has all others. With `--write` it fits all shapes, and writes the model and these
figures to `linear.json`, in the package.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from weft.ops.tiles.candidates import TILES, tile_index
from weft.ops.tiles.formula import (
    Array,
    Coefficients,
    formula_seconds,
    library_copies,
    library_seconds,
    part_seconds,
)
from weft.ops.tiles.gpus import MEASURED, Device
from weft.ops.tiles.model import MODEL, Choice, Model
from weft.ops.tiles.tile import Tile
from weft.proofs.evidence.bench.tiles.search import read
from weft.proofs.evidence.bench.tiles.shapes import HELD_OUT, TRAINING, shapes
from weft.proofs.evidence.bench.tiles.timing import Product

_LIBRARIES = ("torch", "scaled_mm")
_START = Coefficients(5e-7, 1.1e-6, 0.86, 1.5e11, 5e-7, 5e-8, 0.8, 1.0, 3e12, 1.9)
# The formula is fitted to tiles that take at most this much more than the best one.
_GOOD = 1.4
# The same of the mean of what a tile takes beyond it.
_USUAL = 1.6
# The model keeps what tiles took that took at most this much more than the best one.
_NEAR = 1.05
# Errors, as logarithms, that count in proportion and not by their squares.
_STABLE = 0.1
# Numbers of tokens that the model does not keep: they take as long as 1 and 16.
_LEFT_OUT = (4, 8)


@attrs.frozen(eq=False)
class Case:
    """A measured product: its shape `(tokens, rows, columns)`, the seconds of each choice, and with
    what it leaves to other kernels."""

    shape: tuple[int, int, int]
    seconds: dict[Choice, float]
    costs: dict[Choice, float]


def merged(paths: Sequence[Path]) -> tuple[dict[bool, list[Case]], dict[str, Any]]:
    """The cases of all records by whether in FP8, and what the first record says of its machine."""
    seconds = dict[Product, dict[Choice, list[float]]]()
    records = [read(path) for path in paths]
    for measured in (one for measurements, _ in records for one in measurements):
        assert isinstance(measured.product, Product)
        product_seconds = seconds.setdefault(measured.product, {})
        for choice, value in measured.seconds.items():
            if isinstance(choice, Tile) or choice in _LIBRARIES:
                # The mean of two graphs, where the best ones were timed again.
                values = [value, measured.again.get(choice, value)]
                product_seconds.setdefault(choice if isinstance(choice, Tile) else None, []).append(
                    sum(values) / 2
                )
    cases: dict[bool, list[Case]] = {False: [], True: []}
    for product, times in seconds.items():
        fp8 = product.kind == "fp8_linear"
        # The least of several records: a hiccup makes a time longer, never shorter.
        cases[fp8].append(
            _case(product, {choice: min(values) for choice, values in times.items()}, fp8)
        )
    return cases, records[0][1]


def _case(product: Product, seconds: dict[Choice, float], fp8: bool) -> Case:
    def left(choice: Choice) -> float:
        if choice is None:
            return library_copies(product.columns, fp8)
        return part_seconds(product.tokens, product.rows, choice.parts)

    costs = {choice: value + left(choice) for choice, value in seconds.items()}
    return Case((product.tokens, product.rows, product.columns), seconds, costs)


def is_known(choice: Choice, fp8: bool) -> bool:
    """Whether the model chooses among it."""
    if choice is None:
        return True
    return (choice.rows, choice.tokens, choice.columns, choice.warps, choice.stages) in TILES[fp8]


def fit(cases: Sequence[Case], fp8: bool, gpu: Device = MEASURED) -> Coefficients:
    """The coefficients with the least squares of errors of the logarithm of seconds, large errors
    in proportion."""
    samples = []
    for case in cases:
        tiles = [choice for choice in case.seconds if choice is not None and is_known(choice, fp8)]
        good = [tile for tile in tiles if case.seconds[tile] <= _GOOD * min(case.costs.values())]
        if good:
            samples.append((case.shape, good, np.log([case.seconds[tile] for tile in good])))

    def errors(x: Array) -> Array:
        by = Coefficients(*np.exp(x))
        return np.concatenate(
            [np.log(formula_seconds(*shape, fp8, ts, gpu, by)) - y for shape, ts, y in samples]
        )

    # Logarithms of coefficients are fitted, so that none becomes negative.
    start = np.log(attrs.astuple(_START))
    return Coefficients(*map(float, np.exp(_least_squares(errors, start))))


def _least_squares(errors: Any, start: Array) -> Array:
    """Levenberg and Marquardt's method, with a weak pull towards the start where the data do not
    tell."""
    x = start
    damping = 1e-2
    residuals = errors(start)
    # With the number of samples, as their errors are summed: the pull is the same for any number.
    pull = np.full(len(x), 1e-5 * len(residuals))

    def loss(residuals: Array, at: Array, weights: Array) -> float:
        return float((weights * residuals**2).sum() + (pull * (at - start) ** 2).sum())

    for _ in range(40):
        jacobian = np.stack(
            [(errors(x + 1e-4 * unit) - residuals) / 1e-4 for unit in np.eye(len(x))], 1
        )
        # Huber's weights: a time that a hiccup made too long must not bend the whole fit.
        weights = np.minimum(1, _STABLE / np.maximum(np.abs(residuals), 1e-9))
        normal = jacobian.T @ (jacobian * weights[:, None]) + np.diag(pull)
        gradient = jacobian.T @ (residuals * weights) + pull * (x - start)
        while damping < 1e6:
            step = np.clip(
                # At most 0.4 in the logarithm, half as much again: the formula is far from linear
                # further on.
                np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient),
                -0.4,
                0.4,
            )
            other = errors(x + step)
            if loss(other, x + step, weights) < loss(residuals, x, weights):
                break
            damping *= 4
        else:
            return x
        if np.abs(step).max() < 1e-4:
            return np.asarray(x + step)
        x = x + step
        residuals = other
        damping = max(damping / 3, 1e-6)
    return x


def make_model(cases: Sequence[Case], by: Coefficients, fp8: bool, gpu: Device = MEASURED) -> Model:
    """The model with these coefficients and what these cases took beyond the formula."""
    usual: list[list[float]] = [[] for _ in TILES[fp8]]
    places = []
    beyond = []
    for case in cases:
        best = min(case.costs.values())
        entries = dict[int, list[tuple[float, float]]]()
        for choice, more in _beyond(case, by, fp8, gpu).items():
            if choice is None:
                index = -1
            else:
                index = tile_index(choice, fp8)
            if choice is not None and case.costs[choice] <= _USUAL * best:
                usual[index].append(more)
            if choice is None or case.costs[choice] <= _NEAR * best:
                entries.setdefault(index, []).append(
                    (float(np.log(choice.parts if choice else 1)), round(more, 2))
                )
        if case.shape[0] not in _LEFT_OUT:
            places.append(case.shape)
            beyond.append(entries)
    # A tile that was never near the best one is taken to be slow, so that it is not chosen.
    means = [round(float(np.mean(values)), 2) if values else 0.5 for values in usual]
    return Model(fp8, by, means, np.log(np.array(places, float)), beyond)


def _beyond(case: Case, by: Coefficients, fp8: bool, gpu: Device) -> dict[Choice, float]:
    """What each choice that the model knows took beyond the formula."""
    tiles = [choice for choice in case.seconds if choice is not None and is_known(choice, fp8)]
    excess: dict[Choice, float] = {}
    if tiles:
        predicted = formula_seconds(*case.shape, fp8, tiles, gpu, by)
        excess |= {
            tile: float(np.log(case.seconds[tile] / value))
            for tile, value in zip(tiles, predicted, strict=True)
        }
    if None in case.seconds:
        excess[None] = float(
            np.log(case.seconds[None] / library_seconds(*case.shape, fp8, gpu, by))
        )
    return excess


def losses(model: Model, cases: Sequence[Case], gpu: Device = MEASURED) -> list[float]:
    """How much longer the model's choice takes than the best of all that was timed, by case."""
    relative_losses = []
    for case in cases:
        candidates = [choice for choice in case.costs if is_known(choice, model.fp8)]
        chosen = candidates[int(model.costs(*case.shape, candidates, gpu).argmin())]
        relative_losses.append(case.costs[chosen] / min(case.costs.values()) - 1)
    return relative_losses


def losses_without(cases: Sequence[Case], by: Coefficients, fp8: bool) -> list[float]:
    """The losses of each shape by a model that has all others."""
    relative_losses = []
    for shape in dict.fromkeys(case.shape[1:] for case in cases):
        training = [case for case in cases if case.shape[1:] != shape]
        relative_losses += losses(
            make_model(training, by, fp8), [case for case in cases if case.shape[1:] == shape]
        )
    return relative_losses


def figures(values: Sequence[float]) -> dict[str, float]:
    """The number of losses, and their median, 90th and 99th percentile and maximum in percent."""
    cuts = np.percentile(values, [50, 90, 99, 100]) * 100
    return {"cases": len(values)} | dict(
        zip(("median", "p90", "p99", "worst"), map(_percent, cuts), strict=True)
    )


def _percent(value: Any) -> float:
    return round(float(value), 1)


def as_json(model: Model) -> dict[str, Any]:
    """A model as `linear.json` has it."""
    products: dict[str, dict[str, list[int]]] = {}
    for place, entries in zip(np.rint(np.exp(model.places)).astype(int), model.beyond, strict=True):
        flat = [
            number
            for index, corrections in entries.items()
            for log_parts, more in corrections
            for number in (index, round(np.exp(log_parts)), round(100 * more))
        ]
        products.setdefault(f"{place[1]}x{place[2]}", {})[str(place[0])] = flat
    coefficients = {
        name: float(f"{value:.4g}") for name, value in attrs.asdict(model.coefficients).items()
    }
    usual = [round(100 * value) for value in model.usual]
    return {"coefficients": coefficients, "usual": usual, "products": products}


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write linear.json")
    args = parser.parse_args(argv)
    cases, facts = merged(args.records)
    validation_shapes = {*shapes(HELD_OUT)} - {*shapes(TRAINING)}
    environment = {name: facts["environment"][name] for name in ("gpu", "torch", "cuda", "time")}
    written: dict[str, Any] = {"environment": environment, "models": {}, "losses": {}}
    for name, fp8 in (("bf16", False), ("fp8", True)):
        training = [case for case in cases[fp8] if case.shape[1:] not in validation_shapes]
        apart = [case for case in cases[fp8] if case.shape[1:] in validation_shapes]
        first = make_model(training, fit(training, fp8), fp8)
        by = fit(cases[fp8], fp8)
        # What is written knows all shapes. The figures of shapes held out are of the model before.
        final = make_model(cases[fp8], by, fp8)
        errors = np.abs(
            [
                more
                for case in cases[fp8]
                for c, more in _beyond(case, by, fp8, MEASURED).items()
                if c
            ]
        )
        summary = {
            "formula error": {
                "median": _percent(100 * np.median(errors)),
                "p90": _percent(100 * np.percentile(errors, 90)),
            },
            "held out": {"shapes": len({case.shape[1:] for case in apart})}
            | figures(losses(first, apart)),
            "each without itself": {"shapes": len({case.shape[1:] for case in cases[fp8]})}
            | figures(losses_without(cases[fp8], by, fp8)),
            "measured": figures(losses(final, cases[fp8])),
        }
        written["models"][name], written["losses"][name] = as_json(final), summary
        print(name, final.coefficients)
        for what, values in summary.items():
            print(f"  {what}: {values}")
    if args.write:
        MODEL.write_text(format_json(written), encoding="utf-8")


def format_json(written: dict[str, Any]) -> str:
    """JSON with a line for each measured shape."""
    text = json.dumps(written, indent=1)
    for model in written["models"].values():
        for shape, products in model["products"].items():
            text = text.replace(
                _indented(shape, products),
                f'"{shape}": {json.dumps(products, separators=(",", ":"))}',
            )
        text = text.replace(
            json.dumps(model["usual"], indent=1).replace("\n", "\n   "), json.dumps(model["usual"])
        )
    return text + "\n"


def _indented(shape: str, products: Any) -> str:
    return f'"{shape}": ' + json.dumps(products, indent=1).replace("\n", "\n    ")


if __name__ == "__main__":
    main()
