"""Kinds and attributes of spans, in the words of other instrumentations."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.base.span_names import kind_of, with_current_names


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"openinference.span.kind": "LLM", "llm.model_name": "m"}, "llm"),
        ({"openinference.span.kind": "RETRIEVER"}, "internal"),
        ({"gen_ai.operation.name": "plan", "gen_ai.agent.name": "a"}, "chain"),
        ({"gen_ai.operation.name": "embeddings", "gen_ai.system": "openai"}, "internal"),
        ({"traceloop.span.kind": "workflow", "traceloop.entity.name": "team"}, "chain"),
        ({"traceloop.span.kind": "task"}, "chain"),
        ({"traceloop.span.kind": "agent"}, "agent"),
        ({"traceloop.span.kind": "tool"}, "tool"),
        ({"llm.request.type": "chat", "gen_ai.system": "OpenAI"}, "llm"),
        ({"llm.request.type": "embedding"}, "internal"),
        ({"gen_ai.tool.name": "look", "tool_arguments": "{}"}, "tool"),  # Pydantic AI
        ({"agent_name": "clerk", "model_name": "m"}, "agent"),
        ({"gen_ai.system": "openai", "gen_ai.request.model": "m"}, "llm"),  # before 1.27
        ({"http.method": "POST", "gen_ai.agent.name": "clerk"}, "internal"),
    ],
)
def test_the_kind_of_a_span_by_the_words_of_its_instrumentation(
    sent: dict[str, Any], kind: str
) -> None:
    assert kind_of(sent) == kind


@pytest.mark.parametrize(
    ("sent", "name", "value"),
    [
        ({"gen_ai.workflow.name": "crew"}, "gen_ai.agent.name", "crew"),
        ({"agent.name": "clerk"}, "gen_ai.agent.name", "clerk"),
        ({"agent_name": "clerk"}, "gen_ai.agent.name", "clerk"),
        ({"agent_name": "old", "gen_ai.agent.name": "new"}, "gen_ai.agent.name", "new"),
        ({"gen_ai.system": "openai"}, "gen_ai.provider.name", "openai"),
        ({"gen_ai.usage.prompt_tokens": 3}, "gen_ai.usage.input_tokens", 3),
        ({"tool_response": "x"}, "gen_ai.tool.call.result", "x"),
        (
            {"traceloop.span.kind": "agent", "traceloop.entity.name": "clerk"},
            "gen_ai.agent.name",
            "clerk",
        ),
        (
            {"traceloop.span.kind": "tool", "traceloop.entity.name": "look"},
            "gen_ai.tool.name",
            "look",
        ),
    ],
)
def test_older_names_of_attributes_are_kept_and_known_by_the_current_ones(
    sent: dict[str, Any], name: str, value: Any
) -> None:
    found = with_current_names(sent)
    assert found[name] == value
    assert found.items() >= sent.items()
    assert with_current_names({"traceloop.span.kind": "task"}) == {"traceloop.span.kind": "task"}
