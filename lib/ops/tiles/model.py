"""The model of the time of a linear layer: a formula with ten coefficients, corrected by how far
the nearest measured products were from it.

`python -m weft.proofs.evidence.bench.tiles.fit` fits it to measurements. `linear.json` has the
coefficients and the measurements.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from weft.ops.tiles.candidates import tile_index
from weft.ops.tiles.formula import (
    Array,
    Coefficients,
    formula_seconds,
    library_copies,
    library_seconds,
    part_seconds,
)
from weft.ops.tiles.gpus import Device
from weft.ops.tiles.tile import Tile

MODEL = Path(__file__).parent / "linear.json"

# A tile, or torch's own product.
Choice = Tile | None

# The number of nearest measured products that correct the formula.
_NEAREST = 4
# The units of distance in tokens, rows and columns, as natural logarithms of ratios.
_SCALE = np.array([0.5, 0.7, 0.7])
# A tile without a measurement near the best is taken to be slower than usual by this logarithm.
_ABSENT = 0.03
# The unit of distance in numbers of parts, likewise a logarithm.
_PARTS_SCALE = 0.5


@attrs.frozen(eq=False)
class Model:
    """The formula's coefficients, and the logarithms of measured over predicted times.

    Args:
        usual: the mean logarithm of each tile.
        places: `[P, 3]`, the logarithms of tokens, rows and columns of the measured products.
        beyond: for each measured product, by index of the tile, a list of (logarithm of the parts,
            logarithm of the ratio) for each number of parts that was near the best; the index -1 is
            torch's own product.
    """

    fp8: bool
    coefficients: Coefficients
    usual: Sequence[float]
    places: Array
    beyond: Sequence[dict[int, list[tuple[float, float]]]]

    def costs(
        self, tokens: int, rows: int, columns: int, choices: Sequence[Choice], gpu: Device
    ) -> Array:
        """The predicted seconds of each choice, including the time that it costs other kernels."""
        shape = (tokens, rows, columns, self.fp8)
        tiles = [choice for choice in choices if choice is not None]
        seconds = iter(
            formula_seconds(*shape, tiles, gpu, self.coefficients).tolist() if tiles else []
        )
        distances = (((self.places - np.log([tokens, rows, columns])) / _SCALE) ** 2).sum(1)
        # Stable, so that all ranks break ties alike; 1e-3 keeps the weight finite for a product
        # that was measured itself.
        nearest = [
            (int(i), 1 / (1e-3 + distances[i]))
            for i in np.argsort(distances, kind="stable")[:_NEAREST]
        ]
        costs = []
        for choice in choices:
            if choice is None:
                base = library_seconds(*shape, gpu, self.coefficients) * np.exp(
                    self._library_beyond(nearest)
                )
                costs.append(base + library_copies(columns, self.fp8))
            else:
                base = next(seconds) * np.exp(self._beyond(choice, nearest))
                costs.append(base + part_seconds(tokens, rows, choice.parts))
        return np.array(costs)

    def _beyond(self, tile: Tile, nearest: Sequence[tuple[int, float]]) -> float:
        """The estimated logarithm of a tile's time over the formula's, from the nearest measured
        products."""
        index = tile_index(tile, self.fp8)
        parts = np.log(tile.parts)
        usual = self.usual[index] + _ABSENT
        weights = 0.1 * nearest[0][1]
        total = 0.1 * nearest[0][1] * usual
        for place, weight in nearest:
            measured = self.beyond[place].get(index, ())
            likeness = [
                float(np.exp(-0.5 * ((one - parts) / _PARTS_SCALE) ** 2)) for one, _ in measured
            ]
            most = max(likeness, default=0.0)
            mean = sum(
                like * value for like, (_, value) in zip(likeness, measured, strict=True)
            ) / max(sum(likeness), 1e-9)
            weights = weights + weight
            total = total + weight * (most * mean + (1 - most) * usual)
        return total / weights

    def _library_beyond(self, nearest: Sequence[tuple[int, float]]) -> float:
        """The same for torch's own product; infinite if none of the nearest has measured it."""
        measured = [
            (weight, self.beyond[place][-1][0][1])
            for place, weight in nearest
            if -1 in self.beyond[place]
        ]
        if measured:
            return sum(w * value for w, value in measured) / sum(w for w, _ in measured)
        return float("inf")


@functools.cache
def record() -> dict[str, Any]:
    """The contents of `linear.json`: the environment of the measurements, the losses of the choices
    against the best, and the models."""
    return dict(json.loads(MODEL.read_text(encoding="utf-8")))


@functools.cache
def model(fp8: bool) -> Model:
    """The model of `linear.json`."""
    fitted = record()["models"]["fp8" if fp8 else "bf16"]
    places = []
    beyond = []
    for shape, products in fitted["products"].items():
        for tokens, flat in products.items():
            entries: dict[int, list[tuple[float, float]]] = {}
            for index, parts, percent in zip(*(flat[i::3] for i in range(3)), strict=True):
                entries.setdefault(index, []).append((float(np.log(parts)), percent / 100))
            places.append((int(tokens), *map(int, shape.split("x"))))
            beyond.append(entries)
    usual = [percent / 100 for percent in fitted["usual"]]
    return Model(
        fp8, Coefficients(**fitted["coefficients"]), usual, np.log(np.array(places, float)), beyond
    )
