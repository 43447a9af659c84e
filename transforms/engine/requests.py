"""Requests: what was asked, and how far each has come."""

import hashlib

import attrs

from weft.ops.sampling.logits import PENALTIES
from weft.sampling import SamplingParams
from weft.sampling_table import features
from weft.transforms.engine.pages import hash_page
from weft.transforms.engine.prompts import Given


@attrs.frozen
class Request:
    """A prompt to go on from.

    Args:
        id: a name, unique among the requests that have not ended.
        prompt: token ids, at least one; EMBEDDED (-2) where `given` has an embedding.
        max_tokens: tokens to generate at most.
        sampling: how its tokens are chosen, and all that end it (`SamplingParams.for_request`).
        priority: FIFO within a priority; lower numbers first, and higher ones may get no turn.
        adapter: the slot of its LoRA adapter; -1: none.
        given: what its prompt has beside token ids; None: nothing.
        is_masked: whether what it may say next depends on what it has said, so that this must have been read.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    adapter: int = -1
    given: Given | None = None
    is_masked: bool = False

    def __str__(self) -> str:
        """What ranks must say alike of it, in a line."""
        contents = b"" if self.given is None else self.given.content(0, len(self.prompt))
        digest = hashlib.blake2b(repr(self.prompt).encode() + contents, digest_size=6).hexdigest()
        more = f", adapter {self.adapter}" * (self.adapter >= 0) + ", masked" * self.is_masked
        return (
            f"{self.id!r}, a prompt of {len(self.prompt)} tokens ({digest}), max_tokens={self.max_tokens}, "
            f"priority={self.priority}{more}, {self.sampling!r}"
        )


@attrs.define(eq=False)
class Running:
    """A request under way, as the host knows it: some steps behind the device, whose tokens it does not know; where
    there are drafts, nor how many: until it reads them its counts are bounds.

    Args:
        request: what was asked.
        arrival: its place in the order of arrival.
        version: of the parameters that compute its pages.
        tokens: the prompt and the tokens read so far.
        row: its row of the state; -1: it waits.
        cohort: who it is stepped with.
        pages: of the KV cache, in order.
        hashes: the names of its full pages of known tokens.
        kept: its pages that are found by their content.
        filled: tokens of those that it began with that are in the cache, with the steps under way.
        num_unread: steps that sample for it, and that the host has not read.
        most_unread: tokens that they sample at most.
        on_device: whether the state holds the token it goes on from.
        last_job: the last job that samples for it.
        reason: why it ended: `stop`, `length`, `abort` or `error`.
        leader: a request with the same prompt, for whose pages it waits.
        followers: those that wait for its own.
        drafts: whether several of its tokens may be sampled in a step.
        limit: tokens that it has at most, those of its prompt included.
    """

    request: Request
    arrival: int
    version: int
    tokens: list[int]
    row: int = -1
    cohort: int = -1
    pages: list[int] = attrs.field(factory=list)
    hashes: list[bytes] = attrs.field(factory=list)
    kept: int = 0
    filled: int = 0
    num_unread: int = 0
    most_unread: int = 0
    on_device: bool = False
    last_job: int | None = None
    reason: str = ""
    leader: "Running | None" = attrs.field(default=None, repr=False)
    followers: list["Running"] = attrs.field(factory=list, repr=False)
    drafts: bool = attrs.field(init=False)
    limit: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.limit = len(self.request.prompt) + self.request.max_tokens
        # Each token changes the penalties of the next, or its mask, so that several cannot be drawn at once.
        self.drafts = not (features(self.request.sampling) & PENALTIES or self.request.is_masked)

    @property
    def key(self) -> tuple[int, int]:
        """Whose turn it is: the least."""
        return self.request.priority, self.arrival

    @property
    def length(self) -> int:
        """Its tokens, with those under way, at most."""
        return min(len(self.tokens) + self.most_unread, self.limit)

    @property
    def computed(self) -> int:
        """Tokens in the cache, with the steps under way, at most: behind its prompt all but the last."""
        return self.length - 1 if self.on_device else self.filled

    @property
    def num_left(self) -> int:
        """Tokens that are still to be sampled behind the steps under way, at most."""
        return self.limit - len(self.tokens) - self.num_unread

    @property
    def is_full(self) -> bool:
        """Whether all its tokens are sampled, or will be."""
        return len(self.tokens) + self.num_unread >= self.limit

    @property
    def most_useful(self) -> int:
        """Tokens that a step could sample for it."""
        return self.num_left if self.drafts else 1

    def most(self, query_len: int) -> int:
        """Tokens that a step over so many, drafts included, samples for it at most."""
        return query_len if self.drafts else 1

    def name_pages(self, page_size: int) -> None:
        """Give names to the pages that known tokens have filled."""
        for index in range(len(self.hashes), len(self.tokens) // page_size):
            self.hashes.append(self._name_page(index, page_size))

    def name_part(self, page_size: int) -> bytes | None:
        """The name of what its tokens, all of them known, leave in a page that they do not fill; None where that is
        not worth a copy: its last token is computed anyway."""
        full = len(self.tokens) // page_size
        if len(self.tokens) - full * page_size < 2:
            return None
        self.name_pages(page_size)
        return self._name_page(full, page_size)

    def _name_page(self, index: int, page_size: int) -> bytes:
        """The name of a page, whose tokens are known as far as it is filled, and so are the names before it."""
        start, request = index * page_size, self.request
        tokens = self.tokens[start : start + page_size]
        before = self.hashes[index - 1] if index else salt(request.adapter, self.version)
        more = b"" if request.given is None else request.given.content(start, start + len(tokens))
        return hash_page(before + more, tokens)


def salt(adapter: int, version: int) -> bytes:
    """The beginning of every page's name: keys and values of equal tokens differ by the slot of the adapter that
    computes them (-1: none), and by the version of the parameters."""
    return b"version %d adapter %d" % (version, adapter)


def sample_seeds(seed: int, n: int) -> list[int]:
    """A seed for each of the `n` completions of a request; the first has the request's own."""
    return [seed, *(request_seed(seed, index) for index in range(1, n))]


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` of a run."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
