"""The tile of a linear layer: for any shape the one with the least seconds by a model of the device.

The model is a formula with ten coefficients, which `python -m weft.proofs.bench.tile_fit` fits to measurements, times
what the nearest of the measured products took beyond it. `linear_tiles.json` has the coefficients and the measurements.
A choice is a function of shapes and of the device's name, so that all ranks make the same one; nothing is tried out at
run time.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from weft.ops.fp8 import BLOCK
from weft.ops.gpus import MEASURED, Device, device
from weft.ops.tiles import Tile, cdiv, power_of_two, segment_columns

MODEL = Path(__file__).parent / "linear_tiles.json"

TILES: dict[bool, tuple[tuple[int, int, int, int, int], ...]] = {
    False: (
        (64, 16, 64, 4, 6), (64, 16, 128, 4, 3), (64, 16, 128, 4, 4), (64, 16, 128, 4, 5),
        (64, 32, 64, 4, 6), (64, 32, 128, 4, 3), (64, 32, 128, 4, 4), (64, 32, 128, 4, 5),
        (64, 64, 64, 4, 3), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4),
        (128, 64, 64, 4, 5), (128, 64, 128, 4, 3), (128, 64, 128, 4, 4), (128, 64, 128, 8, 3),
        (64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 128, 4, 3),
    ),
    True: (
        (64, 16, 128, 4, 3), (64, 16, 128, 4, 4), (64, 16, 128, 4, 6),
        (64, 32, 128, 4, 3), (64, 32, 128, 4, 4), (64, 32, 128, 4, 6),
        (128, 32, 128, 4, 3), (128, 32, 128, 4, 4), (128, 32, 128, 4, 6),
        (64, 64, 128, 4, 3), (64, 64, 128, 4, 4), (64, 64, 128, 4, 5),
        (128, 64, 128, 4, 3), (128, 64, 128, 4, 4), (128, 64, 128, 4, 5), (64, 128, 128, 4, 3),
    ),
}  # fmt: skip
"""Rows, tokens, columns, warps and stages, by whether in FP8: those of 97 that were timed without which many products
would be slower. In 1,303 of 1,315 measured products the best of these is within 1 % of the best of all."""

_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
_PART_COLUMNS = 256
"""The fewest columns of a part. With fewer a program ends before its loads are in flight."""
_FEW_PROGRAMS, _MANY_PROGRAMS = 44, 528
"""A third of the multiprocessors of an H100, and four times as many: fewer programs leave most of them idle, and more
gain nothing from a split. Candidates do not depend on the device."""

FEW_TOKENS = 128
"""The most tokens for which the segments of a batch-invariant product have programs of their own."""


@functools.cache
def scaled_mm_lacks() -> str | None:
    """Why `scaled_mm`, torch's product in FP8 blocks, cannot run here; None: it can."""
    cuda = torch.version.cuda
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < (12, 9):
        return f"it needs CUDA 12.9, and torch has {cuda}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) != (9, 0):
        return "it needs compute capability 9.0"
    return None


def candidates(tokens: int, rows: int, columns: int, fp8: bool) -> list[Tile]:
    """The tiles of a linear layer with weights `[rows, columns]` that may be the best one, each in several parts.

    A tile is left out if it is mostly empty, or if it reads the weights more than twice though its programs would be
    enough without; a number of parts, if its programs are too few though more are possible, or too many.
    """
    found = []
    for tile in TILES[fp8]:
        height, programs = tile[1], cdiv(tokens, tile[1]) * cdiv(rows, tile[0])
        is_spread = height >= 64 or cdiv(tokens, height) <= 2 or cdiv(tokens, height) * cdiv(rows, 64) <= 264
        if height <= max(16, power_of_two(tokens)) and is_spread:
            found += [Tile(*tile, parts=parts) for parts in _possible_parts(programs, columns, tile[2])]
    return found


def _possible_parts(programs: int, columns: int, across: int) -> Iterator[int]:
    """The numbers of parts to consider. Every part has columns, the last one too."""
    steps = cdiv(columns, across)
    possible = {cdiv(steps, cdiv(steps, n)) for n in _PARTS if n == 1 or n * _PART_COLUMNS <= columns}
    least = min(_FEW_PROGRAMS, programs * max(possible))
    return (n for n in sorted(possible) if programs * n >= least and (n == 1 or programs * n <= _MANY_PROGRAMS))


Array = NDArray[np.float64]


@attrs.frozen
class Coefficients:
    """The coefficients of the formula.

    Args:
        launch: seconds of any launch.
        fill: seconds until the programs that are there together have their first tiles.
        dram: of the bandwidth, when the weights are read once.
        feed: bytes per second into one multiprocessor.
        latency: seconds from a load to its arrival; all stages but one are in flight.
        step: seconds of a step besides.
        peak, chain: of the tensor cores' peak, for all programs of a multiprocessor and for one that waits for itself.
        store: bytes per second of the result.
        power: the bounds are added as a norm with this exponent.
    """

    launch: float
    fill: float
    dram: float
    feed: float
    latency: float
    step: float
    peak: float
    chain: float
    store: float
    power: float


def formula_seconds(
    tokens: int, rows: int, columns: int, fp8: bool, tiles: Sequence[Tile], gpu: Device, by: Coefficients
) -> Array:
    """The seconds of a product with each tile, by the formula.

    Programs run in rounds: as many at a time as fit in the multiprocessors' shared memory and registers. The bounds are
    the weights' bytes, the bytes into a multiprocessor, the chain of one program's steps, and the tensor cores.
    """
    values = np.array([(t.rows, t.tokens, t.columns, t.warps, t.stages, t.parts) for t in tiles], float).T
    height, count, across, warps, stages, parts = values
    itemsize, peak = (1, 2 * gpu.peak) if fp8 else (2, gpu.peak)
    shared = (height + count) * across * itemsize * stages + 1024
    registers = height * count / (32 * warps) * (2 if fp8 else 1)
    registers = np.minimum(255, registers + np.where(warps > 4, 40, np.where(count < 64, 60, 80)))
    together = np.maximum(1, np.minimum(np.floor(228 * 1024 / shared), np.floor(2**16 / (registers * 32 * warps))))
    programs = np.ceil(rows / height) * np.ceil(tokens / count) * parts
    each, rounds = np.ceil(programs / gpu.processors), np.ceil(programs / (gpu.processors * together))
    steps = np.ceil(np.ceil(columns / across) / parts)
    multiply = 2 * height * count * across * gpu.processors / peak
    bounds = (
        rows * columns * itemsize / (gpu.bandwidth * by.dram),
        each * steps * (height + count) * across * itemsize / by.feed,
        rounds * steps * (by.latency / (stages - 1) + by.step + multiply / by.chain),
        each * steps * multiply / by.peak,
    )
    total = sum(np.power(bound, by.power) for bound in bounds) ** (1 / by.power)
    stored = parts * np.where(parts > 1, 4, 2) * tokens * rows / by.store
    return np.asarray(by.launch + by.fill * rounds + total + stored)


def library_seconds(tokens: int, rows: int, columns: int, fp8: bool, gpu: Device, by: Coefficients) -> float:
    """The seconds of torch's own product, by the formula: in bfloat16 it has a good tile for any shape, so that there
    are bounds alone; in FP8 its tiles have 128 rows and tokens."""
    if fp8:
        tile = Tile(128, min(128, power_of_two(max(tokens, 16))), 128, 8, 4)
        return float(formula_seconds(tokens, rows, columns, True, [tile], gpu, by)[0])
    read, multiplied = 2 * rows * columns / (0.85 * gpu.bandwidth), 2 * tokens * rows * columns / (0.75 * gpu.peak)
    return float(2e-6 + (read**3 + multiplied**3) ** (1 / 3))


_COPY = 2e-6
"""The seconds of a small copy."""


def library_copies(columns: int, fp8: bool) -> float:
    """The seconds of the copies that torch's product in FP8 needs: the scales by columns, and blocks padded to four."""
    return (_COPY + (_COPY if columns % (4 * BLOCK) else 0.0)) if fp8 else 0.0


def part_seconds(tokens: int, rows: int, parts: int) -> float:
    """The seconds that the next kernel takes longer for parts than for their sum, as measured on an H100.

    A norm has a program for each token, which reads all parts of its row at 110 GB/s; a gate has several. All programs
    together read at 7.5 TB/s from the cache, and at 2.5 what does not fit there.
    """
    if parts == 1:
        return 0.0
    more = (4 * parts - 2) * (rows if rows <= 8192 else 2048) / 1.1e11
    total = (4 * parts - 2) * tokens * rows / (7.5e12 if 4 * parts * tokens * rows <= 25e6 else 2.5e12)
    return float(0.1e-6 + (more**2 + total**2) ** 0.5)


Choice = Tile | None
"""A tile, or torch's own product."""

_NEAREST = 4
"""The measured products whose times beyond the formula count."""
_SCALE = np.array([0.5, 0.7, 0.7])
"""The distances at which tokens, rows and columns count alike, as natural logarithms of ratios."""
_ABSENT = 0.03
"""A tile that was not near the best in a measured product takes this much more than it usually does, as a logarithm."""
_PARTS_SCALE = 0.5
"""The same of numbers of parts."""


@attrs.frozen(eq=False)
class Model:
    """The formula's coefficients, and what was measured beyond it, as logarithms of ratios.

    Args:
        usual: by tile, the mean.
        places: `[P, 3]`, the logarithms of tokens, rows and columns of the measured products.
        beyond: by product and tile, for each number of parts that was near the best; -1 is torch's own product.
    """

    fp8: bool
    coefficients: Coefficients
    usual: Sequence[float]
    places: Array
    beyond: Sequence[dict[int, list[tuple[float, float]]]]

    def costs(self, tokens: int, rows: int, columns: int, choices: Sequence[Choice], gpu: Device) -> Array:
        """The predicted seconds of each choice, with what it leaves to other kernels."""
        shape, tiles = (tokens, rows, columns, self.fp8), [choice for choice in choices if choice is not None]
        seconds = iter(formula_seconds(*shape, tiles, gpu, self.coefficients).tolist() if tiles else [])
        distances = (((self.places - np.log([tokens, rows, columns])) / _SCALE) ** 2).sum(1)
        nearest = [(int(i), 1 / (1e-3 + distances[i])) for i in np.argsort(distances, kind="stable")[:_NEAREST]]
        found = []
        for choice in choices:
            if choice is None:
                own = library_seconds(*shape, gpu, self.coefficients) * np.exp(self._library_beyond(nearest))
                found.append(own + library_copies(columns, self.fp8))
            else:
                own = next(seconds) * np.exp(self._beyond(choice, nearest))
                found.append(own + part_seconds(tokens, rows, choice.parts))
        return np.array(found)

    def _beyond(self, tile: Tile, nearest: Sequence[tuple[int, float]]) -> float:
        """The logarithm of a tile's seconds over the formula's, estimated from the nearest measured products."""
        index, parts = tile_index(tile, self.fp8), np.log(tile.parts)
        usual = self.usual[index] + _ABSENT
        weights, total = 0.1 * nearest[0][1], 0.1 * nearest[0][1] * usual
        for place, weight in nearest:
            seen = self.beyond[place].get(index, ())
            likeness = [float(np.exp(-0.5 * ((one - parts) / _PARTS_SCALE) ** 2)) for one, _ in seen]
            most = max(likeness, default=0.0)
            mean = sum(like * value for like, (_, value) in zip(likeness, seen, strict=True)) / max(sum(likeness), 1e-9)
            weights, total = weights + weight, total + weight * (most * mean + (1 - most) * usual)
        return total / weights

    def _library_beyond(self, nearest: Sequence[tuple[int, float]]) -> float:
        """The same of torch's own product; infinite if it was measured for none of the nearest."""
        seen = [(weight, self.beyond[place][-1][0][1]) for place, weight in nearest if -1 in self.beyond[place]]
        return sum(w * value for w, value in seen) / sum(w for w, _ in seen) if seen else float("inf")


def tile_index(tile: Tile, fp8: bool) -> int:
    """The place of a tile in `TILES`, whatever its parts."""
    return TILES[fp8].index((tile.rows, tile.tokens, tile.columns, tile.warps, tile.stages))


@functools.cache
def record() -> dict[str, Any]:
    """What `linear_tiles.json` has: where it was measured, how far the choices are from the best, and the models."""
    return dict(json.loads(MODEL.read_text(encoding="utf-8")))


@functools.cache
def model(fp8: bool) -> Model:
    """The model of `linear_tiles.json`."""
    found, places, beyond = record()["models"]["fp8" if fp8 else "bf16"], [], []
    for shape, products in found["products"].items():
        for tokens, flat in products.items():
            entries: dict[int, list[tuple[float, float]]] = {}
            for index, parts, percent in zip(*(flat[i::3] for i in range(3)), strict=True):
                entries.setdefault(index, []).append((float(np.log(parts)), percent / 100))
            places.append((int(tokens), *map(int, shape.split("x"))))
            beyond.append(entries)
    usual = [percent / 100 for percent in found["usual"]]
    return Model(fp8, Coefficients(**found["coefficients"]), usual, np.log(np.array(places, float)), beyond)


@functools.lru_cache(maxsize=4096)
def linear_tile(tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False) -> Tile | None:
    """The tile of a linear layer; None: torch's own product."""
    if not batch_invariant:
        return _best(_rounded(tokens), tokens % 4 > 0, rows, columns, fp8)
    segments = linear_segments(rows, columns, fp8)
    parts = segments if tokens <= FEW_TOKENS else 1
    if device() is None:
        return attrs.evolve(_by_rule(tokens, rows, columns, fp8), parts=parts, segments=segments)
    return attrs.evolve(_best_of_parts(_rounded(tokens), rows, columns, fp8, parts), segments=segments)


def _rounded(tokens: int) -> int:
    """The number of tokens that stands for others: one, and multiples of 16, of 64 from 128 on, of 256 from 1024 on."""
    step = 16 if tokens <= 128 else 64 if tokens <= 1024 else 256
    return cdiv(max(tokens, 1), step) * step if tokens > 1 else 1


@functools.lru_cache(maxsize=4096)
def _best(tokens: int, is_padded: bool, rows: int, columns: int, fp8: bool) -> Tile | None:
    """The best choice; torch's product in FP8 takes a multiple of four tokens, and others are padded."""
    gpu = device()
    if gpu is None:
        return _by_rule(tokens, rows, columns, fp8) if fp8 else None
    has_library = not fp8 or (scaled_mm_lacks() is None and rows % BLOCK == columns % BLOCK == 0)
    choices = [*candidates(tokens, rows, columns, fp8), *([None] if has_library else [])]
    costs = model(fp8).costs(tokens, rows, columns, choices, gpu)
    if fp8 and has_library and is_padded:
        costs[-1] += _COPY + tokens * columns / 1e12
    return choices[int(costs.argmin())]


@functools.lru_cache(maxsize=4096)
def _best_of_parts(tokens: int, rows: int, columns: int, fp8: bool, parts: int) -> Tile:
    """The best tile with this many parts."""
    known = [*dict.fromkeys(attrs.evolve(tile, parts=parts) for tile in candidates(tokens, rows, columns, fp8))]
    return known[int(model(fp8).costs(tokens, rows, columns, known, device() or MEASURED).argmin())]


def one_part_tile(tokens: int, rows: int, columns: int) -> Tile:
    """The best tile in FP8 in one part, where torch's product does not take what it is given."""
    return _best_of_parts(_rounded(tokens), rows, columns, True, 1)


def _by_rule(tokens: int, rows: int, columns: int, fp8: bool) -> Tile:
    """The tile of a linear layer on a GPU of another kind."""
    if tokens > 64:
        if not fp8:
            return Tile(128, 128, 64, 8, 4)
        return Tile(64 if tokens <= 512 else 128, 64, 128, 4, 3)
    programs, steps = cdiv(rows, 64), cdiv(columns, 128)
    parts = max(1, min(steps // 4, 256 // programs, 8))
    return Tile(64, max(16, power_of_two(tokens)), 128, 4, 4, parts)


@functools.cache
def linear_segments(rows: int, columns: int, fp8: bool) -> int:
    """The segments of a batch-invariant product with weights `[rows, columns]`: a function of the weights alone, of no
    device and no measurement.

    They are so many that about 128 programs, one for each multiprocessor, read the weights, and 256 in FP8. Best tiles
    of at most 128 tokens that have as many parts take as long as those of any parts (median of 78 and 75 shapes).
    """
    programs = 256 if fp8 else 128
    parts = max(1, min(cdiv(columns, 128) // 4, programs // cdiv(rows, 64), 8))
    return cdiv(columns, segment_columns(columns, parts))


def linear_parts(tokens: int, rows: int, columns: int, fp8: bool, batch_invariant: bool = False) -> int:
    """The parts of a linear layer on CUDA."""
    tile = linear_tile(tokens, rows, columns, fp8, batch_invariant)
    if tile is None or batch_invariant:
        return 1 if tile is None else tile.parts
    # Every part has columns, the last one too.
    steps = cdiv(columns, tile.columns)
    return cdiv(steps, cdiv(steps, tile.parts))
