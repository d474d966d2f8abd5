"""What the gateway answers on the paths of the translated APIs: see `apis`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from agentrl.base.http_server import read_body
from agentrl.runners.dialects import Dialect, UntranslatableError
from agentrl.runners.dialects.conversation import Body, ConversationMemory
from agentrl.runners.gateway.attribution import CallOrigin
from agentrl.runners.gateway.prompt_size import RefusedPromptError, prompt_size
from agentrl.runners.gateway.refusals import RefusedError, UpstreamError, translate_error
from agentrl.runners.gateway.upstream import Route
from agentrl.runners.translation import google, messages, responses
from agentrl.types import Json

if TYPE_CHECKING:
    from agentrl.runners.gateway.endpoints import Endpoints

NOTHING: Mapping[str, Json] = {}


async def answer_responses(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    return await endpoints.call(responses.DIALECT, caller, request)


async def no_websocket(request: web.Request) -> web.StreamResponse:
    """Refuse a websocket at once; the agent then falls back to POST."""
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


async def answer_google(
    endpoints: Endpoints, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    """Call a method of Google's API, whose path names the model."""
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
    a chat completion request; `field`: name of the count in the response, beside `about`."""
    raw, upstream = await read_body(request), endpoints.upstream
    memory = caller.active.memory
    chat = prompt_of(msgspec.json.decode(raw, type=Body), memory)
    chat["messages"], _ = memory.recall(chat["messages"], joined=True)

    async def once(route: Route) -> web.StreamResponse:
        asked = chat | {"messages": await upstream.adapt(route, chat["messages"])}
        try:
            size = await prompt_size(upstream, route, asked, request.headers)
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
