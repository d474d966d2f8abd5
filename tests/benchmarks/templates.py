"""Which chat templates keep a conversation's tokens, and what parsers read of the same valid calls.

    python -m tests.benchmarks.templates --json     # of what is installed
    make templates                                  # writes docs/reference/templates.md

Templates are TRL's copies of those that families publish, and the library's own, rendered by
transformers. Parsers are vLLM's, SGLang's and the library's. Whatever is missing here is left out;
`make templates` installs all of it, each pinned.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.algorithms.model.chat import template_message
from agentrl.algorithms.model.templates import templates
from agentrl.algorithms.model.tool_formats import THINK, THOUGHT, load_format
from tests.algorithms.model.roundtrip import TOOLS, family_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "templates.md"
YES, NO, NONE = "yes", "**no**", ""
PACKAGES = ("transformers", "trl", "vllm", "sglang")
Read = tuple[str, list[tuple[str, str]]]  # content, names and arguments of calls


# Templates

THOUGHT_TEXT, BEFORE, AFTER = "I think of it.", "Let me look.", "There are 3."


def call(arguments: str, number: int = 0) -> dict[str, Any]:
    function = {"name": "query", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def conversation(*, calls: int, reasoning: bool) -> list[dict[str, Any]]:
    """A question, an answer with `calls` calls and their results, an answer, a second question."""
    said: dict[str, Any] = {"role": "assistant", "content": BEFORE}
    said |= {"reasoning_content": THOUGHT_TEXT} if reasoning else {}
    said |= {"tool_calls": [call('{"text": "a"}', n) for n in range(calls)]} if calls else {}
    results = [
        {"role": "tool", "tool_call_id": f"call0000{n}", "name": "query", "content": "3 rows"}
        for n in range(calls)
    ]
    last = [{"role": "assistant", "content": AFTER}] if calls else []
    question = {"role": "user", "content": "What is there?"}
    return [question, said, *results, *last, {"role": "user", "content": "Thanks."}]


def render(template: str, messages: list[dict[str, Any]], *, prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    shown = [template_message(dict(message), 0) for message in messages]
    texts, _ = render_jinja_template(
        [shown], chat_template=template, tools=TOOLS, add_generation_prompt=prompt,
        bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
    )  # fmt: skip
    return str(texts[0])


def keeps(template: str, *, calls: int, reasoning: bool) -> str:
    """Whether what an answer begins and ends with stays at the beginning of every later prompt;
    nothing if the template does not render such a conversation, or leaves part of it out."""
    messages = conversation(calls=calls, reasoning=reasoning)
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        whole = render(template, messages, prompt=True)
        first = render(template, messages[: answers[0] + 1], prompt=False)
    except Exception:  # noqa: BLE001  # jinja's, and Python's of any kind
        return NONE
    wanted = [BEFORE] + [THOUGHT_TEXT] * reasoning + ["query"] * bool(calls)
    if not all(text in first for text in wanted):
        return NONE
    for at in answers:
        said = render(template, messages[: at + 1], prompt=False)
        asked = render(template, messages[:at], prompt=True)
        if not said.startswith(asked):
            return NO
        # A template may close the last turn in another way, which no answer has.
        words = max(said.rfind(message_end(messages[at])), len(asked))
        if not whole.startswith(said[: words + len(message_end(messages[at]))]):
            return NO
    return YES


def message_end(message: dict[str, Any]) -> str:
    """The last words of an answer that are its own."""
    return '"a"' if message.get("tool_calls") else str(message["content"])


def written(template: str) -> dict[str, str]:
    """How a template writes arguments."""
    found = {}
    cases = {
        "numbers": ('{"number": 1.50, "count": 10000000}', ("1.50", "1.5", "1.5e")),
        "null": ('{"maybe": null}', ("null", "None")),
        "no arguments": ("{}", ("{}", "()")),
    }
    for name, (arguments, shown) in cases.items():
        messages = conversation(calls=0, reasoning=False)
        messages[1]["tool_calls"] = [call(arguments)]
        try:
            text = render(template, messages[:2], prompt=False)
            text = text.removeprefix(render(template, messages[:1], prompt=False))
        except Exception as error:  # noqa: BLE001
            found[name] = type(error).__name__
            continue
        found[name] = next((one for one in shown if one in text), "" if "query" in text else "—")
    return found


def template_rows() -> dict[str, dict[str, str]]:
    texts = {f"agentrl `{name}`": each.text for name, each in sorted(templates().items())}
    if spec := find_spec("trl"):
        folder = Path(str(spec.origin)).with_name("chat_templates")
        texts |= {f"`{file.stem}`": file.read_text() for file in sorted(folder.glob("*.jinja"))}
    return {
        name: {
            "chat": keeps(text, calls=0, reasoning=False),
            "one call": keeps(text, calls=1, reasoning=False),
            "two calls": keeps(text, calls=2, reasoning=False),
            "reasoning": keeps(text, calls=0, reasoning=True),
            "reasoning, call": keeps(text, calls=1, reasoning=True),
            **written(text),
        }
        for name, text in texts.items()
    }


# Parsers

A, B = '{"text": "a"}', '{"number": 1.50, "count": 12345678901234567890}'
BRACKETS = {"text": "said </tool_call> and ] } {"}


class Written(str):
    """A number as it was written."""

    __repr__ = str.__str__


def values(given: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(given, parse_float=Written, parse_int=Written)
    return found


FORMATS: dict[str, Callable[..., str]] = {  # of calls, each (name, arguments)
    "hermes": lambda *calls: "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'
        for name, given in calls
    ),
    "llama3_json": lambda *calls: "; ".join(
        f'{{"name": "{name}", "parameters": {given}}}' for name, given in calls
    ),
    "mistral": lambda *calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in calls),
    "pythonic": lambda *calls: "[" + ", ".join(
        f"{name}({', '.join(f'{k}={v!r}' for k, v in values(given).items())})"
        for name, given in calls
    ) + "]",
    "qwen3_coder": lambda *calls: "\n".join(
        f"<tool_call>\n<function={name}>\n" + "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
            for k, v in values(given).items()
        ) + "</function>\n</tool_call>"
        for name, given in calls
    ),
    "phi4_mini_json": lambda *calls: "functools[" + ", ".join(
        f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls
    ) + "]",
}  # fmt: skip
SGLANG = {
    "hermes": "qwen25", "llama3_json": "llama3", "mistral": "mistral", "pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder",
}  # fmt: skip
FAMILY = {
    "hermes": "qwen", "llama3_json": "llama3", "mistral": "mistral", "pythonic": "gemma",
    "qwen3_coder": "qwen3_coder", "phi4_mini_json": "phi",
}  # fmt: skip


def cases(name: str) -> dict[str, tuple[str, str, list[tuple[str, str]]]]:
    """Valid texts of a format: what was written, its content and its calls."""
    write = FORMATS[name]
    one, null = ("query", A), ("query", '{"maybe": null}')
    empty, hard = ("list_tables", "{}"), ("query", json.dumps(BRACKETS))
    number, lone = ("query", B), write(one)
    return {
        "one call": (lone, "", [one]),
        "two calls": (write(one, one), "", [one, one]),
        "numbers": (write(number), "", [number]),
        "null": (write(null), "", [null]),
        "no arguments": (write(empty), "", [empty]),
        "brackets and tags in a text": (write(hard), "", [hard]),
        "text before": (f"{BEFORE}\n{lone}", BEFORE, [one]),
        "text after": (f"{lone}\n{AFTER}", AFTER, [one]),
        "text around": (f"{BEFORE}\n{lone}\n{AFTER}", f"{BEFORE}\n{AFTER}", [one]),
        "a call inside thoughts": (f"{THINK}\n{lone}\n{THOUGHT}\n\n{AFTER}", "", []),
        "no call": ("A list [1, 2], a set {3}.", "A list [1, 2], a set {3}.", []),
    }


def verdict(found: Read | Exception, content: str, calls: list[tuple[str, str]], case: str) -> str:
    if isinstance(found, Exception):
        return f"**{type(found).__name__}**"
    text, read = found
    same = [(n, json.loads(a)) for n, a in read if a] == [(n, json.loads(a)) for n, a in calls]
    if case == "a call inside thoughts":
        return YES if not read else "**calls it**"
    if not same:
        lost = len(calls) - len(read)
        return f"**{lost} lost**" if lost > 0 else "**other arguments**"
    if text.split() != content.split():
        return "**text lost**" if len(text.split()) < len(content.split()) else "**text added**"
    exact = all(
        a.replace(" ", "") == b.replace(" ", "") for (_, a), (_, b) in zip(read, calls, strict=True)
    )
    return YES if exact or case != "numbers" else "values"


def by_agentrl(name: str, text: str, size: int) -> Read:
    parser = load_format(name, Path())(tools=json.dumps(TOOLS).encode())
    found = [x for at in range(0, len(text), size) for x in parser.push(text[at : at + size])]
    found += parser.finish()
    content = "".join(part for part in found if isinstance(part, str))
    return content, [
        (x.function.name, x.function.arguments) for x in found if not isinstance(x, str)
    ]


def by_vllm(name: str, text: str) -> Read:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[], model="m", tools=TOOLS)
    kind = ToolParserManager.get_tool_parser(name)
    parser: Any = kind(family_tokenizer(FAMILY[name]), request.tools)
    found = parser.extract_tool_calls(text, request)
    functions = [one.function for one in found.tool_calls]
    return found.content or "", [(one.name, one.arguments) for one in functions]


@contextlib.contextmanager
def without_server(package: str, *within: str) -> Iterator[None]:
    """A package of which modules are imported without the server that its __init__ starts with."""
    spec = find_spec(package) if package not in sys.modules else None
    if spec is not None:
        root = Path(str(spec.origin)).parent.parent
        for name in (package, *(f"{package}.{each}" for each in within)):
            module = types.ModuleType(name)
            module.__path__ = [str(root / name.replace(".", "/"))]
            sys.modules[name] = module
    yield


def by_sglang(name: str, text: str) -> Read:
    within = ("srt", "srt.entrypoints", "srt.entrypoints.openai", "srt.utils",
              "srt.function_call", "srt.parser")  # fmt: skip
    with without_server("sglang", *within):
        module = importlib.import_module("sglang.srt.function_call.function_call_parser")
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    tools = [protocol.Tool.model_validate(tool) for tool in TOOLS]
    parser = module.FunctionCallParser(tools, SGLANG[name])
    content, calls = parser.parse_non_stream(text) if parser.has_tool_call(text) else (text, [])
    return content or "", [(one.name, one.parameters) for one in calls]


def parser_rows() -> dict[str, dict[str, dict[str, str]]]:
    """Verdicts by format, parser and case."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name in FORMATS:
        readers: dict[str, Callable[[str, str], Read]] = {
            "agentrl": lambda n, text: by_agentrl(n, text, len(text)),
            "agentrl, streamed": lambda n, text: by_agentrl(n, text, 1),
        }
        if "vllm" in versions():
            readers["vLLM"] = by_vllm
        if name in SGLANG and "sglang" in versions():
            readers["SGLang"] = by_sglang
        found[name] = {
            who: {
                case: verdict(attempt(reader, name, text), content, calls, case)
                for case, (text, content, calls) in cases(name).items()
            }
            for who, reader in readers.items()
        }
    return found


def attempt(reader: Callable[[str, str], Read], name: str, text: str) -> Read | Exception:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return reader(name, text)
    except ImportError:
        raise
    except Exception as error:  # noqa: BLE001  # what a parser raises is a result
        return error


# The page


def table(head: list[str], rows: list[list[str]]) -> str:
    above, *lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([above, f"|{'---|' * len(head)}", *lines])


def grouped(rows: dict[str, list[str]]) -> list[list[str]]:
    """One row for all names with the same cells."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows.items():
        alike.setdefault(tuple(cells), []).append(name)
    return [[", ".join(names), *cells] for cells, names in alike.items()]


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        for package in (name, f"{name}-cpu"):
            with contextlib.suppress(PackageNotFoundError):
                found.setdefault(name, version(package))
    return found


def page(found: dict[str, Any]) -> str:
    templates_, parsers = found["templates"], found["parsers"]
    shown = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    columns = list(next(iter(templates_.values())))
    formats = "\n\n".join(
        f"### `{name}`\n\n"
        + table(
            ["text", *readers],
            grouped({case: [reads[case] for reads in readers.values()] for case in cases(name)}),
        )
        for name, readers in parsers.items()
    )
    rows = grouped({name: [*row.values()] for name, row in templates_.items()})
    return PREFACE.format(
        versions=shown, templates=table(["template", *columns], rows), formats=formats
    )


PREFACE = """# What templates render and parsers read

Written by `make templates` with {versions}. What to do about a template that breaks the
beginning of a prompt: [chat templates and tool formats](../../algorithms/model/FORMATS.md).

## Templates

The library's templates, and TRL's copies of published ones (`NAME_training`: as TRL changed it).
*yes*: later prompts begin with the tokens of the answer, so a conversation is one row of a batch;
**no**: later calls are rows of their own. Empty: the template does not render such a
conversation, or omits its reasoning or calls. The last three columns: how it writes arguments
that the model wrote as `1.50`, `null` and `{{}}`; empty: in another way.

{templates}

## Parsers

The same valid texts, read by each library's parser. *yes*: content and calls are as written,
apart from white space; *values*: numbers are spelled differently, so a later prompt has other
tokens. A call inside thoughts is a draft: *yes* where it is not executed. The reasoning parsers
of vLLM and SGLang, if enabled, remove thoughts before.

{formats}
"""


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = options.parse_args()
    found = {
        "versions": versions(), "templates": template_rows(), "parsers": parser_rows(),
    }  # fmt: skip
    if given.write:
        if missing := set(PACKAGES) - found["versions"].keys():
            sys.exit(f"{', '.join(sorted(missing))} missing: run `make templates`")
        PAGE.write_text(page(found))
    print(json.dumps(found, indent=2) if given.json else page(found))


if __name__ == "__main__":
    main()
