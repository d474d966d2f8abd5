"""Store URLs: their schemes, and their forms without secrets for display and for processes."""

from __future__ import annotations

import re
from difflib import get_close_matches
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from agentrl.errors import Invalid

SCHEMES = {
    "sqlite": "sqlite:///path",
    "postgresql": "postgresql://host/database",
    "postgres": "postgresql://host/database",
    "http": "http://host:port",
    "https": "https://host:port",
}
BEGINNING = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|:/{0,2}|//)")


def scheme_of(url: str) -> str | None:
    """Return the scheme of a store's URL; None for a file path.

    Raises Invalid for an unknown scheme and for a misspelled URL such as `postgres//host/db`."""
    begins = BEGINNING.match(url)
    if begins is None:
        return None
    scheme, separator = begins.groups()
    if separator == "://" and scheme in SCHEMES:
        return scheme
    near = get_close_matches(scheme.lower(), SCHEMES, n=1)
    if not near and separator != "://":
        return None
    forms = (
        SCHEMES[near[0]]
        if near
        else "sqlite:///path, postgresql://host/database or http://host:port"
    )
    raise Invalid(f"Store URL {split_password(url)[0]!r} is invalid: write it as {forms}.")


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and the password if it has one."""
    parts = urlsplit(url)
    address, password = parts.netloc, None
    user, at, host = address.rpartition("@")
    name, colon, secret = user.partition(":")
    if at and colon:
        address, password = f"{name}@{host}", unquote(secret)
    options = parse_qsl(parts.query, keep_blank_values=True)
    kept = [(key, value) for key, value in options if key != "password"]
    if len(kept) < len(options):
        password = dict(options)["password"]
    query = urlencode(kept, quote_via=quote, safe="/") if len(kept) < len(options) else parts.query
    if address == parts.netloc and query == parts.query:
        return url, password
    public = urlunsplit((parts.scheme, address, parts.path, query, parts.fragment))
    if "://" not in public:
        public = public.replace(":", "://", 1)
    return public, password


def split_secret(url: str) -> tuple[str, dict[str, str]]:
    """Return a store's URL without its password or key, and an environment variable with it."""
    scheme, _, _ = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        public, password = split_password(url)
        return public, {} if password is None else {"PGPASSWORD": password}
    if scheme not in ("http", "https"):
        return url, {}
    parts = urlsplit(url)
    _, _, host = parts.netloc.rpartition("@")
    options = parse_qsl(parts.query, keep_blank_values=True)
    key = unquote(parts.username or parts.password or "") or dict(options).get("key")
    query = urlencode([(name, value) for name, value in options if name != "key"])
    public = urlunsplit((parts.scheme, host, parts.path, query, parts.fragment))
    return public, {"AGENTRL_STORE_KEY": key} if key else {}
