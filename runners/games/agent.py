"""The game-playing agent, which requests each move from an OpenAI-compatible API.

It knows only roles; the run file or a rollout's seats decide which model plays `player_0`.
"""

from __future__ import annotations

import os

import httpx
import msgspec

from agentrl.errors import PolicyError
from agentrl.runners.games.match import GameResult, Match, Message, Prompt, read_task
from agentrl.runners.games.rules import View, role_of
from agentrl.runners.tracing import attempt_log
from agentrl.types import Json

PUBLIC = "https://api.openai.com/v1"


def ask_for_move(view: View) -> list[Message]:
    """Default prompt for any game: the player's role, its observation and its legal moves."""
    rules = f"You are {role_of(view.player)} in a game of {view.game}. Reply with one legal move."
    seen = f"{view.seen}\n\n{view.choice}"
    return [{"role": "system", "content": rules}, {"role": "user", "content": seen}]


class GameAgent:
    """The agent for `agent.path = "agentrl.runners.games:GameAgent"`; `prompt` customizes it.

    Every move is a separate conversation, so a policy depends only on the player's observation.
    The client is pooled and reads OPENAI_BASE_URL when the agent is created."""

    def __init__(self, prompt: Prompt = ask_for_move, model: str = "policy") -> None:
        self.prompt, self.model = prompt, model
        self._client = httpx.AsyncClient(
            base_url=os.environ.get("OPENAI_BASE_URL", PUBLIC),
            headers={"authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            timeout=None,  # `Match` applies the task's `move_timeout`
        )

    async def __call__(self, task: Json) -> GameResult:
        """Play the game of a `GameTask`.

        Raises ConfigError for any other input, PolicyError if a model call fails."""
        answered = False

        async def ask(messages: list[Message]) -> str:
            nonlocal answered
            answer = await self.ask(messages)
            answered = True
            return answer

        result = await Match(read_task(task), self.prompt, ask).play()
        log = attempt_log.current()
        if log is not None and not answered:  # ended by other players' moves or a time-out
            log.needs_no_call = True
        return result

    async def ask(self, messages: list[Message]) -> str:
        """Return the model's answer. Raises PolicyError with the server's message."""
        body = msgspec.json.encode({"model": self.model, "messages": messages})
        headers = {"content-type": "application/json"}
        answer = await self._client.post("chat/completions", content=body, headers=headers)
        if answer.status_code != 200:
            reason = f"{answer.status_code} {answer.text:.300}"
            raise PolicyError(f"the request for a move failed: {reason}")
        content = msgspec.json.decode(answer.content)["choices"][0]["message"]["content"]
        return content or ""

    async def aclose(self) -> None:
        await self._client.aclose()
