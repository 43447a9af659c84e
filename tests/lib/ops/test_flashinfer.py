"""The back end of FlashInfer: its arguments, to functions that stand for the package's by their
documentation, and the package itself on a GPU."""

import sys
import types
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from paged_cases import DECODE, FIXED, Request, Shape, assert_matches, dense, draw_case
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.errors import DeviceError
from weft.ops.attention.backends import _PLANS, BACKENDS, attend_by_handle, check_support
from weft.stages.config import parse_config
from weft.stages.model import Model
from weft.stages.random_weights import PRESETS, random_model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits

FLASHINFER = BACKENDS["flashinfer"]
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "eos_token_id": 0,
}


class Wrappers:
    """This test's own, in place of those of the thread."""

    def __init__(self) -> None:
        self.of: dict[Any, Any] = {}
        self.workspaces: dict[torch.device, Tensor] = {}


class Wrapper:
    """What `flashinfer.BatchPrefillWithPagedKVCacheWrapper` is documented to compute, request by
    request."""

    def __init__(self, workspace: Tensor, layout: str, **_: str) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8

    def plan(
        self, bounds: Tensor, pages: Tensor, entries: Tensor, last: Tensor, *sizes: int, **more: Any
    ) -> None:
        assert all(x.dtype == torch.int32 for x in (bounds, pages, entries, last))
        assert more["causal"]
        self.planned = (
            bounds.tolist(),
            pages.tolist(),
            entries.tolist(),
            last.tolist(),
            sizes[3],
            more,
        )
        assert len(entries) == pages[-1]

    def run(self, q: Tensor, paged_kv_cache: Any, out: Tensor | None = None) -> Tensor:
        bounds, pages, entries, last, size, more = self.planned
        assert len(q) == bounds[-1]
        out = torch.empty_like(q) if out is None else out
        window = more["window_left"] + 1
        for r in range(len(bounds) - 1):
            page_ids = entries[pages[r] : pages[r + 1]]
            length = (len(page_ids) - 1) * size + last[r]
            assert length == more["seq_lens"][r]
            keys, values = (x[page_ids].flatten(0, 1)[:length] for x in paged_kv_cache)
            part = slice(bounds[r], bounds[r + 1])
            out[part] = dense(q[part], keys, values, more["sm_scale"], window).to(q.dtype)
        return out


def decode(
    query: Tensor,
    kv_cache: Any,
    workspace: Tensor,
    table: Tensor,
    lengths: Tensor,
    most: int,
    **more: Any,
) -> Tensor:
    """What `flashinfer.decode.trtllm_batch_decode_with_kv_cache` is documented to compute."""
    (keys, values), out = kv_cache, more["out"]
    assert table.shape[1] * keys.shape[1] == most
    assert not workspace[: 4 * len(query) * keys.shape[2]].any()
    assert lengths.dtype == torch.uint32
    for r, length in enumerate(lengths.tolist()):
        request_kv = [x[table[r].long()].flatten(0, 1)[:length] for x in (keys, values)]
        out[r] = dense(query[r : r + 1], *request_kv, more["bmm1_scale"], more["window_left"] + 1)[
            0
        ].to(out.dtype)
    return out


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in the package's place."""
    package = types.ModuleType("flashinfer")
    part = types.ModuleType("flashinfer.decode")
    vars(package).update(BatchPrefillWithPagedKVCacheWrapper=Wrapper, decode=part)
    vars(part).update(trtllm_batch_decode_with_kv_cache=decode)
    patch.setitem(sys.modules, "flashinfer", package)
    patch.setitem(sys.modules, "flashinfer.decode", part)
    patch.setattr("weft.ops.attention.flashinfer._WRAPPERS", Wrappers())


def check(shape: Shape, device: str = "cpu") -> None:
    """The back end's result is that of dense attention where keys and values are in the pages
    already."""
    case = draw_case(shape)
    q, _, _, _, *where = (x.to(device) if isinstance(x, Tensor) else x for x in case.args)
    pages = case.pages.to(device)
    assert_matches(case, attend_by_handle(q, pages, *where, FLASHINFER.handle, True), pages.cpu())


@pytest.mark.parametrize("shape", [shape for shape in FIXED if shape.requests], ids=str)
def test_its_arguments_mean_what_flashinfer_says(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    check(shape)


REQUESTS = st.builds(
    Request, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3), st.booleans()
)


@given(st.lists(REQUESTS, min_size=1, max_size=5), st.integers(0, 3), st.sampled_from([0, 1, 4]))
def test_any_batch(requests: list[Request], tail: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        check(Shape(tuple(requests), tail, 1, 2, 4, 4, window=window))


HEADS = {"page_size": 16, "dim": 128, "dtype": torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
@pytest.mark.parametrize(
    "shape",
    [
        Shape(tuple(Request(past, 1) for past in range(0, 900, 150)), kv_heads=8, group=4, **HEADS),
        Shape(
            (Request(0, 1, padded=True), Request(2000, 1), Request(3, 1)),
            kv_heads=8,
            group=2,
            **HEADS,
        ),
        Shape((Request(0, 200), Request(100, 77), *DECODE), 9, 8, 4, **HEADS),
        Shape(
            (Request(0, 20, 3), Request(5, 0, 2), Request(300, 5), Request(0, 4, padded=True)),
            1,
            8,
            2,
            **HEADS,
        ),
        Shape((Request(0, 0, 3), Request(5, 3, padded=True)), 2, 8, 2, **HEADS),
    ],
    ids=str,
)
def test_on_a_gpu(shape: Shape) -> None:
    check(shape, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_an_engine_has_it_plan_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    config = parse_config({**PRESETS["qwen3-0.6b"], **SMALL}, source="a small model")
    model = random_model(config, seed=0, device=device)
    prompt = [7 * i % 500 for i in range(3000)]
    limits = EngineLimits(max_num_reqs=1, max_num_tokens=4096, max_model_len=3008)

    def logprobs(served_model: Model) -> list[float]:
        engine = Engine(served_model, limits, num_logprobs=1)
        engine.add(prompt, SamplingParams(temperature=0.0, prompt_logprobs=0), max_tokens=2)
        *_, output = engine
        return output.track.prompt_logprobs

    monkeypatch.setattr(_PLANS, "by_key", {})
    result = logprobs(model.with_stages(attend=FLASHINFER))
    assert _PLANS.by_key, "FlashInfer planned a step"
    expected = logprobs(model)
    torch.testing.assert_close(torch.tensor(result), torch.tensor(expected), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("longest", [1, 2])
def test_a_derivative_goes_through_torch(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    case = draw_case(Shape((Request(5, longest), Request(2, longest)), page_size=16))
    q, _, _, _, *where = case.args
    q = q.clone().requires_grad_()
    out = FLASHINFER(longest if longest == 1 else None, q, case.pages, *where)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_without_the_package_or_a_gpu_it_says_so() -> None:
    with pytest.raises(DeviceError, match="runs on cuda, not on cpu"):
        check_support(FLASHINFER, "weft.load(...)", torch.device("cpu"), torch.bfloat16, 128, 0)
    if find_spec("flashinfer") is None:
        with pytest.raises(DeviceError, match="lacks the package flashinfer-python"):
            check_support(
                FLASHINFER, "weft.load(...)", torch.device("cuda"), torch.bfloat16, 128, 0
            )
