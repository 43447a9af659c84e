"""The list of a function's graphs: their signatures, their pieces, and their memory."""

import torch
from torch import Tensor

from weft import Limits, graphify, piecewise
from weft.batches.batch import Batch
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms import make_runner, make_state
from weft.transforms.graphs.calls.key import CacheInfo
from weft.transforms.graphs.memory import CapturedGraph, CapturedGraphs


def doubled(params: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ params) * 2


def test_each_graph_is_told_once_in_the_order_of_capture() -> None:
    graph = graphify(doubled)
    params = torch.eye(4)
    for rows in (3, 1, 3):
        graph(params, torch.ones(rows, 4))
    told = graph.graphs()
    assert isinstance(told, CapturedGraphs)
    assert all(isinstance(one, CapturedGraph) for one in told.graphs)
    # Params are not copied in
    assert [one.of for one in told.graphs] == [
        "float32[3, 4]",
        "float32[1, 4]",
    ]
    assert [one.buffer_bytes for one in told.graphs] == [48, 0]  # the second is part of the first
    assert [(one.mode, one.pieces, one.operators) for one in told.graphs] == [("full", 1, 3)] * 2
    analysis = graph.memory_analysis()
    assert sum(one.graph_bytes for one in told.graphs) == analysis.graph_bytes
    assert sum(one.buffer_bytes for one in told.graphs) == analysis.buffer_bytes
    assert all(0 < one.seconds < 60 for one in told.graphs)
    assert str(told).splitlines()[0] == "graphify(doubled): 2 graphs, 3 replays, 0 eager calls"
    assert told.info == graph.cache_info()


def test_none_is_a_table_without_rows() -> None:
    assert graphify(doubled).graphs() == CapturedGraphs("doubled", (), CacheInfo())
    assert len(str(graphify(doubled).graphs()).splitlines()) == 2


def test_what_only_looks_or_makes_room_is_no_operator() -> None:
    def looks(x: Tensor) -> Tensor:
        room = torch.empty(2, 2)
        room.copy_(x.view(2, 2).t())  # one
        return room[0] + 1  # two

    graph = graphify(looks)
    graph(torch.ones(4))
    assert graph.graphs().graphs[0].operators == 2


def test_pieces_are_counted() -> None:
    graph = piecewise(doubled, split_at="aten::tanh")
    graph(torch.eye(4), torch.ones(1, 4))
    [told] = graph.graphs().graphs
    assert (told.mode, told.pieces, told.operators) == ("piecewise", 2, 3)


def test_under_a_ladder_it_names_the_class() -> None:
    model = load(DEMO, "cpu")
    runner = make_runner(model, Limits(2, 8), mode="full_decode_only")
    state = make_state(model, runner.layouts, lengths=[8, 8])
    ids = [model.encode("a"), model.encode("b")]
    state, _ = runner.step(runner.params, state, Batch.ragged([0, 1], ids))
    runner.step(runner.params, state, Batch.decode([0, 1]))
    assert [one.of for one in runner.graphs[0].graphs().graphs] == ["uniform x1, 2 reqs"]
