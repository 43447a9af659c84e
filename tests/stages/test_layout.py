"""The layers that a stage owns."""

import pytest
from hypothesis import given, strategies as st
from refusal import refused

from weft.errors import ProgramError
from weft.stages.layout import StageLayout, split_layers


@given(num_layers=st.integers(1, 200), data=st.data())
def test_layers_are_split_evenly(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, min(num_layers, 40)))
    layouts = split_layers(num_layers, num_stages)
    assert [i for layout in layouts for i in layout.layers] == list(range(num_layers))
    sizes = [len(layout.layers) for layout in layouts]
    assert max(sizes) - min(sizes) <= 1
    # The last stage also has the head, and the first one the embedding: neither is larger than a
    # stage in between.
    assert sizes[-1] == min(sizes)
    assert num_stages < 3 or sizes[0] <= max(sizes[1:-1])
    assert [layout.first for layout in layouts] == [True] + [False] * (num_stages - 1)
    assert [layout.last for layout in layouts] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [
        (5, 2, [3, 2]),
        (7, 3, [2, 3, 2]),
        (30, 4, [7, 8, 8, 7]),
        (31, 4, [8, 8, 8, 7]),
        (29, 4, [7, 8, 7, 7]),
    ],
)
def test_where_the_layers_left_over_go(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    assert [len(layout.layers) for layout in split_layers(num_layers, num_stages)] == sizes


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 5), (4, 0), (4, -1), (0, 1)])
def test_splits_that_do_not_exist(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ProgramError) as caught:
        split_layers(num_layers, num_stages)
    assert caught.value.call == f"split_layers({num_layers}, {num_stages})"
    assert caught.value.problem == f"{num_layers} layers for {num_stages} stages"
    expected = (
        "use 1 to 4 stages, so that each owns a layer" if num_layers else "use a model with layers"
    )
    assert caught.value.instead == expected


@pytest.mark.parametrize(
    "fields", [(0, 0, 0, 1), (2, 2, 0, 1), (-1, 2, 0, 1), (0, 2, 0, 0), (0, 2, 1, 2), (1, 2, 3, 3)]
)
def test_layouts_that_do_not_exist(fields: tuple[int, int, int, int]) -> None:
    with pytest.raises(ProgramError, match=r"number the stages|give every stage"):
        StageLayout(*fields)


def test_more_stages_than_layers_in_a_split_by_hand() -> None:
    instead = "use 1 to 6 stages, so that each owns a layer"
    with refused(ProgramError, "split_layers(6, 7)", "6 layers for 7 stages", instead):
        split_layers(6, 7)
