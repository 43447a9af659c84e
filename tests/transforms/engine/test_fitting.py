"""Pages and graphs fit into memory: pages leave room for the graphs that will be captured."""

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import weft
from weft.errors import RequestError
from weft.proofs._strategies.engine.engines import small_adapters, small_model
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.model import Model
from weft.transforms.engine import memory as engine_memory
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.pipelines.transports.threads import Threads
from weft.values.trees import tree_leaves

LIMITS = EngineLimits(max_num_reqs=8, max_num_tokens=32, max_model_len=2000, page_size=4)
# Keys and values of three layers, four tokens, one head of four, in float32
PAGE = 2 * 3 * 4 * 1 * 4 * 4
MOST = 8 * 500


class Memory:
    """A GPU that reports the same amount of free memory each time."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.num_calls = 0

    def __call__(self, _: torch.device) -> int:
        self.num_calls += 1
        return self.free


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Memory]:
    def of(free: int) -> Memory:
        fake_memory = Memory(free)
        monkeypatch.setattr(engine_memory, "free_bytes", fake_memory)
        return fake_memory

    return of


def long_model() -> Model:
    """An engine whose requests may be long, so that pages take most of the memory."""
    model = small_model()
    return attrs.evolve(model, config=attrs.evolve(model.config, max_position_embeddings=2000))


def page_bytes(engine: Engine) -> int:
    """The bytes of the pages of all stages and of the draft model."""
    states = engine._executor.state
    caches = [state.kv_pages for state in states]
    caches += [
        state.drafting.kv_pages
        for state in states
        if state.drafting and state.drafting.kv_pages is not None
    ]
    return sum(cache.nbytes for cache in caches)


def table_bytes(engine: Engine) -> int:
    return sum(
        x.nbytes for x in tree_leaves(engine._executor.state) if isinstance(x, torch.Tensor)
    ) - page_bytes(engine)


WAYS: dict[str, dict[str, Any]] = {
    "full": {"graph": "full"},
    "full_and_piecewise": {"graph": "full_and_piecewise"},
    "adapters": {"graph": "full", "adapters": small_adapters()},
    "two stages": {"graph": "full", "pipeline": 2},
    "drafts": {"graph": "full", "speculation": Speculation(2, model=long_model())},
    "threads": {"graph": "full_and_piecewise", "pipeline": 3, "transport": Threads()},
}


@pytest.mark.one_of(6, 2)
@pytest.mark.parametrize("way", WAYS)
def test_pages_and_graphs_fit(way: str, memory: Callable[[int], Memory]) -> None:
    """Memory holds fewer pages than could be used: the graphs, once captured, fit beside them, and
    less than two pages and two fifths of the graphs' memory is left over."""
    sized = Engine(long_model(), LIMITS, **WAYS[way])
    sized.warm_up()
    graphs = sum(graph.memory_analysis().total_bytes for graph in sized.graphs)
    assert graphs > 0
    free = int((1.4 * graphs + table_bytes(sized) + page_bytes(sized) / 2) / 0.85)
    memory(free)
    engine = Engine(long_model(), LIMITS, **WAYS[way])
    engine.warm_up()
    graphs = sum(graph.memory_analysis().total_bytes for graph in engine.graphs)
    taken = page_bytes(engine) + table_bytes(engine) + graphs
    one = page_bytes(engine) // engine.limits.num_pages
    assert 1 < engine.limits.num_pages < MOST
    assert 0.85 * free - 0.4 * graphs - 2 * one <= taken <= 0.85 * free
    engine.add([1, 2, 3], max_tokens=1)
    assert len(list(engine)) == 1


def test_no_pages_are_taken_for_positions_that_the_model_does_not_have() -> None:
    model = long_model()
    limits, expected = (
        Engine(model, attrs.evolve(LIMITS, max_model_len=length), graph="none").limits
        for length in (9000, 2000)
    )
    assert limits == expected
    assert (
        Engine(model, attrs.evolve(LIMITS, max_model_len=90), graph="none").limits.budget.max_pages
        == 23
    )


def test_where_memory_is_plenty_or_pages_are_given_nothing_is_estimated(
    memory: Callable[[int], Memory],
) -> None:
    plenty = memory(4 * MOST * PAGE)
    assert Engine(long_model(), LIMITS, graph="full").limits.num_pages == MOST
    assert plenty.num_calls == 1
    scarce = memory(1)
    assert (
        Engine(long_model(), attrs.evolve(LIMITS, num_pages=7), graph="full").limits.num_pages == 7
    )
    assert scarce.num_calls == 0


def test_more_pages_than_memory_has_room_for_are_refused() -> None:
    num_pages = 10**9
    with pytest.raises(
        RequestError, match=rf"EngineLimits\(num_pages={num_pages}\)\n  saw: pages of \d+ GB"
    ) as caught:
        Engine(long_model(), attrs.evolve(LIMITS, num_pages=num_pages, page_size=4096))
    assert re.search(r" GB, 393 kB each, and [\d.]+ GB free on cpu$", caught.value.problem)
    match = re.fullmatch(
        r"num_pages=(\d+) or fewer; None: as many as fit beside the graphs", caught.value.instead
    )
    assert match is not None
    assert 1 < int(match[1]) < num_pages


def test_pages_are_refused_on_every_rank_where_one_has_no_room_for_them() -> None:
    class Two(Threads):
        def collect(self, value: Any) -> list[Any]:
            return [value, min(value, 5)]

    for num_pages in (5, 6):
        limits = attrs.evolve(LIMITS, num_pages=num_pages)
        with (
            contextlib.nullcontext()
            if num_pages == 5
            else pytest.raises(RequestError, match="rank with room for 5")
        ):
            Engine(long_model(), limits, pipeline=2, graph="none", transport=Two())


def test_memory_that_is_not_known_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "available_bytes", lambda _: None)
    assert (
        Engine(long_model(), attrs.evolve(LIMITS, num_pages=7), graph="none").limits.num_pages == 7
    )


def test_without_graphs_the_tables_alone_are_beside_the_pages(
    memory: Callable[[int], Memory],
) -> None:
    memory(free := MOST * PAGE)
    engine = Engine(long_model(), LIMITS, graph="none")
    assert engine.limits.num_pages == max(1, int(0.85 * free - table_bytes(engine) - PAGE) // PAGE)


def test_ranks_have_as_many_pages_as_the_one_with_the_least_room(
    memory: Callable[[int], Memory],
) -> None:
    class Two(Threads):
        def collect(self, value: Any) -> list[Any]:
            return [value, 5]

    assert (
        Engine(long_model(), LIMITS, pipeline=2, graph="none", transport=Two()).limits.num_pages
        == 5
    )


def test_a_cpu_gives_a_fixed_part() -> None:
    assert engine_memory.free_bytes(torch.device("cpu")) is None
    assert Engine(long_model(), LIMITS, graph="full").limits.num_pages == MOST


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["full", "full_and_piecewise"])
def test_on_a_gpu_whose_memory_is_short_no_graph_is_left_out(
    graph: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch may take 2 GiB more and nothing beyond: pages fill what graphs leave, every class is
    captured, the longest prompts are served, and some memory is left for temporaries. Other tests
    keep the rest of the GPU."""
    model = weft.load(DEMO, "cuda")
    torch.cuda.empty_cache()
    room, reserved, (_, total) = 2**31, torch.cuda.memory_reserved(), torch.cuda.mem_get_info()
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda _=None: (room + reserved - torch.cuda.memory_reserved(), total),
    )
    limits = EngineLimits(max_num_reqs=64, max_num_tokens=2048, page_size=16, max_model_len=2**16)
    model = attrs.evolve(model, config=attrs.evolve(model.config, max_position_embeddings=2**16))
    torch.cuda.set_per_process_memory_fraction((reserved + room) / total)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # a capture that finds no memory warns
            engine = Engine(model, limits, graph=graph)
            stats = engine.warm_up()
            for index in range(64):
                engine.add([1 + index % 50] * 900, max_tokens=2)
            list(engine)
        left, _ = torch.cuda.mem_get_info()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.limits.num_pages < 64 * 2**12, "memory was the bound"
    assert (
        stats.captures
        == sum(stats.graphs.values())
        == sum(len(g.ladder or ()) for g in engine.graphs)
    )
    assert left > 0.02 * room
