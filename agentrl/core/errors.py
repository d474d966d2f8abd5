"""All errors for users: one class per boundary; each message says what to do next."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable


class AgentRLError(Exception):
    """Base of all errors raised on purpose; the command line prints only the message."""


class ConfigError(AgentRLError):
    """A run file, task file, agent path or command-line override is wrong."""


class StoreError(AgentRLError):
    """The store cannot be opened, or it refused a request."""


class Invalid(StoreError):
    """The data can never be stored: a wrong type, a value out of range, a bad combination."""


class NotFound(StoreError):
    """The store has no run, group or attempt of that name."""


class Conflict(StoreError):
    """The request is well-formed, but the current state of the store forbids it."""


class Fenced(Conflict):
    """The caller's lease, fence or run epoch is no longer the current one."""


class Forbidden(StoreError):
    """The API key is missing or unknown, or its scope does not allow the request."""


class Unavailable(StoreError):
    """The store cannot be reached, read or written now; it kept no part of the request."""


class AgentError(AgentRLError):
    """The user's agent or verifier could not be loaded."""


class PolicyError(AgentRLError):
    """A model directory, tokenizer, chat template or policy server is unusable."""


class DamagedError(PolicyError):
    """A checkpoint is missing or damaged; an earlier one may be intact."""


class TrainingError(AgentRLError):
    """An update cannot be computed from the available data."""


DISTRIBUTION = "agentrl"  # the name of the installed package


def install_command(extra: str, option: str = "") -> str:
    """The command that adds an extra to this installation: from the folder or the file that it was
    installed from, by PEP 610, else by the distribution's name."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url, source = urlsplit(str(origin.get("url", ""))), f"{DISTRIBUTION}[{extra}]"
    if url.scheme == "file":
        option += " -e" if origin.get("dir_info", {}).get("editable") else ""
        source = f"{url2pathname(url.path)}[{extra}]"
    elif url.scheme:
        system = origin.get("vcs_info", {}).get("vcs", "")
        source += f" @ {system}{'+' * bool(system)}{origin['url']}"
    return f"pip install{option} {shlex.quote(source)}"


LEARNING = ("torch", "transformers", "tokenizers", "safetensors", "matplotlib")  # the extra `train`


def user_message(error: Exception) -> str:
    """The message of a failed command: that of an AgentRLError, or which extra to install. Reraises
    every other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in LEARNING:
        return f"{error.name} is missing: {install_command('train')}"
    if not isinstance(error, AgentRLError):
        raise error
    return str(error)


def nearest(name: str, valid: Iterable[str]) -> str:
    """ "did you mean 'x'?" for a close match, else the list of valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(names)}"
