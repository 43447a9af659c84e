"""`weft::paged_attention`: the CPU reference, its errors, and behaviour without triton."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from paged_cases import (
    DECODE,
    FIXED,
    RAGGED,
    Case,
    Request,
    Shape,
    assert_matches,
    bits,
    draw_case,
    shapes,
)
from torch import Tensor, library

from weft.errors import DescriptorError, DeviceError
from weft.ops.attention import paged as module
from weft.ops.attention.paged import paged_attention
from weft.ops.backends import OpBackend, backends

# The reference, on the CPU


@settings(deadline=None, max_examples=100)
@given(shapes)
def test_reference_equals_dense_attention(shape: Shape) -> None:
    case = draw_case(shape)
    out = paged_attention(*case.args)
    assert_matches(case, out, case.args[3])


@pytest.mark.parametrize("shape", FIXED, ids=str)
def test_reference_on_the_shapes_that_the_kernels_run(shape: Shape) -> None:
    case = draw_case(shape)
    assert_matches(case, paged_attention(*case.args), case.args[3])


def test_long_prompts_are_attended_in_blocks_of_queries() -> None:
    case = draw_case(Shape((Request(5, module._QUERY_BLOCK + 30),), kv_heads=1, group=1))
    assert_matches(case, paged_attention(*case.args), case.args[3])


def test_a_request_reads_what_another_writes_in_the_same_call() -> None:
    q = torch.zeros(2, 1, 2)
    kv = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]])
    pages = torch.full((2, 2, 1, 1, 2), float("nan"))
    # Request 0 shares the page that request 1 fills
    table = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32)
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    # Request 0's token is at position 1, whose page is 0: give it page 1's slot, so that page 0 is
    # the other's.
    out = paged_attention(q, kv, kv, pages, torch.tensor([1, 0]), table, *lengths, 1, 1.0)
    assert out[:, 0].tolist() == [[2.0, 4.0], [3.0, 6.0]]


def alone(case: Case, request: int) -> tuple[Tensor, Tensor]:
    """One request's rows from the whole batch, and from a batch with that request alone."""
    q, k, v, pages, slots, table, starts, lens, longest, scale, window = case.args
    rows = slice(int(starts[request]), int(starts[request + 1]))
    span = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    one = (
        q[rows],
        k[rows],
        v[rows],
        pages.clone(),
        slots[rows],
        table[request : request + 1],
        span,
    )
    batch = paged_attention(
        q, k, v, pages.clone(), slots, table, starts, lens, longest, scale, window
    )
    return batch[rows], paged_attention(*one, lens[request : request + 1], longest, scale, window)


@settings(deadline=None, max_examples=40)
@given(shapes.filter(lambda shape: len(shape.requests) > 1))
def test_reference_is_batch_invariant_bitwise(shape: Shape) -> None:
    case = draw_case(shape)
    for request in range(len(shape.requests)):
        batched, single = alone(case, request)
        assert torch.equal(bits(batched), bits(single))


@pytest.mark.parametrize("dim", [64, 20])
def test_reference_is_batch_invariant_at_the_size_of_a_model(dim: int) -> None:
    requests = (Request(300, 1), Request(0, 130), Request(17, 1), Request(511, 1), Request(40, 33))
    case = draw_case(Shape(requests, tail=5, kv_heads=4, group=2, dim=dim, page_size=16))
    for request in range(len(requests)):
        batched, single = alone(case, request)
        assert torch.equal(bits(batched), bits(single))


@pytest.mark.parametrize("shape", [Shape(DECODE, tail=1), Shape(RAGGED, tail=1)])
def test_the_op_declares_what_it_does(shape: Shape) -> None:
    case = draw_case(shape)
    # opcheck compares the arguments before and after by value, so no NaN here.
    args = tuple(x.nan_to_num() if isinstance(x, Tensor) else x for x in case.args)
    library.opcheck(torch.ops.weft.paged_attention.default, args)


@pytest.mark.parametrize("shape", FIXED, ids=map(str, FIXED))
def test_keys_and_values_may_have_been_written_before(shape: Shape) -> None:
    case = draw_case(shape)
    q, k, v, pages, *rest = case.args
    out = paged_attention(q, k, v, pages, *rest)
    kept = pages.clone()
    assert torch.equal(paged_attention(q, None, None, pages, *rest), out)
    assert torch.equal(bits(pages), bits(kept))
    with pytest.raises(DescriptorError, match="pass both k and v, or None for both"):
        paged_attention(q, None, v, pages, *rest)


def test_q_k_v_may_be_slices_and_the_pages_a_layer() -> None:
    case = draw_case(Shape(RAGGED, tail=2))
    q, k, v, pages, *rest = case.args
    layers = torch.zeros(3, *pages.shape)
    layers[1] = pages
    fused = torch.cat([q, k, v], dim=1)
    q, k, v = torch.split(fused, [q.shape[1], k.shape[1], v.shape[1]], dim=1)
    out = paged_attention(q, k, v, layers[1], *rest)
    assert out.is_contiguous()
    assert_matches(case, out, layers[1])
    assert not layers[0].any()
    assert not layers[2].any()


# Errors


def refusal(changes: dict[int, object], error: type[Exception] = DescriptorError) -> str:
    args = list(draw_case(Shape(DECODE)).args)
    for index, value in changes.items():
        args[index] = value
    with pytest.raises(error) as caught:
        paged_attention(*args)
    return str(caught.value)


def test_errors_name_the_argument_and_say_what_to_pass() -> None:
    q, k, _, pages, *_ = draw_case(Shape(DECODE)).args
    assert "k has shape [5, 3, 8]" in refusal({1: torch.zeros(5, 3, 8)})
    assert "instead: pass k of shape [5, 2, 8]" in refusal({1: torch.zeros(5, 3, 8)})
    assert "instead: pass q of shape [T, H, D]" in refusal({0: q[0]})
    assert "5 heads, 2 key heads" in refusal({0: q[:, :5]})
    assert "seq_lens has shape [3]" in refusal({7: torch.ones(3, dtype=torch.int32)})
    assert (
        "v has shape [5, 2, 8] and dtype torch.float16 beside q [5, 6, 8] torch.float32"
        in refusal({2: k.half()})
    )
    assert "dtype torch.float64" in refusal({0: q.double()})
    assert "pass seq_lens of shape [5] as torch.int32" in refusal(
        {7: torch.ones(5, dtype=torch.int64)}
    )
    assert "strides" in refusal({3: pages.transpose(2, 3).contiguous().transpose(2, 3)})
    assert "k on meta, q on cpu" in refusal({1: k.to("meta")}, DeviceError)
    assert "no request could have a token" in refusal({8: 0})
    assert (
        "window has -1\n  instead: the positions that a query sees, 1 or more; 0: all"
        in refusal({10: -1})
    )


def test_the_reference_looks_at_the_lengths_too() -> None:
    lens = torch.tensor([1, 4, 5, 41, 0], dtype=torch.int32)
    assert "context 4000, its pages hold" in refusal({7: lens.index_fill(0, torch.tensor(3), 4000)})
    assert "request 0 has -1 queries" in refusal(
        {6: torch.tensor([1, 0, 2, 3, 4, 5], dtype=torch.int32)}
    )
    beyond = {6: torch.tensor([0, 1, 2, 3, 4, 6], dtype=torch.int32), 7: lens.clamp(min=2), 8: 2}
    assert "request 4 has the tokens from 4 to 6, and leaves the 5 tokens" in refusal(beyond)
    assert "request 3 has 2 queries, context 41" in refusal(
        {6: torch.tensor([0, 1, 2, 3, 5, 5], dtype=torch.int32)}
    )
    assert "request 1 has 2 queries, context 1" in refusal(
        {
            6: torch.tensor([0, 0, 2, 3, 4, 5], dtype=torch.int32),
            7: torch.ones(5, dtype=torch.int32),
            8: 2,
        }
    )


# Without triton, and the table


@pytest.mark.slow
def test_without_triton_the_cpu_works_and_cuda_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None  # every import of it fails
import torch
from weft.ops.register import no_triton, triton_version
from weft.ops.backends import backends
assert triton_version() is None
print(backends("cuda")[0].implementation, "|", backends("cuda")[0].reason, "|", no_triton("f()"))
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert shown.startswith("missing | triton cannot be imported")
    assert shown.count("pip install 'triton>=3.6'") == 2


def test_the_table_says_what_runs_where_and_why() -> None:
    cpu, *_ = backends("cpu")
    assert cpu == OpBackend("paged_attention", "reference", cpu.reason)
    assert (
        cpu.reason == "full graphs, batch invariant; attention=... takes also torch (full graphs)"
    )
    cuda, *_ = backends(torch.device("cuda", 1))
    assert cuda.implementation.startswith(("triton ", "missing"))
    with pytest.raises(DeviceError, match="weft has no kernels for 'meta'"):
        backends("meta")
