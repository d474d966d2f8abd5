"""The size of a prompt in tokens, as a policy server counts them, and how many fit after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from agentrl.core.types import Json
from agentrl.runners.gateway.request import Fields, value
from agentrl.runners.gateway.response import read
from agentrl.runners.gateway.upstream import Route, Upstream

# Fields that determine the prompt, as /tokenize has them; see `_rendered` for the others.
RENDERED = {"messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"}
RENDERED |= {"continue_final_message", "add_special_tokens"}
REASONING = ("reasoning", "reasoning_content")  # two names of the same field of a message
# The only value that vLLM accepts.
PROBE = {"x-agentrl-probe": "1", "content-type": "application/json"}


class PromptSize(msgspec.Struct):
    """Response of vLLM and the embedded server to /tokenize, without unused fields."""

    count: int
    max_model_len: int | None = None  # tokens of prompt and completion


@dataclass(eq=False)
class RefusedPromptError(LookupError):
    """A policy server refused to render a prompt, with its status and response body."""

    status: int
    words: bytes


_size = msgspec.json.Decoder(PromptSize)


async def prompt_size(
    upstream: Upstream, route: Route, chat: Fields, headers: Mapping[str, str] = PROBE
) -> PromptSize:
    """Return the length of a prompt. Raises RefusedPromptError if the server refuses it,
    LookupError if the server cannot count tokens, and the errors of `post`."""
    body = _rendered(chat) | {"model": route.model or chat.get("model", "")}
    server = route._replace(base_url=route.base_url.removesuffix("/v1"))
    async with upstream.post(server, "tokenize", msgspec.json.encode(body), headers) as reply:
        content = await read(reply)
        if reply.status in (400, 422):
            raise RefusedPromptError(reply.status, content)
        try:
            return _size.decode(content)
        except msgspec.DecodeError:
            why = f"{server.base_url}/tokenize does not tell how long a prompt is"
            raise LookupError(why) from None


async def find_fitting(upstream: Upstream, route: Route, chat: Fields, wanted: int | None) -> int:
    """Return the number of tokens that fit after the prompt if the call requests more, else 0. vLLM
    rejects such a call, but the agent cannot know the prompt's length."""
    if "messages" not in chat or not wanted:
        return 0
    try:
        size = await prompt_size(upstream, route, chat)
    except LookupError:
        return 0
    fitting = (size.max_model_len or 0) - size.count
    if size.max_model_len is None or not 0 < fitting < wanted:
        return 0
    upstream.max_lengths[route.base_url] = size.max_model_len
    upstream.warn_once(
        "policy %s: an answer has at most the %d tokens that its prompt leaves, and the agent"
        " asks for %d",
        *(route.policy, fitting, wanted),
    )
    return fitting


def _rendered(chat: Fields) -> Fields:
    """Return the fields of a chat completion that determine its prompt, for vLLM's /tokenize.
    Unlike for a chat completion, /tokenize does not rename reasoning and does not turn other fields
    into template arguments."""
    body = {name: chat[name] for name in RENDERED if name in chat}
    sent = body.get("messages")
    if not isinstance(sent, msgspec.Raw) or b'"reasoning' in bytes(sent):
        body["messages"] = [_with_reasoning(message) for message in value(chat, "messages") or ()]
    effort = value(chat, "reasoning_effort")
    extra = {} if effort is None else {"reasoning_effort": effort}
    if documents := value(chat, "documents"):
        extra["documents"] = documents
    if extra:
        thinking = {} if effort is None else {"enable_thinking": effort != "none"}
        arguments = value(chat, "chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {**thinking, **arguments, **extra}
    return body


def _with_reasoning(message: Json) -> Json:
    """Return a message with its reasoning under both names, because servers differ in the name that
    they read."""
    fields = message if isinstance(message, dict) else {}
    thought = next((fields[name] for name in REASONING if fields.get(name) is not None), None)
    return message if thought is None else message | dict.fromkeys(REASONING, thought)
