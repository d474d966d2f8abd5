"""The agent that plays: it asks a model for each move, by an OpenAI-compatible API.

It knows roles only; the run file or a rollout's seats decide which model plays `player_0`.
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
    """The prompt for any game: the player's role, what it sees, and its legal moves."""
    rules = f"You are {role_of(view.player)} in a game of {view.game}. Reply with one legal move."
    seen = f"{view.seen}\n\n{view.choice}"
    return [{"role": "system", "content": rules}, {"role": "user", "content": seen}]


class GameAgent:
    """`agent.path = "agentrl.runners.games:GameAgent"`, or one with a prompt of its own.

    Every move is a conversation of its own, so a policy is a function of what a player sees. The
    client is pooled, and takes its address from OPENAI_BASE_URL when the agent is made."""

    def __init__(self, prompt: Prompt = ask_for_move, model: str = "policy") -> None:
        self.prompt, self.model = prompt, model
        self._client = httpx.AsyncClient(
            base_url=os.environ.get("OPENAI_BASE_URL", PUBLIC),
            headers={"authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            timeout=None,  # `Match` applies the task's `move_timeout`
        )

    async def __call__(self, task: Json) -> GameResult:
        """Play the game of a task's input, see `GameTask`.

        Raises ConfigError for any other input, PolicyError when a model refuses a call."""
        answered = False

        async def ask(messages: list[Message]) -> str:
            nonlocal answered
            answer = await self.ask(messages)
            answered = True
            return answer

        result = await Match(read_task(task), self.prompt, ask).play()
        log = attempt_log.current()
        if log is not None and not answered:  # the others' moves, or a time-out, ended the game
            log.needs_no_call = True
        return result

    async def ask(self, messages: list[Message]) -> str:
        """The model's answer. Raises PolicyError with the server's message."""
        asked = msgspec.json.encode({"model": self.model, "messages": messages})
        headers = {"content-type": "application/json"}
        answer = await self._client.post("chat/completions", content=asked, headers=headers)
        if answer.status_code != 200:
            said = f"{answer.status_code} {answer.text:.300}"
            raise PolicyError(f"the model that was asked for a move answered {said}")
        content = msgspec.json.decode(answer.content)["choices"][0]["message"]["content"]
        return content or ""

    async def aclose(self) -> None:
        await self._client.aclose()
