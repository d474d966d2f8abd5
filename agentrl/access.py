"""Who may call an HTTP server: its address, keys from the environment, and certificates."""

from __future__ import annotations

import hmac
import os
import ssl
from dataclasses import dataclass
from ipaddress import ip_address

from agentrl.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether a server at `host`, a name or an address, is reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(variable: str, setting: str, what: str) -> str:
    """The value of an environment variable; empty if `variable` is. Raises ConfigError, which names
    the setting, where it is missing; what: of which it is the API key, with an article."""
    if variable and not os.environ.get(variable, "").strip():
        raise ConfigError(f"{setting}: the environment has no {variable}; set it to {what} API key")
    return os.environ[variable] if variable else ""


def given_key(authorization: str | None, api_key: str | None) -> str:
    """The key in the headers Authorization and x-api-key of a request."""
    return api_key or (authorization or "").removeprefix("Bearer ").strip()


@dataclass(frozen=True, slots=True)
class Access:
    """How a server is called. Without keys, by anybody who can connect."""

    keys: tuple[str, ...] = ()  # any of them is taken: one that is replaced stays for a while
    certfile: str = ""  # with a chain, in PEM; empty: no TLS
    keyfile: str = ""

    def allows(self, given: str) -> bool:
        """Whether this is one of the keys, where there are any."""
        # Every key is compared: how long that takes tells nothing.
        sent = given.encode(errors="surrogateescape")  # what is no UTF-8 is a wrong key
        same = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        return any(same) or not same

    @property
    def key(self) -> str:
        """That callers send; empty: none."""
        return next(iter(self.keys), "")

    def server_tls(self) -> ssl.SSLContext | None:
        """Raises ConfigError for files that cannot be read, or do not belong together."""
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
        """For calls to the own server, by whatever address; True: the usual checks."""
        if not self.certfile:
            return True
        context = ssl.create_default_context(cafile=self.certfile)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be self-signed
        return context


ANYBODY = Access()
