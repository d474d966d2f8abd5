"""vLLM's parsers of tool calls read the same in what the library's templates write."""

from __future__ import annotations

import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: run `make test-engines`", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, at vLLM's imports
    import vllm
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

from agentrl.algorithms.model.templates import templates
from tests.algorithms.model.roundtrip import TOOLS, Answer, answers, family_tokenizer, rendered

# Of tokenizers that are not Mistral's own, vLLM reads the newer format only.
NAMES = sorted(templates().keys() - {"mistral_v3"})
# In which its parsers lose calls: texts with tags and brackets, an argument called `from`.
HARD = re.compile(r"[<\[\]{}()|]|\"from\"")


def by_vllm(name: str, text: str) -> Answer:
    request = ChatCompletionRequest(messages=[], model="m", tools=TOOLS)
    parser: Any = ToolParserManager.get_tool_parser(templates()[name].tool_format)
    found = parser(family_tokenizer(name), request.tools).extract_tool_calls(text, request)
    functions = [call.function for call in found.tool_calls]
    return found.content or "", [(one.name, json.loads(one.arguments)) for one in functions]


@pytest.mark.parametrize("name", NAMES)
def test_vllm_reads_the_same_calls(name: str) -> None:
    compared = 0
    for content, calls in answers():
        shown = [json.dumps(arguments)[1:-1] for _, arguments in calls]  # without its braces
        if content or not calls or any(HARD.search(one) for one in shown):
            continue
        compared += 1
        assert by_vllm(name, rendered(name, (content, calls))) == (content, calls)
    assert compared > 8


def test_without_tools_chatml_is_vllms_template() -> None:
    file = Path(vllm.__file__).with_name("transformers_utils") / "chat_templates"
    published = (file / "template_chatml.jinja").read_text()
    tokenizer = family_tokenizer("chatml")
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": f"{role}s words"} for role in roles]
    for size in (2, 4):
        options = {"tokenize": False, "add_generation_prompt": True}
        ours = tokenizer.apply_chat_template(messages[:size], **options)
        theirs = tokenizer.apply_chat_template(messages[:size], chat_template=published, **options)
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_vllm_reads_no_calls_in_content(name: str) -> None:
    for content in ("Let me look.", "Two lines:\n- one\n- two", "\u00dcber \U0001f600"):
        assert by_vllm(name, rendered(name, (content, []))) == (content, [])
