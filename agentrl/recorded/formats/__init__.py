"""The formats of recorded traces, each with the tested versions and its losses. A format is
recognised by the contents of a file's rows. In some formats rows are spans, which may come in any
order and be spread over files; in others whole traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from agentrl.recorded.formats import conversations, langfuse, langsmith, openai, otel, transcripts
from agentrl.recorded.nodes import Issues, Node, Note, Object

Spans = Callable[[Object, Issues], Iterator[Node | Note]]
Whole = Callable[[Object, Issues], Iterator[list[Node | Note]]]
Lines = Callable[[Iterable[Object], Issues], Iterator[list[Node | Note]]]

ARGUMENTS = "spaces in tool arguments"
TOKENS = "token ids"


class Format(NamedTuple):
    """A format. is_row: whether a row has this format. One of `spans` (a row has spans), `whole` (a
    row is a trace) and `lines` (a file is a trace) reads it. lost: information that is missing or
    inexact."""

    name: str
    source: str  # the tool that writes it
    version: str  # tested versions
    lost: tuple[str, ...]
    is_row: Callable[[Object], bool]
    spans: Spans | None = None
    whole: Whole | None = None
    lines: Lines | None = None


FORMATS = (
    Format(
        "otlp",
        "OTLP in JSON or protobuf (`.pb`): OpenTelemetry's current GenAI conventions, the two"
        " older forms, OpenInference, OpenLLMetry, Langfuse's SDK",
        "OTLP 1.x; OpenInference 0.1.80,"
        " OpenLLMetry 0.40.14 and 0.62.4, opentelemetry-instrumentation-openai-v2 2.3b0,"
        " Langfuse 5.0.4",
        (
            TOKENS,
            "messages, if the instrumentation was not told to record content or sends it as logs",
            f"{ARGUMENTS}, in today's GenAI form",
            "other attributes",
            "feedback other than agentrl's",
        ),
        otel.is_otlp,
        spans=otel.read_otlp,
    ),
    Format(
        "spans",
        "spans of OpenTelemetry's SDKs (`to_json`) and of Phoenix (its API, data frames)",
        "opentelemetry-sdk 1.45.2, arize-phoenix-client",
        (TOKENS, f"{ARGUMENTS}, in today's GenAI form", "other attributes"),
        otel.is_span,
        spans=otel.read_span,
    ),
    Format(
        "annotations",
        "annotations of Phoenix",
        "arize-phoenix-client",
        ("who gave them",),
        otel.is_annotation,
        spans=otel.read_annotation,
    ),
    Format(
        "langsmith",
        "runs of LangSmith: its client's JSON, bulk export as JSON lines or parquet",
        "langsmith 0.15.1",
        (
            TOKENS,
            ARGUMENTS,
            "attachments, tags, other metadata",
            "feedback of several people, where there are only its statistics",
        ),
        langsmith.is_run,
        spans=langsmith.read_run,
    ),
    Format(
        "langsmith feedback",
        "feedback of LangSmith",
        "langsmith 0.15.1",
        ("who gave it",),
        langsmith.is_feedback,
        spans=langsmith.read_feedback,
    ),
    Format(
        "langfuse",
        "traces of Langfuse, with observations and scores",
        "langfuse 5.0.4",
        (TOKENS, ARGUMENTS, "prompts' links", "media", "tags, other metadata"),
        langfuse.is_trace,
        spans=langfuse.read_trace,
    ),
    Format(
        "langfuse scores",
        "scores of Langfuse (JSON, CSV)",
        "langfuse 5.0.4",
        ("who gave them",),
        langfuse.is_score,
        spans=langfuse.read_score,
    ),
    Format(
        "langfuse observations",
        "observations of Langfuse's API and exports (JSON, CSV)",
        "langfuse 5.0.4",
        (TOKENS, ARGUMENTS, "prompts' links", "media", "tags, other metadata"),
        langfuse.is_observation,
        spans=langfuse.read_observation,
    ),
    Format(
        "openai agents",
        "traces of OpenAI's Agents SDK",
        "openai-agents 0.24.0",
        (
            TOKENS,
            "definitions of tools, of chat models",
            "answers that are named by an id alone",
            "cost",
        ),
        openai.is_trace,
        spans=openai.read_trace,
    ),
    Format(
        "openai completions",
        "stored completions and responses of OpenAI, with their messages",
        "openai 3.57.0",
        (TOKENS, "the tree of calls: each is a trace, unless its metadata has a trace_id"),
        openai.is_completion,
        spans=openai.read_completion,
    ),
    Format(
        "codex",
        "transcripts of Codex (`sessions/*/rollout-*.jsonl`)",
        "0.171.0",
        (
            TOKENS,
            "definitions of tools",
            "cost",
            "the history before a compaction, in its later calls",
        ),
        transcripts.is_codex,
        lines=transcripts.read_codex,
    ),
    Format(
        "qwen",
        "transcripts of Qwen Code (`chats/*.jsonl`)",
        "0.24.4",
        (
            TOKENS,
            ARGUMENTS,
            "the system prompt",
            "definitions of tools",
            "compactions",
            "cost",
        ),
        transcripts.is_qwen,
        lines=transcripts.read_qwen,
    ),
    Format(
        "claude",
        "transcripts of Claude Code (`projects/*/*.jsonl`)",
        "2.1.332",
        (
            TOKENS,
            ARGUMENTS,
            "the system prompt and definitions of tools, of versions that do not write them",
            "hidden thoughts",
            "cost of a call",
        ),
        transcripts.is_claude,
        lines=transcripts.read_claude,
    ),
    Format(
        "opencode",
        "sessions of OpenCode (`opencode export`, `opencode.db`)",
        "1.18.33",
        (
            TOKENS,
            ARGUMENTS,
            "the system prompt",
            "definitions of tools",
            "compactions",
            "calls that write titles",
        ),
        transcripts.is_opencode,
        whole=transcripts.read_opencode,
    ),
    Format(
        "atif",
        "trajectories of Harbor (ATIF)",
        "1.0 to 1.8, harbor 0.26.0",
        (
            TOKENS,
            ARGUMENTS,
            "steps of several calls, as demonstrations",
        ),
        conversations.is_atif,
        whole=conversations.read_atif,
    ),
    Format(
        "chats",
        "rows of chats: `messages`, or ShareGPT's `conversations`",
        "any",
        (TOKENS, "the tree, times, models, cost"),
        conversations.is_chat,
        whole=conversations.read_chat,
    ),
)


def format_of(row: Any) -> Format | None:
    """The format of a row; None if it is of none."""
    if not isinstance(row, dict):
        return None
    return next((form for form in FORMATS if form.is_row(row)), None)


ENVELOPES = (
    "runs",
    "data",
    "observations",
    "spans",
    "traces",
    "trajectories",
    "items",
    "scores",
    "conversations",
    "completions",
)


def unwrapped(row: Any) -> list[Any] | None:
    """The rows in an object of an API, such as {"data": [...], "meta": ...}; None for others."""
    if isinstance(row, dict) and format_of(row) is None:
        for name in ENVELOPES:
            if isinstance(inner := row.get(name), list):
                return inner
    return None
