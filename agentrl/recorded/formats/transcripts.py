"""Transcripts of coding harnesses: Codex, Claude Code, OpenCode and Qwen Code.

A file is one trace: a conversation in which each answer becomes a model call with all messages
before it, and each tool call becomes a tool span. System prompts and definitions of tools are
included only if the transcript has them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.core.errors import ConfigError
from agentrl.recorded import messages
from agentrl.recorded.nodes import (
    Call,
    Issues,
    Node,
    Note,
    Object,
    ToolUse,
    first,
    nanoseconds,
    obj,
    parsed,
    rows,
    usage,
)

Trace = list[Node | Note]


class Turns:
    """Builds a trace from one conversation, in its order."""

    def __init__(self, trace: str, name: str, role: str = "agent") -> None:
        self.trace, self.role, self.model = trace, role, ""
        self.messages: list[Object] = []
        self.tools: list[Object] = []
        self.nodes: Trace = []
        self._name = name
        self._functions: dict[str, Object] = {}  # call id -> function that the model called
        self._open: Node | None = None  # the last answer, which may be continued
        self._place = 0  # its index in `nodes`
        self.is_open = False  # whether nothing follows it
        self.first = self.last = 0
        # The user's request; None: `answer` sets it to the user message before the first answer.
        self.request: str | None = None
        self.root = f"{trace}-root"

    def at(self, time: Any) -> int:
        """Set the time of the following items; returns it in unix nanoseconds, 0 if unknown."""
        moment = nanoseconds(time)
        if moment:
            self.first, self.last = self.first or moment, max(self.last, moment)
        return moment

    def say(self, message: Object) -> None:
        """Add a message that the model did not write."""
        self.is_open = False
        self.messages.append(message)

    def answer(
        self,
        message: Object,
        time: Any = None,
        about: Object | None = None,
        *,
        same: bool = False,
        finish: str = "",
        error: str = "",
        exact: bool = True,
    ) -> None:
        """Add an answer of the model. same: it continues the previous answer, of the same call.
        exact: whether it is one call."""
        moment = self.at(time)
        if self.request is None:
            self.request = next(
                (m["content"] for m in reversed(self.messages) if m["role"] == "user"), None
            )
        for call in message.get("tool_calls") or ():
            self._functions[call["id"]] = call["function"]
        if same and self._open is not None and self._open.call is not None:
            messages.merge(self._open.call.answer or {}, message)
            self.count(about or {}, finish)
            return
        call = (
            Call(
                messages=[*self.messages],
                answer=message,
                tools=self.tools,
                model=self.model,
                finish=finish,
            )
            if exact
            else None
        )
        node = Node(
            trace=self.trace,
            id=f"{self.trace}-{len(self.nodes)}",
            parent=self.root,
            name="chat",
            kind="llm" if exact else "internal",
            start=moment,
            end=moment,
            error=error,
            role=self.role,
            output=message,
            call=call,
            about=about or {},
        )
        self._open, self._place, self.is_open = node, len(self.nodes), True
        self.nodes.append(node)
        self.messages.append(message)

    def count(self, about: Object, finish: str = "") -> None:
        """Set the token counts of the last answer, and why it ended, which are known later."""
        if (node := self._open) and node.call:
            call = replace(node.call, finish=finish or node.call.finish)
            self._open = replace(node, about=node.about | about, call=call)
            self.nodes[self._place] = self._open

    def result(
        self,
        id: str,
        content: Any,
        time: Any = None,
        *,
        error: str = "",
        start: Any = None,
        name: str = "",
    ) -> None:
        """Add the result of a tool."""
        self.is_open = False
        moment = self.at(time)
        text = messages.content_text(content)
        function = self._functions.get(id, {})
        called = str(function.get("name") or name)
        shown = messages.tool_content(content)
        place = len(self.messages)
        if id in self._functions:  # before messages that a hook has added since the call
            while place and self.messages[place - 1]["role"] not in ("assistant", "tool"):
                place -= 1
        self.messages.insert(place, {"role": "tool", "tool_call_id": id, "content": shown})
        arguments = parsed(function.get("arguments"))
        tool = ToolUse(called, arguments, text, self._schema(called))
        self.nodes.append(
            Node(
                trace=self.trace,
                id=f"{self.trace}-{len(self.nodes)}",
                parent=self.root,
                name=called,
                kind="tool",
                start=self.at(start) or moment,
                end=moment,
                error=error,
                role=self.role,
                input=tool.arguments,
                output=text,
                tool=tool,
            )
        )

    def _schema(self, name: str) -> Object:
        return next((tool for tool in self.tools if tool["function"]["name"] == name), {})

    def done(self, about: Object | None = None) -> Trace:
        """The whole trace, below its root."""
        answer = next(
            (m.get("content") for m in reversed(self.messages) if m["role"] == "assistant"), None
        )
        root = Node(
            trace=self.trace,
            id=self.root,
            name=self._name,
            kind="agent",
            start=self.first,
            end=self.last,
            role=self.role,
            input=self.request,
            output=answer,
            about=about or {},
        )
        return [root, *self.nodes] if self.nodes else []


def is_codex(row: Object) -> bool:
    """Whether it is the first line of a rollout file of Codex."""
    return row.get("type") == "session_meta" and isinstance(row.get("payload"), dict)


def read_codex(lines: Iterable[Object], issues: Issues) -> Iterator[Trace]:
    """A rollout file of Codex: `sessions/YYYY/MM/DD/rollout-*.jsonl`."""
    turns: Turns | None = None
    about: Object = {}
    begins: list[int] = []  # lengths of the history before each turn of the user
    for line in lines:
        kind, payload, at = line.get("type"), obj(line.get("payload")), line.get("timestamp")
        if kind == "session_meta" and turns is None:
            turns = Turns(str(payload.get("id") or ""), "codex")
            about = {"version": payload.get("cli_version")}
            if text := obj(payload.get("base_instructions")).get("text"):
                turns.say({"role": "system", "content": text})
            turns.tools = messages.tools_of(first(payload, "dynamic_tools", "tools"))
        if turns is None:
            continue
        if kind == "turn_context":
            turns.model = str(payload.get("model") or turns.model)
        elif kind == "compacted":
            history = messages.messages_of(payload.get("replacement_history")) or [
                {"role": "user", "content": str(payload.get("message") or "")}
            ]
            turns.messages = [m for m in turns.messages[:1] if m["role"] == "system"] + history
            begins = []
        elif kind == "token_usage_record":
            turns.count(usage(payload.get("usage")))
        elif kind == "event_msg" and payload.get("type") == "user_message":
            matching = [n for n, m in enumerate(turns.messages) if _says(m, payload.get("message"))]
            begins.append(matching[-1] if matching else len(turns.messages))
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            user_indices = [n for n, m in enumerate(turns.messages) if m["role"] == "user"]
            begins, gone = _without_last(begins or user_indices, payload.get("num_turns"))
            turns.messages = turns.messages[: min(gone, default=len(turns.messages))]
        elif kind == "response_item":
            _codex_item(turns, payload, at)
    if turns:
        yield turns.done(about)


def _says(message: Object, text: Any) -> bool:
    return bool(message["role"] == "user" and messages.content_text(message["content"]) == text)


def _without_last(begins: list[int], count: Any) -> tuple[list[int], list[int]]:
    """The beginnings of turns, and those of the last turns, which the user has rolled back."""
    split = max(0, len(begins) - (count if isinstance(count, int) else 0))
    return begins[:split], begins[split:]


def _codex_item(turns: Turns, item: Object, at: Any) -> None:
    kind = str(item.get("type"))
    if kind == "message":
        message = messages.message_of(item, "assistant")
        if message["role"] == "assistant":
            turns.answer(message, at, same=turns.is_open)
        else:
            turns.at(at)
            turns.say(message)
    elif kind == "reasoning" or kind.endswith("_call"):
        (message,) = messages.expanded(item)
        message.pop("item", None)
        if kind != "reasoning" or message.get("reasoning_content"):
            turns.answer(message, at, same=turns.is_open)
    elif kind.endswith("call_output"):
        turns.result(str(item.get("call_id") or ""), _codex_output(item.get("output")), at)


def _codex_output(output: Any) -> Any:
    """The output of a tool, without the exit code that some versions write around it."""
    decoded = parsed(output)
    if isinstance(decoded, dict) and {*decoded} == {"output", "metadata"}:
        return decoded["output"]
    return output.get("content", output) if isinstance(output, dict) else output


def is_claude(row: Object) -> bool:
    """Whether it is a line of a transcript of Claude Code."""
    return (
        "sessionId" in row
        and "type" in row
        and (
            isinstance(obj(row.get("message")).get("content"), str | list)
            or row["type"] in CLAUDE_BESIDE
        )
    )


CLAUDE_BESIDE = (
    "queue-operation",
    "summary",
    "file-history-snapshot",
    "last-prompt",
    "mode",
    "permission-mode",
)


def read_claude(lines: Iterable[Object], issues: Issues) -> Iterator[Trace]:
    """A transcript of Claude Code: `projects/FOLDER/SESSION.jsonl`. Conversations of subagents
    (`isSidechain`) become separate traces."""
    conversations: dict[str, Turns] = {}
    last: dict[str, str] = {}
    lengths: dict[str, int] = {}  # of the history after each line, by its id
    tools: list[Object] = []
    about: Object = {}
    for line in lines:
        about = about or ({"version": line["version"]} if line.get("version") else {})
        side = str(line.get("agentId") or "side") if line.get("isSidechain") else ""
        trace = "-".join(filter(None, (str(line.get("sessionId") or ""), side)))
        if line.get("type") == "api-request-shape":
            tools = messages.tools_of(obj(line.get("shape")).get("tools")) or tools
            for conversation in conversations.values():
                conversation.tools = conversation.tools or tools
        message = obj(line.get("message"))
        if line.get("type") not in ("user", "assistant", "attachment", "system"):
            if (before := line.get("parentUuid")) in lengths:  # such as a hook's progress
                lengths[str(line.get("uuid"))] = lengths[before]
            continue
        if line.get("uuid") in lengths:  # written again when the session was resumed
            continue
        if trace not in conversations:
            conversations[trace] = Turns(trace, "claude-code", "subagent" if side else "agent")
            conversations[trace].tools = tools
        turns, at = conversations[trace], line.get("timestamp")
        results = {str(p.get("tool_use_id")): p for p in map(obj, rows(message.get("content")))}
        results.pop("None", None)
        if line.get("type") in ("user", "system") and not results:
            _go_back(turns, line, lengths)
        if line.get("isApiErrorMessage"):
            continue
        if line.get("type") == "attachment":
            _attachment(turns, line)
        elif line.get("type") == "user" and message:
            for entry in messages.expanded(message):
                if entry["role"] == "tool":
                    failed = results.get(entry["tool_call_id"], {}).get("is_error")
                    turns.result(
                        entry["tool_call_id"],
                        entry["content"],
                        at,
                        error="it failed" if failed else "",
                    )
                else:
                    turns.at(at)
                    if not line.get("isMeta"):  # meta messages are written by the harness
                        turns.request = turns.request or messages.content_text(entry["content"])
                    turns.say(entry)
        elif line.get("type") == "assistant" and message.get("model") == "<synthetic>":
            turns.say(messages.message_of(message))  # not written by a model
        elif line.get("type") == "assistant" and message:
            turns.model = str(message.get("model") or turns.model)
            same, last[trace] = last.get(trace) == message.get("id"), str(message.get("id"))
            turns.answer(
                messages.message_of(message),
                at,
                usage(message.get("usage")),
                same=same,
                finish=_stop(message.get("stop_reason")),
            )
        lengths[str(line.get("uuid"))] = len(turns.messages) - _has_system(turns)
    for turns in conversations.values():
        yield turns.done(about)


def _go_back(turns: Turns, line: Object, lengths: dict[str, int]) -> None:
    """Remove messages from the history that a line does not continue: a user went back, or the
    harness restarted with a summary."""
    before = line.get("parentUuid", "")
    if before is None or before in lengths:
        turns.messages = turns.messages[: _has_system(turns) + lengths.get(before or "", 0)]


def _has_system(turns: Turns) -> bool:
    return bool(turns.messages) and turns.messages[0]["role"] == "system"


def _attachment(turns: Turns, line: Object) -> None:
    """Text that the harness has added to the prompt, in versions that record it."""
    attachment = obj(line.get("attachment"))
    if attachment.get("type") == "prompt_snapshot":
        system = "\n\n".join(str(part) for part in rows(attachment.get("systemPrompt")))
        if system and not any(
            m["role"] == "system" and m.get("content") == system for m in turns.messages
        ):
            turns.messages.insert(0, {"role": "system", "content": system})
        return
    for part in rows(line.get("rendered")):
        if text := obj(part).get("content"):
            role = str(line.get("renderedRole") or "user")
            turns.say(
                {
                    "role": role if role in messages.KNOWN else "user",
                    "content": messages.content_text(text),
                }
            )


def _stop(reason: Any) -> str:
    return {
        "tool_use": "tool_calls",
        "end_turn": "stop",
        "max_tokens": "length",
        "STOP": "stop",
    }.get(str(reason or ""), str(reason or ""))


def is_qwen(row: Object) -> bool:
    """Whether it is a line of a transcript of Qwen Code."""
    return (
        "sessionId" in row
        and "uuid" in row
        and (isinstance(obj(row.get("message")).get("parts"), list) or "systemPayload" in row)
    )


def read_qwen(lines: Iterable[Object], issues: Issues) -> Iterator[Trace]:
    """A transcript of Qwen Code: `projects/FOLDER/chats/SESSION.jsonl`."""
    turns: Turns | None = None
    about: Object = {}
    for line in lines:
        message, at = obj(line.get("message")), line.get("timestamp")
        if turns is None:
            turns = Turns(str(line.get("sessionId") or ""), "qwen-code")
            about = {"version": line.get("version")}
        if not message or line.get("type") not in ("user", "assistant", "tool_result"):
            continue
        if line["type"] == "tool_result":
            for part in rows(message.get("parts")):
                answered = obj(obj(part).get("functionResponse"))
                response = obj(answered.get("response"))
                failed = "error" in response
                inner = first(response, "output", "error") if response else answered.get("response")
                turns.result(
                    str(answered.get("id") or ""),
                    inner,
                    at,
                    error="it failed" if failed else "",
                    name=str(answered.get("name") or ""),
                )
        elif line["type"] == "user":
            turns.at(at)
            turns.say(_gemini(message))
        else:
            turns.model = str(line.get("model") or turns.model)
            counted = obj(line.get("usageMetadata"))
            tokens = {
                "input": counted.get("promptTokenCount"),
                "output": counted.get("candidatesTokenCount"),
            }
            turns.answer(_gemini(message), at, usage(tokens))
    if turns:
        yield turns.done(about)


def _gemini(message: Object) -> Object:
    """A message with Google's parts; parts with `thought` are reasoning."""
    parts = [
        {"type": "thinking", "thinking": p.get("text")} if obj(p).get("thought") else p
        for p in rows(message.get("parts"))
    ]
    return messages.message_of({"role": message.get("role"), "content": parts})


def is_opencode(row: Object) -> bool:
    """Whether it is a session as OpenCode exports it."""
    return (
        isinstance(row.get("messages"), list)
        and "info" in row
        and all(isinstance(obj(message).get("parts"), list) for message in row["messages"])
    )


def read_opencode(row: Object, issues: Issues) -> Iterator[Trace]:
    """The output of `opencode export SESSION`."""
    info = obj(row.get("info"))
    turns = Turns(
        str(info.get("id") or ""), "opencode", "subagent" if info.get("parentID") else "agent"
    )
    for entry in row["messages"]:
        about, parts = obj(entry.get("info")), [obj(part) for part in rows(entry.get("parts"))]
        time = obj(about.get("time"))
        texts = "".join(
            str(p.get("text") or "")
            for p in parts
            if p.get("type") == "text" and not p.get("ignored")
        )
        if about.get("role") == "user":
            turns.at(time.get("created"))
            if about.get("system") and not turns.messages:
                turns.say({"role": "system", "content": str(about["system"])})
            images = [
                {"type": "image_url", "image_url": {"url": p.get("url")}}
                for p in parts
                if p.get("type") == "file" and str(p.get("mime")).startswith("image/")
            ]
            text = [{"type": "text", "text": texts}]
            turns.say({"role": "user", "content": [*text, *images] if images else texts})
            continue
        _opencode_answer(turns, about, parts, time)
    yield turns.done({"version": info.get("version")})


def _opencode_answer(turns: Turns, about: Object, parts: list[Object], time: Object) -> None:
    """An assistant message: usually one call; each further `step-start` begins another call."""
    model = about.get("modelID") or obj(about.get("model")).get("modelID")
    turns.model = str(model or turns.model)
    steps: list[list[Object]] = [[]]
    for part in parts:
        if part.get("type") == "step-start" and steps[-1]:
            steps.append([])
        steps[-1].append(part)
    error = obj(about.get("error"))
    for step in steps:
        used = [part for part in step if part.get("type") == "tool"]
        message: Object = {"role": "assistant"}
        message["content"] = "".join(
            str(p.get("text") or "") for p in step if p.get("type") == "text"
        ) or (None if used else "")
        if thought := "".join(
            str(p.get("text") or "") for p in step if p.get("type") == "reasoning"
        ):
            message["reasoning_content"] = thought
        if used:
            message["tool_calls"] = [
                messages.tool_call(p.get("callID"), p.get("tool"), obj(p.get("state")).get("input"))
                for p in used
            ]
        finish = next((p for p in step if p.get("type") == "step-finish"), about)
        why = str(obj(error.get("data")).get("message") or error.get("name") or "") if error else ""
        turns.answer(
            message,
            first(time, "completed", "created"),
            usage(finish.get("tokens"), finish.get("cost")),
            finish=_stop(str(first(finish, "reason", "finish") or "").replace("-", "_")),
            error=why,
        )
        for part in used:
            state = obj(part.get("state"))
            failed = state.get("status") == "error"
            times = obj(state.get("time"))
            turns.result(
                str(part.get("callID") or ""),
                first(state, "output", "error"),
                times.get("end"),
                error=str(state.get("error") or "it failed") if failed else "",
                start=times.get("start"),
            )


def read_opencode_database(path: Path, issues: Issues) -> Iterator[Trace]:
    """The sessions in OpenCode's database, `opencode.db`."""
    try:
        opened = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        with closing(opened) as database:
            for id, parent, version in database.execute(
                "select id, parent_id, version from session order by time_created"
            ):
                rows_of_messages = database.execute(
                    "select id, data from message where session_id = ? order by time_created, id",
                    (id,),
                ).fetchall()
                yield from read_opencode(
                    {
                        "info": {"id": id, "parentID": parent, "version": version},
                        "messages": [
                            {"info": obj(data), "parts": _parts(database, message)}
                            for message, data in rows_of_messages
                        ],
                    },
                    issues,
                )
    except sqlite3.Error as error:
        raise ConfigError(f"{path} is not a database of OpenCode: {error}") from None


def _parts(database: sqlite3.Connection, message: str) -> list[Object]:
    records = database.execute("select data from part where message_id = ? order by id", (message,))
    return [obj(data) for (data,) in records]
