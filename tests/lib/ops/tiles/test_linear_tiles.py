"""The tiles of linear layers: near the best of all that was measured, for shapes that the model has
not seen."""

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

import weft.proofs
from weft.ops import backends as backends_module
from weft.ops.backends import backends
from weft.ops.products.fp8 import Quantized, dequantize, dequantize_weight, reference_quantize
from weft.ops.tiles import linear
from weft.ops.tiles.candidates import TILES, candidates
from weft.ops.tiles.formula import Coefficients, formula_seconds
from weft.ops.tiles.gpus import MEASURED, Device, device
from weft.ops.tiles.linear import (
    gated_many_tile,
    gated_tile,
    linear_parts,
    linear_segments,
    linear_tile,
)
from weft.ops.tiles.model import MODEL, Choice, Model, model
from weft.ops.tiles.tile import segment_columns
from weft.proofs.evidence.bench.tiles import fit
from weft.proofs.evidence.bench.tiles.fit import Case
from weft.proofs.evidence.bench.tiles.shapes import HELD_OUT, TRAINING, shapes
from weft.torchapi.scaled_mm import scaled_mm_lacks

RECORD = Path(weft.proofs.__path__[0]) / "results" / "2026-11-25-h100-tile-search.json.xz"
KINDS = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@pytest.fixture(scope="module")
def cases() -> dict[bool, list[Case]]:
    return fit.merged([RECORD])[0]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what was chosen, before and after."""
    remembered: list[Any] = [device, scaled_mm_lacks, linear.linear_tile, linear.gated_tile]
    remembered += [linear._best, linear._best_of_parts, linear.gated_many_tile]
    for one in remembered:
        one.cache_clear()
    yield
    for one in remembered:
        one.cache_clear()


# What torch's product in FP8 lacks: it depends on the build of torch, so that a test says which
# build it is about.
LACKS = None, "it needs what is not here"


@pytest.fixture(params=LACKS, ids=["with scaled_mm", "without scaled_mm"])
def lacks(
    request: pytest.FixtureRequest, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """What torch's product in FP8 lacks in the test, once for each kind of build."""
    monkeypatch.setattr(linear, "scaled_mm_lacks", lambda: request.param)
    monkeypatch.setattr(backends_module, "scaled_mm_lacks", lambda: request.param)
    return request.param


@KINDS
def test_choices_for_shapes_held_out_are_near_the_best_of_a_full_search(
    fp8: bool, cases: dict[bool, list[Case]]
) -> None:
    """31 shapes in no training data, at eight numbers of tokens. A loss counts what parts cost the
    next kernel."""
    test_shapes = {*shapes(HELD_OUT)} - {*shapes(TRAINING)}
    training = [case for case in cases[fp8] if case.shape[1:] not in test_shapes]
    apart = [case for case in cases[fp8] if case.shape[1:] in test_shapes]
    assert len({case.shape[1:] for case in apart}) >= 30
    losses = fit.losses(fit.make_model(training, model(fp8).coefficients, fp8), apart)
    median, tenth, hundredth, worst = np.percentile(losses, [50, 90, 99, 100])
    assert median <= 0.01
    assert tenth <= 0.05
    assert hundredth <= 0.16
    assert worst <= 0.25


@pytest.mark.one_of(2)
@KINDS
def test_measured_shapes_have_their_best_tiles(fp8: bool, cases: dict[bool, list[Case]]) -> None:
    losses = fit.losses(model(fp8), cases[fp8])
    assert np.median(losses) == 0
    assert np.percentile(losses, 90) <= 0.02


@pytest.mark.one_of(2)
@KINDS
def test_another_record_would_be_noticed(fp8: bool, cases: dict[bool, list[Case]]) -> None:
    """A model whose measurements belong to other shapes chooses worse."""
    fitted = model(fp8)
    turned = Model(fp8, fitted.coefficients, fitted.usual, fitted.places, fitted.beyond[::-1])
    assert (
        np.mean(fit.losses(turned, cases[fp8])) > 2 * np.mean(fit.losses(fitted, cases[fp8])) + 0.01
    )


sizes = st.sampled_from((8, 64, 100, 128, 768, 2048, 5120, 14336, 151936))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(tokens=1, rows=64, columns=5120, fp8=False)
@example(tokens=2048, rows=5120, columns=5120, fp8=True)
@given(
    tokens=st.sampled_from((1, 2, 16, 17)) | st.integers(1, 10_000),
    rows=sizes,
    columns=sizes,
    fp8=st.booleans(),
)
def test_every_shape_has_a_tile(
    lacks: str | None, tokens: int, rows: int, columns: int, fp8: bool
) -> None:
    tiles = candidates(tokens, rows, columns, fp8)
    assert tiles
    assert len(tiles) == len(set(tiles))
    tile = linear_tile(tokens, rows, columns, fp8)
    assert tile is not None or not fp8 or (lacks is None and rows % 128 == columns % 128 == 0)
    for one in [*tiles, *([tile] if tile else [])]:
        assert (one.rows + one.tokens) * one.columns * (1 if fp8 else 2) * one.stages <= 227 * 2**10
        assert one.columns == 128 or not fp8
        steps = -(-columns // one.columns)
        # Every part has columns, the last one too
        assert -(-steps // one.parts) * (one.parts - 1) < steps
    parts = linear_parts(tokens, rows, columns, fp8)
    assert parts == (1 if tile is None else tile.parts)


@settings(deadline=None)
@example(tokens=1, rows=512, columns=256)
@example(tokens=5, rows=128, columns=1000)
@example(tokens=1, rows=6144, columns=1024)
@given(
    tokens=st.integers(1, 20) | st.integers(1, 3000),
    rows=sizes | st.integers(1, 1000),
    columns=sizes,
)
def test_a_product_that_ends_with_a_gate_has_one_part(tokens: int, rows: int, columns: int) -> None:
    plain = linear_tile(tokens, rows, columns, False)
    tile = gated_tile(tokens, rows, columns)
    if plain is not None and plain.parts == 1:
        assert tile == plain
    if tile is not None:
        assert tile.parts == 1
        assert tile.rows >= 16
        assert (tile.ahead > 0) is (tokens <= 16)
        assert (tile.rows + tile.tokens) * tile.columns * 2 * max(
            tile.stages, tile.ahead
        ) <= 227 * 2**10


def test_a_gate_joins_products_of_few_tokens_of_any_model() -> None:
    for hidden, inner, tokens in itertools.product(
        (64, 256, 288, 512, 1024, 4096), (128, 768, 1000, 12288), range(1, 18)
    ):
        tile = gated_tile(tokens, 2 * inner, hidden)
        assert tile is None or tile.parts == 1


def test_a_gate_joins_its_product_where_that_takes_less(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(gated_tile(tokens, 28672, 4096) for tokens in (1, 16, 64))
    # Torch's product, and a gate
    assert [gated_tile(tokens, 28672, 4096) for tokens in (512, 8192)] == [
        None,
        None,
    ]
    # Two parts ask for all weights
    assert [gated_tile(tokens, 6144, 1024) for tokens in (1, 16)] == [
        None,
        None,
    ]
    assert gated_tile(128, 6144, 1024)
    for cached in (linear.gated_tile, linear.linear_tile, linear._best):
        cached.cache_clear()
    monkeypatch.setattr(linear, "device", lambda: None)
    assert gated_tile(1, 28672, 4096) is None


@settings(deadline=None)
@given(tokens=st.integers(1, 3000), rows=sizes, columns=sizes, fp8=st.booleans())
def test_segments_depend_on_the_weights_alone(
    tokens: int, rows: int, columns: int, fp8: bool
) -> None:
    tile = linear_tile(tokens, rows, columns, fp8, batch_invariant=True)
    segments = linear_segments(rows, columns, fp8)
    assert tile is not None
    assert tile.segments == segments
    assert tile.parts == (segments if tokens <= 128 else 1)
    # The tensor cores' instructions that were seen to have the same bits
    assert tile.rows <= 128 >= tile.tokens
    assert segment_columns(columns, segments) * (segments - 1) < columns


def test_segments_depend_on_no_device(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [
        linear_segments.__wrapped__(*shape, fp8)
        for shape in shapes(TRAINING)
        for fp8 in (False, True)
    ]
    monkeypatch.setattr(linear, "device", lambda: Device(10, 1e11, 1e13))
    assert before == [
        linear_segments.__wrapped__(*shape, fp8)
        for shape in shapes(TRAINING)
        for fp8 in (False, True)
    ]


def test_a_gpu_that_was_not_measured_has_the_tiles_of_a_rule(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "device", lambda: None)
    assert linear_tile(64, 4096, 4096, False) is None
    tile = linear_tile(64, 4096, 4096, True)
    assert tile is not None
    assert (tile.rows + tile.tokens) * tile.columns * tile.stages <= 99 * 2**10
    invariant_tile = linear_tile(64, 4096, 4096, False, batch_invariant=True)
    assert invariant_tile is not None
    assert invariant_tile.segments == linear_segments(4096, 4096, False)


def test_a_faster_memory_changes_predictions() -> None:
    shape = (1, 28672, 4096)
    choices = [*candidates(1, 28672, 4096, False)]
    slow, fast = (
        model(False).costs(*shape, choices, gpu).min()
        for gpu in (MEASURED, Device(132, 4.8e12, 989e12))
    )
    assert 1.25 < slow / fast < 1.45


def test_torchs_product_in_fp8_is_chosen_where_it_runs(lacks: str | None) -> None:
    assert [linear_tile(tokens, 4096, 4096, True) is None for tokens in MANY] == [
        lacks is None
    ] * len(MANY)
    assert linear_tile(1, 6144, 4096, True) is not None
    assert linear_tile(2048, 6144 + 64, 4096, True) is not None  # a scale covers 128 rows
    assert linear_tile(2048, 6144, 4096, True, batch_invariant=True) is not None


@pytest.mark.parametrize(
    ("has", "cuda", "capability", "expected"),
    [
        (False, "13.0", (9, 0), "no scaled_mm"),
        (True, "12.8", (9, 0), "CUDA 12.9"),
        (True, None, (9, 0), "CUDA 12.9"),
        (True, "13.0", (10, 0), "capability 9.0"),
        (True, "12.9", (9, 0), None),
    ],
)
def test_what_torchs_product_in_fp8_lacks(
    has: bool,
    cuda: str | None,
    capability: tuple[int, int],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has:
        monkeypatch.delattr(F, "scaled_mm")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    missing = scaled_mm_lacks.__wrapped__()
    assert missing is None if expected is None else expected in str(missing)


@pytest.mark.parametrize(("tokens", "columns"), [(8, 512), (6, 512), (5, 384), (12, 128)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_torchs_product_in_fp8_is_given_what_it_takes(
    tokens: int, columns: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layouts are those that torch's own checks ask for; the sum here is the definition's."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    x = torch.randn(tokens, columns)
    rows = 256
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(2, columns // 128)
    bias = torch.randn(rows).bfloat16() if has_bias else None
    values, scales = reference_quantize(x)

    def scaled_mm(
        a: Tensor, b: Tensor, by_a: Tensor, _: Any, by_b: Tensor, *rest: Any, output_dtype: Any
    ) -> Tensor:
        count = len(a)
        blocks = columns // 128
        padded = -(-columns // 128 // 4) * 4
        assert count % 4 == 0
        assert (by_a.shape, by_a.stride()) == ((count, blocks), (1, count))
        assert (by_b.shape, by_b.stride()) == ((padded, 2), (1, padded))
        assert (b.shape, b.stride()) == ((columns, rows), (1, columns))
        product = (
            dequantize(Quantized(a, by_a.contiguous()))
            @ dequantize_weight(b.t(), by_b[:blocks].t()).t()
        )
        return product.to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    out = importlib.import_module("weft.ops.products.linear_triton")._scaled_mm(
        values, scales, weight, scale, bias
    )
    expected = dequantize(Quantized(values, scales)) @ dequantize_weight(weight, scale).t()
    assert out.shape == (tokens, rows)
    torch.testing.assert_close(
        out, (expected + (0 if bias is None else bias)).bfloat16(), rtol=2e-2, atol=2e-2
    )


# Numbers of tokens for which torch's product in FP8 is faster with weights of 4096 by 4096.
MANY = (512, 1023, 2049)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", MANY)
def test_many_tokens_in_fp8_have_the_references_result(tokens: int) -> None:
    ops: Any = importlib.import_module("weft.ops.products.linear")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(32, 32, device="cuda")
    if scaled_mm_lacks() is None:
        assert linear_tile(tokens, 4096, 4096, True) is None
    quantized = Quantized(*reference_quantize(x))
    out = ops.fp8_linear(quantized, weight, scale, dtype=torch.bfloat16)
    expected = dequantize(quantized).double() @ dequantize_weight(weight, scale).double().t()
    assert float((out.double() - expected).abs().max() / expected.abs().max()) < 0.01


def test_gates_of_many_tokens_are_where_they_are_faster() -> None:
    """For measured products of 300 us and more, the way that the model chooses is close to the
    fastest one."""
    rows = json.loads(RECORD.with_name("2026-11-27-h100-gates.json").read_text())["rows"]
    losses = []
    gains = []
    chosen = 0
    for row in rows:
        place = (row["tokens"], row["rows"], row["columns"])
        us = row["us"]
        other = us["torch"] if gated_tile(*place) is None else us["tile"]
        many = gated_many_tile(*place)
        chosen += many is not None
        chosen_us = other if many is None else us["many"]
        gains.append(other / chosen_us)
        if us["many"] >= 300:
            losses.append(chosen_us / min(us.values()) - 1)
    assert chosen >= 30
    assert np.median(losses) < 0.001
    assert np.quantile(losses, 0.9) < 0.02
    assert max(losses) < 0.05
    assert min(gains) > 0.96
    assert max(gains) > 1.08
    assert gated_many_tile(8192, 6144, 1024) is None, "the host has no time to describe its tensors"


def test_the_doctor_says_how_tiles_are_chosen(lacks: str | None) -> None:
    rows = {row.op: row.reason for row in backends("cuda")}
    assert "for 31 shapes that it had not seen" in rows["linear"]
    assert (
        "F.linear (cuBLAS) where the model has it faster, for 6144x4096 from 64 tokens on"
        in rows["linear"]
    )
    if lacks is None:
        assert (
            "torch's scaled_mm (cuBLASLt) where the model has it faster, for 6144x4096 from"
            in rows["fp8_linear"]
        )
    else:
        assert f"torch's scaled_mm for no shape: {lacks}" in rows["fp8_linear"]


def test_the_file_is_as_it_is_written() -> None:
    text = MODEL.read_text(encoding="utf-8")
    assert fit.format_json(json.loads(text)) == text
    assert max(map(len, text.splitlines())) < 2000


def synthetic(fp8: bool) -> list[Case]:
    """Products whose seconds are the formula's, with coefficients that are not those of the start."""
    by = Coefficients(6e-7, 9e-7, 0.8, 1.2e11, 4e-7, 8e-8, 0.7, 0.9, 2e12, 2.2)
    cases = []
    for rows, columns in shapes(TRAINING)[::4]:
        for tokens in (1, 32, 128, 2048):
            tiles: list[Choice] = [*candidates(tokens, rows, columns, fp8)]
            tile_seconds = formula_seconds(
                tokens, rows, columns, fp8, [one for one in tiles if one is not None], MEASURED, by
            )
            seconds = dict(zip(tiles, tile_seconds.tolist(), strict=True))
            cases.append(Case((tokens, rows, columns), seconds, seconds))
    return cases


@KINDS
def test_the_fit_finds_coefficients_again(fp8: bool) -> None:
    cases = synthetic(fp8)
    by = fit.fit(cases, fp8)
    for case in cases:
        predicted = formula_seconds(
            *case.shape, fp8, [one for one in case.seconds if one], MEASURED, by
        )
        near = np.array([*case.seconds.values()]) <= 1.4 * min(case.seconds.values())
        assert np.abs(np.log(predicted / np.array([*case.seconds.values()])))[near].max() < 0.1
    fitted = fit.make_model(cases, by, fp8)
    again = fit.as_json(fitted)
    assert len(again["usual"]) == len(TILES[fp8])
    assert sum(len(products) for products in again["products"].values()) == len(cases)
