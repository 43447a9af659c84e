"""The launch parameters of the attention kernels, planned from shapes alone."""

import functools

import attrs

from weft.ops.tiles.tile import power_of_two

# The most query rows of a program, with heads of 128 in 16 bits.
_PROMPT_ROWS = 128
# Keys of a tile (64 of them for heads of 128), warps and stages, in 16-bit programs with that many
# rows. Not used with a cache in FP8: the registers of the conversion would spill.
_PROMPT_TILE = 128, 8, 2
# Keys, warps and stages of other programs for prompts, and of all batch-invariant programs.
_FIXED_TILE = 64, 4, 2

# The most registers per thread in programs of 8 warps, so that two programs fit on a
# multiprocessor, which has 65,536. With 128 rows and heads of 128, accumulators take half of them;
# if contexts are shared, too few remain.
_MOST_REGISTERS = 128
# The warps per multiprocessor among which decodes are shared, which leaves 128 registers a thread;
# half as many if the cache is in FP8, where a thread takes 255.
_WARPS = 16
# Among prompts, requests with up to this many query rows share their context as in decodes: it is
# the smallest number of rows of a product.
_FEW_ROWS = 16
# The most requests whose contexts are cut into parts, since each program holds the lengths of all
# of them in registers.
_MOST_COUNTED = 1024
# The most splits of a request: their results are combined at once.
_MOST_SPLITS = 64
# With fewer than 3 programs per multiprocessor, contexts are cut into equal parts if the largest
# share exceeds 9 eighths of a part. With more programs, which hide each other's waits, the
# threshold is 12 eighths.
_FEW_WAVES = 3
_FEW_SLACK = 9
_SLACK = 12
# Contexts are cut into parts only if the largest share exceeds a part by more than this many
# positions, in decodes and among prompts. Below that, one program finishes sooner than the parts
# are combined, or than the prompts are done.
_SPARE = 192
_MIXED_SPARE = 1024
# Up to this many positions, a request stays with one program however short the others are, since it
# ends soon enough.
_LONG = 2048
# Batch-invariant launches with at least this many programs per multiprocessor do not share
# contexts, since shares take memory for each segment of the largest context. They are never cut
# into parts, which are not faster there.
_FEW_INVARIANT_WAVES = 1
# The positions that a batch-invariant launch attends to at a time.
SEGMENT = 512
# The rows of batch-invariant programs, for any number of queries: one layout, so one order of sums.
_FIXED_ROWS = 64


@attrs.frozen
class Launch:
    """The parameters of a launch of `attend_kernel`.

    Args:
        rows: rows of a program's query matrix, a power of two; queries * group of them are used.
        queries: queries per program.
        keys: keys per tile, a power of two.
        dims: the head dimension, rounded up to a power of two.
        one_block: whether each request's queries fit in one program; then, unless contexts are
            shared, program r serves request r.
        share_rows: rows of the programs that share contexts; 0: there are no such programs. If
            one_block, all programs do; otherwise only the first ones, for requests with few
            queries.
        programs: the number of programs for each key head.
        splits: the number of programs that share a request's context if contexts are about equal, a
            power of two.
        parts: the number of programs that share all contexts otherwise; 0: contexts are taken to be
            equal.
        slack: contexts count as about equal if the largest share has at most this many eighths of a
            part.
        spare: the number of tiles by which that share may exceed a part in any case.
        warps: warps per program.
        stages: stages of Triton's pipeline. A tile takes two in a decode, since its page number is
            loaded before its keys.
        registers: the most registers per thread; None: no limit.
        segments: the number of segments, of `SEGMENT` positions each, in the largest context that
            fits in the block table; 0: the context is attended to as a whole.
    """

    rows: int
    queries: int
    keys: int
    dims: int
    one_block: bool
    share_rows: int
    programs: int
    splits: int
    parts: int
    slack: int
    spare: int
    warps: int
    stages: int
    registers: int | None
    segments: int = 0

    @property
    def shared(self) -> bool:
        """Whether several programs may attend to one context; then `combine_kernel` must follow."""
        return self.splits > 1 or self.parts > 0

    @property
    def places(self) -> int:
        """The room for shares, as a number of programs' results; batch-invariant launches have room
        for all segments instead."""
        return max(self.programs if self.one_block else 0, 2 * self.parts)


# Cached because a call takes some 10 µs, and an eager step makes one per layer.
@functools.lru_cache(maxsize=1024)
def plan_launch(
    num_tokens: int,
    num_reqs: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    max_context: int,
    max_query_len: int,
    itemsize: int,
    kv_itemsize: int,
    processors: int,
    batch_invariant: bool = False,
) -> Launch:
    """Plan the launch for these shapes.

    `max_context` is the capacity of a row of the block table, in tokens; `itemsize` and
    `kv_itemsize` are the bytes per element of the queries and of the pages.
    """
    dims = max(16, power_of_two(head_dim))
    # The accumulator, rows * dims in float32, stays in registers, and a tile of keys takes 16 KiB
    # of shared memory.
    most_rows = max(16, min(_PROMPT_ROWS, _PROMPT_ROWS * 256 // (dims * itemsize)))
    if batch_invariant:
        rows = _FIXED_ROWS
    else:
        rows = min(max(16, power_of_two(max_query_len * group)), most_rows)
    rows = max(rows, power_of_two(group))
    queries = rows // group
    one_block = max_query_len <= queries
    # Request r starts at block query_start_loc[r] // queries + r, which leaves room for its partial
    # block without overlap.
    if one_block:
        blocks = num_reqs
    else:
        blocks = num_tokens // queries + num_reqs
    if one_block:
        waves = num_reqs * kv_heads // processors
    else:
        waves = 0
    fp8 = itemsize == 2 and kv_itemsize == 1
    if rows >= _PROMPT_ROWS and itemsize == kv_itemsize == 2 and not batch_invariant:
        keys, warps, stages = _PROMPT_TILE
    elif batch_invariant or rows > 64:
        keys, warps, stages = _FIXED_TILE
    else:
        keys, warps, stages = _tile(rows, dims, waves, fp8)
    keys = max(16, min(keys, 16384 // (dims * kv_itemsize)))
    # 96 KiB of shared memory hold the keys of this many tiles; only very wide heads limit it.
    stages = max(1, min(stages, 98304 // (keys * dims * kv_itemsize)))
    if batch_invariant:
        segments = -(-max_context // SEGMENT)
    else:
        segments = 0
    tiles = segments or -(-max_context // keys)
    places = _WARPS // warps // (1 + fp8) * processors // kv_heads
    splits = 1
    parts = 0
    few = waves < (_FEW_INVARIANT_WAVES if batch_invariant else _FEW_WAVES)
    if one_block:
        if few:
            splits = max(1, min(places // num_reqs, tiles, _MOST_SPLITS))
        else:
            splits = 1
        splits = 1 << splits.bit_length() - 1
    if one_block or batch_invariant or group > _FEW_ROWS:
        share_rows = 0
    else:
        # On an H200, a context of 30,000 positions beside two prompts of 1,000 took 750 us a layer
        # in one program, and 92 us shared.
        share_rows = _FEW_ROWS
    if not batch_invariant and (one_block or share_rows) and (max_context > _LONG or splits > 1):
        # In decodes with many programs, more parts than requests would idle if contexts are about
        # equal.
        if few or not one_block:
            parts = min(places, num_reqs * tiles)
        else:
            parts = num_reqs
        if not (min(parts, num_reqs, tiles) > 1 and num_reqs <= _MOST_COUNTED):
            parts = 0
    if few and one_block:
        slack = _FEW_SLACK
    else:
        slack = _SLACK
    spare = (_SPARE if one_block else _MIXED_SPARE) // keys
    all_share = one_block and splits + parts > 1
    small = rows == 16 and all_share and warps == 4 and kv_itemsize == 2
    fits = (
        (warps == 8 or small)
        and itemsize == 2
        and rows * dims * (1 + all_share) <= _PROMPT_ROWS * 128
    )
    if fits:
        registers = _MOST_REGISTERS
    else:
        registers = None
    if one_block:
        programs = max(blocks * splits, parts)
    else:
        programs = blocks + (max(num_reqs, parts) if share_rows else 0)
    sharing = rows if all_share else share_rows, programs, splits, parts, slack, spare
    return Launch(
        rows, queries, keys, dims, one_block, *sharing, warps, stages, registers, segments
    )


def _tile(rows: int, dims: int, waves: int, fp8: bool) -> tuple[int, int, int]:
    """Keys per tile, warps per program and stages, for programs of up to 64 rows.

    `waves` is the number of programs per multiprocessor in a decode; `fp8` says that keys have one
    byte per element and queries two. Many small programs hide each other's waits; few programs must
    hide their own. Measured on an H200 with heads of 128 in bfloat16, and contexts of 256 to 32,768
    in decodes.
    """
    if fp8 and rows <= 16:
        if waves < 3:
            return (128, 4, 2)
        if waves < 6:
            return (64, 2, 3)
        return (32, 1, 4)
    if rows > 16 or (dims < 128 and waves < 3):
        return 64, 4, 3
    if waves < 3:
        return (64, 8, 6)
    if waves < 6:
        return (64, 4, 2)
    return (16, 1, 4)
