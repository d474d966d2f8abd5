"""Plays one game from its task to its result, and verifies the result.

Invariant: a game ends by its rules, by a forfeit, or after `max_moves`; a move takes at most
`move_timeout`.
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
DEFAULT_RETRIES = 2  # default of `GameTask.retries`


class GameTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `input` of a task: a game, its players, and the consequence of an invalid move.

    forfeit: the player loses, see `Game.forfeited`. penalty: a random legal move is played instead
    and counted; the returns follow the rules. retry: the player is asked again, up to `retries`
    times per move; then it loses. A player that does not answer in time always loses."""

    game: str
    parameters: dict[str, Parameter] = {}
    seed: int | None = None  # for chance and scripted players; None: a new one for each game
    players: dict[str, str] = {}  # "player_1" -> "random", "perfect", "mcts:100"; default: a model
    invalid: Literal["forfeit", "penalty", "retry"] = "forfeit"
    retries: Count | None = None  # default 2
    max_moves: Count = 200  # of all players together; then the game is a draw
    move_timeout: Seconds = 30.0


class GameResult(TypedDict):
    """The result of a game; players are named by their roles."""

    game: str  # with its parameters
    seed: int
    returns: list[float]  # [players]
    moves: list[tuple[str, str]]  # (role or "chance", move) in order
    invalid: dict[str, int]  # role -> number of answers without a legal move
    ended: Ended
    forfeited: dict[str, Literal["invalid", "timeout"]]


def read_task(value: Json) -> GameTask:
    """Convert a task's input. Raises ConfigError if it is not the input of a game."""
    if not isinstance(value, dict) or "game" not in value:
        raise ConfigError(f"the input of a game must be a mapping with 'game', not {value!r:.80}")
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
        """Raises ConfigError for an unknown game or player."""
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
        # Independent generators: one player's moves do not change another's random numbers.
        self.chance = Random(f"{self.seed}/chance")
        self.instead = [Random(f"{self.seed}/{name}/instead") for name in self.roles]
        self.state = self.game.start()
        self.moves: list[tuple[str, str]] = []
        self.invalid: Counter[str] = Counter()
        self.forfeits: dict[int, Literal["invalid", "timeout"]] = {}

    async def play(self) -> GameResult:
        """Play the game to its end. Propagates errors of `ask`."""
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
        """Draw chance moves until a player has to move or the game has ended."""
        while self.state.is_chance_node():
            outcomes, chances = zip(*self.state.chance_outcomes(), strict=True)
            (action,) = self.chance.choices(outcomes, chances)
            player = self.state.current_player()
            self.moves.append(("chance", self.game.words(self.state, player, action)))
            self.state.apply_action(action)

    async def _choices(self, movers: list[int]) -> dict[int, int]:
        """Return the action of each mover that does not forfeit. An error of one is raised after
        all have ended, so no call is left running."""
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
        """Return a player's action, None for a forfeit. A single legal move needs no call."""
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
        """Return a model's action; None after too many invalid answers."""
        view = self.game.view(self.state, player)
        messages = self.prompt(view)
        tries = 1 + ((self.task.retries or DEFAULT_RETRIES) if self.task.invalid == "retry" else 0)
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
    """Return rewards. For each player with model calls or a seat in the rollout: `outcome`, its
    return, and `invalid`, minus the number of its invalid answers. For the rollout: `outcome`, the
    learner's return.

    The learner is the player in the task's field `learner`. By default `outcome` is the mean over
    all players with a trained policy: not a snapshot, which has "@" in its name, and not an
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
    """Return the learning players, all players if none learns. A player without calls is known
    only by its seat."""
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
