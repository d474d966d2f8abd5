"""The routes of the translated APIs (see `apis`), and the state of the Responses API: responses and
their items, conversations, and compactions, for the duration of one attempt. An attempt sees only
its own state, which is dropped at its end. A compaction is a call of the policy like any other,
recorded and trained: its answer becomes the text of the compaction item, from which the next
request is rendered. Nothing here runs in the background. Source:
https://platform.openai.com/docs/api-reference/responses and /conversations
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from aiohttp import web

from agentrl.core.http import read_body
from agentrl.core.types import INSTRUCTION_ROLES, Json
from agentrl.runners.apis import base, common, google, messages, responses
from agentrl.runners.apis.base import Dialect, UntranslatableError
from agentrl.runners.apis.chat import Body, ConversationMemory
from agentrl.runners.gateway.attribution import CallOrigin
from agentrl.runners.gateway.prompt_size import RefusedPromptError, prompt_size
from agentrl.runners.gateway.refusals import RefusedError, UpstreamError, translate_error
from agentrl.runners.gateway.upstream import Route

if TYPE_CHECKING:
    from agentrl.runners.gateway.server import Endpoints


NOTHING: Mapping[str, Json] = {}


async def answer_responses(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    return await endpoints.call(responses.DIALECT, caller, request)


async def no_websocket(request: web.Request) -> web.StreamResponse:
    """Reject a websocket immediately; the agent then falls back to POST."""
    raise RefusedError(426, "no_websocket", "there are no websockets here; POST the call instead")


async def answer_messages(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    return await endpoints.call(messages.DIALECT, caller, request)


async def count_messages(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    """https://docs.anthropic.com/en/api/messages-count-tokens"""
    count = partial(count_tokens, endpoints, caller, request, messages.DIALECT)
    return await count(messages.prompt_of, "input_tokens")


def anthropic_models(names: Sequence[str]) -> Body:
    """https://docs.anthropic.com/en/api/models-list"""
    about = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
    data = [{"id": name, "display_name": name} | about for name in names]
    return {"has_more": False} | ends | {"data": data}


def google_models(names: Sequence[str]) -> Body:
    """https://ai.google.dev/api/models"""
    about = {"version": "1", "supportedGenerationMethods": ["generateContent", "countTokens"]}
    models = [{"name": f"models/{name}", "displayName": name} | about for name in names]
    return {"models": models}


async def answer_google(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    """Handle a method of Google's API; the model's name is in the path."""
    model, verb = request.match_info["model"], request.match_info["verb"]
    stream = verb == "streamGenerateContent"
    dialect = google.dialect(model, stream=stream)
    if verb == "countTokens":
        prompt_of = partial(google.prompt_of, model=model)
        return await count_tokens(endpoints, caller, request, dialect, prompt_of, "totalTokens")
    if verb not in ("generateContent", "streamGenerateContent"):
        raise UntranslatableError(
            verb, "there is generateContent, streamGenerateContent and countTokens", status=404
        )
    if stream and request.query.get("alt") != "sse":
        raise UntranslatableError("alt", "a stream is sent as events only; add ?alt=sse")
    return await endpoints.call(dialect, caller, request)


async def count_tokens(
    endpoints: Endpoints,
    caller: CallOrigin,
    request: web.Request,
    dialect: Dialect,
    prompt_of: Callable[[Body, ConversationMemory], Body],
    field: str,
    *,
    about: Mapping[str, Json] = NOTHING,
) -> web.StreamResponse:
    """Count a request's prompt tokens as rendered by the policy server. `prompt_of` converts it to
    a chat completion request; `field`: name of the count in the response, next to `about`."""
    raw, upstream = await read_body(request), endpoints.upstream
    memory = caller.active.memory
    chat = prompt_of(msgspec.json.decode(raw, type=Body), memory)
    chat["messages"], _ = memory.recall(chat["messages"], joined=True)

    async def once(route: Route) -> web.StreamResponse:
        adapted = chat | {"messages": await upstream.adapt(route, chat["messages"])}
        try:
            size = await prompt_size(upstream, route, adapted, request.headers)
        except RefusedPromptError as error:
            words = translate_error(dialect, error.status, error.words)
            return web.Response(status=error.status, body=words, content_type="application/json")
        except (LookupError, UpstreamError) as error:
            if isinstance(error, UpstreamError) and not (route.frozen and error.final):
                raise
            why = f"the endpoint {route.policy!r} does not tell how many tokens a prompt has"
            why = f"{why}; estimate it, or leave it out"
            raise RefusedError(404, "not_counted", why) from None
        return web.json_response({**about, field: size.count})

    return await endpoints.unrecorded(
        caller, raw, str(chat.get("model") or ""), "count_tokens", once
    )


MAX_BYTES = 64 * 2**20  # maximum size of the items in an attempt's conversations, as JSON
PAGE, MAX_PAGE = 20, 100  # items
# Beginning of the ids of items, by type; others begin with "item".
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "compaction": "cmp"}
PREFIXES |= {"custom_tool_call": "ctc", "function_call_output": "fco"}
# Messages that a compaction keeps word for word.
KEPT = ("user", *INSTRUCTION_ROLES)
SUMMARIZE = (
    "Summarize the conversation so far for yourself: from now on you have your summary in place of"
    " everything but the user's own messages. Say what the goal is, what was done and found out,"
    " with the exact names, values and ids that are still needed, what was decided, what is open"
    " and what comes next. Answer with the summary only."
)


# -- compaction ------------------------------------------------------------------------------------


class CompactionTranslation(responses.ResponsesTranslation):
    """A request to compact a conversation, which the policy answers with a summary."""

    def __init__(self, body: Body, memory: ConversationMemory) -> None:
        for name in ("conversation", "stream"):
            if body.get(name):
                why = "is not possible for a compaction; leave it out"
                raise UntranslatableError(name, why)
        # Request for an answer.
        request = {name: value for name, value in body.items() if name != "text"}
        super().__init__(request | {"store": False}, memory)
        if not self.history:
            why = "there is nothing to compact; send input or previous_response_id"
            raise UntranslatableError("input", why, code="missing_parameter")
        self.ignored += ["text"] if body.get("text") else []
        self.chat["messages"] = [*self.chat["messages"], {"role": "user", "content": SUMMARIZE}]
        self._conversation_memory = memory

    def whole(self, completion: Body, prompt_tokens: int) -> bytes:
        super().whole(completion, prompt_tokens)
        messages = [item for item in self._items if item["type"] == "message"]
        parts = (part for item in messages for part in item["content"])
        text = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        sealed = common.seal(responses.SUMMARY + text)
        history = (complete(item, self._conversation_memory) for item in self.history)
        output = [item for item in history if item.get("role") in KEPT]
        head = {"id": responses.new_id("cmp"), "type": "compaction"}
        answer: Body = {"id": self.answer["id"], "object": "response.compaction"}
        answer |= {name: self.answer[name] for name in ("created_at", "usage")}
        return msgspec.json.encode(
            answer | {"output": [*output, head | {"encrypted_content": sealed}]}
        )


COMPACTION = Dialect("chat/completions", base.error, CompactionTranslation)


async def compact(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    return await endpoints.call(COMPACTION, caller, request)


async def count(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    how = partial(count_tokens, endpoints, caller, request, responses.DIALECT)
    about = {"object": "response.input_tokens"}
    return await how(responses.prompt_of, "input_tokens", about=about)


# -- stored responses ------------------------------------------------------------------------------


async def retrieve(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    answer, _ = _response(caller, request)
    if request.query.get("stream", "false") != "false":
        why = "a stored response is returned as a whole; leave stream out"
        raise UntranslatableError("stream", why)
    _refuse_unknown(request, "include_obfuscation", "stream")
    return web.json_response(body=msgspec.json.encode(answer))


async def forget(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    answer, _ = _response(caller, request)
    stored, id = caller.active.memory.kept, answer["id"]
    for item in answer["output"]:
        stored["items"].pop(item["id"], None)
    stored["responses"].pop(id)
    stored["answers"].pop(id, None)
    return web.json_response({"id": id, "object": "response", "deleted": True})


async def cancel(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    _response(caller, request)
    why = "it is complete; only a response in the background could be cancelled, and there is"
    raise UntranslatableError("response_id", f"{why} none behind this gateway")


async def input_items(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    """List the items before a response: the inputs and outputs of the responses that it continues,
    then its input."""
    _, before = _response(caller, request)
    memory = caller.active.memory
    # Ids must be the same on every page: items without an id get their number.
    items = (complete(item, memory, f"{index}") for index, item in enumerate(before))
    return _page(request, [*items])


def _response(caller: CallOrigin, request: web.Request) -> tuple[Body, list[Body]]:
    id = request.match_info["id"]
    stored = caller.active.memory.kept["responses"].get(id)
    if stored is None:
        why = f"{id!r:.80} is not a stored response of this attempt: one is stored when it is"
        why = f"{why} complete, unless store is false, until it is deleted or the attempt ends"
        raise UntranslatableError("response_id", why, status=404, code="response_not_found")
    return cast(tuple[Body, list[Body]], stored)


# -- conversations ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Conversation:
    """Items that requests may continue, and where their answers are added."""

    memory: ConversationMemory
    id: str = field(default_factory=lambda: responses.new_id("conv"))
    created: int = field(default_factory=lambda: int(time.time()))
    metadata: Body = field(default_factory=dict)
    items: list[Body] = field(default_factory=list)
    size: int = 0  # size of the items in bytes of JSON

    @property
    def about(self) -> Body:
        about: Body = {"id": self.id, "object": "conversation", "created_at": self.created}
        return about | {"metadata": self.metadata}

    def add(self, items: Iterable[Body]) -> list[Body]:
        """Add items to the end; return them as they are kept."""
        added = [complete(item, self.memory) for item in items]
        self.items += added
        self.size += sum(map(_size, added))
        return added

    def remove(self, item: Body) -> None:
        self.items.remove(item)
        self.size -= _size(item)

    def refuse_if_full(self, more: int = 0) -> None:
        """Reject a request if `more` bytes would exceed the limit of the attempt's
        conversations."""
        all = self.memory.kept["conversations"].values()
        if sum(conversation.size for conversation in all) + more > MAX_BYTES:
            why = f"the conversations of this attempt hold at most {MAX_BYTES} bytes; delete one"
            raise RefusedError(413, "conversations_full", f"{why}, or some of its items")


async def create(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    body = await _body(request, "items", "metadata")
    conversation = Conversation(caller.active.memory, metadata=_metadata(body))
    _add(conversation, body)
    caller.active.memory.kept["conversations"][conversation.id] = conversation
    return web.json_response(conversation.about)


async def describe(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    return web.json_response(_conversation(caller, request).about)


async def update(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    conversation = _conversation(caller, request)
    conversation.metadata = _metadata(await _body(request, "metadata"))
    return web.json_response(conversation.about)


async def delete(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    conversation = _conversation(caller, request)
    caller.active.memory.kept["conversations"].pop(conversation.id)
    gone = {"id": conversation.id, "object": "conversation.deleted", "deleted": True}
    return web.json_response(gone)


async def add_items(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    conversation = _conversation(caller, request)
    return _list(_add(conversation, await _body(request, "items")), more=False)


async def list_items(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    return _page(request, _conversation(caller, request).items)


async def read_item(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    item = _item(_conversation(caller, request), request)
    return web.json_response(body=msgspec.json.encode(item))


async def remove_item(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    conversation = _conversation(caller, request)
    conversation.remove(_item(conversation, request))
    return web.json_response(conversation.about)


def _conversation(caller: CallOrigin, request: web.Request) -> Conversation:
    id = request.match_info["id"]
    conversation: Conversation | None = caller.active.memory.kept["conversations"].get(id)
    if conversation is None:
        why = f"{id!r:.80} is no conversation of this attempt; make one with POST /v1/conversations"
        raise UntranslatableError("conversation_id", why, status=404, code="conversation_not_found")
    return conversation


def _item(conversation: Conversation, request: web.Request) -> Body:
    id = request.match_info["item"]
    item = next((item for item in conversation.items if item["id"] == id), None)
    if item is None:
        why = f"{id!r:.80} is no item of conversation {conversation.id}"
        raise UntranslatableError("item_id", why, status=404, code="item_not_found")
    return item


def _add(conversation: Conversation, body: Body) -> list[Body]:
    """Add the items of a request, if a call could be rendered from all of them."""
    items = base.objects(body.get("items"), "items")
    with base.typed():
        responses.messages_of([*conversation.items, *items], conversation.memory)
    conversation.refuse_if_full(sum(map(_size, items)))
    return conversation.add(items)


def _metadata(body: Body) -> Body:
    metadata = body.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise UntranslatableError("metadata", "is not an object", code="invalid_type")
    return metadata or {}


# -- items and pages -------------------------------------------------------------------------------


def complete(item: Body, memory: ConversationMemory, number: str = "") -> Body:
    """Return an item as the API lists it: with id and type, a message's text in parts. A reference
    is replaced by its item. `number`: used in place of a random id."""
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        stored_items: Mapping[str, Body] = memory.kept["items"]
        return stored_items.get(str(item.get("id")), item)
    prefix = PREFIXES.get(kind, "item")
    id = item.get("id") or (f"{prefix}_{number}" if number else responses.new_id(prefix))
    completed = item | {"id": id, "type": kind}
    if kind != "message":
        return completed
    completed["status"] = item.get("status") or "completed"
    if isinstance(text := item.get("content"), str):
        is_answer = item.get("role") == "assistant"
        part: Body = {"type": "output_text" if is_answer else "input_text", "text": text}
        completed["content"] = [part | ({"annotations": []} if is_answer else {})]
    return completed


def _size(item: Body) -> int:
    return len(msgspec.json.encode(item))


async def _body(request: web.Request, *fields: str) -> Body:
    """Return the body of a request, which may have none; refuse unknown fields."""
    body = msgspec.json.decode(await read_body(request) or b"{}", type=dict[str, Any])
    if unknown := sorted(body.keys() - set(fields)):
        raise common.impossible("request", ", ".join(unknown))
    return body


def _refuse_unknown(request: web.Request, *parameters: str) -> None:
    """Reject unknown query parameters, and unsupported values of `include`."""
    for key, value in request.query.items():
        name = key.removesuffix("[]")
        if name == "include" and value not in (*responses.INCLUDED, responses.LOGPROBS):
            raise UntranslatableError(name, f"{value!r:.80} does not exist behind this gateway")
        if name not in ("include", *parameters):
            raise common.impossible("query", name)


def _page(request: web.Request, items: list[Body]) -> web.Response:
    """Return the requested page of items."""
    _refuse_unknown(request, "after", "limit", "order")
    limit, order = request.query.get("limit", f"{PAGE}"), request.query.get("order", "desc")
    if not limit.isdecimal() or not 0 < int(limit) <= MAX_PAGE:
        raise UntranslatableError("limit", f"{limit!r:.80} is not a number from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise UntranslatableError("order", f"{order!r:.80} is neither asc nor desc")
    ordered = items if order == "asc" else items[::-1]
    if after := request.query.get("after"):
        at = next((i for i, item in enumerate(ordered) if item.get("id") == after), None)
        if at is None:
            raise UntranslatableError("after", f"{after!r:.80} is not an item of this list")
        ordered = ordered[at + 1 :]
    return _list(ordered[: int(limit)], more=len(ordered) > int(limit))


def _list(items: list[Body], *, more: bool) -> web.Response:
    ends: Body = {"first_id": items[0].get("id") if items else ""}
    ends |= {"last_id": items[-1].get("id") if items else "", "has_more": more}
    page: Json = {"object": "list", "data": items} | ends
    return web.json_response(body=msgspec.json.encode(page))
