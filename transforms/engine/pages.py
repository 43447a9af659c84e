"""Who holds which page of the KV cache: reference counts, and pages found again by what is in them."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from weft.errors import RequestError


@attrs.define(eq=False)
class Pages:
    """The pages of a KV cache.

    A page that nobody holds is free. A full one whose tokens are known keeps its content until it is needed for
    something else, the longest unused first; a request that begins with the same tokens shares it. One that a prompt
    fills in part is copied by whoever has the same prompt, while it is held.

    Args:
        num_pages: in all, on each stage.
        page_size: tokens a page.
    """

    num_pages: int
    page_size: int
    _count: list[int] = attrs.field(init=False)
    _blank: list[int] = attrs.field(init=False)
    _kept: OrderedDict[int, None] = attrs.field(init=False, factory=OrderedDict)
    _hash_of: dict[int, bytes] = attrs.field(init=False, factory=dict)
    _page_of: dict[bytes, int] = attrs.field(init=False, factory=dict)
    _part_of: dict[int, bytes] = attrs.field(init=False, factory=dict)
    _page_of_part: dict[bytes, int] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._count = [0] * self.num_pages
        self._blank = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._kept)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_free

    @property
    def num_kept(self) -> int:
        """Of those, the pages that would be found again."""
        return len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-num_tokens // self.page_size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of pages, from the first on, with these contents."""
        found = []
        for name in hashes:
            if (page := self._page_of.get(name)) is None:
                break
            found.append(page)
        return found

    def find_part(self, name: bytes) -> int | None:
        """A page that begins with this content, to be copied while its owner goes on writing behind it."""
        return self._page_of_part.get(name)

    def count_free(self, shared: Sequence[int]) -> int:
        """Pages that can be taken once `shared` are held."""
        return self.num_free - sum(self._count[page] == 0 for page in shared)

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that were found."""
        for page in pages:
            if self._count[page] == 0:
                del self._kept[page]
            self._count[page] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages.

        Raises:
            RequestError: there are not so many.
        """
        if count > self.num_free:
            call = f"pages.take({count})"
            raise RequestError(call, f"{self.num_free} free pages of {self.num_pages}", "ask num_free first")
        taken = []
        for _ in range(count):
            page = self._blank.pop() if self._blank else self._forget_oldest()
            self._count[page] = 1
            taken.append(page)
        return taken

    def _forget_oldest(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def keep(self, page: int, name: bytes) -> None:
        """From now on a held page is found by its content. (Another one with the same content is found instead.)"""
        if name not in self._page_of and page not in self._hash_of:
            self._page_of[name] = page
            self._hash_of[page] = name

    def keep_part(self, page: int, name: bytes) -> None:
        """As long as a page is held, what it begins with is found by its content."""
        if name not in self._page_of_part and page not in self._part_of:
            self._page_of_part[name] = page
            self._part_of[page] = name

    def forget(self, pages: Iterable[int]) -> None:
        """Find held pages by their content no more."""
        for page in pages:
            self._forget_part(page)
            if (name := self._hash_of.pop(page, None)) is not None:
                del self._page_of[name]

    def _forget_part(self, page: int) -> None:
        if (name := self._part_of.pop(page, None)) is not None:
            del self._page_of_part[name]

    def release(self, pages: Sequence[int]) -> None:
        """Hold pages no more; the last of a request is the first to be forgotten, as the others serve more prompts."""
        for page in reversed(pages):
            self._count[page] -= 1
            if self._count[page] == 0:
                self._forget_part(page)
                if page in self._hash_of:
                    self._kept[page] = None
                else:
                    self._blank.append(page)


def hash_page(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a page's content: its tokens, and the name of the page before, so that equal names are equal
    prefixes.

    Args:
        before: of the page before, or of the first page what all content depends on (an adapter); and what else this
            page's depends on: embeddings, and positions (`weft.transforms.engine.prompts.Given`).
    """
    text = b",".join(b"%d" % token for token in token_ids)
    return hashlib.blake2b(before + b"|" + text, digest_size=16).digest()
