"""Requests of four APIs that say the same, and some that only one of them can say.

A case is a list of steps, each a request and what the policy server answers it with. `Ask` is
rendered as chat completion, Responses, Messages and generateContent.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.golden.engine import Body, Scripted

APIS = ("chat", "responses", "messages", "google")
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA"
    "WjR9awAAAABJRU5ErkJggg=="
)
SCHEMA: Body = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = ("weather", "The weather of a city.", SCHEMA)
OTHER = ("clock", "The time.", {"type": "object", "properties": {}})


@dataclass(frozen=True)
class Step:
    """An HTTP request. `body` may have "$response", the id of the answer before."""

    body: Any
    replies: tuple[Scripted, ...] = ()
    path: str = ""
    method: str = "POST"
    key: str = ""  # in place of the attempt's; "-": none
    prefix: str = ""  # before the path, with {attempt}


Message = tuple[Any, ...]
"""("user", text), ("image", text), ("assistant", Scripted), ("result", id, name, text, failed)."""


@dataclass(frozen=True)
class Ask:
    """A request in no API's words."""

    messages: list[Message]
    system: str | list[str] = ""
    tools: tuple[Any, ...] = ()
    choice: str = ""  # auto, none, required or the name of a tool
    temperature: float | None = None
    top_p: float | None = None
    limit: int | None = None
    stop: tuple[str, ...] = ()
    schema: bool = False
    effort: str = ""
    model: str = "gpt-5"
    more: Body = field(default_factory=dict)  # fields of any API


# -- rendering -------------------------------------------------------------------------------------


def given(**fields: Any) -> Body:
    return {key: value for key, value in fields.items() if value not in (None, "", (), [], {})}


def chat(ask: Ask) -> tuple[str, Body]:
    turns: list[Body] = []
    if isinstance(ask.system, list):
        parts = [{"type": "text", "text": text} for text in ask.system]
        turns.append({"role": "system", "content": parts})
    elif ask.system:
        turns.append({"role": "system", "content": ask.system})
    for kind, *rest in ask.messages:
        if kind == "user":
            turns.append({"role": "user", "content": rest[0]})
        elif kind == "image":
            url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
            turns.append({"role": "user", "content": [{"type": "text", "text": rest[0]}, url]})
        elif kind == "assistant":
            turns.append(rest[0].message)
        else:
            id, _, text, _ = rest
            turns.append({"role": "tool", "tool_call_id": id, "content": text})
    tools = [
        {"type": "function", "function": {"name": n, "description": d, "parameters": s}}
        for n, d, s in ask.tools
    ]
    named = {"type": "function", "function": {"name": ask.choice}}
    body = {"model": ask.model, "messages": turns} | given(
        tools=tools,
        tool_choice=ask.choice if ask.choice in ("", "auto", "none", "required") else named,
        temperature=ask.temperature,
        top_p=ask.top_p,
        max_tokens=ask.limit,
        stop=list(ask.stop),
        reasoning_effort=ask.effort,
    )
    if ask.schema:
        wanted = {"name": "place", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    return "/v1/chat/completions", body | ask.more


def responses(ask: Ask) -> tuple[str, Body]:
    items: list[Body] = []
    if isinstance(ask.system, list):
        parts = [{"type": "input_text", "text": text} for text in ask.system]
        items.append({"role": "system", "content": parts})
    for kind, *rest in ask.messages:
        if kind == "user":
            items.append({"role": "user", "content": rest[0]})
        elif kind == "image":
            image = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
            items.append(
                {"role": "user", "content": [{"type": "input_text", "text": rest[0]}, image]}
            )
        elif kind == "assistant":
            reply: Scripted = rest[0]
            if reply.thought:
                items.append(
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": reply.thought}],
                    }
                )
            if reply.content:
                text = {"type": "output_text", "text": reply.content, "annotations": []}
                items.append(
                    {"type": "message", "role": "assistant", "content": [text], "id": "msg_1"}
                )
            items += [
                {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
                for id, name, arguments in reply.calls
            ]
        else:
            id, _, text, _ = rest
            items.append({"type": "function_call_output", "call_id": id, "output": text})
    tools = [
        {"type": "function", "name": n, "description": d, "parameters": s, "strict": False}
        for n, d, s in ask.tools
    ]
    named = {"type": "function", "name": ask.choice}
    body = {"model": ask.model, "input": items} | given(
        instructions=ask.system if isinstance(ask.system, str) else "",
        tools=tools,
        tool_choice=ask.choice if ask.choice in ("", "auto", "none", "required") else named,
        temperature=ask.temperature,
        top_p=ask.top_p,
        max_output_tokens=ask.limit,
        reasoning={"effort": ask.effort} if ask.effort else None,
    )
    if ask.schema:
        wanted = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
        body["text"] = {"format": wanted}
    return "/v1/responses", body | ask.more


def messages(ask: Ask) -> tuple[str, Body]:
    turns: list[Body] = []
    for kind, *rest in ask.messages:
        if kind == "user":
            turns.append({"role": "user", "content": rest[0]})
        elif kind == "image":
            source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
            parts = [{"type": "text", "text": rest[0]}, {"type": "image", "source": source}]
            turns.append({"role": "user", "content": parts})
        elif kind == "assistant":
            reply: Scripted = rest[0]
            blocks: list[Body] = []
            if reply.thought:
                blocks.append({"type": "thinking", "thinking": reply.thought, "signature": ""})
            if reply.content:
                blocks.append({"type": "text", "text": reply.content})
            blocks += [
                {"type": "tool_use", "id": id, "name": name, "input": read(arguments)}
                for id, name, arguments in reply.calls
            ]
            turns.append({"role": "assistant", "content": blocks})
        else:
            id, _, text, failed = rest
            block = {"type": "tool_result", "tool_use_id": id, "content": text}
            if failed:
                block["is_error"] = True
            if turns and turns[-1]["role"] == "user" and isinstance(turns[-1]["content"], list):
                turns[-1]["content"].append(block)
            else:
                turns.append({"role": "user", "content": [block]})
    choices = {"auto": "auto", "none": "none", "required": "any"}
    system: Any = ask.system
    if isinstance(system, list):
        system = [{"type": "text", "text": text} for text in system]
    body = {"model": ask.model, "max_tokens": ask.limit or 50, "messages": turns} | given(
        system=system,
        tools=[{"name": n, "description": d, "input_schema": s} for n, d, s in ask.tools],
        tool_choice={"type": choices[ask.choice]}
        if ask.choice in choices
        else {"type": "tool", "name": ask.choice}
        if ask.choice
        else None,
        temperature=ask.temperature,
        top_p=ask.top_p,
        stop_sequences=list(ask.stop),
    )
    config = given(effort=ask.effort)
    if ask.schema:
        config["format"] = {"type": "json_schema", "schema": SCHEMA}
    return "/v1/messages", body | given(output_config=config) | ask.more


def read(arguments: str) -> Any:
    """What a client makes of arguments: an object, or nothing."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def google(ask: Ask) -> tuple[str, Body]:
    contents: list[Body] = []
    for kind, *rest in ask.messages:
        if kind == "user":
            contents.append({"role": "user", "parts": [{"text": rest[0]}]})
        elif kind == "image":
            image = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
            contents.append({"role": "user", "parts": [{"text": rest[0]}, image]})
        elif kind == "assistant":
            reply: Scripted = rest[0]
            parts: list[Body] = []
            if reply.thought:
                parts.append({"text": reply.thought, "thought": True})
            if reply.content:
                parts.append({"text": reply.content})
            parts += [
                {"functionCall": {"id": id, "name": name, "args": read(arguments)}}
                for id, name, arguments in reply.calls
            ]
            contents.append({"role": "model", "parts": parts})
        else:
            id, name, text, failed = rest
            content = {"error" if failed else "output": text}
            part = {"functionResponse": {"id": id, "name": name, "response": content}}
            if contents[-1]["role"] == "user" and "functionResponse" in contents[-1]["parts"][0]:
                contents[-1]["parts"].append(part)
            else:
                contents.append({"role": "user", "parts": [part]})
    texts = ask.system if isinstance(ask.system, list) else [ask.system] if ask.system else []
    config = given(
        temperature=ask.temperature,
        topP=ask.top_p,
        maxOutputTokens=ask.limit,
        stopSequences=list(ask.stop),
        thinkingConfig={"thinkingLevel": ask.effort} if ask.effort else None,
    )
    if ask.schema:
        config |= {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}
    modes = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
    calling = {"mode": modes.get(ask.choice, "ANY")}
    if ask.choice and ask.choice not in modes:
        calling["allowedFunctionNames"] = [ask.choice]  # type: ignore[assignment]
    declared = [{"name": n, "description": d, "parametersJsonSchema": s} for n, d, s in ask.tools]
    body = {"contents": contents} | given(
        systemInstruction={"parts": [{"text": text} for text in texts]} if texts else None,
        generationConfig=config,
        tools=[{"functionDeclarations": declared}] if declared else None,
        toolConfig={"functionCallingConfig": calling} if ask.choice else None,
    )
    return f"/v1beta/models/{ask.model}:generateContent", body | ask.more


RENDER: dict[str, Callable[[Ask], tuple[str, Body]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "google": google,
}

# -- cases that every API can say ------------------------------------------------------------------

HELLO = ("user", "Where is it warm?")
CALL = Scripted(calls=[("call_1", "weather", '{"city": "Lima"}')])
BOTH = Scripted(
    "I look at two.", calls=[("call_1", "weather", '{"city": "Lima"}'), ("call_2", "clock", "{}")]
)
BROKEN = Scripted(calls=[("call_1", "weather", '{"city": "Li')])
THOUGHT = Scripted("In Lima.", thought="South is warm now.")
LOOKED = replace(CALL, thought="I have to look.")
LIMA = Scripted("In Lima.")
RESULT = ("result", "call_1", "weather", "27 degrees", False)
FAILED = ("result", "call_1", "weather", "no such city", True)
LONG = {
    "error": {
        "message": "This model's maximum context length is 32 tokens.",
        "type": "BadRequestError",
        "code": "context_length_exceeded",
    }
}
BUSY = {"error": {"message": "Try again.", "type": "rate_limit", "code": 429}}
ASKED = Ask([HELLO])

Exchange = tuple[Ask, tuple[Scripted, ...]]
SHARED: dict[str, list[Exchange]] = {
    "plain": [(ASKED, (LIMA,))],
    "system": [(replace(ASKED, system="Be brief."), (LIMA,))],
    "system parts": [(replace(ASKED, system=["Be brief.", "Be kind."]), (LIMA,))],
    "options": [(replace(ASKED, temperature=0.3, top_p=0.9, limit=7, stop=("END",)), (LIMA,))],
    "greedy": [(replace(ASKED, temperature=0.0), (LIMA,))],
    "history": [
        (Ask([HELLO, ("assistant", LIMA), ("user", "And cold?")]), (Scripted("In Oslo."),))
    ],
    "continued": [
        (ASKED, (LIMA,)),
        (Ask([HELLO, ("assistant", LIMA), ("user", "And cold?")]), (Scripted("In Oslo."),)),
    ],
    "changed history": [
        (ASKED, (LIMA,)),
        (
            Ask([HELLO, ("assistant", Scripted("In Rome.")), ("user", "And cold?")]),
            (Scripted("In Oslo."),),
        ),
    ],
    "same again": [(ASKED, (LIMA,)), (ASKED, (Scripted("In Cairo."),))],
    "tool": [(replace(ASKED, tools=(TOOL,), choice="auto"), (CALL,))],
    "several calls": [(replace(ASKED, tools=(TOOL, OTHER)), (BOTH,))],
    "tool result": [
        (replace(ASKED, tools=(TOOL,)), (CALL,)),
        (Ask([HELLO, ("assistant", CALL), RESULT], tools=(TOOL,)), (LIMA,)),
    ],
    "several results": [
        (replace(ASKED, tools=(TOOL, OTHER)), (BOTH,)),
        (
            Ask(
                [HELLO, ("assistant", BOTH), RESULT, ("result", "call_2", "clock", "9:00", False)],
                tools=(TOOL, OTHER),
            ),
            (LIMA,),
        ),
    ],
    "failed tool": [
        (replace(ASKED, tools=(TOOL,)), (CALL,)),
        (Ask([HELLO, ("assistant", CALL), FAILED], tools=(TOOL,)), (LIMA,)),
    ],
    "malformed arguments": [
        (replace(ASKED, tools=(TOOL,)), (BROKEN,)),
        (Ask([HELLO, ("assistant", BROKEN), FAILED], tools=(TOOL,)), (LIMA,)),
    ],
    "result without call": [(Ask([HELLO, RESULT], tools=(TOOL,)), (LIMA,))],
    "must call": [(replace(ASKED, tools=(TOOL, OTHER), choice="required"), (CALL,))],
    "named tool": [(replace(ASKED, tools=(TOOL, OTHER), choice="clock"), (BOTH,))],
    "no tool": [(replace(ASKED, tools=(TOOL,), choice="none"), (LIMA,))],
    "schema": [(replace(ASKED, schema=True), (Scripted('{"city": "Lima"}'),))],
    "effort": [(replace(ASKED, effort="low"), (LIMA,))],
    "thought": [(ASKED, (THOUGHT,))],
    "thought again": [
        (replace(ASKED, tools=(TOOL,)), (LOOKED,)),
        (Ask([HELLO, ("assistant", LOOKED), RESULT], tools=(TOOL,)), (THOUGHT,)),
    ],
    "cut by length": [
        (replace(ASKED, limit=2), (replace(LIMA, fields={"finish_reason": "length"}),))
    ],
    "filtered": [(ASKED, (Scripted("", fields={"finish_reason": "content_filter"}),))],
    "empty": [(ASKED, (Scripted(""),))],
    "inexact": [(ASKED, (replace(LIMA, ids=False),))],
    "image": [(Ask([("image", "What is it?")], model="eyes"), (Scripted("A dot."),))],
    "image for text": [(Ask([("image", "What is it?")]), (Scripted("A dot."),))],
    "letters": [
        (
            Ask([("user", 'Grüße \U0001f600 "quoted" \\ <b> \u2028')]),
            (Scripted('Çok güzel \U0001f600 "so"\n'),),
        )
    ],
    "unknown field": [(replace(ASKED, more={"unheard_of": 3}), (LIMA,))],
    "no messages": [(Ask([]), (LIMA,))],
    "too long": [(ASKED, (Scripted(status=400, error=LONG),))],
    "busy once": [(ASKED, (Scripted(status=429, error=BUSY), LIMA))],
    "server fails": [(ASKED, tuple([Scripted(status=500, error="out of memory")] * 9))],
    "unreadable": [(ASKED, tuple([Scripted(status=200, error="<html>hello</html>")] * 9))],
    "cut stream": [(ASKED, (replace(LIMA, cut=2), LIMA))],
    "error in stream": [(ASKED, (replace(LIMA, cut=2, error=LONG), LIMA))],
}

# -- cases of one API ------------------------------------------------------------------------------


def body_of(api: str, ask: Ask = ASKED, **more: Any) -> Body:
    return RENDER[api](ask)[1] | more


def own(api: str, body: Body, *replies: Scripted, path: str = "", **fields: Any) -> Step:
    return Step(body, replies or (LIMA,), path or RENDER[api](ASKED)[0], **fields)


CACHED = {"cache_control": {"type": "ephemeral"}}
GOOGLE_USER = {"role": "user", "parts": [{"text": "Where is it warm?"}]}
DATED = {"type": "custom", "name": "patch", "description": "A patch.", "format": {"type": "text"}}

OWN: dict[str, dict[str, list[Step]]] = {
    "chat": {
        "two choices": [own("chat", body_of("chat", n=2))],
        "log-probs": [own("chat", body_of("chat", logprobs=True, top_logprobs=0))],
        "usage": [own("chat", body_of("chat", stream_options={"include_usage": True}))],
        "bias": [own("chat", body_of("chat", logit_bias={"5": -100}, presence_penalty=0.5))],
        "developer": [
            own(
                "chat",
                {
                    "model": "m",
                    "messages": [
                        {"role": "developer", "content": "Be brief."},
                        {"role": "user", "content": "Hi", "name": "ann"},
                    ],
                },
            )
        ],
        "refusal": [own("chat", body_of("chat"), Scripted(None, more={"refusal": "I may not."}))],
        "completion": [
            own(
                "chat",
                {"model": "m", "prompt": "Once"},
                Scripted("upon a time"),
                path="/v1/completions",
            )
        ],
        "role in path": [own("chat", body_of("chat"), prefix="/a/{attempt}/planner")],
        "path without key": [own("chat", body_of("chat"), prefix="/a/{attempt}", key="-")],
        "wrong key": [own("chat", body_of("chat"), key="unknown")],
        "wrong type": [own("chat", body_of("chat", messages="hello"))],
        "embedding": [own("chat", {"model": "m", "input": "hi"}, path="/v1/embeddings")],
        "models": [Step(None, (), "/v1/models", "GET")],
        "seed and user": [own("chat", body_of("chat", seed=3, user="ann", metadata={"a": "b"}))],
    },
    "responses": {
        "text input": [own("responses", {"model": "m", "input": "Where is it warm?"})],
        "previous response": [
            own("responses", body_of("responses")),
            own(
                "responses",
                {"model": "m", "input": "And cold?", "previous_response_id": "$response"},
                Scripted("In Oslo."),
            ),
        ],
        "unknown response": [
            own("responses", {"model": "m", "input": "And?", "previous_response_id": "resp_none"})
        ],
        "read again": [
            own("responses", body_of("responses")),
            Step(None, (), "/v1/responses/$response", "GET"),
        ],
        "deleted": [
            own("responses", body_of("responses")),
            Step(None, (), "/v1/responses/$response", "DELETE"),
        ],
        "counted": [
            own("responses", {"model": "m", "input": "hi"}, path="/v1/responses/input_tokens")
        ],
        "custom tool": [
            own(
                "responses",
                body_of("responses", tools=[DATED]),
                Scripted(calls=[("call_1", "patch", '{"input": "a line"}')]),
            )
        ],
        "hosted tool": [own("responses", body_of("responses", tools=[{"type": "web_search"}]))],
        "background": [own("responses", body_of("responses", background=True))],
        "file": [
            own(
                "responses",
                {
                    "model": "m",
                    "input": [
                        {"role": "user", "content": [{"type": "input_file", "file_data": "AA"}]}
                    ],
                },
            )
        ],
        "metadata": [own("responses", body_of("responses", metadata={"a": "b"}, store=False))],
        "conversation": [own("responses", body_of("responses", conversation="conv_none"))],
    },
    "messages": {
        "cached parts": [
            own(
                "messages",
                {
                    "model": "m",
                    "max_tokens": 9,
                    "system": [{"type": "text", "text": "Be brief."} | CACHED],
                    "messages": [
                        {"role": "user", "content": [{"type": "text", "text": "Hi"} | CACHED]}
                    ],
                    "metadata": {"user_id": "ann"},
                },
            )
        ],
        "counted": [
            own(
                "messages",
                {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
                path="/v1/messages/count_tokens",
            )
        ],
        "thinking budget": [
            own(
                "messages", body_of("messages", thinking={"type": "enabled", "budget_tokens": 1024})
            )
        ],
        "adaptive thinking": [
            own("messages", body_of("messages", thinking={"type": "adaptive"}), THOUGHT)
        ],
        "prefilled": [
            own(
                "messages",
                {
                    "model": "m",
                    "max_tokens": 9,
                    "messages": [
                        {"role": "user", "content": "Hi"},
                        {"role": "assistant", "content": "Well,"},
                    ],
                },
            )
        ],
        "hosted tool": [
            own(
                "messages",
                body_of("messages", tools=[{"type": "web_search_20250305", "name": "web_search"}]),
            )
        ],
        "document": [
            own(
                "messages",
                {
                    "model": "m",
                    "max_tokens": 9,
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {
                                    "type": "document",
                                    "source": {
                                        "type": "text",
                                        "media_type": "text/plain",
                                        "data": "x",
                                    },
                                }
                            ],
                        }
                    ],
                },
            )
        ],
        "no limit": [
            own("messages", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]})
        ],
        "one call at a time": [
            own(
                "messages",
                body_of(
                    "messages",
                    replace(ASKED, tools=(TOOL,)),
                    tool_choice={"type": "auto", "disable_parallel_tool_use": True},
                ),
                CALL,
            )
        ],
        "broken input": [
            own(
                "messages",
                {
                    "model": "m",
                    "max_tokens": 9,
                    "tools": [{"name": "weather", "input_schema": SCHEMA}],
                    "messages": [
                        {"role": "user", "content": "Hi"},
                        {
                            "role": "assistant",
                            "content": [
                                {
                                    "type": "tool_use",
                                    "id": "call_1",
                                    "name": "weather",
                                    "input": {"INVALID_JSON": '{"city": "Li'},
                                }
                            ],
                        },
                        {
                            "role": "user",
                            "content": [
                                {"type": "tool_result", "tool_use_id": "call_1", "content": "?"}
                            ],
                        },
                    ],
                },
            )
        ],
        "wrong key": [own("messages", body_of("messages"), key="unknown")],
    },
    "google": {
        "snake case": [
            own(
                "google",
                {
                    "contents": [GOOGLE_USER],
                    "system_instruction": {"parts": [{"text": "Be brief."}]},
                    "generation_config": {"max_output_tokens": 9, "top_k": 3, "seed": 5},
                },
            )
        ],
        "counted": [
            own("google", {"contents": [GOOGLE_USER]}, path="/v1beta/models/m:countTokens")
        ],
        "safety": [
            own(
                "google",
                body_of(
                    "google",
                    safetySettings=[
                        {"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}
                    ],
                ),
            )
        ],
        "two candidates": [
            own("google", body_of("google", generationConfig={"candidateCount": 2}))
        ],
        "unknown verb": [
            own("google", {"contents": [GOOGLE_USER]}, path="/v1beta/models/m:embedContent")
        ],
        "hosted tool": [own("google", body_of("google", tools=[{"googleSearch": {}}]))],
        "thoughts": [
            own(
                "google",
                body_of("google", generationConfig={"thinkingConfig": {"includeThoughts": True}}),
                THOUGHT,
            )
        ],
        "sealed thought": [
            own(
                "google",
                {
                    "contents": [
                        GOOGLE_USER,
                        {
                            "role": "model",
                            "parts": [
                                {
                                    "text": "In Lima.",
                                    "thoughtSignature": b64encode(b"another server").decode(),
                                }
                            ],
                        },
                        {"role": "user", "parts": [{"text": "And cold?"}]},
                    ]
                },
            )
        ],
        "file": [
            own(
                "google",
                {
                    "contents": [
                        {
                            "role": "user",
                            "parts": [
                                {"fileData": {"fileUri": "gs://a/b", "mimeType": "image/png"}}
                            ],
                        }
                    ]
                },
            )
        ],
        "no role": [own("google", {"contents": [{"parts": [{"text": "Hi"}]}]})],
        "wrong key": [own("google", body_of("google"), key="unknown")],
        "both spellings": [
            own(
                "google",
                {
                    "contents": [GOOGLE_USER],
                    "generationConfig": {"topK": 3},
                    "generation_config": {"topK": 4},
                },
            )
        ],
    },
}


def cases(api: str) -> Iterator[tuple[str, bool, list[Step]]]:
    """Name, whether it is streamed, and steps of each case of an API."""
    for stream in (False, True):
        for name, exchanges in SHARED.items():
            steps = [Step(*_flip(RENDER[api](ask), replies)) for ask, replies in exchanges]
            yield name, stream, [streamed(api, step) if stream else step for step in steps]
        for name, own_steps in OWN[api].items():
            steps = [streamed(api, step) if stream else step for step in own_steps]
            if not stream or steps != own_steps:
                yield name, stream, steps


def _flip(rendered: tuple[str, Body], replies: tuple[Scripted, ...]) -> tuple[Body, Any, str]:
    path, body = rendered
    return body, replies, path


STREAMS = ("/chat/completions", "/completions", "/responses", "/messages")


def streamed(api: str, step: Step) -> Step:
    """The step with a streamed answer, where the API has that."""
    if api == "google":
        path = step.path.replace(":generateContent", ":streamGenerateContent?alt=sse")
        return replace(step, path=path)
    if step.method != "POST" or not step.path.endswith(STREAMS):
        return step
    return replace(step, body=step.body | {"stream": True})
