"""Task files: texts to be scored and questions to be answered, one JSON object a line."""

from pathlib import Path

import attrs

from weft.errors import RequestError
from weft.json_text import parse_json

_MOST = 2**26
"""Characters of a file."""
_FORMS = 'a JSON object a line: {"text": "..."}, or {"prompt": "...", "answer": "..."}'


@attrs.frozen
class Text:
    """A text whose tokens are scored."""

    line: int
    text: str


@attrs.frozen
class Question:
    """A prompt that is answered right if the completion, of as many tokens as the answer has, is the answer."""

    line: int
    prompt: str
    answer: str


def read_tasks(path: str) -> tuple[list[Text], list[Question]]:
    """The texts and the questions of a task file; empty lines are none.

    Raises:
        RequestError: the file cannot be read, or holds a line that is neither, or nothing.
    """
    call = f"weft bench --eval {path:.300}"
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except (OSError, ValueError) as error:
        raise RequestError(call, f"it cannot be read: {error}", "a file of UTF-8 text") from error
    if len(text) > _MOST:
        raise RequestError(call, f"more than {_MOST} characters", "a part of it")
    lines = text.split("\n")
    tasks = [_task(call, index + 1, line) for index, line in enumerate(lines) if line.strip()]
    if not tasks:
        raise RequestError(call, "no task in it", _FORMS)
    return [one for one in tasks if isinstance(one, Text)], [one for one in tasks if isinstance(one, Question)]


def _task(call: str, number: int, line: str) -> Text | Question:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise RequestError(call, f"line {number} is no JSON: {error}", _FORMS) from error
    names = sorted(found) if isinstance(found, dict) else []
    if names not in (["text"], ["answer", "prompt"]):
        seen = f"line {number} has {', '.join(map(repr, names)) or 'no names'}"
        raise RequestError(call, seen, _FORMS)
    for name in names:
        if not isinstance(found[name], str) or not found[name]:
            raise RequestError(call, f"line {number} has {name}={found[name]!r}", f"{name} is a string, not empty")
    return Text(number, found["text"]) if names == ["text"] else Question(number, found["prompt"], found["answer"])
