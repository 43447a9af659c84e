"""Prompts: what a request brings besides token ids: embeddings, positions, and extra inputs for
stages."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values, is_int
from weft.display.summary import Summarized
from weft.ops.requests import EMBEDDED
from weft.stages.attention.rope import mrope_position_delta
from weft.stages.custom.functions import StageFunctions
from weft.stages.model import Model

# Limit of a prompt's positions. Positions after the prompt continue from the largest one, in int64,
# and so do not overflow.
_MAX_POSITION = 2**31
_PROMPT_RULES: dict[str, Rule] = {
    "inputs_embeds": (Tensor | None, "inputs_embeds=torch.as_tensor(...)"),
    "positions": (Tensor | None, "positions=torch.as_tensor(...)"),
    "without token_ids, inputs_embeds": (
        Tensor,
        "EmbedsPrompt(token_ids, inputs_embeds), or embeddings alone",
    ),
}
_PLACE: Rule = (
    lambda place: is_int(place, 0, _MAX_POSITION - 1),
    f"positions from 0 to {_MAX_POSITION - 1}",
)


@attrs.frozen(eq=False, repr=False)
class EmbedsPrompt(Summarized):
    """A prompt with embeddings in place of some tokens, such as those of an image, or of all
    tokens.

    Args:
        token_ids: one id per token; `weft.EMBEDDED` (-2) where the token's embedding is in
            `inputs_embeds`. None: all tokens are embedded.
        inputs_embeds: [n, hidden_size] in the model's dtype, on any device; rows of tokens that
            have an id are not read.
        positions: [3, n] int64, for a model with mRoPE: each token's place in time, height and
            width, from transformers' `get_rope_index`. None: the positions of text.

    >>> import weft
    >>> from weft.transforms.engine.generate import generate
    >>> model = weft.load("demo", "cpu")
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

    def __len__(self) -> int:
        return len(ids_of(self))


def check_embeds(prompt: EmbedsPrompt, call: str, model: Model) -> None:
    """Check the prompt against the model.

    Raises:
        RequestError: the parts do not fit the model, or each other.
    """
    ids = ids_of(prompt)
    config = model.config
    shape, places = [len(ids), config.hidden_size], [3, len(ids)]
    if EMBEDDED in ids:
        embedded = ", some of which are EMBEDDED (-2)"
    else:
        embedded = ""
    rules: dict[str, Rule] = {
        "inputs_embeds": (
            lambda x: (
                EMBEDDED not in ids
                if x is None
                else (list(x.shape), x.dtype) == (shape, model.dtype)
            ),
            (f"a row for each of the prompt's {len(ids)} tokens{embedded}: {shape}, {model.dtype}"),
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
    check_values(
        call, rules, {"inputs_embeds": prompt.inputs_embeds, "positions": prompt.positions}
    )
    if prompt.positions is not None:
        least, most = prompt.positions.aminmax()
        ends = {"the least position": int(least), "the greatest position": int(most)}
        check_values(call, dict.fromkeys(ends, _PLACE), ends)


def ids_of(prompt: EmbedsPrompt) -> list[int]:
    """One token id, or EMBEDDED, per token."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    assert prompt.inputs_embeds is not None, "checked where it was made"
    return [EMBEDDED] * len(prompt.inputs_embeds)


@attrs.frozen
class PromptContent:
    """A prompt's embeddings, positions and per-token inputs, which its token ids do not determine.
    Two are equal if their contents are equal.

    Args:
        inputs_embeds, positions: as in `weft.EmbedsPrompt`; the positions are on the host.
        delta: position minus index, for each token after the prompt.
        contents: for each token of the prompt, what its keys and values depend on besides its id:
            the digest of its embedding, its positions if they differ from its index, and the digest
            of its inputs if they differ from the defaults. Empty for a plain text token.
        token_extras: [n + 1, ...] by name: each token's inputs for the model's stages; the last row
            is the default.
    """

    inputs_embeds: Tensor | None = attrs.field(eq=False, repr=False)
    positions: Tensor | None = attrs.field(eq=False, repr=False)
    delta: int
    contents: tuple[bytes, ...] = attrs.field(repr=False)
    token_extras: Mapping[str, Tensor] = attrs.field(factory=dict, eq=False, repr=False)

    def content(self, start: int, stop: int) -> bytes:
        """What the keys and values of the request's tokens `start:stop` depend on besides their
        ids."""
        texts = ((index, self._content_of(index)) for index in range(start, stop))
        return b"".join(b";%d:%s" % (index - start, text) for index, text in texts if text)

    def _content_of(self, index: int) -> bytes:
        if index < len(self.contents):
            return self.contents[index]
        return position_content(index, [index + self.delta] * 3)


def position_content(index: int, positions: Sequence[int]) -> bytes:
    """A token's three positions as text; empty if each equals the token's index, as for plain
    text."""
    if list(positions) == [index] * 3:
        return b""
    return b"@%d/%d/%d" % tuple(positions)


def read_content(prompt: EmbedsPrompt) -> PromptContent:
    """A prompt's embeddings and positions, and their digests. Both are copied, so that the user may
    change them later, and both are read on the host."""
    embeds = prompt.inputs_embeds
    positions = prompt.positions
    ids = ids_of(prompt)
    if embeds is None or EMBEDDED not in ids:
        embeds = None
    else:
        embeds = embeds.detach().clone()
    if positions is None:
        positions = None
    else:
        positions = positions.cpu().clone()
    texts = [b""] * len(ids)
    if embeds is not None:
        rows = zip(_bytes_of(embeds), ids, strict=True)
        texts = [_digest(row) if token == EMBEDDED else b"" for row, token in rows]
    if positions is not None:
        places = (
            position_content(index, position) for index, position in enumerate(positions.T.tolist())
        )
        texts = [text + place for text, place in zip(texts, places, strict=True)]
    if positions is None:
        delta = 0
    else:
        delta = mrope_position_delta(positions)
    return PromptContent(embeds, positions, delta, tuple(texts))


def _digest(row: Any) -> bytes:
    return hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest().encode()


@attrs.frozen
class RequestExtras:
    """A request's extra inputs: rows of the tables that the model's stages read. Two are equal if
    their contents are equal.

    Args:
        values: by name, on the host.
        digest: a digest of all values, which enters the hashes of the request's KV pages.
    """

    values: Mapping[str, Tensor] = attrs.field(eq=False, repr=False)
    digest: bytes


def check_extras(
    call: str, functions: StageFunctions, extras: Any, num_tokens: int
) -> tuple[RequestExtras | None, dict[str, Tensor]]:
    """Copies of a request's extras, and of its tokens' extras; None and an empty dict if there are
    none.

    Args:
        functions: the model's, which hold the default values by name.
        extras: what the user passed.
        num_tokens: of the request's prompt.

    Raises:
        RequestError: the model has no extra of a name, or a value has another shape or dtype than
            the default.
    """
    if not extras:
        check_values(call, {"extras": _EXTRAS}, {"extras": extras})
        return None, {}
    defaults = functions.extras
    of_tokens = functions.token_extras
    instead = (
        f"a dict of the model's extras by name: {', '.join(map(repr, (*defaults, *of_tokens)))}"
    )
    if not (defaults or of_tokens):
        instead = (
            "no extras, since the model has none; model.with_stages(..., extras={name: default})"
            " gives it some"
        )
    names: Rule = (
        lambda mapping: isinstance(mapping, Mapping) and mapping.keys() <= {*defaults, *of_tokens},
        instead,
    )
    check_values(call, {"extras": names}, {"extras": extras})
    rules = {name: _like(defaults[name]) for name in extras.keys() & defaults}
    rules |= {name: _like(of_tokens[name], num_tokens) for name in extras.keys() & of_tokens}
    check_values(call, rules, extras)
    tokens = {name: extras[name].detach().clone() for name in of_tokens if name in extras}
    values = {
        # A copy even of a tensor on the CPU, since the user may change it before the request is
        # admitted.
        name: extras[name].detach().to("cpu", copy=True)
        # Sorted, so that the digest does not depend on the order of the user's dict.
        for name in sorted(extras.keys() - tokens.keys())
    }
    if not values:
        return None, tokens
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values.items():
        # With its length, so that no two sets of names give the same bytes.
        digest.update(b"%d:%s;" % (len(name), name.encode()))
        digest.update(_bytes_of(value.reshape(1, -1))[0].tobytes())
    return RequestExtras(values, digest.hexdigest().encode()), tokens


def with_token_extras(
    content: PromptContent | None,
    defaults: Mapping[str, Tensor],
    token_extras: Mapping[str, Tensor],
    num_tokens: int,
) -> PromptContent | None:
    """A prompt's content with its tokens' inputs; unchanged if none are given.

    Args:
        content: the prompt's embeddings and positions; None: it has none.
        defaults: the model's, by name.
        token_extras: [num_tokens, ...] by name; a name that is missing here has its default for all
            tokens.
    """
    if not token_extras:
        return content
    content = content or PromptContent(None, None, 0, (b"",) * num_tokens)
    rows = dict[str, Tensor]()
    texts = [hashlib.blake2b(digest_size=16) for _ in range(num_tokens)]
    differs = [False] * num_tokens
    for name, default in sorted(defaults.items()):
        last = default[None].to(token_extras[name].device if name in token_extras else "cpu")
        rows[name] = torch.cat(
            (token_extras.get(name, last.expand(num_tokens, *default.shape)), last)
        )
        whole = _bytes_of(rows[name].flatten(1) if default.dim() else rows[name][:, None])
        for index, (text, row) in enumerate(zip(texts, whole, strict=False)):
            text.update(row.tobytes())
            # By bytes, as in the digest: by value, a default that is NaN would differ from itself.
            differs[index] |= bool((row != whole[-1]).any())
    more = (
        b"#" + text.hexdigest().encode() if is_different else b""
        for text, is_different in zip(texts, differs, strict=True)
    )
    contents = tuple(before + after for before, after in zip(content.contents, more, strict=True))
    return attrs.evolve(content, contents=contents, token_extras=rows)


def _bytes_of(rows: Tensor) -> Any:
    """The bytes of each row of a tensor [n, ...], as an array on the host."""
    return rows.cpu().contiguous().view(torch.uint8).numpy()


_EXTRAS: Rule = (
    lambda extras: extras is None or isinstance(extras, Mapping),
    "a dict of tensors by name, or None",
)


def _like(default: Tensor, num_tokens: int | None = None) -> Rule:
    """The rule for a request's value: a tensor of the default's shape and dtype, or one such value
    per token."""
    shape = [*([] if num_tokens is None else [num_tokens]), *default.shape]

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and (list(value.shape), value.dtype) == (
            shape,
            default.dtype,
        )

    if num_tokens is None:
        each = "for one request"
    else:
        each = f"for each of the prompt's {num_tokens} tokens"
    return fits, f"a tensor {shape}, {default.dtype}, {each}, as the model's default"
