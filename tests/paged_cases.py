"""Random requests and their pages, and the results of dense attention for them."""

import itertools
import math
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor


@attrs.frozen
class Request:
    """`past` positions in the cache, `new` live tokens, then `dead` tokens of slot -1; or,
    `padded`, a seq_len of 0."""

    past: int = 0
    new: int = 0
    dead: int = 0
    padded: bool = False


@attrs.frozen
class Shape:
    """The shape of a batch: its requests, `tail` tokens after the last one, and the sizes of the
    model."""

    requests: tuple[Request, ...]
    tail: int = 0
    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int = 0
    kv_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        longest = max([0, *(r.new + r.dead for r in self.requests)])
        sizes = f"{self.kv_heads}x{self.group}x{self.dim}-page{self.page_size}"
        window = f"-window{self.window}" if self.window else ""
        kept = "" if self.kv_dtype is None else "-fp8"
        return f"{len(self.requests)}reqs-upto{longest}-{sizes}-{str(self.dtype).removeprefix('torch.')}{window}{kept}"


@attrs.frozen
class Case:
    """The operator's arguments, in order, its expected result, and the expected kv_pages."""

    args: tuple[Any, ...]
    out: Tensor
    pages: Tensor


def dense(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """The last len(queries) positions of one request attend to its history: a head and a query at a
    time, float64."""
    group = queries.shape[1] // keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    for i in range(len(queries)):
        end = len(keys) - len(queries) + i + 1
        visible = slice(max(0, end - window) if window else 0, end)
        for head in range(queries.shape[1]):
            scores = keys[visible, head // group].double() @ queries[i, head].double() * scale
            weights = (scores - scores.max()).exp()
            out[i, head] = weights @ values[visible, head // group].double() / weights.sum()
    return out


@attrs.frozen
class Rows:
    """Tokens: the operator's inputs for them, and the expected outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: list[int]
    out: Tensor


def padding(shape: Shape, slots: list[int]) -> Rows:
    """Tokens of NaN, whose output must be 0."""
    q = torch.full(
        (len(slots), shape.kv_heads * shape.group, shape.dim), float("nan"), dtype=shape.dtype
    )
    k = q[:, : shape.kv_heads]
    return Rows(q, k, k, slots, torch.zeros(q.shape, dtype=torch.float64))


def draw_table(shape: Shape, random: torch.Generator) -> tuple[Tensor, int]:
    """A block table of distinct pages in random order, a column wider than needed, and a page that
    no one owns."""
    needed = [math.ceil((r.past + r.new + r.dead) / shape.page_size) for r in shape.requests]
    order = torch.randperm(sum(needed) + 2, generator=random)
    table = order[-1].int().repeat(len(needed), max([1, *needed]) + 1)
    for row, pages in zip(table, order[:-2].split(needed), strict=True):
        row[: len(pages)] = pages
    return table, int(order[-2])


def draw_request(
    shape: Shape,
    request: Request,
    table: list[int],
    pages: Tensor,
    expected: Tensor,
    random: torch.Generator,
) -> list[Rows]:
    """A request's tokens. Its past is written to `pages` and `expected`, and the operator's writes
    to `expected`."""
    live = request.past + request.new
    kv = torch.randn(2, live, shape.kv_heads, shape.dim, generator=random).to(shape.dtype)
    kv[:, ::7] *= 300 if shape.kv_dtype is not None else 1  # beyond what FP8 holds
    history = (
        kv
        if shape.kv_dtype is None
        else kv.float().clamp(-448, 448).to(shape.kv_dtype).to(shape.dtype)
    )
    q = torch.randn(request.new, shape.kv_heads * shape.group, shape.dim, generator=random).to(
        shape.dtype
    )
    slots = [
        table[i // shape.page_size] * shape.page_size + i % shape.page_size for i in range(live)
    ]
    pages.flatten(1, 2)[:, slots[: request.past]] = history[:, : request.past].to(pages.dtype)
    kept = request.past if request.padded else live
    expected.flatten(1, 2)[:, slots[:kept]] = history[:, :kept].to(pages.dtype)
    out = dense(q, history[0], history[1], shape.dim**-0.5, shape.window)
    keys, values = kv[:, request.past :]
    new = Rows(q, keys, values, slots[request.past :], out * 0 if request.padded else out)
    return [new, padding(shape, [-1] * request.dead)]


def draw_case(shape: Shape) -> Case:
    """Random data for a shape, with NaN wherever nothing may read."""
    random = torch.Generator().manual_seed(shape.seed)
    table, free = draw_table(shape, random)
    num_pages = max([free, *table.flatten().tolist()]) + 2
    kept = shape.kv_dtype or shape.dtype
    pages = torch.full(
        (2, num_pages, shape.page_size, shape.kv_heads, shape.dim), float("nan"), dtype=kept
    )
    expected = pages.clone()
    drawn = [
        draw_request(shape, request, row, pages, expected, random)
        for request, row in zip(shape.requests, table.tolist(), strict=True)
    ]
    # A slot of the tail may be -1 or any old value; nothing is written either way.
    tail = padding(shape, [free * shape.page_size if i % 2 else -1 for i in range(shape.tail)])
    rows = [*itertools.chain(*drawn), tail]
    lengths = [sum(len(part.slots) for part in parts) for parts in drawn]
    seq_lens = [0 if r.padded else r.past + r.new + r.dead for r in shape.requests]
    args = (
        *(torch.cat([getattr(part, name) for part in rows]) for name in ("q", "k", "v")),
        pages,
        torch.tensor([slot for part in rows for slot in part.slots], dtype=torch.int64),
        table,
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        max([1, *lengths]),
        shape.dim**-0.5,
        shape.window,
    )
    return Case(args, torch.cat([part.out for part in rows]), expected)


def bits(x: Tensor) -> Tensor:
    """`x` as integers, so that NaN equals itself and -0 differs from 0."""
    return (
        x.contiguous().cpu().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    )


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_matches(case: Case, out: Tensor, pages: Tensor) -> None:
    assert out.dtype == case.args[0].dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), case.out, rtol=tolerance, atol=tolerance)
    zero = (case.out == 0).flatten(1).all(1)
    assert not bits(out)[zero].any(), "padding must be exactly 0"
    assert torch.equal(bits(pages), bits(case.pages)), (
        "kv_pages changed where no slot points, or not where one does"
    )


requests = st.builds(
    Request, st.integers(0, 13), st.integers(0, 6), st.sampled_from([0, 0, 0, 2]), st.booleans()
) | (st.builds(Request, st.integers(0, 13), st.just(1)))
shapes = st.builds(
    Shape,
    st.lists(requests, max_size=5).map(tuple),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([1, 8, 24]),
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
    st.sampled_from([0, 0, 1, 2, 5, 16, 100]),
)

DECODE = tuple(Request(past, 1) for past in (0, 3, 4, 40, 17))
RAGGED = (
    Request(0, 9),
    Request(6, 1),
    Request(),
    Request(5, 4, 1),
    Request(2, 3, padded=True),
    Request(70, 7),
    Request(1, 0, 2),
)
FIXED = [
    Shape(DECODE),
    Shape((*DECODE, Request(0, 1, padded=True), Request()), tail=2, group=7, dim=24, page_size=16),
    Shape((Request(90, 1),), kv_heads=1, group=1, page_size=2),
    Shape(
        tuple(Request(past, 1) for past in (5, 0, 1400, 64, 63, 130, 700)),
        kv_heads=1,
        group=2,
        page_size=16,
    ),
    Shape((Request(662, 3), Request(5, 3), Request(1100, 1)), kv_heads=1, window=600),
    Shape((Request(90, 3), Request(2, 2)), kv_heads=1, group=2, dim=16, page_size=3),
    Shape(RAGGED, tail=3),
    Shape(RAGGED, group=1, dim=80, page_size=1),
    Shape(
        (Request(3, 40), Request(0, 23), Request(64, 1), Request(0, 2, padded=True)),
        tail=1,
        kv_heads=1,
        group=7,
        dim=24,
        page_size=16,
    ),
    Shape((Request(0, 2),), group=20, dim=1),
    Shape((), tail=2),
    Shape(()),
    Shape(RAGGED, tail=3, dtype=torch.float16),
    Shape(DECODE, dtype=torch.float16),
    Shape(RAGGED, tail=3, window=5),
    Shape((*DECODE, Request(0, 1, padded=True)), window=16, page_size=16),
    Shape((Request(300, 1),), kv_heads=1, group=1, window=70),
    Shape((Request(3, 90), Request(200, 40)), window=33, dim=16, page_size=16),
    Shape(RAGGED, tail=3, kv_dtype=torch.float8_e4m3fn),
    Shape(
        (*DECODE, Request(0, 1, padded=True)),
        page_size=16,
        dtype=torch.float16,
        kv_dtype=torch.float8_e4m3fn,
    ),
    Shape(
        (Request(4, 2), Request(0, 1, padded=True), Request(1100, 3), Request(30, 1)),
        tail=1,
        window=900,
    ),
    Shape((*(Request(past, 1) for past in range(6)), Request(2100, 1), *DECODE), page_size=16),
    Shape((Request(700, 1), Request(150, 1), Request(90, 1)), kv_heads=1, page_size=16),
    Shape(
        (
            Request(60, 1),
            Request(2100, 1, 1),
            Request(30, 3, 1),
            Request(0, 2, padded=True),
            Request(70, 90),
        ),
        tail=16,
        kv_heads=1,
        group=4,
        dim=100,
    ),
]
