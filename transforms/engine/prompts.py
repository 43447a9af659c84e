"""Prompts: what a request brings beside token ids: embeddings, positions, and the extras that stages take."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int
from weft.batch import EMBEDDED
from weft.display.summary import Summarized
from weft.stages.model import Model
from weft.stages.rope import mrope_position_delta

_MAX_POSITION = 2**31
"""Limit of a prompt's positions; those after the prompt, counted on from its largest one, are int64."""
_PROMPT_RULES: dict[str, Rule] = {
    "inputs_embeds": (Tensor | None, "inputs_embeds=torch.as_tensor(...)"),
    "positions": (Tensor | None, "positions=torch.as_tensor(...)"),
    "without token_ids, inputs_embeds": (Tensor, "EmbedsPrompt(token_ids, inputs_embeds), or embeddings alone"),
}
_PLACE: Rule = (lambda place: is_int(place, 0, _MAX_POSITION - 1), f"positions from 0 to {_MAX_POSITION - 1}")


@attrs.frozen(eq=False, repr=False)
class EmbedsPrompt(Summarized):
    """A prompt with embeddings in place of some tokens, such as those of an image, or of all tokens.

    Args:
        token_ids: one id per token; `weft.EMBEDDED` (-2) where the token's embedding is in `inputs_embeds`. None: that
            is so for all tokens.
        inputs_embeds: [n, hidden_size] in the model's dtype, on any device; rows of other tokens are not read.
        positions: [3, n] int64, for a model with mRoPE: each token's place in time, height and width, from
            transformers' `get_rope_index`. None: the positions of text.

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
        values = {"inputs_embeds": self.inputs_embeds, "positions": self.positions}
        if self.token_ids is None:
            values["without token_ids, inputs_embeds"] = self.inputs_embeds
        check_values("weft.EmbedsPrompt(...)", _PROMPT_RULES, values)

    @property
    def ids(self) -> list[int]:
        """One token id, or EMBEDDED, per token."""
        if self.token_ids is not None:
            return list(self.token_ids)
        assert self.inputs_embeds is not None, "checked where it was made"
        return [EMBEDDED] * len(self.inputs_embeds)

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, call: str, model: Model) -> None:
        """Check the prompt against the model.

        Raises:
            RequestError: the parts do not fit the model or each other.
        """
        ids, config = self.ids, model.config
        shape, places = [len(ids), config.hidden_size], [3, len(ids)]
        embedded = ", some of which are EMBEDDED (-2)" if EMBEDDED in ids else ""
        rules: dict[str, Rule] = {
            "inputs_embeds": (
                lambda x: EMBEDDED not in ids if x is None else (list(x.shape), x.dtype) == (shape, model.dtype),
                f"a row for each of the prompt's {len(ids)} tokens{embedded}: {shape}, {model.dtype}",
            ),
            "positions": (
                lambda x: x is None or (list(x.shape), x.dtype) == (places, torch.int64),
                f"{places}, torch.int64: get_rope_index(...)[0][:, 0]",
            ),
        }
        if config.rope.mrope_section is None:
            rules["positions"] = (
                (lambda x: x is None),
                f"leave them out: {model!r} has no mRoPE",
            )
        check_values(call, rules, {"inputs_embeds": self.inputs_embeds, "positions": self.positions})
        if self.positions is not None:
            least, most = self.positions.aminmax()
            ends = {"the least position": int(least), "the greatest position": int(most)}
            check_values(call, dict.fromkeys(ends, _PLACE), ends)


@attrs.frozen
class PromptContent:
    """A prompt's embeddings and positions, which token ids do not tell. Equal when their contents are equal.

    Args:
        inputs_embeds, positions: as in `weft.EmbedsPrompt`; the positions are on the host.
        delta: position minus index, for each token after the prompt.
        contents: for each token of the prompt, what its keys and values depend on besides its id: the digest of its
            embedding, and its positions where they differ from its index. Empty for a plain text token.
    """

    inputs_embeds: Tensor | None = attrs.field(eq=False, repr=False)
    positions: Tensor | None = attrs.field(eq=False, repr=False)
    delta: int
    contents: tuple[bytes, ...] = attrs.field(repr=False)

    def content(self, start: int, stop: int) -> bytes:
        """What the keys and values of the request's tokens `start:stop` depend on besides their ids."""
        texts = ((index, self._content_of(index)) for index in range(start, stop))
        return b"".join(b";%d:%s" % (index - start, text) for index, text in texts if text)

    def _content_of(self, index: int) -> bytes:
        if index < len(self.contents):
            return self.contents[index]
        return position_content(index, [index + self.delta] * 3)


def position_content(index: int, positions: Sequence[int]) -> bytes:
    """A token's three positions as text; empty where each is the token's index, as for plain text."""
    return b"" if list(positions) == [index] * 3 else b"@%d/%d/%d" % tuple(positions)


def read_content(prompt: EmbedsPrompt) -> PromptContent:
    """A prompt's embeddings and positions, and their digests. Copies both, so that the user may change them later, and
    reads both on the host."""
    embeds, positions, ids = prompt.inputs_embeds, prompt.positions, prompt.ids
    embeds = None if embeds is None or EMBEDDED not in ids else embeds.detach().clone()
    positions = None if positions is None else positions.cpu().clone()
    texts = [b""] * len(ids)
    if embeds is not None:
        rows = embeds.cpu().contiguous().view(torch.uint8).numpy()
        texts = [_digest(row) if token == EMBEDDED else b"" for row, token in zip(rows, ids, strict=True)]
    if positions is not None:
        places = (position_content(index, own) for index, own in enumerate(positions.T.tolist()))
        texts = [text + place for text, place in zip(texts, places, strict=True)]
    delta = 0 if positions is None else mrope_position_delta(positions)
    return PromptContent(embeds, positions, delta, tuple(texts))


def _digest(row: Any) -> bytes:
    return hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest().encode()


@attrs.frozen
class RequestExtras:
    """A request's own extras: rows of the tables that its model's stages read. Equal when their contents are equal.

    Args:
        values: by name, on the host.
        digest: of all of them; pages of the KV cache that are computed with others have another name.
    """

    values: Mapping[str, Tensor] = attrs.field(eq=False, repr=False)
    digest: bytes


def check_extras(call: str, defaults: Mapping[str, Tensor], given: Any) -> RequestExtras | None:
    """A request's extras, copied to the host; None if it has none.

    Args:
        defaults: the model's extras by name.
        given: what the user passed.

    Raises:
        RequestError: a name that the model does not have, or a value of another shape or dtype.
    """
    if not given:
        check_values(call, {"extras": _EXTRAS}, {"extras": given})
        return None
    known = ", ".join(map(repr, defaults)) or "none: model.with_stages(..., extras={name: default})"
    names: Rule = (
        lambda own: isinstance(own, Mapping) and own.keys() <= defaults.keys(),
        f"a dict of the model's extras by name: {known}",
    )
    check_values(call, {"extras": names}, {"extras": given})
    rules = {name: _like(defaults[name]) for name in given}
    check_values(call, rules, given)
    values = {name: given[name].detach().to("cpu", copy=True) for name in sorted(given)}
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values.items():
        digest.update(b"%d:%s;" % (len(name), name.encode()))
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return RequestExtras(values, digest.hexdigest().encode())


_EXTRAS: Rule = (lambda given: given is None or isinstance(given, Mapping), "a dict of tensors by name, or None")


def _like(default: Tensor) -> Rule:
    """The rule of a request's value: a tensor of the default's shape and dtype."""

    def fits(given: Any) -> bool:
        return isinstance(given, Tensor) and (given.shape, given.dtype) == (default.shape, default.dtype)

    return fits, f"a tensor {list(default.shape)}, {default.dtype}, for one request, as the model's default"
