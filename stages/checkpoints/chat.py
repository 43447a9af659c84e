"""Chats as prompts, by a checkpoint's chat template: Jinja in a sandbox, as in transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from weft.arguments.checks import Rule, check_values
from weft.errors import CheckpointError, RequestError
from weft.stages.checkpoints.chat_jinja import compiled, said

Messages = Sequence[Mapping[str, Any]]
# The special tokens that a template may name.
TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
_RULES: dict[str, Rule] = {
    "messages": (
        lambda conversation: (
            isinstance(conversation, list | tuple)
            and conversation
            and all(isinstance(message, Mapping) for message in conversation)
        ),
        'a list of messages, as in [{"role": "user", "content": "Hello"}]',
    )
}


@attrs.frozen
class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        source: the template in Jinja.
        special_tokens: the texts of the special tokens that it may use, such as `bos_token`.
    """

    source: str = attrs.field(repr=False)
    special_tokens: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    def render(
        self, messages: Messages, /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The messages as one text.

        Args:
            messages: dicts, each with a `role` and a `content`.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: other variables of the template, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: `messages` are not messages, or the template refuses them.

        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ end }}")
        >>> template.render([{"role": "user", "content": "Hello"}], end="</s>")
        '<user>Hello</s>'
        """
        context = {"add_generation_prompt": add_generation_prompt, **variables}
        return render_chat(self, "chat_template.render(messages)", messages, context)


def render_chat(
    template: ChatTemplate, call: str, messages: Messages, variables: Mapping[str, Any]
) -> str:
    """Like `ChatTemplate.render`; errors name `call`."""
    values = template_values(template, call, messages, variables)
    try:
        return str(compiled(template.source).render(values))
    # Any exception: a template is a program that somebody else wrote.
    except Exception as error:
        raise refused_by_template(call, said(error)) from error


def template_values(
    template: ChatTemplate, call: str, messages: Messages, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """All values that a template reads.

    Raises:
        RequestError: `messages` are not messages, or a variable has the name of another value.
    """
    check_values(call, _RULES, {"messages": messages})
    reserved = [name for name in variables if name == "messages" or name in template.special_tokens]
    if reserved:
        raise RequestError(
            call,
            f"the variable {reserved[0]}",
            "other names: the checkpoint and the messages set it",
        )
    return {
        **template.special_tokens,
        **variables,
        "messages": [dict(message) for message in messages],
    }


def refused_by_template(call: str, problem: str) -> RequestError:
    """The error for a template that raised."""
    return RequestError(
        call, problem, 'messages that it takes, as in [{"role": "user", "content": "Hello"}]'
    )


def read_chat_template(folder: Path, call: str) -> ChatTemplate | None:
    """The template of a checkpoint folder, from chat_template.jinja or tokenizer_config.json; None
    if it has none.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    alone = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    try:
        if alone.is_file():
            # Newer versions of transformers write this file, and it takes precedence there, too.
            source = alone.read_text(encoding="utf-8")
        else:
            source = None
        if config.is_file():
            raw = json.loads(config.read_text(encoding="utf-8"))
        else:
            raw = {}
    except (OSError, ValueError) as error:
        raise CheckpointError(call, f"{folder}: {error}", "save the tokenizer again") from error
    raw = raw if isinstance(raw, dict) else {}
    if source is None:
        source = _default_of(raw.get("chat_template"))
    if source is None:
        return None
    texts = {name: _text_of(raw.get(name)) for name in TOKENS}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None})


def _default_of(template: Any) -> str | None:
    """The template; if there are several, the one named `default`."""
    # Several templates are a list of objects: {"name": "tool_use", "template": ...}.
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if isinstance(template, str):
        return template
    return None


def _text_of(token: Any) -> str | None:
    # A token is a text, or an AddedToken as an object: {"content": "<s>", "lstrip": false, ...}.
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        return token
    return None
