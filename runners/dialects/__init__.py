"""The model APIs that agents may call: OpenAI's completions, and those that parts bring.

An API of a part is named by its path, a route of aiohttp such as `/v1/messages`, which follows the
prefix of an attempt. The gateway reads the names once, when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from aiohttp import web

from agentrl.base.parts import installed_plugins
from agentrl.runners.dialects.base import CHAT, TEXT, Dialect, Translation, UntranslatableError
from agentrl.runners.dialects.conversation import Body

if TYPE_CHECKING:
    from agentrl.runners.gateway.attribution import CallOrigin
    from agentrl.runners.gateway.endpoints import Endpoints

    Answer = Callable[[Endpoints, CallOrigin, web.Request], Awaitable[web.StreamResponse]]

__all__ = [
    "OWN",
    "Dialect",
    "ModelApi",
    "Translation",
    "UntranslatableError",
    "client_api",
    "dialect_of",
    "listed",
    "model_apis",
]

OWN = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@dataclass(frozen=True, slots=True)
class ModelApi:
    """What the gateway answers on a path, and how it tells errors there."""

    answer: Answer | None  # a POST
    dialect: Dialect  # of errors
    get: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None  # of no attempt
    others: Mapping[str, Answer] = field(default_factory=dict)  # by method, such as GET or DELETE
    header: str = ""  # that clients of this API send with every request
    models: Callable[[Sequence[str]], Body] | None = None  # the list of models, for these clients


@cache
def model_apis() -> dict[str, ModelApi]:
    """The APIs of installed parts, by path."""
    return {point.name: point.load() for point in installed_plugins("dialects")}


def listed() -> list[str]:
    """Return what is answered, as method and path."""
    apis = model_apis().items()
    methods = ((path, [*(["POST"] if api.answer else []), *api.others]) for path, api in apis)
    found = [f"POST {path}" for path in OWN]
    return found + [f"{method} {path}" for path, called in methods for method in called]


def client_api(request: web.Request) -> ModelApi | None:
    """Return the API whose clients send a request with these headers, if its part says so."""
    apis = (api for api in model_apis().values() if api.header)
    return next((api for api in apis if api.header in request.headers), None)


def dialect_of(request: web.Request) -> Dialect:
    """Return the dialect in which errors of a request are told: that of its path, which may be one
    that nothing answers, such as `/v1/messages/batches`, or else of its headers."""
    apis = model_apis().items()
    meant = (api for path, api in apis if _pattern(path).search(request.path))
    api = next(meant, None) or client_api(request)
    return CHAT if api is None else api.dialect


@cache
def _pattern(path: str) -> re.Pattern[str]:
    return re.compile("[^/]+".join(map(re.escape, re.split("{.*?}", path))))
