"""The formula for the seconds of a linear layer with a tile, and of torch's own product."""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from weft.ops.products.fp8 import BLOCK
from weft.ops.tiles.gpus import Device
from weft.ops.tiles.tile import Tile, cdiv, power_of_two

Array = NDArray[np.float64]


@attrs.frozen
class Coefficients:
    """The coefficients of the formula.

    Args:
        launch: seconds that every launch takes.
        fill: seconds until programs that run at the same time have their first tiles.
        dram: the fraction of the memory bandwidth that is reached when the weights are read once.
        feed: bytes per second into one multiprocessor.
        latency: seconds from a load to its arrival; all stages but one are in flight.
        step: further seconds per step.
        peak, chain: the fraction of the tensor cores' peak reached by all programs of a
            multiprocessor together, and by one program that waits for its own results.
        store: bytes per second at which the result is stored.
        power: the exponent of the norm that combines the bounds.
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
    tokens: int,
    rows: int,
    columns: int,
    fp8: bool,
    tiles: Sequence[Tile],
    gpu: Device,
    by: Coefficients,
) -> Array:
    """The seconds that the formula predicts for a product with each tile.

    Programs run in rounds of as many as fit in the multiprocessors' shared memory and registers.
    The bounds are the bytes of the weights, the bytes into a multiprocessor, the chain of one
    program's steps, and the tensor cores.
    """
    values = np.array(
        [(t.rows, t.tokens, t.columns, t.warps, t.stages, t.parts) for t in tiles], float
    ).T
    height, count, across, warps, stages, parts = values
    itemsize, peak = (1, 2 * gpu.peak) if fp8 else (2, gpu.peak)
    # CUDA reserves 1 KiB of shared memory for each program.
    shared = (height + count) * across * itemsize * stages + 1024
    # In FP8 a block's product is held beside the sum until it is scaled.
    registers = height * count / (32 * warps) * (2 if fp8 else 1)
    registers = np.minimum(255, registers + np.where(warps > 4, 40, np.where(count < 64, 60, 80)))
    # A multiprocessor of sm_90 has 228 KiB of shared memory, and 2**16 registers.
    together = np.maximum(
        1, np.minimum(np.floor(228 * 1024 / shared), np.floor(2**16 / (registers * 32 * warps)))
    )
    programs = np.ceil(rows / height) * np.ceil(tokens / count) * parts
    each = np.ceil(programs / gpu.processors)
    rounds = np.ceil(programs / (gpu.processors * together))
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


def library_seconds(
    tokens: int, rows: int, columns: int, fp8: bool, gpu: Device, by: Coefficients
) -> float:
    """The predicted seconds of torch's own product.

    In bfloat16 torch has a good tile for any shape, so only the bounds count; in FP8 its tiles have
    128 rows and up to 128 tokens.
    """
    if fp8:
        tile = Tile(128, min(128, power_of_two(max(tokens, 16))), 128, 8, 4)
        return float(formula_seconds(tokens, rows, columns, True, [tile], gpu, by)[0])
    read = 2 * rows * columns / (0.85 * gpu.bandwidth)
    multiplied = 2 * tokens * rows * columns / (0.75 * gpu.peak)
    return float(2e-6 + (read**3 + multiplied**3) ** (1 / 3))


# The seconds of a small copy.
COPY_SECONDS = 2e-6


def library_copies(columns: int, fp8: bool) -> float:
    """The seconds of the copies that torch's FP8 product needs: scales laid out by columns, and a
    multiple of four blocks."""
    if fp8:
        return COPY_SECONDS + (COPY_SECONDS if columns % (4 * BLOCK) else 0.0)
    return 0.0


def gate_seconds(tokens: int, rows: int) -> float:
    """The seconds of a gate in a separate kernel, as measured on an H100, which reads `[tokens,
    rows]` from the cache, or from memory if it does not fit there."""
    return 0.86e-6 + 3 * tokens * rows / (5e12 if 2 * tokens * rows <= 25e6 else 3e12)


def gated_many_seconds(tokens: int, rows: int, columns: int, tile: Tile, gpu: Device) -> float:
    """The predicted seconds of a product of many tokens that ends with a gate
    (`weft.ops.products.gated_many_triton`).

    Programs run in rounds, one on each multiprocessor. For 8 shapes and 14 numbers of tokens on an
    H100, four in five predictions are within 8 % of the measured time.
    """
    rounds = cdiv(cdiv(tokens, tile.tokens) * cdiv(rows, tile.rows), gpu.processors)
    each = 5e-6 + 1.13 * 2 * tile.tokens * tile.rows * columns * gpu.processors / gpu.peak
    return float(
        ((rounds * each) ** 3 + (2 * rows * columns / (0.85 * gpu.bandwidth)) ** 3) ** (1 / 3)
    )


def part_seconds(tokens: int, rows: int, parts: int) -> float:
    """The additional seconds that the next kernel takes for parts instead of their sum, as measured
    on an H100.

    A norm has one program for each token, which reads all parts of its row at 110 GB/s; a gate has
    several. All programs together read at 7.5 TB/s from the cache, and at 2.5 TB/s from memory if
    the parts do not fit there.
    """
    if parts == 1:
        return 0.0
    more = (4 * parts - 2) * (rows if rows <= 8192 else 2048) / 1.1e11
    total = (
        (4 * parts - 2) * tokens * rows / (7.5e12 if 4 * parts * tokens * rows <= 25e6 else 2.5e12)
    )
    return float(0.1e-6 + (more**2 + total**2) ** 0.5)
