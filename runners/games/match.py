"""One game from its task to its result: whose turn it is, what a bad move costs, when it ends.

Always true: a game ends. By its rules, when a player forfeits it, or after `max_moves`; and no
player is waited for longer than `move_timeout` for a move.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Literal, TypedDict

import msgspec

from agentrl.config.base import Count, Seconds
from agentrl.errors import ConfigError, nearest
from agentrl.runners.games.rules import Game, Parameter, View, role_of
from agentrl.runners.games.scripted import Scripted, scripted
from agentrl.runners.tracing.roles import role
from agentrl.types import Json

Message = dict[str, str]
Prompt = Callable[[View], list[Message]]
Ask = Callable[[list[Message]], Awaitable[str]]
RETRIES = 2  # after an invalid move, where the task does not say


class GameTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `input` of a task: a game, who plays it, and what is done about invalid moves.

    forfeit: the player has lost, see `Game.forfeited`. penalty: a random legal move is played
    instead, and counted; the returns stay those of the rules. retry: the player is told and asked
    again, up to `retries` times for a move; then it has lost. A player that does not answer in time
    has lost in any case."""

    game: str
    parameters: dict[str, Parameter] = {}
    seed: int | None = None  # of chance and scripted players; none: another one each time
    players: dict[str, str] = {}  # "player_1" -> "random", "perfect", "mcts:100"; others: models
    invalid: Literal["forfeit", "penalty", "retry"] = "forfeit"
    retries: Count | None = None  # default 2
    max_moves: Count = 200  # of all players; then the game is a draw
    move_timeout: Seconds = 30.0


class GameResult(TypedDict):
    """How a game went; players are called by their roles."""

    game: str  # with its parameters
    seed: int
    returns: list[float]  # [players]
    moves: list[tuple[str, str]]  # (who, what) in order, chance included
    invalid: dict[str, int]  # answers that were no legal move
    ended: Literal["rules", "forfeit", "max_moves"]
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
        # Apart from each other, so that what one player does changes nobody else's luck.
        self.chance = Random(f"{self.seed}/chance")
        self.instead = [Random(f"{self.seed}/{name}/instead") for name in self.roles]
        self.state = self.game.start()
        self.moves: list[tuple[str, str]] = []
        self.invalid: Counter[str] = Counter()
        self.forfeits: dict[int, Literal["invalid", "timeout"]] = {}

    async def play(self) -> GameResult:
        """Raises what `ask` raises."""
        made = 0
        while not self.state.is_terminal():
            if self.state.is_chance_node():
                self.deal()
                continue
            movers = self.game.to_move(self.state)
            if made + len(movers) > self.task.max_moves:
                return self._result("max_moves", self.game.broken_off(self.state))
            choices = await self._choices(movers)
            if self.forfeits:
                return self._result("forfeit", self.game.forfeited(self.state, self.forfeits))
            for player, action in choices.items():
                words = self.game.words(self.state, player, action)
                self.moves.append((self.roles[player], words))
            self.game.advance(self.state, choices)
            made += len(movers)
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
        """The action of each mover; of those who forfeit the game instead, none."""
        if len(movers) == 1:
            chosen: list[int | None] = [await self._choose(movers[0])]
        else:  # whoever fails is heard when all are done: no call is left behind
            asked = [self._choose(player) for player in movers]
            chosen = list(map(_known, await asyncio.gather(*asked, return_exceptions=True)))
        pairs = zip(movers, chosen, strict=True)
        return {player: action for player, action in pairs if action is not None}

    async def _choose(self, player: int) -> int | None:
        """A player's action; a move without alternative is made without asking."""
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
        """The action of a model; None after as many invalid answers as it may give."""
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
                messages = [*messages, *_complaint(view, answer)]
        return None

    def _result(
        self, ended: Literal["rules", "forfeit", "max_moves"], returns: list[float]
    ) -> GameResult:
        return GameResult(
            game=str(self.game.rules),
            seed=self.seed,
            returns=returns,
            moves=self.moves,
            invalid=dict(self.invalid),
            ended=ended,
            forfeited={self.roles[player]: why for player, why in self.forfeits.items()},
        )


def _complaint(view: View, answer: str) -> list[Message]:
    said = f"That is not a legal move. {view.choice}"
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]


def _known(choice: int | BaseException | None) -> int | None:
    if isinstance(choice, BaseException):
        raise choice
    return choice
