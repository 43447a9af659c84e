"""Prompts that are not tokens alone: embeddings, and three positions a token."""

import hashlib
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments import kind_of
from weft.batch import EMBEDDED, IN_ORDER
from weft.errors import RequestError
from weft.stages.model import Model
from weft.stages.rope import mrope_position_delta
from weft.summary import Summarized
from weft.torchapi import to_device

_MOST = 2**31
"""Positions; those behind the prompt, counted from its largest one, are int64."""


@attrs.frozen(eq=False, repr=False)
class EmbedsPrompt(Summarized):
    """A prompt with embeddings in the place of some tokens, such as those of an image, or of all.

    Args:
        token_ids: of each token; `weft.EMBEDDED` (-2) where `inputs_embeds` has it. None: everywhere.
        inputs_embeds: [n, hidden_size] in the model's dtype, on any device; rows of other tokens are not read.
        positions: [3, n] int64, for a model with mRoPE: where each token stands in time, height and width, as
            transformers' `get_rope_index` says. None: as text does.

    >>> from weft.stages.model import DEMO, load
    >>> from weft.transforms.engine.generate import generate
    >>> model = load(DEMO, "cpu")
    >>> ids = model.encode("The function returns")
    >>> prompt = EmbedsPrompt([EMBEDDED, *ids[1:]], model.params.embed_tokens[ids])
    >>> one, other = generate(model, [prompt, ids], max_tokens=4)
    >>> one.token_ids == other.token_ids
    True
    """

    token_ids: Sequence[int] | None = None
    inputs_embeds: Tensor | None = None
    positions: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("inputs_embeds", "positions"):
            if not isinstance(value := getattr(self, name), Tensor | None):
                seen = f"{name} is {kind_of(value)}"
                raise RequestError("weft.EmbedsPrompt(...)", seen, f"{name}=torch.as_tensor(...)")
        if self.token_ids is None and self.inputs_embeds is None:
            call, instead = "weft.EmbedsPrompt(...)", "EmbedsPrompt(token_ids, inputs_embeds), or embeddings alone"
            raise RequestError(call, "neither token_ids nor inputs_embeds", instead)

    @property
    def ids(self) -> list[int]:
        """A token id each, or EMBEDDED."""
        if self.token_ids is not None:
            return list(self.token_ids)
        assert self.inputs_embeds is not None, "checked where it was made"
        return [EMBEDDED] * len(self.inputs_embeds)

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, call: str, model: Model) -> None:
        """Refuse what does not fit the model or itself.

        Raises:
            RequestError: it is so.
        """
        ids, hidden = self.ids, model.config.hidden_size
        _check_embeds(call, self.inputs_embeds, EMBEDDED in ids, (len(ids), hidden), model.dtype)
        if self.positions is None:
            return
        if model.config.rope.mrope_section is None:
            seen = f"positions, and {model!r}, which has no mRoPE"
            raise RequestError(call, seen, "EmbedsPrompt(token_ids, inputs_embeds): a token stands where it is read")
        if self.positions.shape != (3, len(ids)) or self.positions.dtype != torch.int64:
            seen = f"positions of shape {list(self.positions.shape)}, {self.positions.dtype}, for {len(ids)} tokens"
            raise RequestError(call, seen, f"[3, {len(ids)}] int64: get_rope_index(...)[0][:, 0]")
        if outside := [x for x in (int(self.positions.min()), int(self.positions.max())) if not 0 <= x < _MOST]:
            raise RequestError(call, f"a position {outside[0]}", f"positions from 0 to {_MOST - 1}")


def _check_embeds(call: str, given: Any, needed: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if given is None and needed:
        raise RequestError(call, "a token that is EMBEDDED (-2), and no inputs_embeds", f"inputs_embeds {list(shape)}")
    if given is not None and (tuple(given.shape) != shape or given.dtype != dtype):
        seen = f"inputs_embeds of shape {list(given.shape)}, {given.dtype}, for {shape[0]} tokens"
        raise RequestError(call, seen, f"a row for each of the prompt's tokens: {list(shape)}, {dtype}")


@attrs.frozen
class Given:
    """What a request's prompt has beside token ids. Equal where the contents are.

    Args:
        inputs_embeds, positions: of the prompt; the positions on the host.
        delta: how far tokens behind the prompt stand from their places.
        contents: for each token of the prompt, what its keys and values depend on beside ids: the digest of its
            embedding, and its positions where they are not its place; empty for one that is like a token of text.
    """

    inputs_embeds: Tensor | None = attrs.field(eq=False, repr=False)
    positions: Tensor | None = attrs.field(eq=False, repr=False)
    delta: int
    contents: tuple[bytes, ...] = attrs.field(repr=False)

    def content(self, start: int, stop: int) -> bytes:
        """What keys and values of the request's tokens from one to another depend on beside their ids."""
        told = ((at, self._of_token(at)) for at in range(start, stop))
        return b"".join(b";%d:%s" % (at - start, text) for at, text in told if text)

    def _of_token(self, at: int) -> bytes:
        return self.contents[at] if at < len(self.contents) else _of_position(at, [at + self.delta] * 3)


def read_given(prompt: EmbedsPrompt) -> Given:
    """What a prompt has beside ids, with its contents: copies, so that nobody changes what they say. Reads both on the
    host."""
    embeds, positions, ids = prompt.inputs_embeds, prompt.positions, prompt.ids
    embeds = None if embeds is None or EMBEDDED not in ids else embeds.detach().clone()
    positions = None if positions is None else positions.cpu().clone()
    texts = [b""] * len(ids)
    if embeds is not None:
        rows = embeds.cpu().contiguous().view(torch.uint8).numpy()
        texts = [_digest(row) if token == EMBEDDED else b"" for row, token in zip(rows, ids, strict=True)]
    if positions is not None:
        places = (_of_position(at, own) for at, own in enumerate(positions.T.tolist()))
        texts = [text + place for text, place in zip(texts, places, strict=True)]
    delta = 0 if positions is None else mrope_position_delta(positions)
    return Given(embeds, positions, delta, tuple(texts))


def _digest(row: Any) -> bytes:
    return hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest().encode()


def _of_position(at: int, own: Sequence[int]) -> bytes:
    """A token's three positions in words; nothing where they are its place, as a token of text has it."""
    return b"" if list(own) == [at] * 3 else b"@%d/%d/%d" % tuple(own)


def place_embeds(
    given: Sequence[Given | None],
    starts: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    device: torch.device | str,
) -> Tensor | None:
    """The embeddings [num_tokens, hidden_size] of a batch's tokens; None where none is EMBEDDED.

    Args:
        given: of each request.
        starts: tokens of each before the batch.
        token_ids: of each, in the batch.
    """
    if not any(EMBEDDED in ids for ids in token_ids):
        return None
    like = next(one.inputs_embeds for one in given if one is not None and one.inputs_embeds is not None)
    placed = torch.zeros(sum(map(len, token_ids)), like.shape[1], dtype=like.dtype, device=device)
    first = 0
    for one, start, ids in zip(given, starts, token_ids, strict=True):
        if one is not None and one.inputs_embeds is not None:
            own = one.inputs_embeds[start : start + len(ids)]
            placed[first : first + len(own)] = to_device(own, device)
        first += len(ids)
    return placed


def place_positions(
    given: Sequence[Given | None],
    starts: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    device: torch.device | str,
) -> Tensor | None:
    """The positions [3, num_tokens] of a batch's tokens, -1 where they follow from the state; None where all do. The
    arguments as of `place_embeds`."""
    placed = torch.full((3, sum(map(len, token_ids))), IN_ORDER)
    first = 0
    for one, start, ids in zip(given, starts, token_ids, strict=True):
        if one is not None and one.positions is not None:
            own = one.positions[:, start : start + len(ids)]
            placed[:, first : first + own.shape[1]] = own
        first += len(ids)
    return to_device(placed, device) if bool((placed >= 0).any()) else None
