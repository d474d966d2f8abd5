"""One game from its task to its result, and the verifier of the result.

Always true: a game ends, by its rules, when a player forfeits it, or after `max_moves`; a player
has at most `move_timeout` for a move.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from statistics import fmean
from typing import Literal, TypedDict

import msgspec

from agentrl.config.base import Count, Seconds
from agentrl.errors import ConfigError, nearest
from agentrl.runners.games.rules import Game, Parameter, View, role_of
from agentrl.runners.games.scripted import Scripted, scripted
from agentrl.runners.tracing.roles import role
from agentrl.types import Json, Reward, Scope, Task, Trace

Message = dict[str, str]
Prompt = Callable[[View], list[Message]]
Ask = Callable[[list[Message]], Awaitable[str]]
Ended = Literal["rules", "forfeit", "max_moves"]
RETRIES = 2  # after an invalid move, where the task does not say


class GameTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `input` of a task: a game, who plays it, and what follows an invalid move.

    forfeit: the player loses, see `Game.forfeited`. penalty: a random legal move is played instead,
    and counted; the returns stay those of the rules. retry: the player is told and asked again, up
    to `retries` times for a move; then it loses. A player that does not answer in time always
    loses."""

    game: str
    parameters: dict[str, Parameter] = {}
    seed: int | None = None  # of chance and scripted players; None: a new one for each game
    players: dict[str, str] = {}  # "player_1" -> "random", "perfect", "mcts:100"; models otherwise
    invalid: Literal["forfeit", "penalty", "retry"] = "forfeit"
    retries: Count | None = None  # default 2
    max_moves: Count = 200  # of all players; then the game is a draw
    move_timeout: Seconds = 30.0


class GameResult(TypedDict):
    """How a game went; players are called by their roles."""

    game: str  # with its parameters
    seed: int
    returns: list[float]  # [players]
    moves: list[tuple[str, str]]  # (role or "chance", move) in order
    invalid: dict[str, int]  # answers that were no legal move
    ended: Ended
    forfeited: dict[str, Literal["invalid", "timeout"]]


def read_task(value: Json) -> GameTask:
    """Raises ConfigError for what is not the input of a game."""
    if not isinstance(value, dict) or "game" not in value:
        raise ConfigError(f"the input of a game is a mapping with 'game', not {value!r:.80}")
    for key in value:
        if key not in GameTask.__struct_fields__:
            raise ConfigError(f"input.{key}: {nearest(str(key), GameTask.__struct_fields__)}")
    try:
        task = msgspec.convert(value, GameTask)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`$.", "`input.")) from None
    if task.retries is not None and task.invalid != "retry":
        raise ConfigError("input.retries is for invalid = 'retry'; leave it out or choose that")
    return task


class Match:
    """Owns the state of one game."""

    def __init__(self, task: GameTask, prompt: Prompt, ask: Ask) -> None:
        """Raises ConfigError for a game or player that does not exist."""
        self.task, self.prompt, self.ask = task, prompt, ask
        self.seed = secrets.randbits(32) if task.seed is None else task.seed
        self.game = Game(task.game, task.parameters, seed=self.seed % 2**31)
        self.roles = [role_of(player) for player in range(self.game.players)]
        for name in task.players:
            if name not in self.roles:
                raise ConfigError(f"input.players: {name!r}; {nearest(name, self.roles)}")
        self.scripted: dict[int, Scripted] = {
            player: scripted(task.players[name], self.game, player, f"{self.seed}/{name}")
            for player, name in enumerate(self.roles)
            if name in task.players
        }
        # Independent generators, so that no player's moves change the chance of another.
        self.chance = Random(f"{self.seed}/chance")
        self.instead = [Random(f"{self.seed}/{name}/instead") for name in self.roles]
        self.state = self.game.start()
        self.moves: list[tuple[str, str]] = []
        self.invalid: Counter[str] = Counter()
        self.forfeits: dict[int, Literal["invalid", "timeout"]] = {}

    async def play(self) -> GameResult:
        """Raises what `ask` raises."""
        count = 0
        while not self.state.is_terminal():
            if self.state.is_chance_node():
                self.deal()
                continue
            movers = self.game.to_move(self.state)
            if count + len(movers) > self.task.max_moves:
                return self._result("max_moves", self.game.broken_off(self.state))
            choices = await self._choices(movers)
            if self.forfeits:
                return self._result("forfeit", self.game.forfeited(self.state, self.forfeits))
            for player, action in choices.items():
                move = self.game.words(self.state, player, action)
                self.moves.append((self.roles[player], move))
            self.game.advance(self.state, choices)
            count += len(movers)
        return self._result("rules", [float(value) for value in self.state.returns()])

    def deal(self) -> None:
        """Chance moves until a player has to, or the game has ended."""
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            (action,) = self.chance.choices(outcomes, chances)
            player = self.state.current_player()
            self.moves.append(("chance", self.game.words(self.state, player, action)))
            self.state.apply_action(action)

    async def _choices(self, movers: list[int]) -> dict[int, int]:
        """The action of each mover who does not forfeit the game. An error of one is raised when
        all have ended, so no call is left behind."""
        choosing, choices = [self._choose(player) for player in movers], dict[int, int]()
        actions: list[int | BaseException | None] = []
        if len(movers) == 1:
            actions.append(await choosing[0])
        else:
            actions += await asyncio.gather(*choosing, return_exceptions=True)
        for player, action in zip(movers, actions, strict=True):
            if isinstance(action, BaseException):
                raise action
            if action is not None:
                choices[player] = action
        return choices

    async def _choose(self, player: int) -> int | None:
        """A player's action. The only legal move is made without asking."""
        legal: list[int] = self.state.legal_actions(player)
        if len(legal) == 1:
            return legal[0]
        if player in self.scripted:
            return self.scripted[player](self.state)
        try:
            async with asyncio.timeout(self.task.move_timeout) as limit:
                action = await self._ask(player)
        except TimeoutError:
            if not limit.expired():
                raise
            self.forfeits[player] = "timeout"
            return None
        if action is None and self.task.invalid == "penalty":
            return self.instead[player].choice(legal)
        if action is None:
            self.forfeits[player] = "invalid"
        return action

    async def _ask(self, player: int) -> int | None:
        """The action of a model; None when it has given as many invalid answers as it may."""
        view = self.game.view(self.state, player)
        messages = self.prompt(view)
        tries = 1 + ((self.task.retries or RETRIES) if self.task.invalid == "retry" else 0)
        with role(self.roles[player]):
            for _ in range(tries):
                answer = await self.ask(messages)
                action = view.read(answer)
                if action is not None:
                    return action
                self.invalid[self.roles[player]] += 1
                again = f"That is not a legal move. {view.choice}"
                messages = [*messages, {"role": "assistant", "content": answer}]
                messages.append({"role": "user", "content": again})
        return None

    def _result(self, ended: Ended, returns: list[float]) -> GameResult:
        return GameResult(
            game=str(self.game.rules),
            seed=self.seed,
            returns=returns,
            moves=self.moves,
            invalid=dict(self.invalid),
            ended=ended,
            forfeited={self.roles[player]: why for player, why in self.forfeits.items()},
        )


def verify(task: Task, result: GameResult, trace: Trace) -> list[Reward]:
    """For each player that a model plays, by its calls or its seat in the rollout: `outcome`, its
    return, and `invalid`, minus the number of its invalid answers. For the rollout: `outcome`, the
    learner's return.

    The learner is the player that the task's field `learner` names. Without one it is the mean of
    all players whose policy is trained: not a snapshot, which has "@" in its name, and not an
    endpoint, which has no versions."""
    returns = {role_of(index): value for index, value in enumerate(result["returns"])}
    playing = {call.role for call in trace.transitions}.union(trace.rollout.seats)
    playing -= set(task["input"].get("players", ()))
    rows = []
    for player, value in returns.items():
        if player in playing:
            invalid = float(-result["invalid"].get(player, 0))
            rows.append(Reward(value=value, scope=Scope.ROLE, target=player))
            rows.append(Reward(value=invalid, name="invalid", scope=Scope.ROLE, target=player))
    learners = _learners(task, list(returns), trace)
    return [*rows, Reward(value=fmean(returns[player] for player in learners))]


def _learners(task: Task, players: list[str], trace: Trace) -> list[str]:
    """All players if none learns. A player that made no call is known by its seat alone."""
    if "learner" in task:
        if task["learner"] not in players:
            known = ", ".join(players)
            raise ConfigError(f"the task's learner is {task['learner']!r:.80}; there are {known}")
        return [task["learner"]]
    others = {call.role for call in trace.transitions if call.version is None}
    seated = trace.rollout.seats | {call.role: call.policy for call in trace.transitions}
    others |= {player for player, policy in seated.items() if "@" in policy}
    others |= set(task["input"].get("players", ()))
    return [player for player in players if player not in others] or players
