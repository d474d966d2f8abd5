"""Chat templates with tools: what they render is read back, and which is for which model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from agentrl.algorithms.model import templates
from agentrl.algorithms.model.chat import Chat, Codec, RequestError
from agentrl.algorithms.model.templates import proposed
from agentrl.algorithms.model.tool_formats import TOOL_FORMAT, ToolParser, mark, parser_of
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.doctor import policy as doctors
from tests.algorithms.model.roundtrip import TOOLS, failures, family_tokenizer, tool_roundtrip

NAMES = list(templates.templates())
NO_TOOLS = (  # as SmolLM2 publishes it
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
    " Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("name", NAMES)
def test_conversations_come_back_as_they_were(name: str) -> None:
    assert [line for line in failures(name) if line] == []
    assert tool_roundtrip(name) == 1.0


def test_a_parser_of_another_format_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(family_tokenizer("llama3").init_kwargs, TOOL_FORMAT, "hermes")
    assert tool_roundtrip("llama3") < 0.5


CALLED = [
    *HI,
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00001", "type": "function",
         "function": {"name": "query", "arguments": '{"text": "a"}'}}
    ]},
    {"role": "tool", "content": "3 rows", "tool_call_id": "call00001"},
]  # fmt: skip
# What each family's published format has of this conversation, in this order.
PUBLISHED = {
    "chatml": ["<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n<tool_call>\n",
               '{"name": "query", "arguments": {"text": "a"}}', "\n</tool_call><|im_end|>\n",
               "<|im_start|>user\n<tool_response>\n3 rows\n</tool_response><|im_end|>\n",
               "<|im_start|>assistant\n"],
    "smollm": ["<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"],
    "qwen": ["<|im_start|>system\nYou are Qwen, created by Alibaba Cloud."],
    "qwen3_coder": ["<tool_call>\n<function=query>\n<parameter=text>\na\n</parameter>\n",
                    "</function>\n</tool_call><|im_end|>\n"],
    "llama3": ["<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
               "<|start_header_id|>assistant<|end_header_id|>\n\n",
               '{"name": "query", "parameters": {"text": "a"}}<|eot_id|>',
               "<|start_header_id|>ipython<|end_header_id|>\n\n3 rows<|eot_id|>",
               "<|start_header_id|>assistant<|end_header_id|>\n\n"],
    "mistral": ["[AVAILABLE_TOOLS][{", "}][/AVAILABLE_TOOLS][INST]Hi[/INST]",
                '[TOOL_CALLS]query[ARGS]{"text": "a"}</s>',
                '[TOOL_RESULTS]{"content": "3 rows"}[/TOOL_RESULTS]'],
    "mistral_v3": ['[TOOL_CALLS][{"name": "query", "arguments": {"text": "a"}}]</s>',
                   '[TOOL_RESULTS]{"content": "3 rows"}[/TOOL_RESULTS]'],
    "gemma": ["<start_of_turn>user\n", "Hi<end_of_turn>\n<start_of_turn>model\n",
              '[query(text="a")]<end_of_turn>\n', "<start_of_turn>user\n",
              "<end_of_turn>\n<start_of_turn>model\n"],
    "phi": ["<|system|>", "<|tool|>[{", "}]<|/tool|><|end|><|user|>Hi<|end|><|assistant|>",
            'functools[{"name": "query", "arguments": {"text": "a"}}]<|end|>',
            "<|tool_response|>3 rows<|end|><|assistant|>"],
    "deepseek": [mark("User") + "Hi" + mark("Assistant") + mark("tool calls begin"),
                 mark("tool call begin") + "function" + mark("tool sep") + "query\n```json\n"
                 '{"text": "a"}\n```' + mark("tool call end") + mark("tool calls end"),
                 mark("end of sentence") + mark("tool outputs begin") + mark("tool output begin")
                 + "3 rows" + mark("tool output end") + mark("tool outputs end")],
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_in_the_familys_format(name: str) -> None:
    shown = text_of(family_tokenizer(name), CALLED, TOOLS)
    assert '"list_tables"' in shown
    for piece in PUBLISHED[name]:
        assert piece in shown, shown
        shown = shown[shown.index(piece) + len(piece) :]
    assert shown == "" or name in ("smollm", "qwen", "qwen3_coder")


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_there_is_no_word_of_them(name: str) -> None:
    tokenizer = family_tokenizer(name)
    told = [{"role": "system", "content": "Be brief."}, *HI]
    assert "Be brief." in text_of(tokenizer, told)
    assert "function" not in text_of(tokenizer, told) + text_of(tokenizer, HI)
    assert "Be brief." in text_of(tokenizer, told[:1], TOOLS)


@pytest.mark.parametrize(
    "roles", [("user",), ("system", "user"), ("user", "assistant", "user"), ("system",)]
)
def test_without_tools_it_is_the_published_template_of_smollm2(roles: tuple[str, ...]) -> None:
    messages = [{"role": role, "content": f" {role}s \n words"} for role in roles]
    published = fresh("smollm")
    assert text_of(family_tokenizer("smollm"), messages) == text_of(published, messages)


def text_of(tokenizer: Any, messages: Any, tools: Any = None) -> str:
    copied = json.loads(json.dumps(messages))
    return str(tokenizer.decode(Chat(tokenizer, Codec(tokenizer)).encode(copied, tools)))


@pytest.mark.parametrize("name", NAMES)
def test_a_familys_model_gets_its_template_proposed(name: str) -> None:
    tokenizer = fresh(name)
    tokenizer.chat_template = templates.templates()[name].sign or None
    assert proposed(tokenizer) == name
    assert f"policy.chat_template = '{name}'" in templates.template_fix(tokenizer)


def fresh(name: str) -> Any:
    """A tokenizer of a family, with a template without tools."""
    tokenizer = family_tokenizer(name)
    backend = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    backend.eos_token, backend.chat_template = "<|endoftext|>", NO_TOOLS
    return backend


def run(folder: Path, **policy: str) -> RunConfig:
    return resolve({"root": str(folder), "policy": {"model": "m", **policy}}, source="test")


def test_a_named_template_brings_its_format_and_end_and_is_saved(tmp_path: Path) -> None:
    tokenizer = fresh("llama3")
    templates.choose(tokenizer, run(tmp_path, chat_template="llama3"))
    assert parser_of(tokenizer).__name__ == "Llama3Json"
    assert tokenizer.eos_token == "<|eot_id|>"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.chat_template == templates.templates()["llama3"].text
    assert parser_of(again).__name__ == "Llama3Json"
    assert again.eos_token == "<|eot_id|>"
    templates.choose(again, run(tmp_path))  # a run without the settings takes those of the files
    assert parser_of(again).__name__ == "Llama3Json"


def test_a_template_file_is_read_from_the_run_files_folder(tmp_path: Path) -> None:
    tokenizer = fresh("mistral")
    (tmp_path / "mine.jinja").write_text(templates.templates()["mistral"].text)
    templates.choose(tokenizer, run(tmp_path, chat_template="mine.jinja"))
    assert parser_of(tokenizer).__name__ == "Mistral"
    assert tokenizer.eos_token == "<|endoftext|>"  # a file may end turns as it likes


def test_without_settings_all_is_as_before(tmp_path: Path) -> None:
    tokenizer = fresh("smollm")
    before = dict(tokenizer.init_kwargs)
    templates.choose(tokenizer, run(tmp_path))
    assert tokenizer.init_kwargs == before
    assert tokenizer.chat_template == NO_TOOLS
    assert parser_of(tokenizer) is ToolParser


def test_a_format_that_the_template_does_not_write_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = fresh("chatml")
    with pytest.raises(PolicyError, match="'mistral': the chat template writes calls as hermes"):
        templates.choose(tokenizer, run(tmp_path, chat_template="chatml", tool_format="mistral"))
    own = fresh("llama3")
    own.chat_template = templates.templates()["llama3"].text
    with caplog.at_level(logging.WARNING, "agentrl.algorithm"):
        templates.choose(own, run(tmp_path))
    assert "set policy.tool_format = 'llama3_json'" in caplog.text
    assert parser_of(own) is ToolParser  # as before
    templates.choose(own, run(tmp_path, tool_format="llama3_json"))
    assert parser_of(own).__name__ == "Llama3Json"


@pytest.mark.parametrize("name", NAMES)
def test_the_format_of_a_template_is_found_from_a_call(name: str) -> None:
    tokenizer = family_tokenizer(name)
    assert (
        templates.format_of(templates._shown_call(tokenizer))
        == templates.templates()[name].tool_format
    )


def test_a_template_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"no token <\|start_header_id\|>.*set it to 'smollm'"):
        templates.choose(fresh("smollm"), run(tmp_path, chat_template="llama3"))


def test_a_model_without_a_template_gets_one_proposed(tmp_path: Path) -> None:
    tokenizer = fresh("gemma")
    tokenizer.chat_template = None
    with pytest.raises(PolicyError, match=r"no chat template; set policy.chat_template = 'gemma'"):
        templates.choose(tokenizer, run(tmp_path))
    templates.choose(tokenizer, run(tmp_path, chat_template="gemma"))
    assert "<start_of_turn>user\nHi<end_of_turn>" in text_of(tokenizer, HI)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }", "has an error in line 2"),
        ("{{ messages[0].content | shout }}", "has an error in line 1: .*shout"),
        ("{{ raise_exception('no users here') }}", "cannot render .* no users here"),
        ("{{ nothing.content }}", "cannot render the message of a user: 'nothing' is undefined"),
    ],
)
def test_a_template_with_an_error_is_refused_before_a_rollout(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "mine.jinja").write_text(text)
    with pytest.raises(PolicyError, match=f"(?s)policy.chat_template = 'mine.jinja': .*{says}"):
        templates.choose(fresh("smollm"), run(tmp_path, chat_template="mine.jinja"))
    tokenizer = fresh("smollm")
    tokenizer.chat_template = text
    with pytest.raises(PolicyError, match=f"(?s)model .*{says}"):
        templates.choose(tokenizer, run(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}",
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}",
        "{% for m in messages %}{% if m.tool_calls %}{{ m.no.such }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_some_conversations_is_taken(tmp_path: Path, text: str) -> None:
    tokenizer = fresh("smollm")
    tokenizer.chat_template = text
    templates.choose(tokenizer, run(tmp_path))
    assert tokenizer.chat_template == text


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"chat_template": "lama3"}, "policy.chat_template = 'lama3'; did you mean 'llama3'"),
        ({"chat_template": "none.jinja"}, "none.jinja cannot be read"),
        ({"chat_template": "."}, "policy.chat_template = '.'; "),
        ({"tool_format": "xml"}, "policy.tool_format = 'xml'; valid: "),
    ],
)
def test_what_does_not_exist_is_refused_before_a_model_is_loaded(
    tmp_path: Path, policy: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        templates.check(run(tmp_path, **policy))
    assert says in str(refused.value)


def test_policies_with_own_models_have_own_templates(tmp_path: Path) -> None:
    def config(**member: str) -> RunConfig:
        members = {"a": {"roles": ["x"], "lora": {"rank": 4}},
                   "b": {"roles": ["y"], "lora": {"rank": 4}, **member}}  # fmt: skip
        policy = {"model": "m", "chat_template": "chatml"}
        return resolve({"root": str(tmp_path), "policy": policy, "policies": members}, source="t")

    from agentrl.core.config.derived import view

    own = config(model="n", chat_template="llama3")
    templates.check(own)
    assert [view(own, name).policy.chat_template for name in "ab"] == ["chatml", "llama3"]
    with pytest.raises(ConfigError, match=r"policies.b.chat_template: .* set policy.chat_template"):
        templates.check(config(chat_template="llama3"))
    assert msgspec.to_builtins(view(config(model="n"), "b").policy)["model"] == "n"


def test_dropped_tools_have_their_fix_in_the_error() -> None:
    with pytest.raises(RequestError, match=r"set policy.chat_template = 'smollm'.*'hermes'"):
        text_of(fresh("smollm"), HI, TOOLS)


def test_the_doctor_proposes_the_same() -> None:
    status, sentence = doctors.tool_calls(fresh("smollm"))
    assert status == "warn"
    assert "set policy.chat_template = 'smollm'" in sentence
    dropping = family_tokenizer("gemma")
    before = dropping.chat_template
    dropping.chat_template = before.replace(
        "message.content or ''", "message.content.split('>')[-1]"
    )
    try:
        status, sentence = doctors.thinking(dropping)
    finally:
        dropping.chat_template = before
    assert status == "warn"
    assert "set policy.chat_template = 'gemma'" in sentence


CALL = {
    "role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "find", "arguments": '{"word": "lamp"}'}},
        {"function": {"name": "find", "arguments": '{"word": "a \\"red\\" chair"}'}},
    ],
}  # fmt: skip
TALK = [
    {"role": "system", "content": " Be\nbrief. "}, {"role": "user", "content": "Where is it?"},
    CALL, {"role": "tool", "content": '{"a": "<b>"}'}, {"role": "assistant", "content": "There."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
]  # fmt: skip
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
CALLS = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        (EACH + CALLS + "{% endfor %}", ""),
        (EACH.replace("m.content", "(m.content or '') | tojson") + CALLS + "{% endfor %}", ""),
        (EACH.replace("m.content", "'' if m.role == 'assistant' else m.content") + CALLS
         + "{% endfor %}", ""),
        (EACH + CALLS.replace("m.tool_calls", "(m.tool_calls or [])[:1]") + "{% endfor %}",
         "a call's argument in messages[2] (role assistant)"),
        (EACH.replace("messages", "messages[2:]") + CALLS + "{% endfor %}",
         "the text of messages[0] (role system)"),
        (EACH.replace("m.content", "'' if m.role == 'tool' else m.content") + CALLS
         + "{% endfor %}", "the text of messages[3] (role tool)"),
        (EACH.replace("m.content", "'' if loop.last else m.content") + CALLS
         + "{% endfor %}", "the text of messages[5] (role user)"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_reported_once(
    template: str, left_out: str, tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of SmolVLM, of text that is no list of parts, and of gpt-oss, of second calls."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.chat_template = template
    chat = Chat(tokenizer, Codec(tokenizer))
    for options in ({}, {"again": True}):
        chat.encode(TALK, **options)  # type: ignore[arg-type]
    lines = [record.getMessage() for record in caplog.records if "leaves out" in record.msg]
    assert [line.partition(", so ")[0] for line in lines] == (
        [f"The chat template leaves out {left_out}"] if left_out else []
    )
