"""Chats, by templates of many families, against transformers' `apply_chat_template`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import weft
from weft.errors import RequestError
from weft.stages import ChatTemplate
from weft.stages.checkpoints import chat_jinja
from weft.stages.checkpoints.known_models import DEMO

END = "<|endoftext|>"
TEMPLATES = {
    "chatml": (
        "{%- for message in messages %}{%- if loop.first and message.role != 'system' %}{{-"
        " '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}{{- '<|im_start|>' +"
        " message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
        " '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content']"
        " | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content"
        " %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{"
        " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system ="
        " messages[0]['content'] %}{% set rest = messages[1:] %}{% else %}{% set rest = messages"
        " %}{% endif %}{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 %"
        " 2 == 0) %}{{ raise_exception('Conversation roles must alternate"
        " user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{"
        " '[INST] ' }}{% if loop.first and system is defined %}{{ system + '\\n\\n' }}{% endif %}{{"
        " message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{%"
        " endif %}{% endfor %}"
    ),
    "qwen3": (
        "{%- set ns = namespace(last=messages|length - 1) %}{%- if tools %}{{- '# Tools' }}{%- for"
        " tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n' }}{%- endif %}{%-"
        " for message in messages %}{%- set content = message.content %}{%- if message.role =="
        " 'assistant' and '</think>' in content %}{%- set content ="
        " content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{%- if loop.index0 == ns.last"
        " %}{%- set content = content ~ '!' %}{%- endif %}{{- '<|im_start|>' + message.role + '\\n'"
        " + content + '<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{-"
        " '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is"
        " false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    ),
    "marked": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}\n    {% if"
        " m.role == 'assistant' %}\n{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration"
        " %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    ),
}
VARIABLES: dict[str, list[dict[str, Any]]] = {
    "qwen3": [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"tools": [{"name": "größe", "n": [1, 2]}]},
    ]
}
words = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ["Hello", " a ", "<think>x</think>\ny", END, "{{ bos_token }}", "<|im_end|>", "\n"]
)
chats = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "system", "tool"]),
        words,
    ),
    min_size=1,
    max_size=4,
)


@attrs.frozen(eq=False)
class Both:
    """A model, and transformers' tokenizer of its folder, which begins each text with a token of
    its own."""

    model: weft.Model
    theirs: Any


@pytest.fixture(scope="module", params=TEMPLATES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Both]:
    folder = tmp_path_factory.mktemp("chat")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO / name)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 256)])
    names: dict[str, Any] = {
        "bos_token": END,
        "eos_token": END,
        "chat_template": TEMPLATES[request.param],
    }
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    theirs.save_pretrained(folder)
    return request.param, Both(weft.load(folder, "cpu", "float32"), theirs)


def rendered(theirs: Any, chat: Any, variables: dict[str, Any]) -> tuple[str | None, str]:
    """The text by transformers, or None and the beginning of its error."""
    try:
        return str(theirs.apply_chat_template(chat, tokenize=False, **variables)), ""
    except Exception as error:
        return None, str(error).split("\n")[0][:40]


@given(chats, st.booleans())
def test_the_prompt_is_that_of_transformers(both: tuple[str, Both], chat: Any, add: bool) -> None:
    name, pair = both
    for more in VARIABLES.get(name, [{}]):
        variables = {"add_generation_prompt": add, **more}
        text, refused = rendered(pair.theirs, chat, variables)
        if text is None:
            with pytest.raises(
                RequestError, match=r"the checkpoint's chat template raised"
            ) as caught:
                pair.model.encode_chat(chat, **variables)
            assert refused in str(caught.value)
            continue
        ids = pair.theirs.apply_chat_template(chat, **variables)["input_ids"]
        assert pair.model.encode_chat(chat, **variables) == ids
        assert pair.model.chat_template is not None
        assert pair.model.chat_template.render(chat, **variables) == text
        # The begin that the template itself may write is not doubled
        assert pair.model.encode(text) == [
            256,
            *ids,
        ]


@pytest.mark.one_of(5, 2)
def test_generate_completes_chats(both: tuple[str, Both]) -> None:
    model = both[1].model
    two = [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "A list is"}]]
    expected = weft.generate(model, [model.encode_chat(chat) for chat in two], max_tokens=5)
    completions = weft.generate(model, two, max_tokens=5, chat=True)
    assert [output.token_ids for output in completions] == [output.token_ids for output in expected]
    streamed = [*weft.generate(model, two[:1], max_tokens=5, chat=True, stream=True)]
    assert [token for output in streamed for token in output.token_ids] == expected[0].token_ids


WRONG: list[Any] = [
    "Hello",
    [],
    [["user", "Hello"]],
    None,
    {"role": "user", "content": "Hello"},
    [1, 2],
]


@pytest.mark.parametrize("messages", WRONG)
def test_what_is_no_chat(messages: Any) -> None:
    model = attrs.evolve(weft.load(DEMO, "cpu"), chat_template=ChatTemplate(TEMPLATES["chatml"]))
    with pytest.raises(
        RequestError, match=r"model.encode_chat\(messages\)\n.*\n  instead: a list of messages, as"
    ):
        model.encode_chat(messages)
    with pytest.raises(RequestError, match="instead: a list of messages, as in"):
        weft.generate(model, [messages], max_tokens=1, chat=True)


def test_a_checkpoint_without_a_template_or_a_tokenizer() -> None:
    model = weft.load(DEMO, "cpu")
    chat = [{"role": "user", "content": "Hello"}]
    assert model.chat_template is None
    with pytest.raises(
        RequestError, match=r"demo holds no chat template\n  instead: a checkpoint of a chat model"
    ):
        weft.generate(model, [chat], max_tokens=1, chat=True)
    mute = attrs.evolve(model, tokenizer=None, chat_template=ChatTemplate(TEMPLATES["chatml"]))
    with pytest.raises(RequestError, match=r"demo holds no tokenizer.json"):
        mute.encode_chat(chat)


@pytest.mark.parametrize("name", ["messages", "bos_token"])
def test_variables_that_are_the_checkpoints_own(name: str) -> None:
    template = ChatTemplate("{{ bos_token }}", {"bos_token": END})
    model = attrs.evolve(weft.load(DEMO, "cpu"), chat_template=template)
    chat = [{"role": "user", "content": "Hello"}]
    with pytest.raises(RequestError, match=rf"saw: the variable {name}\n  instead: other names"):
        model.encode_chat(chat, **{name: "x"})
    with pytest.raises(
        RequestError, match=rf"chat_template.render\(messages\)\n  saw: the variable {name}"
    ):
        template.render(chat, **{name: "x"})


def test_a_variable_of_any_name_is_a_variable() -> None:
    chat = [{"role": "user", "content": "Hello"}]
    for name in ("self", "call", "template", "variables", "context"):
        ChatTemplate("{{ messages[0].content }}").render(chat, **{name: "x"})
    assert ChatTemplate("{{ call }}{{ source }}").render(chat, call=1, source=2) == "12"


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    for source in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'a' * }}",
        "{{ 1 / 0 }}",
        f"{{% include '{tmp_path}' %}}",
    ):
        with pytest.raises(RequestError, match="the checkpoint's chat template raised"):
            ChatTemplate(source).render(chat)


_SLOW = """
import os
import chat_jinja
chat_jinja._limit_time(600.0)
while os.sched_getscheduler(0) != os.SCHED_IDLE:
    pass
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's priorities")
def test_a_slow_rendering_runs_only_when_nothing_else_does() -> None:
    folder = Path(chat_jinja.__file__).parent
    subprocess.run([sys.executable, "-c", _SLOW], cwd=folder, check=True, timeout=300)
