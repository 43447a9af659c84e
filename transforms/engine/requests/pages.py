"""Pages of the KV cache: reference counts, and a prefix cache that looks up pages by content.

Eviction: a full, published page stays in the prefix cache when no request holds it any more.
`Pages.allocate` evicts such pages, least recently used first, only when no empty page is left.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs


@attrs.define(eq=False)
class Pages:
    """The pages of a KV cache.

    A page that no request holds is free. A free page is empty or evictable. An evictable page is
    published under the hash of its content, and a request that begins with the same tokens shares
    it. A page that a prompt fills in part can be looked up while a request holds it; whoever finds
    it copies it, because its owner continues to write to it.

    Args:
        num_pages: the total, on each stage.
        page_size: tokens per page.
    """

    num_pages: int
    page_size: int
    _refcounts: list[int] = attrs.field(init=False)
    _empty: list[int] = attrs.field(init=False)
    _evictable: OrderedDict[int, None] = attrs.field(init=False, factory=OrderedDict)
    _hash_of: dict[int, bytes] = attrs.field(init=False, factory=dict)
    _page_of: dict[bytes, int] = attrs.field(init=False, factory=dict)
    _partial_hash_of: dict[int, bytes] = attrs.field(init=False, factory=dict)
    _page_of_partial: dict[bytes, int] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._refcounts = [0] * self.num_pages
        # Descending, since `pop` takes from the end: page 0 is used first.
        self._empty = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that no request holds."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_held(self) -> int:
        """Pages that at least one request holds."""
        return self.num_pages - self.num_free

    @property
    def num_evictable(self) -> int:
        """Free pages whose content can still be looked up."""
        return len(self._evictable)

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """The published pages with these content hashes, up to the first hash that is missing."""
        pages = []
        for content_hash in hashes:
            if (page := self._page_of.get(content_hash)) is None:
                break
            pages.append(page)
        return pages

    def lookup_partial(self, content_hash: bytes) -> int | None:
        """A held page that begins with this content. Copy it: its owner continues to write after
        that content."""
        return self._page_of_partial.get(content_hash)

    def count_free(self, shared: Sequence[int]) -> int:
        """Number of pages that can be allocated once the pages `shared` are held."""
        # A shared page that nobody holds is free now, but will not be once it is acquired: it must
        # not count twice.
        return self.num_free - sum(self._refcounts[page] == 0 for page in shared)

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages that a lookup returned."""
        for page in pages:
            if self._refcounts[page] == 0:
                # Out of the eviction order, or the next `allocate` could give a page that is being
                # read to another request.
                del self._evictable[page]
            self._refcounts[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold `count` free pages, at most `num_free`: empty ones first, then evicted ones."""
        assert count <= self.num_free, "the scheduler asks num_free first"
        allocated = []
        for _ in range(count):
            # An empty page costs nothing; an eviction costs a prefix that a later prompt could
            # share.
            if self._empty:
                page = self._empty.pop()
            else:
                page = self._evict_oldest()
            self._refcounts[page] = 1
            allocated.append(page)
        return allocated

    def _evict_oldest(self) -> int:
        """Drop the least recently used page from the prefix cache."""
        page, _ = self._evictable.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def publish(self, page: int, content_hash: bytes) -> None:
        """Publish a full, held page under its content's hash. If another page with the same content
        is published, that one stays."""
        if content_hash not in self._page_of and page not in self._hash_of:
            self._page_of[content_hash] = page
            self._hash_of[page] = content_hash

    def publish_partial(self, page: int, content_hash: bytes) -> None:
        """Publish the beginning of a held page under its content's hash, for as long as the page is
        held."""
        if content_hash not in self._page_of_partial and page not in self._partial_hash_of:
            self._page_of_partial[content_hash] = page
            self._partial_hash_of[page] = content_hash

    def unpublish(self, pages: Iterable[int]) -> None:
        """Remove held pages from the prefix cache."""
        for page in pages:
            self._unpublish_partial(page)
            if (content_hash := self._hash_of.pop(page, None)) is not None:
                del self._page_of[content_hash]

    def forget(self) -> int:
        """Remove all pages from the prefix cache, including those that requests hold; returns how
        many were published."""
        count = len(self._page_of)
        # Held pages follow when they are released, since nothing is published then.
        self._empty += self._evictable
        for names in (
            self._evictable,
            self._hash_of,
            self._page_of,
            self._partial_hash_of,
            self._page_of_partial,
        ):
            names.clear()
        return count

    def _unpublish_partial(self, page: int) -> None:
        if (content_hash := self._partial_hash_of.pop(page, None)) is not None:
            del self._page_of_partial[content_hash]

    def release(self, pages: Sequence[int]) -> None:
        """Release a request's pages. Its last pages are evicted first, because the first pages of a
        prompt are a prefix of more prompts."""
        for page in reversed(pages):
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                self._unpublish_partial(page)
                if page in self._hash_of:
                    self._evictable[page] = None
                else:
                    self._empty.append(page)


def hash_page(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The content hash of a page: a hash of its tokens and of the hash before it, so that equal
    hashes mean equal prefixes.

    Args:
        before: the hash of the previous page; for the first page, a salt for what all content
            depends on (adapter, parameters). Appended to it is what else this page depends on:
            embeddings, positions and per-token inputs
            (`weft.transforms.engine.requests.prompts.PromptContent`).
    """
    # The count marks where the tokens begin: `before` may end with content of any length.
    return _digest(before, b"|%d|" % len(token_ids) + array("q", token_ids).tobytes())


def hash_pages(before: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """`hash_page` of each full page of these tokens, in one fast loop, for tokens without
    embeddings, positions or inputs.

    >>> first = hash_page(b"", [1, 2])
    >>> hash_pages(b"", [1, 2, 3, 4, 5], 2) == [first, hash_page(first, [3, 4])]
    True
    """
    ids = array("q", token_ids)
    size = page_size * array("q").itemsize
    hashes = list[bytes]()
    data = ids.tobytes()
    head = b"|%d|" % page_size
    for start in range(0, len(ids) // page_size * size, size):
        before = _digest(before, head + data[start : start + size])
        hashes.append(before)
    return hashes


def _digest(before: bytes, content: bytes) -> bytes:
    # 16 bytes: two prefixes of one hash would share pages silently, which at 128 bits does not
    # happen by chance.
    return hashlib.blake2b(before + content, digest_size=16).digest()
