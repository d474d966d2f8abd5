"""Who demonstrates, the rollouts that it plays, and which of them are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec

from agentrl import run_owner
from agentrl.algorithms.demonstrations.conversations import conversations_of, what_is_said
from agentrl.algorithms.demonstrations.scripted import load_script, served
from agentrl.algorithms.prompts.schedule import candidate_in_use
from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.base.access import read_sent_key
from agentrl.base.images import digests, with_data_urls
from agentrl.base.processes import log_phase
from agentrl.config import RunConfig, UpstreamConfig
from agentrl.config.run_file import tasks_of
from agentrl.errors import ConfigError
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import AUXILIARY_ROLE, Rollout, RolloutState

log = logging.getLogger("agentrl.algorithm")
NAME = "demonstrator"  # of the upstream, and of the group of rollouts
LINE_EVERY = 10.0  # seconds between lines about the progress
ROLLOUTS_PER_READ = 256
UNFINISHED = ("length", "cut")  # ends of answers that nobody should imitate


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Who answers: a model on a server, or a function ("file.py:name")."""

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
            raise ConfigError(f"--url {url}: nobody answers ({error or type(error)})") from None
        if status in (401, 403):
            raise ConfigError(f"--url {url}: it refuses the key ({status}); name it by --key-env")
        yield UpstreamConfig(base_url=url, model=self.model, key_env=self.key_env)

    def identity(self, root: Path) -> list[str]:
        """What its answers depend on."""
        return [self.url, self.model, self.script, content_digest(self.script, root)]


def content_digest(reference: str, root: Path) -> str:
    """Digest of the file in a reference such as "file.py:name"; of nothing if it names no file."""
    file = root / reference.rpartition(":")[0]
    return sha256(file.read_bytes() if reference and file.is_file() else b"").hexdigest()


async def kept_conversations(
    store: Store, rows: Sequence[Rollout], least: float
) -> tuple[list[dict[str, Any]], str]:
    """The conversations to keep, each once, and a sentence about how many they are."""
    good = [row for row in rows if row.state is RolloutState.SUCCEEDED and row.reward() >= least]
    found: dict[bytes, dict[str, Any]] = {}
    cut = 0
    for first in range(0, len(good), ROLLOUTS_PER_READ):
        page = good[first : first + ROLLOUTS_PER_READ]
        calls = await store.calls([row.id for row in page])
        for row in page:
            own = [one for one in calls.get(row.id, []) if one.policy == NAME]
            own = [one for one in own if one.role != AUXILIARY_ROLE]
            if any(one.finish in UNFINISHED for one in own):
                cut += 1
                continue
            for one in conversations_of(own):
                about = [*map(what_is_said, one["messages"])], one["tools"], one["imitate"]
                if names := digests(one["messages"]):
                    images = await store.images(row.run, names)
                    one["messages"] = with_data_urls(one["messages"], images)
                of = {"rollout": row.id, "reward": row.reward()}
                found.setdefault(msgspec.json.encode(about, order="sorted"), one | of)
    return [*found.values()], _summary(rows, len(good), len(found), cut, least)


def _summary(rows: Iterable[Rollout], good: int, kept: int, cut: int, least: float) -> str:
    rewards = [row.reward() for row in rows]
    known = [reward for reward in rewards if reward == reward]  # NaN: it failed
    best = f", at most {max(known):g}" if known and not good else ""
    text = f"{good} of {len(rewards)} rollouts have a reward of at least {least:g}{best}"
    text += f", of which {cut} have an answer that was cut short" if cut else ""
    return f"{text}: {kept} different conversations"


async def play(config: RunConfig) -> None:
    """The algorithm process: requests the rollouts, and waits for them to end."""
    tasks = tasks_of(config, "heldout")
    tasks = tasks[: config.eval.tasks or None] * config.eval.samples
    async with open_store(config.store) as store:
        state = await run_owner.open_as_child(store, config)
        candidate = await candidate_in_use(store, config, state)
        wanted = evaluation_rollouts(config, 0, NAME, tasks, config.sampling, candidate=candidate)
        log_phase(log, f"{len(wanted)} rollouts of {config.upstreams[NAME].model}")
        await store.enqueue(wanted)
        while not await store.settled(wanted[0].group, timeout=LINE_EVERY):
            counts = await store.counts(config.name)
            log_phase(log, f"{counts.succeeded + counts.failed} of {len(wanted)} rollouts done")


def run(config: RunConfig) -> None:
    asyncio.run(play(config))
