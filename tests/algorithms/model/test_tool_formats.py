"""Parsers of tool calls: what is read, and that a stream says the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agentrl.algorithms.model.tool_formats import ToolCall, ToolParser, load_format, mark
from agentrl.core.errors import ConfigError
from agentrl.core.types import Json
from tests.algorithms.model.roundtrip import TOOLS, split

SCHEMAS = json.dumps(TOOLS).encode()
Calls = list[tuple[str, Json]]
BEGIN, DONE = mark("tool calls begin"), mark("tool calls end")
ONE, END, SEP = mark("tool call begin"), mark("tool call end"), mark("tool sep")
V3 = f"{ONE}function{SEP}query\n```json\n" + '{"text": "a"}\n```' + END
V31 = f'{ONE}query{SEP}{{"text": "a"}}{END}'
XML = "<tool_call>\n<function=query>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>"
A: Calls = [("query", {"text": "a"})]

# format, text, content, calls. Those with calls are as the families publish them.
CASES: list[tuple[str, str, str, Calls]] = [
    ("llama3_json", '{"name": "query", "parameters": {"text": "a"}}', "", A),
    ("llama3_json", '<|python_tag|>{"name": "query", "parameters": {"text": "a"}}', "", A),
    ("llama3_json", '{"type": "function", "name": "query", "parameters": {"text": "a"}}', "", A),
    ("llama3_json", '{"name": "query", "arguments": {"text": "a"}}', "", A),
    ("llama3_json", '{"name":"query","parameters":{"text":"a"}} ;\n{"name":"f","parameters":{}}',
     "", [*A, ("f", {})]),
    ("llama3_json", '{"name": "query", "parameters": {"text": "a"}}; <|python_tag|>\n'
     '{"name": "f", "parameters": {}}', "", [*A, ("f", {})]),
    ("llama3_json", 'Look.\n{"name": "query", "parameters": {"text": "a"}}\nDone.', "Look.\nDone.",
     A),
    ("llama3_json", '[{"name": "query", "parameters": {"text": "a"}}, {"name": "f", "parameters":'
     ' {}}]', "", [*A, ("f", {})]),
    ("llama3_json", 'Look: <|python_tag|>[\n {"name": "query", "parameters": {"text": "a"}}\n] ok',
     "Look: ok", A),
    ("llama3_json", '{"name": "query", "parameters": {"text": "a"}},\n{"name":"f","parameters":{}}',
     "", [*A, ("f", {})]),
    ("llama3_json", *("A list [1, 2], [x] and [] or [{}] or [{\"a\": 1}] here",) * 2, []),
    ("llama3_json", *('[{"name": "query", "parameters": {}}, 3]',) * 2, []),
    ("llama3_json", *('[{"name": "query", "parameters": {}}, {"na',) * 2, []),
    ("llama3_json", '{"name": "query", "parameters": {"text": "a"}}; and more', "; and more", A),
    ("llama3_json", *('<|python_tag|>search.call(query="a")',) * 2, []),
    ("llama3_json", 'int main() { return 0; }', "int main() { return 0; }", []),
    ("llama3_json", '{"city": "Oslo"} is JSON', '{"city": "Oslo"} is JSON', []),
    ("llama3_json", '{"name": "query", "parameters": 3}', '{"name": "query", "parameters": 3}', []),
    ("llama3_json", '{"name": "a", "parameters": {"name": "b", "parameters": {}}',
     '{"name": "a", "parameters": {"name": "b", "parameters": {}}', []),
    ("llama3_json", '{"name": "a", "x": {"name": "b", "parameters": {}}}',
     '{"name": "a", "x": {"name": "b", "parameters": {}}}', []),
    ("mistral", '[TOOL_CALLS][{"name": "query", "arguments": {"text": "a"}}]', "", A),
    ("mistral", '[TOOL_CALLS] [{"name": "query", "arguments": {"text": "a"}, "id": "9Ae3bDc2F"}]',
     "", A),
    ("mistral", '[TOOL_CALLS]query[ARGS]{"text": "a"}', "", A),
    ("mistral", '[TOOL_CALLS]query[CALL_ID]9Ae3bDc2F[ARGS]{"text": "a"}', "", A),
    ("mistral", 'Look.[TOOL_CALLS]query[ARGS]{"text": "a"}[TOOL_CALLS]f[ARGS]{}', "Look.",
     [*A, ("f", {})]),
    ("mistral", '[TOOL_CALLS]query{"text": "a"}', "", A),
    ("mistral", "[TOOL_CALLS]query[ARGS]{text}", "[TOOL_CALLS]query[ARGS]{text}", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", '[TOOL_CALLS][{"name": "query"}]', '[TOOL_CALLS][{"name": "query"}]', []),
    ("mistral", '[TOOL_CALLS][{"name": "query", "argu', '[TOOL_CALLS][{"name": "query", "argu', []),
    ("mistral", "[TOOL_CALLS] is a token", "[TOOL_CALLS] is a token", []),
    ("pythonic", '[query(text="a")]', "", A),
    ("pythonic", "[query(text='a'), f()]", "", [*A, ("f", {})]),
    ("pythonic", "[ query( text = 'a' , ) ]", "", A),
    ("pythonic", '[query(count=-3, flag=True, maybe=None, list=[1, {"a": (2,)}], from="x")]', "",
     [("query", {"count": -3, "flag": True, "maybe": None, "list": [1, {"a": [2]}], "from": "x"})]),
    ("pythonic", "[query(flag=true, maybe=null, map={'a': 1})]", "",
     [("query", {"flag": True, "maybe": None, "map": {"a": 1}})]),
    ("pythonic", r'[query(text="\d \n \u00e9")]', "", [("query", {"text": "\\d \n \u00e9"})]),
    ("pythonic", 'Look.\n[query(text="a")]', "Look.", A),
    ("pythonic", "[1, 2] and [x] and [f", "[1, 2] and [x] and [f", []),
    ("pythonic", "[query('a')]", "[query('a')]", []),
    ("pythonic", "[query(text=open('a'))]", "[query(text=open('a'))]", []),
    ("pythonic", "[query(text={1, 2})]", "[query(text={1, 2})]", []),
    ("pythonic", "[query(number=1e999)]", "[query(number=1e999)]", []),
    ("pythonic", "[query(text='\\ud800')]", "[query(text='\\ud800')]", []),
    ("pythonic", "[query(text='a'", "[query(text='a'", []),
    ("pythonic", "[query(text='a') f()]", "[query(text='a') f()]", []),
    ("pythonic", *("[f(x=" + "[" * 2000 + "]" * 2000 + ")]",) * 2, []),
    ("qwen3_coder", XML, "", A),
    ("qwen3_coder", f"Look.\n{XML}\n{XML}", "Look.", [*A, *A]),
    ("qwen3_coder", XML.replace("<tool_call>\n", "").replace("\n</tool_call>", ""), "", A),
    ("qwen3_coder", XML.removesuffix("\n</tool_call>"), "", A),
    ("qwen3_coder", XML.replace("\n", ""), "", A),
    ("qwen3_coder", "<tool_call>\n<function=list_tables>\n</function>\n</tool_call>", "",
     [("list_tables", {})]),
    ("qwen3_coder", XML.replace("\na\n", "\n</tool_call>\n\n"), "",
     [("query", {"text": "</tool_call>\n"})]),
    ("qwen3_coder", XML.replace("text>\na", "count>\n3"), "", [("query", {"count": 3})]),
    ("qwen3_coder", XML.replace("text>\na", "flag>\nTrue"), "", [("query", {"flag": True})]),
    ("qwen3_coder", XML.replace("text>\na", "flag>\nyes"), "", [("query", {"flag": "yes"})]),
    ("qwen3_coder", XML.replace("text>\na", "maybe>\nnull"), "", [("query", {"maybe": None})]),
    ("qwen3_coder", XML.replace("text>\na", "map>\n{\"a\": NaN}"), "",
     [("query", {"map": '{"a": NaN}'})]),
    ("qwen3_coder", XML.replace("query", "unknown").replace("a\n", "3\n"), "",
     [("unknown", {"text": "3"})]),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>", []),
    ("qwen3_coder", XML[: XML.index("</parameter>")], XML[: XML.index("</parameter>")], []),
    ("qwen3_coder", "<function=f", "<function=f", []),
    ("deepseek_v3", f"{BEGIN}{V3}{DONE}", "", A),
    ("deepseek_v3", f"Look.{BEGIN}{V3}\n{V3}{DONE}", "Look.", [*A, *A]),
    ("deepseek_v3", f"{BEGIN}{V3}", "", A),
    ("deepseek_v3", f"{BEGIN}{V3.removesuffix(END)}", "", A),
    ("deepseek_v3", f"{BEGIN}{V3} and{DONE}", f"{BEGIN}{V3} and{DONE}", []),
    ("deepseek_v3", f"{BEGIN}{V31}{DONE}", f"{BEGIN}{V31}{DONE}", []),
    ("deepseek_v3", f"{BEGIN}{V3[:-30]}", f"{BEGIN}{V3[:-30]}", []),
    ("deepseek_v3", f"{BEGIN}{DONE}", f"{BEGIN}{DONE}", []),
    ("deepseek_v31", f"{BEGIN}{V31}{V31}{DONE}", "", [*A, *A]),
    ("deepseek_v31", f"{BEGIN}{V3}{DONE}", f"{BEGIN}{V3}{DONE}", []),
    ("phi4_mini_json", 'functools[{"name": "query", "arguments": {"text": "a"}}]', "", A),
    ("phi4_mini_json", '<|tool_call|>[{"name": "query", "parameters": {"text": "a"}}]'
     "<|/tool_call|>", "", A),
    ("phi4_mini_json", '<|tool_call|>[{"name": "query", "arguments": {"text": "a"}}] and', "and",
     A),
    ("phi4_mini_json", *("import functools\nfunctools.cache",) * 2, []),
    ("phi4_mini_json", 'functools[{"name": "query"}]', 'functools[{"name": "query"}]', []),
]  # fmt: skip
CALL = '<tool_call>\n{"name": "query", "arguments": {"text": "a"}}\n</tool_call>'
CASES += [
    ("hermes", f"Before.\n\n{CALL}\nAfter.", "Before.\n\nAfter.", A),
    ("hermes", f"Before. {CALL}After.", "Before. After.", A),
    ("hermes", f"Before.{CALL} After.", "Before. After.", A),
    ("hermes", f"Before.{CALL}After.", "Before. After.", A),
    ("hermes", f"Before.\n{CALL}\n\n{CALL} Then.\n\n{CALL}\nAfter.\n",
     "Before.\nThen.\n\nAfter.\n", [*A, *A, *A]),
    ("hermes", f"\n{CALL}\nAfter.", "After.", A),
    ("hermes", f"Before.\n{CALL}\n", "Before.", A),
    ("mistral", 'Before. [TOOL_CALLS][{"name": "query", "arguments": {"text": "a"}}]\nAfter.',
     "Before. After.", A),
]  # fmt: skip
FORMATS = sorted({case[0] for case in CASES})


def read(name: str, text: str, size: int, *, thinking: bool = False) -> tuple[str, Calls]:
    parser = load_format(name, Path())(thinking=thinking, tools=SCHEMAS)
    found = list[str | ToolCall]()
    for start in range(0, len(text), size):
        found += parser.push(text[start : start + size])
    return split(found + parser.finish())


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_content_and_calls_at_once_and_streamed(
    name: str, text: str, content: str, calls: Calls
) -> None:
    for size in (len(text), 1, 3, 7):
        assert read(name, text, size) == (content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), [c for c in CASES if c[3]])
def test_reasoning_has_no_calls_and_what_follows_it_has(
    name: str, text: str, content: str, calls: Calls
) -> None:
    for size in (len(text), 1):
        assert read(name, f"<think>\n{text}</think>{text}", size) == (
            f"<think>\n{text}</think>{content}", calls,
        )  # fmt: skip
        found = read(name, f"{text}</think>{text}", size, thinking=True)
        assert found == (f"{text}</think>{content}", calls)


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_says_the_same_however_it_is_streamed(name: str) -> None:
    """Pieces of calls in any order, and calls with pieces taken out."""
    rng = random.Random(name)
    texts = [text for each, text, *_ in CASES if each == name and len(text) < 400]
    for _ in range(300):
        pieces = [text[: rng.randint(0, len(text))] for text in rng.choices(texts, k=3)]
        pieces += [text[rng.randint(0, len(text)) :] for text in rng.choices(texts, k=2)]
        text = "".join(rng.sample(pieces, len(pieces))) + rng.choice(["", " ", "\n", '"', "'"])
        whole = read(name, text, len(text) or 1)
        for size in (1, 2, 5):
            assert read(name, text, size) == whole, text


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_is_not_held_back(name: str) -> None:
    parser = load_format(name, Path())()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" you.") == [" you."]


@pytest.mark.parametrize("written", ['{"a":1}', '{ "a" : 1.50, "b": "\\u00e9\\/" }', "{}"])
@pytest.mark.parametrize(
    "shape",
    [
        ("llama3_json", '{"name": "f", "parameters": ARGUMENTS}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]ARGUMENTS"),
        ("deepseek_v31", f"{BEGIN}{ONE}f{SEP}ARGUMENTS{END}{DONE}"),
        ("phi4_mini_json", 'functools[{"name": "f", "arguments": ARGUMENTS}]'),
    ],
)
def test_arguments_in_json_are_what_the_model_wrote(shape: tuple[str, str], written: str) -> None:
    name, text = shape
    parser = load_format(name, Path())()
    (call,) = (part for part in parser.push(text.replace("ARGUMENTS", written)) + parser.finish())
    assert isinstance(call, ToolCall)
    assert call.function.arguments == written


def test_names_are_vllms_and_others_are_refused() -> None:
    assert load_format("hermes", Path()) is ToolParser
    assert load_format("llama4_json", Path()) is load_format("llama3_json", Path())
    with pytest.raises(ConfigError, match=r"policy.tool_format = 'mistra'; did you mean 'mistral'"):
        load_format("mistra", Path())


def test_a_format_of_ones_own_is_a_class_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    parser = load_format("mine.py:Shout", tmp_path)(tools=SCHEMAS)
    assert split(parser.push("Look. !query! Done.") + parser.finish()) == (
        "Look. Done.",
        [("query", {})],
    )


MINE = '''\
from agentrl.algorithms.model.tool_formats import Function, ToolParser


class Shout(ToolParser):
    """A call is a name between exclamation marks."""

    opens = ("!",)

    def read(self, text, *, last):
        end = text.find("!", 1)
        if end < 0:
            return (0, ()) if last else None
        return end + 1, [Function(text[1:end], "{}")]
'''


LONG = 1_000_000  # characters
OPEN_ENDED = {
    "hermes": ['<tool_call>{"name": "', '<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
    "qwen3_coder": ["<function=f>\n<parameter=a>\n", "<function=f><parameter=a>b</parameter>", XML],
    "llama3_json": ['{"name": [', '{"name": "f", "parameters": {}};'],
    "mistral": ["[TOOL_CALLS]f{", '[TOOL_CALLS]f[ARGS]{"a": 1}'],
    "pythonic": ["[f(a=(", "[f(a=1)]"],
    "phi4_mini_json": ["functools[{", 'functools[{"name": "f", "arguments": {}}]'],
    "deepseek_v3": [OPEN_BLOCK := BEGIN + ONE, BEGIN + V3 + DONE],
}


@pytest.mark.parametrize("name", OPEN_ENDED)
def test_the_work_is_linear_in_the_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a call seems to begin: characters that are read, of texts of two lengths."""
    format = ToolParser if name == "hermes" else load_format(name, Path())
    for unit in OPEN_ENDED[name]:
        sizes = []
        for length in (LONG // 40, LONG // 10):
            read, own = [0], format.read

            def counted(self: ToolParser, text: str, *, last: bool, own=own, read=read):  # type: ignore[no-untyped-def]
                read[0] += len(text)
                return own(self, text, last=last)

            with monkeypatch.context() as patch:
                patch.setattr(format, "read", counted)
                text = unit * (length // len(unit))
                content, calls = format().whole(text)
            assert len(content) in (0, len(text)) or calls
            sizes.append(read[0] / length)
        assert sizes[1] < 1.5 * sizes[0] + 10, (unit, sizes)


def test_a_call_of_a_megabyte_is_read_token_by_token() -> None:
    value = "x\n" * (LONG // 2)
    text = f"<function=query>\n<parameter=text>\n{value}\n</parameter>\n</function>"
    parser = load_format("qwen3_coder", Path())(tools=SCHEMAS)
    found = [part for at in range(0, len(text), 16) for part in parser.push(text[at : at + 16])]
    (call,) = found + parser.finish()
    assert json.loads(call.function.arguments) == {"text": value}
