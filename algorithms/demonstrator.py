"""The demonstrator of `agentrl demonstrate`: the model or Python function that answers, the
rollouts that are run, and which of them are kept. A function is served as OpenAI chat completions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
from aiohttp import web

from agentrl.algorithms.conversations import conversations_of, is_unfinished, message_key
from agentrl.algorithms.prompts import candidate_in_use
from agentrl.algorithms.sampling.tasks import evaluation_rollouts
from agentrl.core import user_code
from agentrl.core.access import read_sent_key
from agentrl.core.config import RunConfig, UpstreamConfig
from agentrl.core.config.run_file import tasks_of
from agentrl.core.errors import ConfigError
from agentrl.core.http import listen, read_body
from agentrl.core.images import digests, with_data_urls
from agentrl.core.loading import load_attribute
from agentrl.core.processes import log_phase, log_to_stderr
from agentrl.core.types import AUXILIARY_ROLE, Rollout, RolloutState
from agentrl.store import open_store, run_folder
from agentrl.store.base import Store

Script = Callable[..., Any]
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def load_script(path: str, root: Path) -> Script:
    """The function that `path` ("file.py:name") names. Raises ConfigError if there is none."""
    script = load_attribute(path, root, key="--script")
    if not callable(script):
        raise ConfigError(f"--script = {path!r}: it is not a function of messages and tools")
    function: Script = script
    return function


@asynccontextmanager
async def served(script: Script, name: str) -> AsyncIterator[str]:
    """Context in which `script(messages, tools)` answers; the value is the base URL. The script
    returns a text, or a message with `content` and `tool_calls`; a tool call may be just {"name":
    ..., "arguments": ...}."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await read_body(request))
        try:
            answer = await user_code.in_thread(script, body["messages"], body.get("tools") or [])
            message = message_of(answer)
        except Exception as error:  # noqa: BLE001 - the user's function is a boundary
            last = traceback.extract_tb(user_code.cause_of(error).__traceback__)[-1]
            why = f"{user_code.text_of(error)} ({last.filename}:{last.lineno})"
            return web.json_response({"error": {"message": f"{name} raised {why}"}}, status=400)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        card = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": name}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            completion = {"object": "chat.completion", "choices": [choice], "usage": USAGE}
            return web.json_response(card | completion)
        for number, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = number
        choice = {"index": 0, "delta": message, "finish_reason": finish}
        chunk = card | {"object": "chat.completion.chunk", "choices": [choice]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", complete)
    runner, url = await listen(app, "127.0.0.1", 0)
    try:
        yield f"{url}/v1"
    finally:
        await runner.cleanup()


def message_of(answer: Any) -> dict[str, Any]:
    """Convert the return value of a script to an assistant message. Raises TypeError for other
    values."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    if not isinstance(answer, dict):
        raise TypeError(f"it returned {answer!r:.80}, neither text nor a message")
    message: dict[str, Any] = {"role": "assistant", "content": None, **answer}
    if calls := answer.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    named = {"name": function["name"], "arguments": text}
    return {"id": call.get("id") or f"call_{uuid4().hex}", "type": "function", "function": named}


log = logging.getLogger("agentrl.algorithm")
NAME = "demonstrator"  # name of the upstream, and of the group of rollouts
LINE_EVERY = 10.0  # seconds between lines about the progress
ROLLOUTS_PER_READ = 256


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """The source of answers: a model on a server, or a function ("file.py:name")."""

    url: str = ""  # ends in /v1
    model: str = ""
    key_env: str = ""
    script: str = ""

    @asynccontextmanager
    async def answering(self, root: Path) -> AsyncIterator[UpstreamConfig]:
        """Context in which it answers. Raises ConfigError if it cannot be reached or loaded."""
        if self.script:
            async with served(load_script(self.script, root), self.script) as url:
                yield UpstreamConfig(base_url=url, model=self.script)
            return
        url = self.url.rstrip("/")
        key = read_sent_key(self.key_env, "--key-env", "the server's") if self.key_env else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            async with httpx.AsyncClient(timeout=10.0) as client:
                status = (await client.get(f"{url}/models", headers=headers)).status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"--url {url}: no server answers ({error or type(error)})") from None
        if status in (401, 403):
            raise ConfigError(f"--url {url}: the key is rejected ({status}); set --key-env")
        yield UpstreamConfig(base_url=url, model=self.model, key_env=self.key_env)

    def identity(self, root: Path) -> list[str]:
        """A key of everything that the answers depend on."""
        return [self.url, self.model, self.script, content_digest(self.script, root)]


def content_digest(reference: str, root: Path) -> str:
    """Digest of the file in a reference such as "file.py:name"; the empty digest if it names no
    file."""
    file = root / reference.rpartition(":")[0]
    return sha256(file.read_bytes() if reference and file.is_file() else b"").hexdigest()


async def kept_conversations(
    store: Store, rows: Sequence[Rollout], least: float
) -> tuple[list[dict[str, Any]], str]:
    """The conversations to keep, each once, and a sentence about how many they are."""
    good = [row for row in rows if row.state is RolloutState.SUCCEEDED and row.reward() >= least]
    conversations: dict[bytes, dict[str, Any]] = {}
    cut = 0
    for first in range(0, len(good), ROLLOUTS_PER_READ):
        page = good[first : first + ROLLOUTS_PER_READ]
        calls = await store.calls([row.id for row in page])
        for row in page:
            answered = [call for call in calls.get(row.id, []) if call.policy == NAME]
            answered = [call for call in answered if call.role != AUXILIARY_ROLE]
            if any(map(is_unfinished, answered)):
                cut += 1
                continue
            for talk in conversations_of(answered):
                content = [*map(message_key, talk["messages"])], talk["tools"], talk["imitate"]
                if names := digests(talk["messages"]):
                    images = await store.images(row.run, names)
                    talk["messages"] = with_data_urls(talk["messages"], images)
                source = {"rollout": row.id, "reward": row.reward()}
                key = msgspec.json.encode(content, order="sorted")
                conversations.setdefault(key, talk | source)
    return [*conversations.values()], _summary(rows, len(good), len(conversations), cut, least)


def _summary(rows: Iterable[Rollout], good: int, different: int, cut: int, least: float) -> str:
    rewards = [row.reward() for row in rows]
    scored = [reward for reward in rewards if reward == reward]  # NaN: failed
    best = f", at most {max(scored):g}" if scored and not good else ""
    text = f"{good} of {len(rewards)} rollouts have a reward of at least {least:g}{best}"
    text += f", of which {cut} have an answer that was cut short" if cut else ""
    return f"{text}: {different} different conversations"


async def play(config: RunConfig) -> None:
    """The algorithm process: requests the rollouts, and waits for them to end."""
    tasks = tasks_of(config, "heldout")
    tasks = tasks[: config.eval.tasks or None] * max(1, config.eval.samples)
    async with open_store(config.store) as store:
        state = await run_folder.open_as_child(store, config)
        candidate = await candidate_in_use(store, config, state)
        wanted = evaluation_rollouts(config, 0, NAME, tasks, config.sampling, candidate=candidate)
        log_phase(log, f"{len(wanted)} rollouts of {config.upstreams[NAME].model}")
        await store.enqueue(wanted)
        while not await store.settled(wanted[0].group, timeout=LINE_EVERY):
            counts = await store.counts(config.name)
            log_phase(log, f"{counts.succeeded + counts.failed} of {len(wanted)} rollouts done")


def main(config: RunConfig) -> None:
    log_to_stderr()
    asyncio.run(play(config))
