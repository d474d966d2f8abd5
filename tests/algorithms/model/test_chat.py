from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agentrl.algorithms.model.chat import Chat, Codec, RequestError, warn_described

TOOL = {"type": "function", "function": {"name": "query", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def render(tokenizer: Any, messages: object, tools: object = None, options: object = None) -> str:
    chat = Chat(tokenizer, Codec(tokenizer))
    raw = [json.dumps(value).encode() for value in (messages, tools, options or {})]
    return str(tokenizer.decode(chat.prompt(*raw)))


def test_a_prompt_is_what_the_template_gives(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
    )
    assert render(tokenizer, messages, [TOOL]) == expected
    assert expected.endswith("<|im_start|>assistant\n")


PLAIN = "{%- for message in messages %}{{- message.role + ': ' + message.content }}{%- endfor %}"


def test_tools_that_the_template_does_not_render_are_refused(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    warn_described.cache_clear()
    messages = [{"role": "user", "content": "Hi"}]
    other = {"type": "function", "function": {"name": "search", "parameters": {}}}
    blind = copy.deepcopy(tokenizer)
    blind.chat_template = PLAIN
    chat = Chat(blind, Codec(blind))
    hi, tools = json.dumps(messages).encode(), json.dumps([TOOL, other]).encode()
    for _ in range(2):
        with pytest.raises(RequestError, match="does not render tools") as refused:
            chat.prompt(hi, tools, b"{}")
    assert refused.value.body.error.code == "tools_not_rendered"
    assert chat.prompt(hi, b"null", b"{}") == chat.prompt(hi, b"[]", b"{}")
    told = [{"role": "system", "content": "query(sql), and search: words"}, *messages]
    assert "query(sql)" in render(blind, told, [TOOL, other])
    assert "search" in render(tokenizer, messages, [TOOL, other])
    (said,) = caplog.messages
    assert said.startswith("The chat template does not render tools, which messages describe")
    seen = json.dumps(told).encode()
    assert chat.prompt(seen, tools, b"{}")
    assert caplog.messages == [said]
    hello = json.dumps([{"role": "user", "content": "Hello"}]).encode()
    with pytest.raises(RequestError, match="would not see query, search"):  # in another request
        chat.prompt(hello, tools, b"{}")


def function(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description}}


PRICE = function("price", 'The "price" of an item,\n    in dollars.')
CONVERT = function("convert", "Convert between units of length.")


@pytest.mark.parametrize(
    ("tools", "text", "hidden"),
    [
        ([PRICE, CONVERT], "What is the price of a saw? Please convert it.", "price, convert"),
        ([PRICE], 'You have price(item): The "price" of  an item, in dollars.', ""),
        ([PRICE], json.dumps(PRICE), ""),
        ([PRICE, CONVERT], json.dumps(PRICE), "convert"),
        ([PRICE, CONVERT], json.dumps([PRICE, CONVERT]), ""),
        ([CONVERT], "Convert between units of length.", "convert"),  # by what name, is not said
        ([function("search")], "Please search for Ada.", "search"),
        ([function("search")], "research(it): not this one", "search"),
        ([function("search")], "Use `search`.", ""),
        ([function("search")], "search(words) finds pages.", ""),
        ([{"type": "web_search"}], "web_search", "them"),
    ],
)
def test_tools_are_seen_only_with_their_descriptions(
    tokenizer: Any, tools: list[Any], text: str, hidden: str
) -> None:
    blind = copy.deepcopy(tokenizer)
    blind.chat_template = PLAIN
    for role in ("system", "user"):
        messages = [{"role": role, "content": text}]
        if not hidden:
            render(blind, messages, tools)
            continue
        with pytest.raises(RequestError, match=f"would not see {hidden};"):
            render(blind, messages, tools)


def history(*arguments: object) -> list[Any]:
    functions = ({"name": "query", "arguments": each} for each in arguments)
    calls = [{"id": str(id), "function": function} for id, function in enumerate(functions)]
    return [
        {"role": "user", "content": f"Hi, {arguments}"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]


WRITTEN = [
    '{"sql":"SELECT 1"}',
    '{"sql": "SELECT 1"}',
    '{ "b" : [1,2 ,3],\n"a":{"c":null} }',
    '{"x":"\\u00e9\\/\\ud800", "é":"\\u000a"}',
    '{"n": 1.50, "m": 1e5, "k": -0.0, "big": 123456789012345678901234567890, "j": 1E400}',
    '{"a":1,"a":2}',
    "{}",
    '{"</tool_call>":"<tool_call>"}',
]


def test_arguments_are_rendered_as_they_were_written(tokenizer: Any) -> None:
    for written in WRITTEN:
        assert f'"arguments": {written}}}' in render(tokenizer, history(written))
    text = render(tokenizer, history(*WRITTEN, *WRITTEN))
    found = [part.rpartition("}\n</tool_call>")[0] for part in text.split('"arguments": ')[1:]]
    assert found == WRITTEN * 2
    assert '"arguments": {broken}' in render(tokenizer, history("{broken"))
    assert '"arguments": {"a": "é"}}' in render(tokenizer, history({"a": "é"}))
    assert '"arguments": {}}' in render(tokenizer, history(""))


def test_a_template_keeps_its_own_way_of_writing_arguments(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{%- for message in messages %}{%- for call in message.tool_calls or [] %}"
        "{%- for name, value in call.function.arguments | items %}"
        "{{- '<' + name + '>' + value | string }}{%- endfor %}{%- endfor %}{%- endfor %}"
    )
    assert render(own, history('{"a":1.50,"b":"c"}')) == "<a>1.5<b>c"
    some = "{%- if call.function.arguments %}{{- call.function.arguments | tojson }}{%- endif %}"
    own.chat_template = own.chat_template.partition("{%- for name")[0] + some
    own.chat_template += "{%- endfor %}{%- endfor %}"
    assert render(own, history("{ }")) == ""
    assert render(own, history('{"a":1.50}')) == '{"a":1.50}'


def test_text_parts_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "one two<|im_end|>" in render(tokenizer, [{"role": "user", "content": parts}])


def test_template_options_are_passed_on(tokenizer: Any) -> None:
    text = render(
        tokenizer, [{"role": "user", "content": "x"}], None, {"add_generation_prompt": False}
    )
    assert text.endswith("x<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([], None, "messages is empty"),
        ("hi", None, "messages is not a list"),
        ([1], None, "messages is not a list of objects"),
        ([{"content": "x"}], None, "messages[0] has no role"),
        ([{"role": "user", "content": 7}], None, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "part that is not text"),
        ([{"role": "assistant", "tool_calls": [1]}], None, "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], None, "messages[0].tool_calls"),
        ([{"role": "user", "content": "x"}], "query", "tools is not a list"),
    ],
)
def test_bad_messages_are_refused_by_name(
    tokenizer: Any, messages: object, tools: object, says: str
) -> None:
    with pytest.raises(RequestError) as error:
        render(tokenizer, messages, tools)
    assert says in str(error.value)
    assert error.value.status == 400


def test_a_template_that_raises_is_the_requests_fault(tokenizer: Any) -> None:
    original = tokenizer.chat_template
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(RequestError, match="roles must alternate"):
            render(tokenizer, [{"role": "user", "content": "x"}])
    finally:
        tokenizer.chat_template = original


def test_tool_calls_that_are_no_list_are_refused(tokenizer: Any) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": 1}
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls is not a list"):
        render(tokenizer, [said])


KEYS = "{%- for m in messages %}{%- for k in m|sort %}{{ k }}={{ m[k] }};{%- endfor %}{%- endfor %}"


@pytest.mark.parametrize(
    ("message", "seen"),
    [
        ({"content": "a", "name": None, "tool_calls": None}, "content=a;role=user;"),
        ({"content": None}, "content=;role=user;"),
        (
            {"content": "a", "reasoning": "r"},
            "content=a;reasoning=r;reasoning_content=r;role=user;thinking=r;",
        ),
        (
            {"content": "a", "thinking": "t", "reasoning": "r"},
            "content=a;reasoning=r;reasoning_content=t;role=user;thinking=t;",
        ),
        (
            {"content": "a", "reasoning_content": "c", "thinking": "t"},
            "content=a;reasoning_content=c;role=user;thinking=t;",
        ),
        (
            {"content": "a", "reasoning_content": None, "reasoning": ""},
            "content=a;reasoning=;reasoning_content=;role=user;thinking=;",
        ),
        ({"content": "a", "more": {"x": None}}, "content=a;more={'x': None};role=user;"),
    ],
)
def test_templates_see_the_same_message_with_every_transformers(
    tokenizer: Any, message: dict[str, Any], seen: str
) -> None:
    """transformers >= 5.21.1 edits messages before a template sees them; older ones do not."""
    shown = copy.deepcopy(tokenizer)
    shown.chat_template = KEYS
    text = Chat(shown, Codec(shown))._render(
        [Chat(shown, Codec(shown)).message({"role": "user", **message}, 0)], None, {}
    )
    assert text == seen
