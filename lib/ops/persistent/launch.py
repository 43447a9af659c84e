"""The CUDA implementation of `weft::run_persistent`. Import it only where triton is installed."""

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import INTERPRETED
from weft.ops.persistent.instructions import Attend, Heads, Instruction, Linear, Norm
from weft.ops.persistent.kernel_triton import run_kernel
from weft.ops.persistent.program import instructions_of, place_table, processors
from weft.ops.products.blocks_triton import TRITON_DTYPES
from weft.ops.tiles.tile import power_of_two

_KEYS = 64
"""Keys of a step of attention."""
_SPLITS = 8
"""The most shares of a context."""
_WARPS, _STAGES = 8, 4
_NO_HEADS = Heads(0, 1, 16, 1, torch.float32, False)


def run(reads: list[Tensor], writes: list[Tensor], text: str) -> None:
    """`weft::run_persistent`."""
    instructions = instructions_of(reads, writes, text)
    like = instructions[0].like
    attends = [each for each in instructions if isinstance(each, Attend)]
    heads = attends[0].heads if attends else _NO_HEADS
    table, counters = place_table(instructions, 1 + heads.kv_heads, like.device)
    where = attends[0].where if attends else (table,) * 6
    programs, group = processors(like.device), max(heads.num_heads // heads.kv_heads, 1)
    made = power_of_two(group + 2)
    width = power_of_two(max(made * heads.dim, *map(_norm_width, instructions)))
    splits = min(_SPLITS, programs // heads.kv_heads)
    scratch = like.new_empty((programs, width))
    rows = min(_KEYS, max(2048 // heads.dim, 8))  # of keys, which warps read side by side
    cells = programs * rows + heads.kv_heads * _SPLITS
    shares = like.new_empty((cells, power_of_two(group), heads.dim), dtype=torch.float32)
    maxima, sums = like.new_empty((2, cells, power_of_two(group)), dtype=torch.float32)
    count, kv_type = len(instructions), TRITON_DTYPES.get(heads.kv_dtype, tl.float8e4nv)
    with torch.cuda.device_of(table):
        for first, last in [(i, i + 1) for i in range(count)] if INTERPRETED.value else [(0, count)]:
            run_kernel[(programs,)](
                table, counters, counters[1:], scratch, shares, maxima, sums, *where, first, last, splits,
                PROGRAMS=programs, WIDTH=width, TYPE=TRITON_DTYPES[like.dtype], HEADS=heads.num_heads,
                KV_HEADS=heads.kv_heads, DIM=heads.dim, PAGE_SIZE=heads.page_size, KV_TYPE=kv_type,
                HEAD_NORM=heads.normed, GROUP=power_of_two(group), MADE=made, ROWS=rows, KEYS=_KEYS, SPLITS=_SPLITS,
                num_warps=_WARPS, num_stages=_STAGES, launch_cooperative_grid=True,
            )  # fmt: skip


def _norm_width(instruction: Instruction) -> int:
    """The columns of its norm; 16, the least, if it has none."""
    has_norm = isinstance(instruction, Norm) or (isinstance(instruction, Linear) and instruction.gain is not None)
    return int(instruction.x.shape[-1]) if has_norm and not isinstance(instruction, Attend) else 16
