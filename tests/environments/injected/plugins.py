"""The plug-ins with faults inside of the packages that they play: `inject(place)` is called in each
place, and does what `fault` says there. All play in this process, so that a fault can be set."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from decimal import Decimal
from importlib import import_module
from typing import Any

from agentrl.environments.plugins import (
    benchmarks,
    games,
    gymnasium,
    inspect,
    openenv,
    reasoning_gym,
    verifiers,
)

RAISED = {
    "exception": RuntimeError("broken pipe in the game"),
    "time-out": TimeoutError("no answer in 30 s"),
    "lost sandbox": ConnectionResetError("sandbox sb-1 is gone"),
    "exit": SystemExit(3),
    "missing key": KeyError("state"),
}
REWARDS: dict[str, Any] = {
    "no reward": None, "nan": math.nan, "infinite": -math.inf, "text": "well done", "digits": "0.5",
    "out of range": 7.0, "list": [1.0], "decimal nan": Decimal("NaN"), "bytes": bytearray(b"0.5"),
    "truth in text": "True", "mapping": {"score": 1.0}, "complex": 1 + 0j,
}  # fmt: skip


def fault() -> tuple[str, str]:
    """Place and kind, from a variable: the file of the plug-ins is loaded more than once."""
    place, _, kind = os.environ.get("INJECTED_FAULT", "").partition(":")
    return place, kind


def hang() -> float:
    """Seconds, more than a rollout may take."""
    return float(os.environ.get("INJECTED_HANG", "6"))


def inject(place: str) -> None:
    if fault()[0] != place:
        return
    if fault()[1] == "hang":
        time.sleep(hang())
    if (error := RAISED.get(fault()[1])) is not None:
        raise error


async def injected(place: str) -> None:
    """`inject` for what shares an event loop."""
    if fault() == (place, "hang"):
        await asyncio.sleep(hang())
    else:
        inject(place)


def paid(value: Any, place: str = "reward") -> Any:
    """A reward, or what the fault makes of it."""
    return REWARDS[fault()[1]] if fault()[0] == place and fault()[1] in REWARDS else value


class Faulty:
    """An object whose methods of these names fail as the fault says, and whose results are
    changed."""

    def __init__(self, inner: Any, places: dict[str, str], change: dict[str, Callable[..., Any]]):
        self.__dict__.update(inner=inner, places=places, change=change)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in self.places:
            return self.change[name](found) if name in self.change else found

        def method(*given: Any, **named: Any) -> Any:
            place = self.places[name]
            if fault() == (place, "broken reset"):
                return None
            if place != "clean-up":
                inject(place)
            returned = found(*given, **named)
            if place == "clean-up":  # what was not released would be missing for the next faults
                inject(place)
            return self.change[name](returned) if name in self.change else returned

        return method


SETUP_STEP = {"reset": "set-up", "step": "step", "close": "clean-up"}


def second(row: Any) -> Any:
    return (row[0], paid(row[1]), *row[2:])


def with_faults(game: Any) -> Any:
    game.env = Faulty(game.env, SETUP_STEP, {"step": second})
    return game


class Gymnasium(gymnasium.Gymnasium):
    def open(self, input: Any) -> Any:
        inject("open")
        return with_faults(super().open(input))


class MiniGrid(gymnasium.MiniGrid):
    def open(self, input: Any) -> Any:
        inject("open")
        return with_faults(super().open(input))


class TextWorld(gymnasium.TextWorld):
    isolation = "none"

    def open(self, input: Any) -> Any:
        inject("open")
        return with_faults(super().open(input))


class TextArena(games.TextArena):
    isolation = "none"

    def open(self, input: Any) -> Any:
        inject("open")
        game = super().open(input)
        places = {"reset": "set-up", "get_observation": "tool", "step": "step", "close": "scoring"}
        game.env = Faulty(game.env, places, {"close": self.closed})
        return game

    def closed(self, ended: Any) -> Any:
        found, _ = ended
        if fault() == ("reward", "no reward"):
            return None, {}
        return {player: paid(value) for player, value in found.items()}, {}


class PettingZoo(games.PettingZoo):
    def open(self, input: Any) -> Any:
        inject("open")
        game = super().open(input)
        places = {"reset": "set-up", "last": "tool", "step": "step"}
        rewards = {"rewards": lambda known: {name: paid(value) for name, value in known.items()}}
        game.env = Faulty(game.env, places, rewards)
        return game


class ReasoningGym(reasoning_gym.ReasoningGym):
    def __init__(self, what: str, **options: Any) -> None:
        super().__init__(what, **options)
        self.known = dict(self.data)

    def verify(self, task: dict[str, Any], result: Any) -> float:
        faulty = Faulty(self.known["train"], {"score_answer": "scoring"}, {"score_answer": paid})
        self.data = self.known | {"train": faulty}
        try:
            return super().verify(task, result)
        finally:
            self.data = self.known


class Verifiers(verifiers.Verifiers):
    def __init__(self, what: str, **options: Any) -> None:
        super().__init__(what, **options)
        both = (self.env.rubric, *getattr(self.env.rubric, "rubrics", ()))
        rubric = next(one for one in both if one.funcs)
        setup = self.env.setup_state

        async def set_up(*given: Any, **named: Any) -> Any:
            await injected("set-up")
            return await setup(*given, **named)

        first = rubric.funcs[0]

        async def rewarded(parser: Any, completion: Any, answer: str) -> Any:
            await injected("scoring")
            return paid(await first(parser, completion, answer))

        rubric.funcs[0], self.env.setup_state = rewarded, set_up


class Evals(benchmarks.Evals):
    def run(self, index: int, endpoint: Any) -> Any:
        module, inner = import_module("evals"), self.eval

        def made(*players: Any) -> Any:
            played = inner(*players)
            sample = played.eval_sample

            def eval_sample(*given: Any) -> Any:
                inject("step")
                found = sample(*given)
                inject("scoring")
                return found

            played.eval_sample = eval_sample
            return played

        record = import_module("evals.record")
        match = record.record_match

        def recorded(correct: Any, **more: Any) -> Any:
            if fault() == ("reward", "no reward"):
                return None
            return match(paid(correct), **more)

        self.eval, record.record_match = made, recorded
        api = import_module("evals.api")
        known = api.record_match
        api.record_match = recorded
        try:
            return super().run(index, endpoint)
        finally:
            self.eval, record.record_match, api.record_match = inner, match, known
            del module


class Tau2(benchmarks.Tau2):
    def run(self, id: str, endpoint: Any) -> Any:
        package = import_module("tau2.run")
        known = package.run_task

        def run_task(*given: Any, **named: Any) -> Any:
            inject("set-up")
            done = known(*given, **named)
            inject("scoring")
            done.reward_info.__dict__["reward"] = paid(done.reward_info.reward)
            if fault() == ("reward", "no reward"):
                done.reward_info = None
            return done

        package.run_task = run_task
        try:
            return super().run(id, endpoint)
        finally:
            package.run_task = known


class BFCL(benchmarks.BFCL):
    isolation = "none"

    def open(self, input: Any) -> Any:
        inject("open")
        game = super().open(input)
        for module, name, place in (
            ("utils", "execute_multi_turn_func_call", "tool"),
            ("checker", "multi_turn_checker", "scoring"),
        ):
            package = import_module(f"{benchmarks.CHECKER}{module}")
            own = f"known_{name}"
            vars(package).setdefault(own, getattr(package, name))
            setattr(package, name, getattr(Faulty(package, {own: place}, {own: checked}), own))
        return game


def checked(found: Any) -> Any:
    return found | {"valid": paid(found["valid"])} if isinstance(found, dict) else found


class OpenEnv(openenv.OpenEnv):
    def open(self, input: Any) -> Any:
        package = import_module("openenv")
        inner = vars(package).setdefault("KnownClient", package.GenericEnvClient)
        places = SETUP_STEP | {"connect": "open"}

        class Client:
            def __init__(self, **given: Any) -> None:
                self.client = inner(**given)

            def sync(self) -> Any:
                return Faulty(self.client.sync(), places, {"step": result_of})

        package.GenericEnvClient = Client
        return super().open(input)


def result_of(result: Any) -> Any:
    result.reward = paid(result.reward)
    return result


class VerifiersV1(verifiers.VerifiersV1):
    pass


class Inspect(inspect.Inspect):
    isolation = "none"
