"""Names of the attributes of spans, and the kind of a span by its attributes."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.types import Json

DIFF = "agentrl.diff"  # span attribute: the changes that the agent made in its workspace
KIND, TRACELOOP_KIND = "openinference.span.kind", "traceloop.span.kind"
KINDS = frozenset({"agent", "chain", "tool", "llm"})
TRACELOOP_KINDS = {"workflow": "chain", "task": "chain", "agent": "agent", "tool": "tool"}
# Names of version 0.1.0 of OpenTelemetry's semantic conventions for generative AI.
OPERATION, AGENT_NAME, TOOL_NAME = "gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.tool.name"
OPERATIONS = {
    "chat": "llm",
    "text_completion": "llm",
    "generate_content": "llm",
    "execute_tool": "tool",
    "invoke_agent": "agent",
    "create_agent": "agent",
    "invoke_workflow": "chain",
    "plan": "chain",
}
CURRENT = {
    "gen_ai.system": "gen_ai.provider.name",
    "gen_ai.workflow.name": AGENT_NAME,
    "gen_ai.usage.prompt_tokens": "gen_ai.usage.input_tokens",
    "gen_ai.usage.completion_tokens": "gen_ai.usage.output_tokens",
    "gen_ai.openai.request.seed": "gen_ai.request.seed",
    "agent.name": AGENT_NAME,  # OpenInference
    "tool.name": TOOL_NAME,
    "agent_name": AGENT_NAME,  # Pydantic AI up to version 2 of its instrumentation
    "tool_arguments": "gen_ai.tool.call.arguments",
    "tool_response": "gen_ai.tool.call.result",
}
"""The current name of each older or other name of an attribute that instrumentations send."""
DESCRIPTION = "otel.status_description"  # the message of a failed span


def kind_of(attributes: dict[str, Json]) -> str:
    """The kind of a span, from its OpenInference attribute (which is removed from `attributes`),
    its GenAI operation or OpenLLMetry kind, or what only spans of one kind have in instrumentations
    without these; otherwise "internal"."""
    kind = str(attributes.get(KIND, "")).lower()
    if kind in KINDS:
        del attributes[KIND]
        return kind
    if OPERATION in attributes:
        return OPERATIONS.get(str(attributes[OPERATION]), "internal")
    if (kind := str(attributes.get(TRACELOOP_KIND, "")).lower()) in TRACELOOP_KINDS:
        return TRACELOOP_KINDS[kind]
    if attributes.get("llm.request.type") in ("chat", "completion"):  # OpenLLMetry
        return "llm"
    if TOOL_NAME in attributes:
        return "tool"
    if "gen_ai.request.model" in attributes and "gen_ai.system" in attributes:
        return "llm"
    return "agent" if "agent_name" in attributes else "internal"


def with_current_names(attributes: Mapping[str, Json]) -> dict[str, Json]:
    """The attributes, and those with an older name under their current one too."""
    added = {CURRENT[old]: attributes[old] for old in CURRENT if old in attributes}
    entity = {"tool": TOOL_NAME, "agent": AGENT_NAME, "workflow": AGENT_NAME}
    name = entity.get(str(attributes.get(TRACELOOP_KIND)))
    if name is not None and "traceloop.entity.name" in attributes:
        added.setdefault(name, attributes["traceloop.entity.name"])
    return added | dict(attributes)
