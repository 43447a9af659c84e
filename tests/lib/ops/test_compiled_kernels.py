"""Checks of the code that Triton compiles for an H100; they need no GPU.

A kernel that is placed early may load constant weights before the last kernel has ended, and
nothing else. No product on the tensor cores is waited for, part by part, by the assembler."""

import itertools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.ops.attention.launch import plan_launch
from weft.ops.constants import constant
from weft.ops.tiles.candidates import TILES
from weft.ops.tiles.linear import GATED_MANY, linear_tile
from weft.ops.tiles.tile import Tile

pytest.importorskip("triton")

WAIT = "griddepcontrol.wait"
PLACED = "griddepcontrol.launch_dependents"
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that compiles a kernel; a kernel asks which GPU it is compiled for, and there is
    none."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.language import target_info

    target = GPUTarget("cuda", 90, 32)

    def current_target() -> GPUTarget:
        return target

    monkeypatch.setattr(current_target, "__triton_builtin__", True, raising=False)
    monkeypatch.setattr(target_info, "current_target", current_target)
    # No other process may meet with this code
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_kernel(
        fn: Any,
        pointers: dict[str, str],
        constants: dict[str, Any],
        *,
        aligned: Sequence[str] = (),
        **options: Any,
    ) -> list[str]:
        signature = pointers | dict.fromkeys(constants, "constexpr")
        names = {
            name: signature.get(name, "fp32" if name == "eps" else "i32") for name in fn.arg_names
        }
        by_16 = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(fn, names, constants, by_16)
        return str(
            compile(source, target=target, options={"launch_pdl": True, **options}).asm["ptx"]
        ).splitlines()

    return compile_kernel


def accesses(lines: list[str]) -> list[list[str]]:
    """The lines that read or write memory, by the number of waits before them."""
    groups: list[list[str]] = [[]]
    for line in lines:
        if WAIT in line:
            groups.append([])
        elif re.search(r"\b(ld\.global|cp\.async|st\.global|atom|red)\b", line):
            groups[-1].append(line)
    return groups


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ahead", "early"), [(0, False), (1, False), (1, True), (4, False), (4, True)]
)
@pytest.mark.parametrize("kind", ["bf16", "fp8e4nv"])
def test_a_product_reads_only_weights_before_it_waits(
    ptx: Any, kind: str, early: bool, ahead: int
) -> None:
    from weft.ops.products.linear_triton import _linear_kernel

    pointers = {
        "x": f"*{kind}",
        "weight": f"*{kind}",
        "x_scales": "*fp32",
        "scale": "*fp32",
        "bias": "*bf16",
    }
    shape = {"ROWS": 64, "TOKENS": 16, "COLUMNS": 128, "SWAP": True, "SEGMENTS": 1, "GROUP": 1}
    how = {
        "FP8": kind != "bf16",
        "BIAS": True,
        "EVEN": True,
        "AHEAD": ahead,
        "ALL": ahead == 4,
        "EARLY": early,
    }
    for gated, rows in ((False, 64), (True, 64), (True, 32)):
        constants = shape | how | {"GATED": gated, "ROWS": rows}
        out = {"out": "*bf16" if gated else "*fp32"}
        before, after = accesses(
            ptx(_linear_kernel.jit, pointers | out, constants, num_warps=4, num_stages=3)
        )
        assert after
        assert bool(before) is early
        assert all(".cg" in line for line in before)


@pytest.mark.parametrize("is_early", [None, 0, 1])
def test_a_norm_reads_only_a_constant_weight_before_it_waits(
    ptx: Any, is_early: int | None
) -> None:
    """None: as it is compiled, so that a branch leads around the first wait."""
    from triton.language import bfloat16

    from weft.ops.norm_triton import _norm_kernel

    names = ("x", "residual", "weight", "total", "normed", "values")
    pointers = {**dict.fromkeys(names, "*bf16"), "x": "*fp32", "scales": "*fp32"}
    how = {"PARTS": 4, "ADD": True, "NORM": True, "QUANTIZE": False, "GROUPS": 8, "TYPE": bfloat16}
    constants = {} if is_early is None else {"is_early": is_early, "at_once": 1}
    lines = ptx(_norm_kernel.jit, pointers, how | constants, num_warps=4)
    *never, weight, after = accesses(lines)
    assert never == ([] if is_early else [[]])
    assert weight
    assert after
    assert all(".cg" in line for line in weight)
    first = next(i for i, line in enumerate(lines) if WAIT in line)
    assert any(PLACED in line for line in lines[:first]), "the next kernel may be placed before"


def test_small_kernels_are_compiled_once_for_all_numbers_of_tokens() -> None:
    from weft.ops.attention.output_triton import combine_kernel
    from weft.ops.attention.paged_triton import attend_kernel
    from weft.ops.experts.routing_triton import _route_kernel
    from weft.ops.norm_triton import _norm_kernel
    from weft.ops.products.gate_triton import _gate_kernel
    from weft.ops.rotary_triton import _rotary_kernel

    for kernel in (
        combine_kernel,
        attend_kernel,
        _route_kernel,
        _norm_kernel,
        _gate_kernel,
        _rotary_kernel,
    ):
        told = [x for x in kernel.jit.params if x.name in ("at_once", "is_early")]
        assert told
        assert all(x.do_not_specialize and not x.is_constexpr for x in told)


def serialized(ptx: list[str], folder: Path) -> list[str]:
    """The assembler's warnings that it makes products on the tensor cores wait for one another. It
    only warns: a kernel like that took 3.25 ms instead of 2.86."""
    from triton.backends.nvidia.compiler import get_ptxas

    (folder / "kernel.ptx").write_text("\n".join(ptx))
    command = [get_ptxas(90).path, "-v", "--gpu-name", "sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return [line for line in (said.stdout + said.stderr).splitlines() if "serialized" in line]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_product_of_many_tokens_does_not_wait_for_itself(
    ptx: Any, tmp_path: Path, bias: bool
) -> None:
    from weft.ops.products.gated_many_triton import _gated_many_kernel

    tile = GATED_MANY
    width = GATED_MANY.rows // 2
    described = {"x": f"tensordesc<bf16[{tile.tokens},{tile.columns}]>", "bias": "*bf16"}
    described |= {"weight": f"tensordesc<bf16[2,{width},{tile.columns}]>"}
    described |= {"out": f"tensordesc<bf16[{tile.tokens},{width}]>"}
    constants = {
        "BIAS": bias,
        "TOKENS": tile.tokens,
        "WIDTH": width,
        "COLUMNS": tile.columns,
        "GROUP": 16,
    }
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    lines = ptx(_gated_many_kernel.jit, described, constants, **how)
    assert sum("wgmma.mma_async" in line for line in lines) == tile.columns // 16, (
        "one product a step, 256 wide"
    )
    first = next(i for i, line in enumerate(lines) if "wgmma.mma_async" in line)
    ways = [
        line for line in lines[:first] if re.search(r"\bbra\b", line) and "waitLoop" not in line
    ]
    assert not ways, "a way around the loop, for which CUDA 12.8 makes products wait"
    assert not serialized(lines, tmp_path)


@pytest.mark.one_of(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(("dim", "group"), [(128, 2), (128, 8), (64, 4)])
def test_attention_of_prompts_fits_twice_on_a_multiprocessor(
    ptx: Any, dim: int, group: int
) -> None:
    from weft.ops.attention.paged_triton import attend_kernel

    plan = plan_launch(8192, 4, group, 4, dim, 8192, 8192, 2, 2, 132)
    pointers = dict.fromkeys(
        ("q", "kv_pages", "out", "shares", "maxima", "sums", "scales"), "*bf16"
    )
    pointers |= {"slot_mapping": "*i64", "values": "i64", "scale": "fp32"}
    pointers |= dict.fromkeys(("spans", "block_table", "query_start_loc", "seq_lens"), "*i32")
    shape = {
        "HEADS": 4 * group,
        "KV_HEADS": 4,
        "DIM": dim,
        "PAGE_SIZE": 16,
        "QUERIES": plan.queries,
        "ROWS": plan.rows,
    }
    shape |= {
        "KEYS": plan.keys,
        "DIMS": plan.dims,
        "SHARE_ROWS": plan.share_rows,
        "SPLITS": plan.splits,
        "PARTS": plan.parts > 0,
        "WINDOW": 0,
        "ONE_BLOCK": False,
        "QUANTIZE": False,
    }
    shape |= {"BLOCK_R": 128, "SEGMENT": 0, "SEGMENTS": 0}
    how = {"num_warps": plan.warps, "num_stages": plan.stages, "maxnreg": plan.registers}
    aligned = [name for name, kind in pointers.items() if kind[0] == "*"] + [
        "values",
        "stride_q",
        "stride_table",
    ]
    lines = ptx(attend_kernel.jit, pointers, shape, aligned=aligned, **how)
    assert any("wgmma.mma_async" in line for line in lines)
    assert any(f".maxnreg {plan.registers}" in line for line in lines)
    assert plan.registers * 2 * 32 * plan.warps <= 65536


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_no_product_with_a_tile_waits_for_itself(
    ptx: Any, tmp_path: Path, fp8: bool, runs_nightly: bool
) -> None:
    from triton.language import bfloat16

    from weft.ops.experts.products_many_triton import _many_kernel
    from weft.ops.products.linear_triton import _linear_kernel

    kind = "fp8e4nv" if fp8 else "bf16"
    pointers = {
        "x": f"*{kind}",
        "weight": f"*{kind}",
        "x_scales": "*fp32",
        "scale": "*fp32",
        "bias": "*bf16",
    }
    tiles = TILES[fp8] if runs_nightly else TILES[fp8][::5]
    for (rows, tokens, columns, warps, stages), gated in itertools.product(tiles, (False, True)):
        shape = {
            "ROWS": rows,
            "TOKENS": tokens,
            "COLUMNS": columns,
            "SWAP": tokens < 64,
            "SEGMENTS": 1,
            "GROUP": 1,
        }
        how = {
            "FP8": fp8,
            "BIAS": False,
            "EVEN": True,
            "AHEAD": 0,
            "ALL": False,
            "EARLY": False,
            "GATED": gated,
        }
        if not (fp8 and gated):
            how_many = {"num_warps": warps, "num_stages": stages}
            lines = ptx(_linear_kernel.jit, pointers | {"out": "*bf16"}, shape | how, **how_many)
            assert not serialized(lines, tmp_path), (rows, tokens, columns, warps, stages)
    pointers = {
        "x": f"*{kind}",
        "x_scales": "*fp32",
        "scale": "*fp32",
        "weights": "*fp32",
        "out": "*bf16",
    }
    pointers |= {"order": "*i32", "owners": "*i32", "weight": f"tensordesc<{kind}[64,128]>"}
    how = {
        "TOP_K": 8,
        "FP8": fp8,
        "EVEN": True,
        "WIDTH": 64,
        "TOKENS": 64,
        "COLUMNS": 128,
        "TYPE": bfloat16,
    }
    for gated in (False, True):
        lines = ptx(_many_kernel.jit, pointers, how | {"GATED": gated}, num_warps=4, num_stages=3)
        assert not serialized(lines, tmp_path), gated


class Recorder:
    """In the place of a kernel: keeps one parameter of its launches."""

    def __init__(self, kernel: Any, name: str) -> None:
        self.parameters = kernel.jit.arg_names
        self.name = name
        self.flags: list[bool] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            arguments = {**dict(zip(self.parameters, args, strict=False)), **options}
            self.flags.append(bool(arguments[self.name]))

        return launch


@pytest.mark.parametrize("tokens", [1, 17])
def test_only_constant_weights_of_few_tokens_are_loaded_early(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    from weft.ops import norm_triton
    from weft.ops.products import linear_triton

    products = Recorder(linear_triton._linear_kernel, "EARLY")
    norms = Recorder(norm_triton._norm_kernel, "is_early")
    monkeypatch.setattr(linear_triton, "_linear_kernel", products)
    monkeypatch.setattr(norm_triton, "_norm_kernel", norms)
    x, weight, gain = (
        torch.ones(shape, dtype=torch.bfloat16) for shape in ((tokens, 256), (256, 256), (256,))
    )
    tile = linear_tile(1, 256, 256, False) if tokens == 1 else Tile(64, 32, 128, 4, 3)
    assert tile is not None
    with constant([weight, gain]):
        for one, other in (
            (weight, gain),
            (weight.clone(), gain.clone()),
            (weight[:, ::2].contiguous(), gain * 2),
        ):
            linear_triton.run_tile(x[:, : one.shape[1]], None, one, None, None, x.dtype, tile)
            norm_triton.norm(x, other, 1e-6)
    linear_triton.run_tile(x, None, weight, None, None, x.dtype, tile)
    norm_triton.norm(x, gain, 1e-6)
    for kernel in (products, norms):
        assert kernel.flags == [tokens == 1, False, False, False]
