"""Access control of HTTP servers: address, API keys from the environment, and certificates."""

from __future__ import annotations

import hmac
import os
import ssl
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from agentrl.core.errors import ConfigError

READING = ("GET", "HEAD", "OPTIONS")  # methods that only read
# Content type that a page may send without a CORS preflight.
FORM = b"application/x-www-form-urlencoded"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`, a name or an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback_host(host: str) -> bool:
    """`is_loopback` for a host from a URL too, in which an IPv6 address has brackets."""
    return is_loopback(host.removeprefix("[").removesuffix("]"))


def is_for_this_machine(host: bytes) -> bool:
    """Whether the header Host names this machine. Otherwise a web page may have resolved its own
    name to this address (DNS rebinding) to read a server through its visitor's browser."""
    name = host.decode("latin-1").lower()
    if not name.endswith("]"):  # an IPv6 address without a port
        name = name.rpartition(":")[0] or name
    return not name or is_loopback_host(name)


@lru_cache(64)  # the calls of a client have the same headers
def cross_site(
    method: str, host: bytes, content_type: bytes, origin: bytes = b"", *, has_key: bool = False
) -> tuple[int, str] | None:
    """Status and message for a request without a valid key that a web page may have sent; None for
    others. A page can send this machine requests that need no CORS preflight, and under its own
    host name also read the response. has_key: whether the request has a header for a key, even an
    empty one, which needs a preflight. The other parameters are values of headers, empty if
    missing. Browsers send the header Origin with requests that write, and need not send a
    Content-Type."""
    if not is_for_this_machine(host):
        return 403, "without a key, this server is only for localhost or 127.0.0.1"
    kind = content_type.partition(b";")[0].strip().lower()
    if method in READING or (kind.startswith(b"application/") and kind != FORM):
        return None
    if has_key or (not kind and not origin):  # a program that leaves it out
        return None
    return 415, "send the header Content-Type: application/json, or that of another API's data"


def read_key(variable: str, setting: str, what: str) -> str:
    """The API key in an environment variable; empty if `variable` is empty.

    Raises ConfigError with the name of the setting if the variable is not set. what: the owner of
    the key, for the message, such as "the judge's"."""
    key = os.environ.get(variable, "").strip()  # a key from a file ends in a newline
    if variable and not key:
        raise ConfigError(f"{setting}: the environment has no {variable}; set it to {what} API key")
    return key


def read_sent_key(variable: str, setting: str, what: str) -> str:
    """`read_key` for a key that is sent to another server. Raises ConfigError too if a header
    cannot contain it."""
    key = read_key(variable, setting, what)
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{setting}: {variable} has several lines, or characters that no API key has; set it"
            f" to {what} API key alone"
        )
    return key


@dataclass(frozen=True, slots=True)
class Access:
    """Keys and certificate of a server. Without keys anybody who can connect may call it."""

    keys: tuple[str, ...] = ()  # each is accepted: an old key stays valid while it is replaced
    certfile: str = ""  # certificate chain in PEM; empty: no TLS
    keyfile: str = ""

    def allows(self, sent_key: str) -> bool:
        """Whether `sent_key` is one of the server's; always true without keys."""
        # Compares with every key in constant time: the duration reveals nothing.
        sent = sent_key.encode(errors="surrogateescape")  # a key that is not UTF-8 is wrong
        same = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        return any(same) or not same

    @property
    def key(self) -> str:
        """The key that callers send; empty: none."""
        return next(iter(self.keys), "")

    def server_tls(self) -> ssl.SSLContext | None:
        """The server's TLS context. Raises ConfigError for unreadable or mismatched files."""
        if not self.certfile:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certfile, self.keyfile or None)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"engine.ssl_certfile = {self.certfile!r}: {error.strerror or error}; name a "
                "certificate and its key (engine.ssl_keyfile), both in PEM"
            ) from None
        return context

    def client_tls(self) -> ssl.SSLContext | bool:
        """The TLS context for calls to this server at any address; True: the default checks."""
        if not self.certfile:
            return True
        context = ssl.create_default_context(cafile=self.certfile)
        context.check_hostname = False
        # The certificate need not be self-signed.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


ANYBODY = Access()
