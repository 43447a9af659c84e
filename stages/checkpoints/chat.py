"""Chats as prompts, by the template that a checkpoint brings: Jinja, in a sandbox, as transformers runs it."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.arguments.checks import Rule, check_values
from weft.errors import CheckpointError, RequestError

Messages = Sequence[Mapping[str, Any]]
TOKENS = "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
"""The special tokens that a template may name."""
_RULES: dict[str, Rule] = {
    "messages": (
        lambda given: isinstance(given, list | tuple) and given and all(isinstance(own, Mapping) for own in given),
        'a list of messages, as in [{"role": "user", "content": "Hello"}]',
    )
}


class _Refused(Exception):
    """A template refuses its messages."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says; in a prompt it changes nothing."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _compiled(source: str) -> Any:
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


@attrs.frozen
class ChatTemplate:
    """A checkpoint's template.

    Args:
        source: in Jinja.
        special_tokens: the texts that it names, such as `bos_token`.
    """

    source: str = attrs.field(repr=False)
    special_tokens: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    def render(self, messages: Messages, /, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The messages as one text.

        Args:
            messages: each with a `role` and a `content`.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: others that the template reads, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: these are no messages, or the template refuses them.

        >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ end }}")
        >>> template.render([{"role": "user", "content": "Hello"}], end="</s>")
        '<user>Hello</s>'
        """
        own = {"add_generation_prompt": add_generation_prompt, **variables}
        return render_chat(self, "chat_template.render(messages)", messages, own)


def render_chat(template: ChatTemplate, call: str, messages: Messages, variables: Mapping[str, Any]) -> str:
    """As `ChatTemplate.render`; errors name `call`."""
    check_values(call, _RULES, {"messages": messages})
    reserved = [name for name in variables if name == "messages" or name in template.special_tokens]
    if reserved:
        raise RequestError(call, f"the variable {reserved[0]}", "other names: the checkpoint and the messages set it")
    given = {**template.special_tokens, **variables}
    try:
        return str(_compiled(template.source).render({**given, "messages": [dict(own) for own in messages]}))
    except Exception as error:  # a template is a program that somebody else wrote
        seen = f"the checkpoint's chat template raised {type(error).__name__}: {error!s:.300}"
        instead = 'messages that it takes, as in [{"role": "user", "content": "Hello"}]'
        raise RequestError(call, seen, instead) from error


def read_chat_template(folder: Path, call: str) -> ChatTemplate | None:
    """The template of a checkpoint folder, from chat_template.jinja or tokenizer_config.json; None if it has none.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    alone, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        source = alone.read_text(encoding="utf-8") if alone.is_file() else None
        raw = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(call, f"{folder}: {error}", "save the tokenizer again") from error
    raw = raw if isinstance(raw, dict) else {}
    source = _default_of(raw.get("chat_template")) if source is None else source
    if source is None:
        return None
    texts = {name: _text_of(raw.get(name)) for name in TOKENS}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None})


def _default_of(given: Any) -> str | None:
    """The template, or of several named ones that of the name `default`."""
    if isinstance(given, list):
        named = {own.get("name"): own.get("template") for own in given if isinstance(own, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _text_of(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
