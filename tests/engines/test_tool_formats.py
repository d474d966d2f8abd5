"""vLLM's parsers of tool calls read the same in what the library's templates write."""

from __future__ import annotations

import json
import re
import warnings
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: run `make test-engines`", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, at vLLM's imports
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

from agentrl.algorithms.formats.templates import templates
from tests.algorithms.formats.roundtrip import TOOLS, Answer, answers, family_tokenizer, rendered

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


@pytest.mark.parametrize("name", NAMES)
def test_vllm_reads_no_calls_in_content(name: str) -> None:
    for content in ("Let me look.", "Two lines:\n- one\n- two", "\u00dcber \U0001f600"):
        assert by_vllm(name, rendered(name, (content, []))) == (content, [])
