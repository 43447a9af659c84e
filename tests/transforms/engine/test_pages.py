"""`Pages` against a model that lists the holders of every page."""

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.transforms.engine.requests.pages import Pages, hash_page


class PagesMachine(RuleBasedStateMachine):
    """Holders allocate, acquire, publish and release pages in any order; the model knows each
    page's holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(6, 2)
        self.holders: list[list[int]] = []
        self.names: dict[bytes, int] = {}  # published pages
        self.parts: dict[bytes, int] = {}

    def count(self, page: int) -> int:
        return sum(pages.count(page) for pages in self.holders)

    @rule(count=st.integers(0, 7))
    def take(self, count: int) -> None:
        free = [page for page in range(6) if not self.count(page)]
        if count > len(free):
            with pytest.raises(AssertionError, match="asks num_free first"):
                self.pages.allocate(count)
            return
        taken = self.pages.allocate(count)
        assert len(set(taken)) == count
        assert set(taken) <= set(free)
        blank = set(free) - set(self.names.values())
        assert len(blank - set(taken)) == 0 or not set(taken) & set(self.names.values()), (
            "empty pages go first"
        )
        self.names = {name: page for name, page in self.names.items() if page not in taken}
        self.holders.append(taken)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=st.sampled_from((b"a", b"b", b"c")), part=st.booleans())
    def name(self, data: st.DataObject, name: bytes, part: bool) -> None:
        page = data.draw(st.sampled_from([page for pages in self.holders for page in pages]))
        pages_by_name = self.parts if part else self.names
        (self.pages.publish_partial if part else self.pages.publish)(page, name)
        if name not in pages_by_name and page not in pages_by_name.values():
            pages_by_name[name] = page

    @rule(names=st.lists(st.sampled_from((b"a", b"b", b"c")), max_size=3, unique=True))
    def share(self, names: list[bytes]) -> None:
        pages = self.pages.lookup(names)
        assert pages == [self.names[name] for name in names[: len(pages)]]
        assert len(pages) == len(names) or names[len(pages)] not in self.names
        free = sum(not self.count(page) for page in range(6))
        assert self.pages.count_free(pages) == free - sum(not self.count(page) for page in pages)
        self.pages.acquire(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), broken=st.booleans())
    def release(self, data: st.DataObject, broken: bool) -> None:
        gone = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if broken:
            self.pages.unpublish(gone)
            self.names = {name: page for name, page in self.names.items() if page not in gone}
            self.parts = {name: page for name, page in self.parts.items() if page not in gone}
        self.pages.release(gone)
        self.parts = {name: page for name, page in self.parts.items() if self.count(page)}

    @invariant()
    def counts_are_right(self) -> None:
        used_pages = {page for pages in self.holders for page in pages}
        assert self.pages.num_held == len(used_pages)
        assert self.pages.num_free == 6 - len(used_pages)
        assert self.pages.num_evictable == len(set(self.names.values()) - used_pages)
        for name in (b"a", b"b", b"c"):
            assert self.pages.lookup([name]) == ([self.names[name]] if name in self.names else [])
            assert self.pages.lookup_partial(name) == self.parts.get(name)

    def teardown(self) -> None:
        for pages in self.holders:
            self.pages.release(pages)
        assert self.pages.num_free == 6


TestPages: Any = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30)


def test_the_least_recently_used_page_is_evicted_first_and_the_end_of_a_request_before_its_beginning() -> (
    None
):
    pages = Pages(4, 1)
    first = pages.allocate(2)
    second = pages.allocate(2)
    for page, name in zip([*first, *second], (b"0", b"1", b"2", b"3"), strict=True):
        pages.publish(page, name)
    pages.release(first)
    pages.release(second)
    assert pages.allocate(1) == [first[1]]
    assert pages.lookup([b"0", b"1"]) == [first[0]]


def test_equal_hashes_mean_equal_prefixes() -> None:
    whole = hash_page(hash_page(b"", [1, 2]), [3, 4])
    assert whole == hash_page(hash_page(b"", (1, 2)), (3, 4))
    other_hashes = [
        hash_page(b"", [3, 4]),
        hash_page(hash_page(b"", [2, 1]), [3, 4]),
        hash_page(b"", [1, 2, 3, 4]),
    ]
    other_hashes += [
        hash_page(hash_page(b"", [12]), [34]),
        hash_page(hash_page(b"x", [1, 2]), [3, 4]),
    ]
    assert len({whole, *other_hashes}) == 6
