"""The model APIs that agents may call, by the paths of their routes, which follow the prefix of an
attempt: OpenAI's completions, and those that are translated into them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from aiohttp import web

from agentrl.runners.apis import google, messages, responses
from agentrl.runners.apis.base import CHAT, TEXT, Dialect
from agentrl.runners.apis.chat import Body
from agentrl.runners.gateway import stored_responses
from agentrl.runners.gateway.attribution import CallOrigin

if TYPE_CHECKING:
    from agentrl.runners.gateway.server import Endpoints

    Answer = Callable[[Endpoints, CallOrigin, web.Request], Awaitable[web.StreamResponse]]

OWN = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@dataclass(frozen=True, slots=True)
class ModelApi:
    """An API on a path: the handlers of requests, and the format of errors."""

    dialect: Dialect  # format of errors
    answer: Answer | None = None  # handler of POST
    # Handlers by method, such as GET or DELETE.
    others: Mapping[str, Answer] = field(default_factory=dict)
    # Handler of GET outside of attempts.
    get: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    header: str = ""  # header that clients of this API send with every request
    models: Callable[[Sequence[str]], Body] | None = None  # the list of models, for these clients


GOOGLE = ModelApi(
    google.dialect("", stream=False),
    stored_responses.answer_google,
    header="x-goog-api-key",
    models=stored_responses.google_models,
)
MESSAGES = ModelApi(
    messages.DIALECT,
    stored_responses.answer_messages,
    header="anthropic-version",
    models=stored_responses.anthropic_models,
)
TRANSLATED: Mapping[str, ModelApi] = {
    "/v1/responses": ModelApi(
        responses.DIALECT, stored_responses.answer_responses, get=stored_responses.no_websocket
    ),
    "/v1/responses/compact": ModelApi(responses.DIALECT, stored_responses.compact),
    "/v1/responses/input_tokens": ModelApi(responses.DIALECT, stored_responses.count),
    "/v1/responses/{id}": ModelApi(
        responses.DIALECT,
        others={"GET": stored_responses.retrieve, "DELETE": stored_responses.forget},
    ),
    "/v1/responses/{id}/cancel": ModelApi(responses.DIALECT, stored_responses.cancel),
    "/v1/responses/{id}/input_items": ModelApi(
        responses.DIALECT, others={"GET": stored_responses.input_items}
    ),
    "/v1/conversations": ModelApi(responses.DIALECT, stored_responses.create),
    "/v1/conversations/{id}": ModelApi(
        responses.DIALECT,
        stored_responses.update,
        others={"GET": stored_responses.describe, "DELETE": stored_responses.delete},
    ),
    "/v1/conversations/{id}/items": ModelApi(
        responses.DIALECT,
        stored_responses.add_items,
        others={"GET": stored_responses.list_items},
    ),
    "/v1/conversations/{id}/items/{item}": ModelApi(
        responses.DIALECT,
        others={"GET": stored_responses.read_item, "DELETE": stored_responses.remove_item},
    ),
    "/v1/messages": MESSAGES,
    "/messages": MESSAGES,  # AI SDK takes ANTHROPIC_BASE_URL for an address that ends in /v1
    "/v1/messages/count_tokens": ModelApi(messages.DIALECT, stored_responses.count_messages),
    "/v1/models/{model}:{verb}": GOOGLE,
    "/v1beta/models/{model}:{verb}": GOOGLE,
}


def listed() -> list[str]:
    """Return the supported methods and paths."""
    apis = TRANSLATED.items()
    methods = ((path, [*(["POST"] if api.answer else []), *api.others]) for path, api in apis)
    own_paths = [f"POST {path}" for path in OWN]
    return own_paths + [
        f"{method} {path}" for path, api_methods in methods for method in api_methods
    ]


def client_api(request: web.Request) -> ModelApi | None:
    """Return the API whose clients send a request with these headers, if they identify it."""
    apis = (api for api in TRANSLATED.values() if api.header)
    return next((api for api in apis if api.header in request.headers), None)


def dialect_of(request: web.Request) -> Dialect:
    """Return the dialect of the errors of a request: that of its path, even of an unsupported one
    such as `/v1/messages/batches`, or else that of its headers."""
    meant = (api for path, api in TRANSLATED.items() if _pattern(path).search(request.path))
    api = next(meant, None) or client_api(request)
    return CHAT if api is None else api.dialect


@cache
def _pattern(path: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, re.split("{.*?}", path))))
