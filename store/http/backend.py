"""Served stores: `http(s)://[KEY@]host[:port]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from agentrl.store.base import Store
from agentrl.store.urls import StoreBackend

VARIABLE = "AGENTRL_STORE_KEY"


def connect(url: str, *, create: bool, readonly: bool, clock: Callable[[], float] | None) -> Store:
    """Create a client. Sends no request yet; the server decides on `create` and `clock`."""
    from agentrl.store.http.client import connect

    return connect(url, readonly=readonly)


def split_secret(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    _, _, host = parts.netloc.rpartition("@")
    options = parse_qsl(parts.query, keep_blank_values=True)
    key = unquote(parts.username or parts.password or "") or dict(options).get("key")
    query = urlencode([(name, value) for name, value in options if name != "key"])
    public = urlunsplit((parts.scheme, host, parts.path, query, parts.fragment))
    return public, {VARIABLE: key} if key else {}


HTTP = StoreBackend(form="http://host:port", open=connect, split_secret=split_secret)
HTTPS = replace(HTTP, form="https://host:port")
