"""The prefix cache as the scheduler uses it: requests get pages that other requests have computed,
and publish the pages that they compute.

The pages themselves are in `weft.transforms.engine.requests.pages`.
"""

from weft.transforms.engine.requests.host_state import HostState, RequestState, requeue_followers
from weft.transforms.engine.requests.pages import Pages


def allocate_pages(host: HostState, req: RequestState, copies: list[tuple[int, int]]) -> bool:
    """Give a request the pages of its tokens, cached ones first; False if too few are free."""
    pages = host.pages
    length = req.length
    shared, source = lookup_prefix(pages, req)
    cached_pages = [*shared, *([] if source is None else [source])]
    need = pages.pages_for(length) - len(shared)
    if need > pages.count_free(cached_pages):
        return False
    # Before `allocate`, which could otherwise evict the cached pages.
    pages.acquire(cached_pages)
    req.pages = [*shared, *pages.allocate(need)]
    num_found = len(shared) * pages.page_size
    if req.request.prefix_caching == "recompute":
        req.num_found = num_found
    else:
        req.num_prefilled = num_found
    if source is not None:
        copies.append((source, req.pages[len(shared)]))
        # The copy holds all tokens but the last, which is computed for its logits.
        req.num_prefilled = length - 1
    host.num_found += max(num_found, req.num_prefilled)
    return True


def lookup_prefix(pages: Pages, req: RequestState) -> tuple[list[int], int | None]:
    """The cached pages that a request can share, and a cached page after them for it to copy.

    A request computes at least its last token, whose logits it needs. So if all of its pages are
    cached, it copies the last one and writes on the copy. With the policy `snapshot` it recomputes
    this page instead, since snapshots exist for whole pages only. With `recompute` it can share all
    pages, since recomputed tokens are not written.
    """
    policy = req.request.prefix_caching
    has_logprobs = req.request.sampling.prompt_logprobs is not None
    req.hash_pages(pages.page_size)
    # Logprobs need the logits of every token of the prompt.
    if policy == "none" or (has_logprobs and policy != "recompute"):
        return [], None
    shared = pages.lookup(req.page_hashes)
    if policy == "recompute":
        return shared, None
    if len(shared) * pages.page_size == req.length:
        return shared[:-1], shared[-1] if policy == "full" else None
    if policy == "snapshot":
        return shared, None
    if len(shared) == len(req.page_hashes):
        content_hash = req.hash_partial_page(pages.page_size)
    else:
        content_hash = None
    return shared, None if content_hash is None else pages.lookup_partial(content_hash)


def publish_pages(host: HostState, req: RequestState) -> None:
    """Publish a request's full pages to the prefix cache, once they are computed by launched
    steps."""
    req.hash_pages(host.pages.page_size)
    full = min(len(req.tokens), req.num_computed) // host.pages.page_size
    for index in range(req.num_published, full):
        host.pages.publish(req.pages[index], req.page_hashes[index])
    req.num_published = max(req.num_published, full)


def publish_prompt(host: HostState, req: RequestState) -> None:
    """Once launched steps compute all known tokens of a request, publish its partly filled last
    page, and requeue its followers."""
    if req.num_computed < len(req.tokens):
        return
    if (content_hash := req.hash_partial_page(host.pages.page_size)) is not None:
        host.pages.publish_partial(req.pages[len(req.page_hashes)], content_hash)
    requeue_followers(host, req)
