"""Prompt lookup against its definition, written here over Python lists."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings, strategies as st

from weft.ops.sampling.ngram import find_drafts


def by_definition(tokens: Sequence[int], count: int, shortest: int, longest: int) -> list[int]:
    """For n from the longest down: find the latest earlier occurrence of the last n tokens, and
    draft the tokens after it; where these end, go on with the drafts so far."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == list(tokens[len(tokens) - n :]):
                said = list(tokens)
                for index in range(count):
                    said.append(said[start + n + index])
                return said[len(tokens) :]
    return [-1] * count


@settings(max_examples=400)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_drafts_are_those_of_the_definition(
    tokens: list[list[int]], count: int, shortest: int, more: int, behind: int
) -> None:
    longest = shortest + more
    width = max(map(len, tokens)) + behind
    # After the end is another request's text
    table = torch.randint(0, 3, (len(tokens), width), dtype=torch.int32)
    for row, ids in zip(table, tokens, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    drafts = find_drafts(table, torch.tensor([*map(len, tokens)]), count, shortest, longest)
    assert drafts.tolist() == [by_definition(ids, count, shortest, longest) for ids in tokens]


def test_text_that_repeats_itself_is_drafted_whole() -> None:
    assert find_drafts(torch.tensor([[5, 1, 2, 1, 2]]), torch.tensor([5]), 5, 1, 3).tolist() == [
        [1, 2, 1, 2, 1]
    ]
