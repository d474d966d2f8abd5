"""Store URLs: the backend for a URL, and URLs without secrets for display. A backend is selected by
the scheme, among built-in ones and entry points of packages in the group `agentrl.stores`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from agentrl.core.errors import Invalid
from agentrl.core.plugins import plugin_points

if TYPE_CHECKING:
    from agentrl.store.base import Store

KEY_VARIABLE = "AGENTRL_STORE_KEY"  # variable with the key for clients of a served store
BEGINNING = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|:/{0,2}|//)")


class Opener(Protocol):
    """Opens the store at a URL: see `agentrl.store.open_store`."""

    def __call__(
        self, url: str, *, create: bool, readonly: bool, clock: Callable[[], float] | None
    ) -> Store: ...


@dataclass(frozen=True, slots=True)
class StoreBackend:
    """The stores of a scheme. Its module imports drivers only where they are used."""

    form: str  # form of its URLs, for messages: "postgresql://host/database"
    open: Opener
    # A URL -> the same without its secret, and an environment variable with the secret from which
    # `open` takes it. AGENTRL_STORE_ begins the variable's name, so that no other program gets it.
    split_secret: Callable[[str], tuple[str, dict[str, str]]] = lambda url: (url, {})
    backup: Callable[[str, Path], None] | None = None  # copies the store at a URL to a new file


def backend_of(url: str) -> StoreBackend:
    """Return the backend of a URL, or of the path of an SQLite file.

    Raises Invalid for an unknown scheme and for a misspelled URL such as `postgres//host/db`."""
    begins = BEGINNING.match(url)
    scheme, separator = begins.groups() if begins else ("", "")
    backends = plugin_points("stores")
    if separator == "://" and scheme in backends.names:
        return _load(backends, scheme)
    near = get_close_matches(scheme.lower(), backends.names, n=1)
    if begins is None or (not near and separator != "://"):
        return _load(backends, "sqlite")
    # Anything before an @ or after a ? may be a secret.
    shown = begins[0] + url[begins.end() :].rpartition("@")[2].partition("?")[0]
    if near:
        forms = [_load(backends, near[0]).form]
    else:  # a backend may have several schemes
        loaded = (_load(backends, name) for name in sorted(backends.names, reverse=True))
        forms = [*{backend.open: backend.form for backend in loaded}.values()]
    form = " or ".join([", ".join(forms[:-1]), forms[-1]] if forms[1:] else forms)
    raise Invalid(f"Store URL {shown!r} is invalid: write it as {form}.")


def split_secret(url: str) -> tuple[str, dict[str, str]]:
    """Return a store's URL without its password or key, and an environment variable with it."""
    return backend_of(url).split_secret(url)


def _load(backends: EntryPoints, scheme: str) -> StoreBackend:
    backend: StoreBackend = backends[scheme].load()
    return backend


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and the password if it has one."""
    parts = urlsplit(url)
    address, password = parts.netloc, None
    user, at, host = address.rpartition("@")
    name, colon, secret = user.partition(":")
    if at and colon:
        address, password = f"{name}@{host}", unquote(secret)
    options = parse_qsl(parts.query, keep_blank_values=True)
    public_options = [(key, value) for key, value in options if key != "password"]
    if len(public_options) < len(options):
        password = dict(options)["password"]
    query = (
        urlencode(public_options, quote_via=quote, safe="/")
        if len(public_options) < len(options)
        else parts.query
    )
    if address == parts.netloc and query == parts.query:
        return url, password
    public = urlunsplit((parts.scheme, address, parts.path, query, parts.fragment))
    if "://" not in public:
        public = public.replace(":", "://", 1)
    return public, password
