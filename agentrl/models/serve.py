"""`agentrl serve`: a run's policies behind the gateway's APIs, without recording. The gateway of
training answers, so calls are translated and adapted to the chat template as during training. A
call belongs to no rollout, and nothing of it is stored. The policy server behind the gateway
listens on this machine only, with a random key.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec.structs import replace

from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.stages import prepare_process
from agentrl.core import files
from agentrl.core.access import Access, is_loopback
from agentrl.core.config import RunConfig, derived, resolve
from agentrl.core.config.learning import DataConfig
from agentrl.core.config.live import LiveConfig
from agentrl.core.config.run_file import apply_override, store_in
from agentrl.core.errors import ConfigError
from agentrl.core.http import request_key
from agentrl.core.types import Attempt, NewRollout, Purpose, Sampling, score_text
from agentrl.evaluation import evaluation_run
from agentrl.models.export import Chosen
from agentrl.runners.gateway.attribution import ActiveAttempt, AttemptRegistry
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.upstream import Route, Upstream
from agentrl.runners.main import run_features
from agentrl.store import open_store

ENGINE_KEY = "AGENTRL_SERVED_ENGINE_KEY"
OPTIONS = {
    "engine.ssl_certfile": "--certfile", "engine.ssl_keyfile": "--keyfile", "runner.port": "--port",
}  # fmt: skip
CALL_TIMEOUT = 3600.0  # seconds of a call
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Served:
    """The served checkpoint, with address and access."""

    chosen: Chosen
    host: str
    port: int
    access: Access
    overrides: tuple[str, ...] = ()


class OpenCalls(Feature):
    """Lets callers with a key call the policies."""

    def __init__(self, access: Access, config: RunConfig) -> None:
        self._access, self._config = access, config
        self.attempts: AttemptRegistry | None = None

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        app.middlewares.append(self._admit)
        app.router.add_get("/health", _healthy)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in ("/", "/health"):
            return await handler(request)
        if not self._access.allows(request_key(request.headers)):
            error = {"type": "authentication_error", "message": "the API key is missing or unknown"}
            return web.json_response({"type": "error", "error": error}, status=401)
        active = self._call()
        try:
            request.match_info["attempt"] = active.id
            return await handler(request)
        finally:
            assert self.attempts is not None
            self.attempts.unregister(active.id)

    def _call(self) -> ActiveAttempt:
        """An unrecorded attempt for one call."""
        assert self.attempts is not None
        id = uuid.uuid4().hex
        rollout = NewRollout(
            id=id, run=self._config.name, group=id, index=0, task={}, purpose=Purpose.EVAL,
            sampling=replace(self._config.sampling, seed=None), timeout=CALL_TIMEOUT, step=0,
        )  # fmt: skip
        attempt = Attempt(id=id, rollout=rollout, fence=0, lease_until=time.time() + CALL_TIMEOUT)
        active = self.attempts.register(attempt, scoring=True)
        for feature in self.attempts.features:  # calls are processed as in training
            feature.join(active)
        return active


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def settings_of(served: Served, output: Path) -> RunConfig:
    """The settings of the run with the chosen weights. Raises ConfigError for wrong overrides."""
    config = served.chosen.config
    # The run plays no rollouts here, so [sampling] is allowed even if it learned from a data set.
    config = replace(config, data=DataConfig(), live=LiveConfig())
    data = msgspec.to_builtins(evaluation_run(config, config.name, served.chosen.saved.path))
    for override in served.overrides:
        if override.startswith("engine.kind="):  # a table of another kind has other keys
            data["engine"] = {"max_context": config.engine.max_context}
    for override in served.overrides:
        apply_override(data, override)
    data |= {"output": str(output), "store": store_in(output), "root": config.root}
    # Only this process uses the policy server.
    hidden = {"host": "127.0.0.1", "port": 0, "advertise": "", "key_env": ENGINE_KEY}
    data["engine"] |= hidden | {"ssl_certfile": "", "ssl_keyfile": ""}
    os.environ[ENGINE_KEY] = secrets.token_urlsafe(24)
    return resolve(data, source=f"run {config.name}")


async def serve_policies(
    served: Served, *, started: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Serve until `stop` is set; calls `started` with a message for users."""
    if not (is_loopback(served.host) or served.access.keys):
        raise ConfigError(f"--host {served.host}: anybody could call; give --key-env VARIABLE")
    if served.access.keyfile and not served.access.certfile:
        raise ConfigError("--keyfile needs --certfile")
    with with_option_names():
        served.access.server_tls()  # raises errors before models are loaded
    async with AsyncExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-serve-")))
        config = settings_of(served, output)
        prepare_process(config.seed)
        stack.enter_context(files.reading(served.chosen.saved.path))
        models = await asyncio.to_thread(load_policies, config)
        serving = PolicyServers(config, models)
        await serving.start()
        stack.push_async_callback(serving.close)
        async with serving.updating():
            steps = served.chosen.saved.steps
            await serving.publish(dict.fromkeys(derived.trained_policies(config), steps))
        store = await stack.enter_async_context(open_store(config.store))
        await store.open_run(config.name, msgspec.to_builtins(config))  # the gateway reads it
        calls = OpenCalls(served.access, config)
        gateway = Gateway(
            store, config.name, host=served.host, port=served.port, access=served.access,
            roles=derived.policy_by_role(config), remote=True,
            features=[*run_features(store, config), calls],
        )  # fmt: skip
        calls.attempts, router = gateway.attempts, gateway.router
        router.frozen = _routes(serving, config.engine.access.key)
        router.any = next(iter(router.frozen.values())) if len(router.frozen) == 1 else None
        with with_option_names():
            await asyncio.to_thread(gateway.start)
        stack.push_async_callback(asyncio.to_thread, gateway.close)
        started(announcement(served, config, gateway.base_url, router.frozen))
        await serving.during(_until(stop))


@contextmanager
def with_option_names() -> Iterator[None]:
    """Replace names of settings in errors by the command-line options that set them here."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for setting, option in OPTIONS.items():
            message = message.replace(f"{setting} = ", f"{option} ").replace(setting, option)
        raise ConfigError(message) from None


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


def _routes(serving: PolicyServers, key: str) -> dict[str, Route]:
    return {
        name: Route(name, version, base_url, model, key)
        for name, version, base_url, model in serving.table()
    }


def measured(chosen: Chosen, sampling: Sampling) -> str:
    """The temperature of the evaluation, and its score."""
    at = chosen.config.eval.temperature
    condition = "even if they set one" if sampling.override_agent else "unless they set one"
    text = f"temperature of calls: {sampling.temperature:g}, {condition}"
    metrics = next((row.metrics for row in chosen.steps if row.step == chosen.saved.steps), {})
    if (score := metrics.get("eval/score")) is None:
        return f"{text}. No held-out score of this checkpoint was measured"
    bounds = [metrics[key] for key in ("eval/score_low", "eval/score_high") if key in metrics]
    share = chosen.shares
    texts = [score_text(x, share) for x in (score, *bounds)]
    between = f" (95 % interval {' to '.join(texts[1:])})" if bounds else ""
    return f"{text}. Held-out score at temperature {at:g}: {texts[0]}{between}"


def announcement(
    served: Served, config: RunConfig, base_url: str, routes: Mapping[str, Route]
) -> str:
    """The message with variables for an agent's environment. config: of the server."""
    chosen, root = served.chosen, base_url.removesuffix("/v1")
    names = ", ".join(map(repr, routes))
    which = "any model name selects it" if len(routes) == 1 else "the model's name selects one"
    lines = [
        f"serving {names} of run {chosen.config.name!r} after step {chosen.saved.steps} "
        f"({chosen.why}): {chosen.saved.path}",
        f"  OPENAI_BASE_URL={base_url}     chat completions, completions, responses; {which}",
        f"  ANTHROPIC_BASE_URL={root}     messages",
        f"  GOOGLE_GEMINI_BASE_URL={root}     generateContent",
    ]
    lines.append(f"  {measured(chosen, config.sampling)}")
    key = "one of the keys" if served.access.keys else "any text"
    return "\n".join([*lines, f"  API key: {key}. Ctrl-C stops it."])
