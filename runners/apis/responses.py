"""OpenAI's Responses API on top of chat completions.

Client tools, parallel calls, reasoning and structured output are translated, and so are
`previous_response_id`, `conversation` and references to items within one attempt, which `stored`
serves. Hosted tools are dropped; files are refused.
Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec

from agentrl.core.types import Json
from agentrl.runners.apis import base, common
from agentrl.runners.apis.base import Dialect, UntranslatableError
from agentrl.runners.apis.chat import Body, ConversationMemory
from agentrl.runners.apis.common import ClientTools, arguments_of, custom_input, flat_name

# Fields that a chat completion cannot express, with the values at which they have no effect. Any
# other value is refused.
ALLOWED: dict[str, tuple[Json, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "moderation": (None,),
    "prompt": (None,),
    "truncation": (None, "auto", "disabled"),  # a prompt that is too long is refused either way
}
# Server options, dropped: limits of hosted tools, cache hints, data stored with a response.
# `service_tier` and `user` have no effect either, but chat completions have them, so they are
# passed on. Hosted tools are listed in `common.HOSTED`.
IDLE = {"access_programs", "background_options", "client_metadata", "image", "max_tool_calls"}
IDLE |= {"metadata", "prompt_cache_options", "stream_options"}
TRANSLATED = {"conversation", "include", "input", "instructions", "max_output_tokens"}
TRANSLATED |= {"previous_response_id", "reasoning", "store", "text", "tool_choice", "tools"}
# Fields of a request to input_tokens.
COUNTED = {"conversation", "input", "instructions", "model", "parallel_tool_calls", "reasoning"}
COUNTED |= {"previous_response_id", "text", "tool_choice", "tools", "truncation"}
LOGPROBS = "message.output_text.logprobs"
# Other accepted values of `include`: the first is always there, the others concern hosted tools or
# the agent's input.
HOSTED_DATA = {"code_interpreter_call.outputs", "file_search_call.results"}
HOSTED_DATA |= {"web_search_call.action.sources", "web_search_call.results"}
INCLUDED = {"reasoning.encrypted_content", "message.input_image.image_url"}
INCLUDED |= {"computer_call_output.output.image_url", *HOSTED_DATA}
# Options of `reasoning`, as in `ALLOWED`. `NO_SUMMARY` is dropped: a summary does not change the
# answer, and the policy's chat template decides which turns keep their reasoning.
REASONING: dict[str, tuple[Json, ...]] = {"mode": (None, "standard")}
NO_SUMMARY = {"context", "generate_summary", "summary"}
# Fields of items and of their parts that are used, by type. Other fields have no effect on the
# policy and are recorded; marks for prompt caching do not change answers.
ITEM = {"type", "id", "status"}
READ = {"message": ITEM | {"role", "content"}, "item_reference": ITEM}
READ["function_call"] = ITEM | {"call_id", "name", "namespace", "arguments"}
READ["custom_tool_call"] = ITEM | {"call_id", "name", "namespace", "input"}
READ["computer_call"] = ITEM | {"call_id", "action", "actions"}
READ |= dict.fromkeys(
    ("function_call_output", "custom_tool_call_output", "computer_call_output"),
    ITEM | {"call_id", "output"},
)
READ["reasoning"] = ITEM | {"summary", "content", "encrypted_content"}
READ |= dict.fromkeys(("compaction", "compaction_summary"), ITEM | {"encrypted_content"})
PART = {"type", "prompt_cache_breakpoint"}
READ |= dict.fromkeys(("input_text", "text"), PART | {"text"})
READ["output_text"] = PART | {"text", "logprobs"}  # the policy's own log-probs
READ["refusal"] = PART | {"refusal"}
READ |= dict.fromkeys(("input_image", "computer_screenshot"), PART | {"image_url", "detail"})
REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}

COMPUTER = "computer"  # function name of computer actions
# Prefix of the message that replaces compacted items; it identifies compactions of this gateway.
SUMMARY = "The conversation before this was replaced by your summary of it:\n\n"
SCREENS = {"computer_screenshot", "input_image"}  # types of a computer's output

# Key of a chat message -> type of the item, type of its part, the part's field.
PARTS = {
    "reasoning_content": ("reasoning", "reasoning_text", "text"),
    "content": ("message", "output_text", "text"),
    "refusal": ("message", "refusal", "refusal"),
}


# -- the request -----------------------------------------------------------------------------------


def chat_request(
    body: Body, memory: ConversationMemory, tools: ClientTools, earlier: list[Body]
) -> Body:
    """Return a request's chat completion, which continues the `earlier` messages. Adds the tools
    that it offers to `tools`."""
    common.refuse_unless(body, ALLOWED)
    chat = {k: v for k, v in body.items() if k not in ALLOWED.keys() | IDLE | TRANSLATED}
    instructions = body.get("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    tools.add(body.get("tools"), "tools")
    items, reasoning = body.get("input"), body.get("reasoning") or {}
    if not isinstance(items, str):
        items, reasoning = _settings(base.objects(items, "input"), tools, reasoning)
    chat["messages"] = _messages([*system, *earlier], items, memory)
    if not chat["messages"]:
        raise UntranslatableError("input", "must not be empty", code="missing_parameter")
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if tools.chat:
        chat["tools"] = tools.chat
    choice = body.get("tool_choice")
    if choice is not None and (tools.chat or choice not in ("auto", "none")):
        chat["tool_choice"] = _tool_choice(choice)
    for item in body.get("include") or ():
        if item != LOGPROBS and item not in INCLUDED:
            raise UntranslatableError("include", f"{item!r:.80} does not exist behind this gateway")
        if item == LOGPROBS:
            chat["logprobs"] = True
    return chat | _format(body.get("text") or {}) | _reasoning(reasoning)


def ignored(body: Body) -> list[str]:
    """List the request's options that have no effect; for tools see `ClientTools.ignored`."""
    options = [name for name in sorted(IDLE & body.keys()) if body[name]]
    options += ["truncation"] if body.get("truncation") == "auto" else []
    options += [f"include: {name}" for name in sorted(HOSTED_DATA & {*(body.get("include") or ())})]
    reasoning = body.get("reasoning") or {}
    idle = sorted(NO_SUMMARY & reasoning.keys())
    options += [f"reasoning.{name}" for name in idle if reasoning[name]]
    items = body.get("input")
    return options + (sorted(set(_unread(items, "input"))) if isinstance(items, list) else [])


def _unread(parts: list[Body], where: str) -> Iterator[str]:
    """Yield fields of items, or of parts of an item, that have no effect."""
    for part in parts:
        kind = part.get("type") or ("message" if "role" in part else "item_reference")
        if kind in READ:
            yield from (f"{where}.{kind}.{name}" for name in part.keys() - READ[kind] if part[name])
        for name in ("content", "output"):
            if isinstance(inner := part.get(name), list):
                yield from _unread(inner, f"{where}.{kind}.{name}")


def _settings(items: list[Body], tools: ClientTools, reasoning: Body) -> tuple[list[Body], Body]:
    """Split items: return the items of the conversation, and `reasoning` updated by the rest."""
    conversation_items = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if item.get("type") == "additional_tools":
            tools.add(item.get("tools"), f"{path}.tools")
        elif item.get("type") == "configuration_update":
            if unknown := sorted(item.keys() - {"type", "id", "role", "reasoning"}):
                raise common.impossible(path, ", ".join(unknown))
            reasoning = reasoning | (item.get("reasoning") or {})
        else:
            conversation_items.append(item)
    return conversation_items, reasoning


def _tool_choice(choice: Json) -> Json:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        name = flat_name(choice.get("name"), choice.get("namespace"))
        return {"type": "function", "function": {"name": name}}
    raise UntranslatableError("tool_choice", f"{choice!r:.80} is not possible behind this gateway")


def _format(options: Body) -> Body:
    chat = {"verbosity": options["verbosity"]} if options.get("verbosity") else {}
    wanted = {**(options.get("format") or {"type": "text"})}
    kind = wanted.pop("type", None)
    if kind != "text":
        settings = {kind: wanted} if kind == "json_schema" else wanted
        chat["response_format"] = {"type": kind} | settings
    return chat


def _reasoning(options: Body) -> Body:
    common.refuse_unless(options, REASONING, "reasoning.")
    supported = REASONING.keys() | NO_SUMMARY
    unsupported = {k: v for k, v in options.items() if v is not None and k not in supported}
    effort = unsupported.pop("effort", None)
    if unsupported:
        raise common.impossible("reasoning", ", ".join(sorted(unsupported)))
    return {} if effort is None else {"reasoning_effort": effort}


def messages_of(items: list[Body], memory: ConversationMemory) -> list[Body]:
    """Return the chat messages of items, which may refer to items of stored responses."""
    return _messages([], items, memory)


def items_of(value: Json) -> list[Body]:
    """Return the items of an `input`; a text is a user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return [*base.objects(value, "input")]


def history(id: str | None, memory: ConversationMemory) -> list[Body]:
    """Return the items up to a stored response, including its output; empty without a response."""
    if id is None or id not in memory.kept["responses"]:
        return []
    answer, before = memory.kept["responses"][id]
    return [*before, *answer["output"]]


def _conversation(body: Body, memory: ConversationMemory) -> Any:
    """Return the conversation that a request continues, a `stored.Conversation`; None if none."""
    reference = body.get("conversation")
    id = reference.get("id") if isinstance(reference, dict) else reference
    if id is None and reference is None:
        return None
    if not isinstance(id, str) or id not in memory.kept["conversations"]:
        why = f"{id!r:.80} is no conversation of this attempt; make one with POST /v1/conversations"
        raise UntranslatableError("conversation", why, code="conversation_not_found")
    conversation = memory.kept["conversations"][id]
    conversation.refuse_if_full()
    return conversation


def prompt_of(body: Body, memory: ConversationMemory) -> Body:
    """Return the chat completion whose prompt a request to input_tokens counts."""
    if unknown := sorted(body.keys() - COUNTED):
        raise common.impossible("input_tokens", ", ".join(unknown))
    with base.typed():
        return ResponsesTranslation(body, memory).chat


def _messages(earlier: list[Body], items: Json, memory: ConversationMemory) -> list[Body]:
    """Return the `earlier` chat messages and those of input items."""
    turns = common.Turns(earlier)
    if isinstance(items, str):
        turns.add("user", items)
        return turns.messages
    for index, item in enumerate(base.objects(items, "input")):
        _add(turns, item, f"input[{index}]", memory)
    return turns.messages


def _add(turns: common.Turns, item: Body, where: str, memory: ConversationMemory) -> None:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "message":
        role, content = base.text(item.get("role"), f"{where}.role"), item.get("content")
        turns.add(role, _content(content, f"{where}.content", plain=role == "assistant"))
    elif kind in ("function_call", "custom_tool_call", "computer_call"):
        id, arguments = item.get("call_id"), item.get("arguments")
        if kind == "computer_call":  # written by a model with the built-in tool
            action = item.get("actions") or item.get("action")
            item, arguments = {"name": COMPUTER}, msgspec.json.encode(action).decode()
        if kind == "custom_tool_call":
            text = base.text(item.get("input"), f"{where}.input")
            arguments = arguments_of(text, memory.arguments.get(str(id)))
        turns.call(id, flat_name(item.get("name"), item.get("namespace")), arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = _content(item.get("output"), f"{where}.output", plain=False)
        turns.add_result(item.get("call_id"), output, where)
    elif kind == "computer_call_output":
        output = _screenshot(item.get("output"), f"{where}.output")
        turns.add_result(item.get("call_id"), output, where)
    elif kind == "reasoning":
        shown = base.joined(item.get("content"), f"{where}.content")
        sealed = common.unseal(item.get("encrypted_content"))
        if thought := common.thought_of(shown, sealed):
            turns.think(thought)
        else:
            _add(turns, _remembered(item.get("id"), where, memory), where, memory)
    elif kind in ("compaction", "compaction_summary"):
        turns.add("user", _summary(item, where))
    elif kind == "item_reference":
        _add(turns, _remembered(item.get("id"), where, memory), where, memory)
    else:
        raise UntranslatableError(where, f"an item of type {kind!r:.80} is not possible here")


def _summary(item: Body, where: str) -> str:
    """Return the message that replaces compacted items."""
    text = common.unseal(item.get("encrypted_content"))
    if not text.startswith(SUMMARY):
        why = "this compaction is of another server, and only that can read it; send the items"
        raise UntranslatableError(where, f"{why} that it replaced, or compact them here")
    return text


def _remembered(id: Json, where: str, memory: ConversationMemory) -> Body:
    """Return the output item with an id, for a request that has only the id."""
    if not isinstance(id, str) or id not in memory.kept["items"]:
        why = f"{id!r:.80} is not an item of this attempt's stored responses; send its content"
        raise UntranslatableError(where, why, code="item_not_found")
    item: Body = memory.kept["items"][id]
    return item


def _content(content: Json, where: str, *, plain: bool) -> Json:
    if isinstance(content, str):
        return content
    parts: list[Body] = []
    for part in base.objects(content, where):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": base.text(part.get("text"), where)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": base.text(part.get("refusal"), where)})
        elif kind == "input_image" and part.get("image_url") and not plain:
            about = {"detail": part["detail"]} if part.get("detail") else {}
            parts.append(common.image(part["image_url"], **about))
        else:
            raise UntranslatableError(where, f"a part of type {kind!r:.80} is not possible here")
    return common.content(parts)


def _screenshot(output: Json, where: str) -> list[Body]:
    """Return the screenshot after a computer action."""
    fields = output if isinstance(output, dict) else {}
    kind, url = fields.get("type"), fields.get("image_url")
    if kind not in SCREENS or not url:
        why = f"a screenshot of type {kind!r:.80} without image_url is not possible here"
        raise UntranslatableError(where, why)
    return [common.image(url)]


# -- the answer ------------------------------------------------------------------------------------


class ResponsesTranslation(common.ChatTranslation):
    def __init__(self, body: Body, memory: ConversationMemory) -> None:
        previous, self._conversation = body.get("previous_response_id"), _conversation(body, memory)
        earlier: list[Body] = []
        if previous is not None and self._conversation is not None:
            why = "has all before this call, and so has previous_response_id; leave one out"
            raise UntranslatableError("conversation", why)
        if previous is not None and previous not in memory.kept["answers"]:
            why = f"{previous!r:.80} is not a stored response of this attempt"
            code = "previous_response_not_found"
            raise UntranslatableError("previous_response_id", why, code=code)
        if previous is not None:
            earlier = memory.kept["answers"][previous]
        self.history = history(previous, memory)  # items before the answer
        if self._conversation is not None:
            self.history = [*self._conversation.items]
            earlier = messages_of(self.history, memory)
        self._new = items_of(body.get("input"))
        self.history += self._new
        self._tools = ClientTools()
        chat = chat_request(body, memory, self._tools, earlier)
        super().__init__(chat, _envelope(body), streamed=bool(body.get("stream")))
        if self._conversation is not None:
            self.answer["conversation"] = {"id": self._conversation.id}
        self.ignored = ignored(body) + self._tools.ignored
        self._memory = memory if body.get("store") is not False else ConversationMemory()
        self._system = body.get("instructions") is not None  # not kept for later calls
        self._items: list[Body] = self.answer["output"]
        self._sequence = 0

    def _start(self, model: str, prompt_tokens: int) -> None:
        self.answer["model"] = model
        self._event("response.created", response=self.answer)
        self._event("response.in_progress", response=self.answer)

    def _count(self, usage: Body) -> None:
        self.answer["usage"] = _usage(usage)

    def _write(self, key: str, text: str, choice: Body) -> None:
        kind, part_type, field = PARTS[key]
        if self._switch(key):
            item: Body = {"type": kind, "id": new_id("rs" if kind == "reasoning" else "msg")}
            item |= {"status": "in_progress", "content": []}
            extra: Body = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            item |= extra
            self._add_item(item)
            part: Body = {"type": part_type, field: ""}
            if part_type == "output_text":
                part |= {"annotations": [], "logprobs": []}
            self._event("response.content_part.added", part=part, **self._where(content_index=0))
            item["content"].append(part)
        part = self._items[-1]["content"][0]
        part[field] += text
        where = self._where(content_index=0)
        if "logprobs" in part:
            where["logprobs"] = (choice.get("logprobs") or {}).get("content") or []
            part["logprobs"] += where["logprobs"]
        self._event(f"response.{part_type}.delta", delta=text, **where)

    def _begin_call(self, id: str, name: str) -> None:
        head = self._tools.item(name)
        custom = head["type"] == "custom_tool_call"
        item = {"id": new_id("ctc" if custom else "fc"), "status": "in_progress"} | head
        self._add_item(item | {"call_id": id, "input" if custom else "arguments": ""})

    def _add_arguments(self, arguments: str) -> None:
        if self._items[-1]["type"] == "function_call":
            self._items[-1]["arguments"] += arguments
            self._event("response.function_call_arguments.delta", delta=arguments, **self._where())

    def _close(self) -> None:
        item = self._items[-1]
        item["status"] = "completed" if self._finish not in REASONS else "incomplete"
        if item["type"] == "custom_tool_call":  # parsed from the complete arguments
            item["input"] = text = custom_input(self._arguments)
            self._memory.arguments[str(item["call_id"])] = self._arguments
            self._event("response.custom_tool_call_input.delta", delta=text, **self._where())
            self._event("response.custom_tool_call_input.done", input=text, **self._where())
        elif item["type"] == "function_call":
            call = {"arguments": item["arguments"], "name": item["name"]}
            self._event("response.function_call_arguments.done", **call, **self._where())
        else:
            (part,) = item["content"]
            where = self._where(content_index=0)
            final = {k: v for k, v in part.items() if k not in ("type", "annotations")}
            self._event(f"response.{part['type']}.done", **final, **where)
            self._event("response.content_part.done", part=part, **where)
            # Even if not requested, because some clients send back nothing else.
            if item["type"] == "reasoning":
                item["encrypted_content"] = common.seal(part["text"])
        self._memory.kept["items"][item["id"]] = item
        self._event("response.output_item.done", item=item, output_index=len(self._items) - 1)

    def _end(self) -> None:
        if reason := REASONS.get(self._finish):
            self.answer |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        else:
            self.answer |= {"status": "completed", "completed_at": int(time.time())}
        sent = self.chat["messages"][self._system :]
        self._memory.kept["answers"][self.answer["id"]] = _messages(sent, self._items, self._memory)
        self._memory.kept["responses"][self.answer["id"]] = self.answer, self.history
        if self._conversation is not None:
            self._conversation.add([*self._new, *self._items])
        self._event(f"response.{self.answer['status']}", response=self.answer)

    def _add_item(self, item: Body) -> None:
        self._items.append(item)
        self._event("response.output_item.added", item=item, output_index=len(self._items) - 1)

    def _where(self, **extra: int) -> Body:
        item = self._items[-1]["id"]
        return {"item_id": item, "output_index": len(self._items) - 1} | extra

    def _event(self, kind: str, **fields: Any) -> None:
        super()._event(kind, sequence_number=self._sequence, **fields)
        self._sequence += 1


def _envelope(body: Body) -> Body:
    """Build a response without output; fields absent from the request have OpenAI's defaults."""
    defaults: Body = {"max_output_tokens": None, "max_tool_calls": None, "metadata": {}}
    defaults |= {"instructions": None, "parallel_tool_calls": True, "previous_response_id": None}
    defaults |= {"prompt_cache_key": None, "safety_identifier": None, "service_tier": "default"}
    defaults |= {"store": True, "temperature": 1.0, "tool_choice": "auto", "tools": []}
    defaults |= {"top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None}
    defaults["text"] = {"format": {"type": "text"}}
    defaults["reasoning"] = {"effort": None, "summary": None}
    echoed = {k: v if body.get(k) is None else body[k] for k, v in defaults.items()}
    head: Body = {"id": new_id("resp"), "object": "response", "created_at": int(time.time())}
    head |= {"status": "in_progress", "background": False, "error": None, "model": ""}
    return head | {"incomplete_details": None, "output": [], "usage": None} | echoed


def _usage(usage: Body) -> Body:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
    }


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


DIALECT = Dialect("chat/completions", base.error, ResponsesTranslation)
