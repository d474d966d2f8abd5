"""Games of OpenSpiel as text: tasks, agent and verifier. OpenSpiel applies the rules. This module
adds only the returns after a forfeit or of a game that is ended early. Invariant: a game ends by
its rules, by a forfeit, or after `max_moves`; a move takes at most `move_timeout`.

The agent requests each move from an OpenAI-compatible API. It knows only roles; the run file or a
rollout's seats decide which model plays `player_0`. Scripted players are random, perfect (minimax),
or OpenSpiel's Monte Carlo tree search.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from statistics import fmean
from typing import Any, Literal, TypedDict

import httpx
import msgspec

from agentrl.core.config.base import Count, Seconds
from agentrl.core.errors import ConfigError, PolicyError, install_command, nearest
from agentrl.core.types import Json, Reward, Scope, Task, Trace
from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing.attempt_log import role

Parameter = bool | int | float | str
SEED = "rng_seed"  # OpenSpiel's parameter for games that sample chance moves themselves
LAST_WORD = re.compile(r".*\bmove:(.*)", re.IGNORECASE | re.DOTALL)


def role_of(player: int) -> str:
    """Return the role of a player's model calls."""
    return f"player_{player}"


@dataclass(frozen=True, slots=True)
class View:
    """A player's observation and legal moves when it has to move."""

    game: str  # OpenSpiel's short name
    player: int  # from 0
    seen: str  # OpenSpiel's text of the information state or observation
    legal: Mapping[str, int]  # moves as text -> OpenSpiel's actions

    @property
    def choice(self) -> str:
        """The legal moves, one per line, because moves may contain any other separator."""
        return "\n".join(["Legal moves:", *self.legal])

    def read(self, answer: str) -> int | None:
        """Parse an answer: a legal move alone, or after its last "Move:". Case, spaces and a final
        full stop are ignored. Returns its action, or None without a legal move."""
        last = LAST_WORD.fullmatch(answer)
        text = _plain(last[1] if last else answer)
        return next((action for move, action in self.legal.items() if _plain(move) == text), None)


class Game:
    """An OpenSpiel game with its parameters; several of its states may be in play at once."""

    def __init__(
        self, name: str, parameters: Mapping[str, Parameter] | None = None, seed: int = 0
    ) -> None:
        """`name`: a short name or a full game string, such as "misere(game=tic_tac_toe())".
        `seed`: for games that sample chance outside of their tree.

        Raises ConfigError for an unknown game and for one that text agents cannot play."""
        self._spiel = library()
        kind = self._spiel.GameType
        wanted = tuple((parameters or {}).items())
        self.rules = _loaded(name, wanted)
        if self.rules.get_type().chance_mode == kind.ChanceMode.SAMPLED_STOCHASTIC:
            if SEED not in self.rules.get_type().parameter_specification:
                raise ConfigError(f"game = {name!r}: its chance cannot be seeded; choose another")
            # Not shared, because it has its own random state.
            self.rules = _load(name, ((SEED, seed), *wanted))
        about = self.rules.get_type()
        if about.dynamics == kind.Dynamics.MEAN_FIELD or about.action_structs_only:
            raise ConfigError(f"game = {name!r} has no moves as text; choose another")
        self.name: str = about.short_name
        self.players: int = self.rules.num_players()
        self.perfect = about.information == kind.Information.PERFECT_INFORMATION
        self._has_information_state = about.provides_information_state_string
        self._has_observation = about.provides_observation_string
        self._same_return = about.utility == kind.Utility.IDENTICAL
        self._constant_sum = about.utility in (kind.Utility.ZERO_SUM, kind.Utility.CONSTANT_SUM)
        self._pays_during_game = about.reward_model == kind.RewardModel.REWARDS
        if not (self._has_information_state or self._has_observation or self.perfect):
            raise ConfigError(f"game = {name!r} has no observations as text; choose another")

    def start(self) -> Any:
        """The state before the first move, a `pyspiel.State`."""
        return self.rules.new_initial_state()

    def to_move(self, state: Any) -> list[int]:
        """Return the players to move, several in a simultaneous move."""
        if state.current_player() != self._spiel.PlayerId.SIMULTANEOUS:
            return [state.current_player()]
        return [player for player in range(self.players) if state.legal_actions(player)]

    def advance(self, state: Any, choices: Mapping[int, int]) -> None:
        """Apply the actions of all players in `to_move`."""
        if state.current_player() != self._spiel.PlayerId.SIMULTANEOUS:
            state.apply_action(*choices.values())
            return
        none = self._spiel.INVALID_ACTION
        state.apply_actions([choices.get(player, none) for player in range(self.players)])

    def view(self, state: Any, player: int) -> View:
        """Return the player's view of `state`: with perfect information the board, else its
        information state, else its observation; and its legal moves."""
        if self.perfect:
            text = state.observation_string(player) if self._has_observation else str(state)
        elif self._has_information_state:
            text = state.information_state_string(player)
        else:
            text = state.observation_string(player)
        return View(self.name, player, text.strip(), self.moves(state, player))

    def moves(self, state: Any, player: int) -> dict[str, int]:
        """Map legal moves as text to actions. Equal texts are distinguished by their action."""
        texts = [(self.words(state, player, a), a) for a in state.legal_actions(player)]
        count = Counter(_plain(text) for text, _ in texts)
        return {
            text if count[_plain(text)] == 1 else f"{text} ({action})": action
            for text, action in texts
        }

    def words(self, state: Any, player: int, action: int) -> str:
        """Return a move as one line of text."""
        return " ".join(state.action_to_string(player, action).split()).strip(" ,")

    def forfeited(self, state: Any, losers: Collection[int]) -> list[float]:
        """Compute the returns [players] of a game that `losers` forfeited: they get the lowest
        return of the game.

        In a constant-sum game the others share the rest of the sum; if all forfeit, all share the
        sum. In a game with identical returns all get the lowest. In any other game the others keep
        their returns so far: no one profits from another player's mistake."""
        worst, players = self.rules.min_utility(), range(self.players)
        if self._same_return:
            return [worst] * self.players
        others = self.players - len(losers)
        if not self._constant_sum:
            return [worst if p in losers else float(state.returns()[p]) for p in players]
        if not others:
            return self._evenly()
        share = (self.rules.utility_sum() - worst * len(losers)) / others
        return [worst if player in losers else share for player in players]

    def broken_off(self, state: Any) -> list[float]:
        """Compute the returns [players] of a game that is ended early: a draw if it has a constant
        sum and pays at its end only, else each player's returns so far."""
        if self._constant_sum and not self._pays_during_game:
            return self._evenly()
        return [float(value) for value in state.returns()]

    def _evenly(self) -> list[float]:
        return [self.rules.utility_sum() / self.players] * self.players


def library() -> Any:
    """Import pyspiel. Raises ConfigError if it is not installed."""
    try:
        import pyspiel
    except ImportError:
        raise ConfigError(f"games need OpenSpiel: {install_command('games')}") from None
    return pyspiel


def _load(name: str, parameters: tuple[tuple[str, Parameter], ...]) -> Any:
    spiel = library()
    short, registered = name.partition("(")[0], spiel.registered_names()
    if short not in registered:
        raise ConfigError(
            f"game = {name!r}: OpenSpiel has no such game; {nearest(short, registered)}"
        )
    try:
        named = spiel.game_parameters_from_string(name)
        del named["name"]
        return spiel.load_game(short, named | dict(parameters))
    except (spiel.SpielError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"game = {name!r} cannot be loaded: {reason}") from None


_loaded = lru_cache(maxsize=64)(_load)  # some games read files


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


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
    max_moves: Count = 200  # moves of all players together; after that the game is a draw
    move_timeout: Seconds = 30.0


class GameResult(TypedDict):
    """The result of a game; players are named by their roles."""

    game: str  # name with parameters
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
        """Return the action of each mover that does not forfeit. An error is raised only after all
        calls have ended, so none is left running."""
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
            names = ", ".join(players)
            raise ConfigError(f"the task's learner is {task['learner']!r:.80}; there are {names}")
        return [task["learner"]]
    others = {call.role for call in trace.transitions if call.version is None}
    seated = trace.rollout.seats | {call.role: call.policy for call in trace.transitions}
    others |= {player for player, policy in seated.items() if "@" in policy}
    others |= set(task["input"].get("players", ()))
    return [player for player in players if player not in others] or players


PUBLIC = "https://api.openai.com/v1"


def ask_for_move(view: View) -> list[Message]:
    """Default prompt for any game: the player's role, its observation and its legal moves."""
    rules = f"You are {role_of(view.player)} in a game of {view.game}. Reply with one legal move."
    text = f"{view.seen}\n\n{view.choice}"
    return [{"role": "system", "content": rules}, {"role": "user", "content": text}]


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


Scripted = Callable[[Any], int]
"""Maps a `pyspiel.State` in which the player has to move to its action."""
KINDS = ("random", "perfect", "mcts")
MAX_SEARCHED_MOVES = 12  # longer games are not searched by minimax
SIMULATIONS = 100  # default number of MCTS simulations for a move


def scripted(kind: str, game: Game, player: int, seed: str) -> Scripted:
    """Create a player of kind "random", "perfect", "mcts" or "mcts:SIMULATIONS".

    Raises ConfigError for another kind, and for one that cannot play this game."""
    name, colon, number = kind.partition(":")
    counted = name == "mcts" and number.isdecimal() and int(number) > 0
    if name not in KINDS or (colon and not counted):
        raise ConfigError(f"players: {kind!r} is not a scripted player; {nearest(name, KINDS)}")
    rng = Random(seed)
    if name == "random":
        return lambda state: rng.choice(state.legal_actions(player))
    _check(game, name)
    if name == "perfect":
        solved = _solved(str(game.rules))
        return lambda state: rng.choice(solved(state))
    return _mcts(game, int(number or SIMULATIONS), rng.getrandbits(31))


def _check(game: Game, name: str) -> None:
    """Raise ConfigError unless this is a sequential two-player zero-sum game with perfect
    information and, for a perfect player, short and without chance."""
    kind, about = library().GameType, game.rules.get_type()
    in_turns = about.dynamics == kind.Dynamics.SEQUENTIAL and game.players == 2
    if not (in_turns and game.perfect and about.utility == kind.Utility.ZERO_SUM):
        raise ConfigError(
            f"players: {name!r} plays sequential two-player zero-sum games with perfect "
            f"information, and {game.name} is not one; choose 'random' or a model"
        )
    certain = about.chance_mode == kind.ChanceMode.DETERMINISTIC
    if name == "perfect" and not (certain and game.rules.max_game_length() <= MAX_SEARCHED_MOVES):
        raise ConfigError(
            f"players: 'perfect' plays games of up to {MAX_SEARCHED_MOVES} moves without "
            f"chance, and {game.name} is not one; choose 'mcts'"
        )


@lru_cache(maxsize=8)
def _solved(game: str) -> Callable[[Any], list[int]]:
    """Return a function from a state of the game to all its best actions."""
    from open_spiel.python.algorithms.minimax_solver import TOLERANCE, MinimaxSolver

    table = MinimaxSolver(game).solve()

    def best(state: Any) -> list[int]:
        values, top = table[str(state)]
        return [action for action in state.legal_actions() if values[action] > top - TOLERANCE]

    return best


def _mcts(game: Game, simulations: int, seed: int) -> Scripted:
    spiel = library()
    evaluator = spiel.RandomRolloutEvaluator(1, seed)
    options = {"uct_c": 2.0, "max_simulations": simulations, "max_memory_mb": 100, "solve": True}
    bot = spiel.MCTSBot(game.rules, evaluator, seed=seed, verbose=False, **options)
    return lambda state: int(bot.step(state))
