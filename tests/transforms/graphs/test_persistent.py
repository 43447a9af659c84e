"""The persistent back end: what it runs as programs, and that results are those of the function itself."""

import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, library, nn
from torch.multiprocessing.reductions import StorageWeakRef

import weft
from weft.errors import CaptureError, ProgramError
from weft.ops.attention.paged import paged_attention
from weft.ops.norm import add_rms_norm, rms_norm
from weft.ops.persistent import matching
from weft.ops.products.gate import silu_mul
from weft.ops.products.linear import linear
from weft.ops.rotary import rotate_and_keep
from weft.sampling import SamplingParams
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS, random_model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.split import Split
from weft.transforms.graphs.backends.persistent import Fuser
from weft.trees import tree_leaves

Programs = list[list[str]]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """The instructions of each program that runs, by name: `+norm` with a norm before the product, `+gate` with the
    gate after it."""
    found, run = Programs(), Fuser._run_program

    def noted(self: Fuser, matched: Any) -> None:
        names = []
        for each in (one.instruction for one in matched):
            norm, gate = getattr(each, "gain", None) is not None, getattr(each, "gate", False)
            names.append(type(each).__name__ + "+norm" * (norm and hasattr(each, "weight")) + "+gate" * gate)
        if names:
            found.append(names)
        run(self, matched)

    monkeypatch.setattr(Fuser, "_run_program", noted)
    return found


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


GAIN, WIDE_GAIN, WIDE = weights(64), weights(128), weights(128, 64, seed=4)
UP, DOWN, SQUARE = weights(256, 64, seed=1), weights(64, 128, seed=2), weights(64, 64, seed=3)


def feed(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """A norm and a gated block."""
    normed, total = add_rms_norm(x, residual, GAIN, 1e-5)
    return linear(silu_mul(linear(normed, UP), torch.float32), DOWN), total


def blocks(x: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Blocks, with a change between the second and the third."""
    added, total = feed(x, x)
    added, total = feed(added, total)
    added, total = feed(change(added), total)
    added, total = feed(added, total)
    return added + total


def agrees(fn: Callable[..., Any], *args: Any) -> None:
    """Captured by the back end it has the bits of the function itself, in the capturing call and in replays."""
    graph = weft.graphify(fn, backend="persistent")
    for step in range(3):
        given = [x + step if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
        found, wanted = graph(*given), fn(*given)
        for one, other in zip(*(tree_leaves(tree) for tree in (found, wanted)), strict=True):
            assert torch.equal(one, other)


def test_a_run_of_operators_is_one_program(programs: Programs) -> None:
    agrees(blocks, weights(1, 64))
    assert programs[-1] == ["Linear+norm+gate", "Linear"] * 4


def test_more_tokens_run_as_they_are(programs: Programs) -> None:
    agrees(blocks, weights(2, 64))
    assert programs == []


def test_columns_that_are_no_multiple_of_eight_run_as_they_are(programs: Programs) -> None:
    def norms(x: Tensor) -> Tensor:
        for _ in range(5):
            x = rms_norm(x, WIDE_GAIN[:100], 1e-5)
        return x

    agrees(norms, weights(1, 100))
    assert programs == []


def test_what_an_instruction_reads_early_is_written_by_another_program(programs: Programs) -> None:
    def adaptive(x: Tensor) -> Tensor:
        for _ in range(4):
            gain = linear(linear(linear(linear(x, SQUARE), SQUARE), SQUARE), SQUARE)
            x = rms_norm(x, gain[0], 1e-5)
        return x

    agrees(adaptive, weights(1, 64))
    assert [len(program) for program in programs[-5:]] == [4, 5, 5, 5, 1]


def test_any_other_operator_divides_programs(programs: Programs) -> None:
    agrees(lambda x: blocks(x, torch.tanh), weights(1, 64))
    assert programs[-2:] == [["Linear+norm+gate", "Linear"] * 2] * 2


def test_views_do_not_divide_programs(programs: Programs) -> None:
    agrees(lambda x: blocks(x, lambda y: y.view(2, 32).unsqueeze(0).flatten().view(1, 64)), weights(1, 64))
    assert len(programs[-1]) == 8


def test_few_operators_run_as_they_are(programs: Programs) -> None:
    agrees(lambda x: feed(x, x), weights(1, 64))
    assert programs[-1] == ["Linear+norm+gate", "Linear"]


def kept_between(x: Tensor) -> Any:
    """Results that instructions would otherwise pass on unwritten are returned, too."""
    normed, total = add_rms_norm(x, x, GAIN, 1e-5)
    gate_up = linear(normed, UP)
    inner = silu_mul(gate_up, torch.float32)
    down = linear(inner, DOWN)
    again = linear(rms_norm(down, GAIN, 1e-5), SQUARE)
    return normed, gate_up[:, :7], total, linear(again, SQUARE)


def read_twice(x: Tensor) -> Any:
    """A norm's result goes to two products."""
    normed = rms_norm(x, GAIN, 1e-5)
    first, second = linear(normed, SQUARE), linear(normed, UP)
    return linear(first, SQUARE), linear(silu_mul(second, torch.float32), DOWN)


def part_of_a_result(x: Tensor) -> Any:
    """A product takes a part of a norm's result, and a gate a part of a product's."""
    left = linear(rms_norm(x.view(2, 64), GAIN, 1e-5)[:1], SQUARE)
    inner = silu_mul(linear(left, UP)[:, :128].contiguous(), torch.float32)
    return linear(linear(inner, SQUARE), SQUARE)


def cut_otherwise(x: Tensor) -> Any:
    """Products take the first half of a norm's result."""
    for _ in range(5):
        x = linear(linear(rms_norm(x, WIDE_GAIN, 1e-5).view(2, 64)[:1], SQUARE), WIDE)
    return x


def written_between(x: Tensor) -> Any:
    """A result is changed in place before it is read."""
    first = linear(rms_norm(x, GAIN, 1e-5), SQUARE)
    second = linear(first, SQUARE)
    first.mul_(2)
    return linear(linear(linear(linear(first, SQUARE), SQUARE), SQUARE), SQUARE) + second


def with_a_loop(x: Tensor) -> Any:
    """What a loop reads was put off before it, and its steps put off more."""

    def body(carried: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return carried[0] + 1, blocks(carried[1])

    start = blocks(x)
    _, x = weft.while_loop(lambda carried: carried[0] < 3, body, (torch.zeros((), dtype=torch.int64), start))
    return blocks(x)


def in_inference_mode(x: Tensor) -> Any:
    """`reshape`, `contiguous` and `to` come whole, and may copy; and what was put off in it runs after it."""
    with torch.inference_mode():
        y = blocks(x)
        found = y.t().reshape(-1) + 1, y.t().contiguous() + 1, y.to(torch.float64) + 1
        last = blocks(y)
    return *found, last.clone()


def read_by_its_storage(x: Tensor) -> Any:
    """A result's storage outlives all its tensors."""
    normed = rms_norm(x, GAIN, 1e-5)
    storage, first = normed.untyped_storage(), linear(normed, SQUARE)
    del normed
    last = linear(linear(linear(first, SQUARE), SQUARE), SQUARE).tanh()
    return last, torch.empty(0).set_(storage, 0, (1, 64), (64, 1)).clone()


def seen_as_another_dtype(x: Tensor) -> Tensor:
    """A product takes the bits of a norm's result as numbers of another dtype."""
    found = rms_norm(x.half(), GAIN.half(), 1e-5).view(torch.bfloat16)
    for _ in range(4):
        found = linear(found, SQUARE.bfloat16())
    return found.nan_to_num()


def broadcast(x: Tensor) -> Any:
    """A residual of one token is added to two."""
    normed, total = add_rms_norm(torch.cat((x, x)), x, GAIN, 1e-5)
    return linear(linear(linear(linear(normed, SQUARE), SQUARE), SQUARE), SQUARE), total


CHAINS = [kept_between, read_twice, part_of_a_result, cut_otherwise, written_between, with_a_loop]
CHAINS += [in_inference_mode, read_by_its_storage, seen_as_another_dtype, broadcast]


@pytest.mark.parametrize("fn", CHAINS, ids=lambda fn: fn.__name__)
def test_results_are_those_of_the_function(fn: Callable[..., Any]) -> None:
    agrees(fn, weights(1, 128 if fn in (part_of_a_result, cut_otherwise) else 64))


def four_products(x: Tensor, weight: Tensor) -> Tensor:
    return linear(linear(linear(linear(x, weight), SQUARE), SQUARE), SQUARE)


@pytest.mark.parametrize("shape", [(64, 32), (64, 48)])
def test_a_product_that_does_not_fit_is_refused_where_it_is_called(shape: tuple[int, ...]) -> None:
    weight = weights(*shape)

    def fn(x: Tensor) -> Tensor:
        try:
            y = linear(x, weight)
        except RuntimeError:
            y = x
        return four_products(y, SQUARE)

    with pytest.raises(CaptureError, match=r"it goes on after an error of an operator.*weft\.linear"):
        weft.graphify(fn, backend="persistent")(weights(1, 64))


def test_autocast_is_that_of_the_call() -> None:
    """A replay has no autocast, so a result that follows it is refused; but none is computed without it silently."""

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = four_products(x, SQUARE)
        return found + 1

    with pytest.raises(RuntimeError, match="dtype"):
        weft.graphify(fn, backend="tape")(weights(1, 64))
    with pytest.raises(RuntimeError, match="dtype"):
        weft.graphify(fn, backend="persistent")(weights(1, 64))


def test_an_operator_of_others_sees_what_was_put_off() -> None:
    """Its schema says that it makes a view; it may still read and write."""
    others = library.Library("others", "DEF")
    others.define("double(Tensor(a) x) -> Tensor(a)")
    others.impl("double", lambda x: x.mul_(2), "CPU")
    agrees(lambda x: torch.ops.others.double(four_products(x, SQUARE)), weights(1, 64))


def attend(x: Tensor, pages: Tensor, cos: Tensor, window: int = 0, queries: int = 1) -> tuple[Tensor, Tensor]:
    """Attention of one token of each request, in a cache of two pages of 8."""
    count = len(x)
    slots = torch.arange(count) * 8 + 3
    table, starts = torch.arange(count, dtype=torch.int32)[:, None], torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.full((count,), 4, dtype=torch.int32)
    qkv = linear(rms_norm(x, GAIN, 1e-5), WIDE)
    q, pages = rotate_and_keep(qkv, None, None, 1e-5, cos, cos, slots, pages, 4, [64, 96])
    mixed = paged_attention(q, None, None, pages, slots, table, starts, lengths, queries, 0.25, window)
    return linear(linear(mixed.flatten(1), SQUARE), SQUARE), pages


@pytest.mark.parametrize(
    ("options", "program"), [({}, ["Linear+norm", "Attend", "Linear", "Linear"]), ({"window": 2}, [])]
)
def test_attention_is_an_instruction_with_its_rotation(
    options: dict[str, Any], program: list[str], programs: Programs
) -> None:
    def step(pages: Tensor, x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
        out, pages = attend(x, pages, cos, **options)
        return pages, out

    graph = weft.graphify(step, backend="persistent", donate_argnames="pages")
    pages, other = weights(2, 2, 8, 2, 16, seed=5), weights(2, 2, 8, 2, 16, seed=5)
    for seed in range(3):
        x, cos = weights(1, 64, seed=seed), weights(1, 8, seed=seed)
        pages, found = graph(pages, x, cos)
        other, wanted = step(other, x, cos)
        assert torch.equal(found, wanted)
        assert torch.equal(pages, other)
    assert (program in programs) is bool(program)


def test_attention_at_which_the_graph_is_split_is_no_instruction(programs: Programs) -> None:
    def step(pages: Tensor, x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
        out, pages = attend(x, pages, cos)
        return pages, out

    given = weights(2, 2, 8, 2, 16, seed=5), weights(1, 64), weights(1, 8)
    wanted = step(given[0].clone(), *given[1:])
    split = {"split_at": "weft::paged_attention", "donate_argnames": "pages"}
    found = weft.graphify(step, backend="persistent", **split)(*given)
    assert all(map(torch.equal, found, wanted))
    assert not any("Attend" in program for program in programs)


LLAMA = {
    **PRESETS["llama-3.2-1b"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize("config", [PRESETS["tiny"], LLAMA], ids=["qwen3", "llama"])
def test_an_engine_says_the_same_tokens(config: dict[str, Any], programs: Programs) -> None:
    model = random_model(parse_config(config, source="a test"), seed=0)

    def say(graph: str, backend: str | None) -> Iterator[tuple[str, list[int]]]:
        limits = EngineLimits(max_num_reqs=3, max_model_len=64)
        engine = Engine(model, limits, graph=graph, seed=0, backend=backend, num_logprobs=2)
        for index in range(5):
            sampling = SamplingParams(temperature=1.0, ignore_eos=True, logprobs=2)
            engine.add([3, 1, 4, 1, 5][: index + 1], sampling, max_tokens=7 + index)
        yield from ((output.id, output.token_ids) for output in engine)

    assert [*say("full_and_piecewise", "persistent")] == [*say("none", None)]
    layers = config["num_hidden_layers"]
    assert ["Linear+norm", "Attend", "Linear", "Linear+norm+gate", "Linear"] * layers + ["Norm"] in programs


def test_dropped_weights_are_not_held() -> None:
    """Not even by a cycle of references, which would hold them until the garbage collector runs."""
    graph = weft.graphify(lambda params, x: four_products(x, params["w"]) + 1, backend="persistent")
    params = {"w": weights(64, 64)}
    gc.disable()
    for _ in range(2):
        graph(params, weights(1, 64))
    held = StorageWeakRef(params["w"].untyped_storage())
    del params
    gc.enable()
    assert held.expired()


def test_ranks_in_processes_are_refused() -> None:
    """A kernel that needs every multiprocessor would wait for one that waits for another rank, for ever."""
    split = Split(mock.Mock(ranks=lambda _: [0]), 2)
    split.check("f()", weft.load("demo", "cpu"))
    seen = "backend='persistent', whose kernels need a whole GPU, beside kernels that wait for other ranks"
    with pytest.raises(ProgramError) as error:
        split.check("f()", weft.load("demo", "cpu"), "persistent")
    assert (error.value.seen, error.value.instead) == (seen, "backend=None, or all stages in one process")


def test_a_module_of_others_runs_as_it_is(programs: Programs) -> None:
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.GRU(64, 32, batch_first=True)).eval()
    with torch.no_grad():
        agrees(lambda x: block(x), weights(1, 3, 32))
    assert programs == []


# Mutants: each is found by one of the tests above ---------------------------------------------------------------------


def test_a_result_that_something_else_holds_must_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "storage_uses", lambda _: mock.ANY)
    with pytest.raises((AssertionError, weft.WeftError)):
        agrees(kept_between, weights(1, 64))


def test_what_was_put_off_must_run_before_another_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.transforms.graphs.backends.persistent._only_views", lambda _: True)
    with pytest.raises((AssertionError, weft.WeftError)):
        agrees(lambda x: blocks(x, torch.tanh), weights(1, 64))
