"""OpenEnv: every episode is a session of a running server."""

import json
import time
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.environments import Episode, EpisodeError
from agentrl.environments.toolbox import Seeded, as_fields, content, number

FULL = """openenv:{}: its sessions were all taken for {:g} s (CAPACITY_REACHED): give the server's \
create_app a higher max_concurrent_envs, or set runner.concurrency to the number that it has"""


class OpenEnvSession(Episode):
    env: Any = None

    def __init__(self, plugin: "OpenEnv", seed: int) -> None:
        self.plugin, self.seed, self.turns = plugin, seed, 0

    def reset(self) -> str:
        deadline = time.monotonic() + self.plugin.wait
        while (state := self.begin()) is None:  # the server is full, but a session may end soon
            if time.monotonic() > deadline:
                raise EpisodeError(FULL.format(self.plugin.url, self.plugin.wait))
            time.sleep(0.2)
        return (
            f"{state}\nAct by replying with JSON of this schema: {json.dumps(self.plugin.schema)}"
        )

    def begin(self) -> str | None:
        from openenv import GenericEnvClient

        self.env = GenericEnvClient(base_url=self.plugin.url).sync()
        try:
            self.env.connect()
            return json.dumps(self.env.reset(seed=self.seed, **self.plugin.options).observation)
        except RuntimeError as error:
            if "CAPACITY_REACHED" not in str(error):
                raise
            self.close()
            return None

    def step(self, reply: dict[str, Any]) -> tuple[str, float | None, bool]:
        self.turns += 1
        is_last, needed = self.turns >= self.plugin.limit, self.plugin.schema.get("required", [])
        try:
            result = self.env.step(as_fields(content(reply), needed))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            return f"That is not an action: {error}", self.plugin.illegal, is_last
        reward = None if result.reward is None else number(result.reward)
        return json.dumps(result.observation), reward, bool(result.done or is_last)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


class OpenEnv(Seeded):
    """A running OpenEnv server; WHAT is its address. Options: episodes (per split, one seed each),
    limit (of turns), wait (seconds for a session), illegal (reward of a reply without an action);
    other options are passed to its reset."""

    requires = ("openenv==0.10.0",)

    def __init__(self, what: str, episodes: int = 64, limit: int = 20, wait: float = 60.0,
                 illegal: float = -1.0, **options: Any) -> None:  # fmt: skip
        import httpx

        self.url, self.episodes, self.limit, self.wait = what.rstrip("/"), episodes, limit, wait
        self.illegal, self.options = illegal, options
        try:
            self.schema = httpx.get(f"{self.url}/schema").raise_for_status().json()["action"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ConfigError(f"no OpenEnv server answers at {what}; start it ({error})") from None

    def open(self, input: Any) -> OpenEnvSession:
        return OpenEnvSession(self, input["seed"])
