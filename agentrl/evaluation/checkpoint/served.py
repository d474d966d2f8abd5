"""The settings of an evaluation without a run file: an environment and a model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec

from agentrl.errors import ConfigError

TIMEOUT = 10.0  # seconds for the list of models
MODEL = "model"  # name of the endpoint


def settings_of(environment: str, model: str, name: str, key_env: str) -> dict[str, Any]:
    """Settings of a run. model: the URL of a server, or what `policy.model` may be; name: of the
    model at the server; key_env: the variable with its key. Raises ConfigError."""
    if not model:
        raise ConfigError("--model is missing: give a server's URL, or a model's name or folder")
    run = re.sub(r"[^A-Za-z0-9._-]+", "-", environment).strip("-._") or "environment"
    data: dict[str, Any] = {"name": run, "root": str(Path.cwd()), "environment": environment}
    if not model.startswith(("http://", "https://")):
        if name or key_env:
            raise ConfigError(f"--model-name and --key-env go with a URL, and {model!r} is none")
        return data | {"policy": {"model": model}}
    served = {"base_url": model, "model": name or _only_model(model, key_env), "key_env": key_env}
    return data | {"upstreams": {MODEL: served}, "roles": {"*": MODEL}}


def _only_model(url: str, key_env: str) -> str:
    """The name of the model that a server has. Raises ConfigError unless it has one."""
    key = os.environ.get(key_env, "") if key_env else ""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=TIMEOUT)
        answer.raise_for_status()
        names = [one["id"] for one in msgspec.json.decode(answer.content)["data"]]
    except (httpx.HTTPError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--model {url}: its list of models cannot be read ({error}); give --model-name, and"
            " check that the server runs and that the URL ends in /v1"
        ) from None
    if len(names) != 1:
        listed = ", ".join(map(str, names[:10])) or "none"
        raise ConfigError(f"--model {url} serves {listed}: choose one with --model-name")
    return str(names[0])
