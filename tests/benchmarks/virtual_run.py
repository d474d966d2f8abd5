"""A training run on a simulated clock: engine, updater, learner and weights are the project's, and
only time is made up. So its figures do not depend on the machine, and a run can be repeated.

The agent is that of `examples/staff` without LangChain: a query, its result, an answer. What a step
of the engine, a tool and an update take is in `Costs`; tool times are drawn by rollout and call, so
that all modes meet the same ones.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import json
import sqlite3
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import asdict

from agentrl.algorithms.engines.embedded.attention import GenerationRequest, TokenUpdate
from agentrl.algorithms.engines.embedded.engine import PREFILL_TOKENS, Engine, TokenUpdates
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.model.load import end_tokens
from agentrl.algorithms.model.tool_formats import ToolParser
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.algorithms.simulation import Workload, lognormal
from agentrl.algorithms.train import stages
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import RunConfig, load
from agentrl.core.loading import load_attribute
from agentrl.core.types import (
    Group,
    NewRollout,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    float32,
    int32,
)

STAFF = Path(__file__).parents[2] / "examples" / "staff"
WINDOW = 192  # rollouts whose mean is the reward at a time
CALLS = 5  # of a rollout, at most


@dataclass(frozen=True)
class Costs:
    """Seconds. tool: mean and sigma of a lognormal distribution; none: rollouts of one call."""

    step: float = 0.01  # of the engine,
    per_row: float = 5e-5  # and more for each call that it decodes
    per_token: float = 2e-5  # and for each token that it is fed
    update: float = 0.6
    tool: tuple[float, float] | None = (0.2, 1.5)
    length: tuple[float, float, int, int] | None = None
    calls: int = 1


@dataclass(frozen=True)
class Mode:
    """in_flight: else calls end before an update, and others wait. asked: groups are trained in the
    order in which they were asked for, else as they end."""

    ahead: float = 0.0
    in_flight: bool = False
    asked: bool = False


@dataclass(eq=False)
class Play:
    """A rollout that runs."""

    new: NewRollout
    group: int
    messages: list[dict[str, Any]]
    calls: list[tuple[GenerationRequest, TokenUpdate]] = field(default_factory=list)
    reward: float = 0.0


class VirtualRun:
    """`steps` training steps in a mode, begun with the model in `policy`."""

    def __init__(
        self, policy: Path, mode: Mode, *, seed: int = 0, steps: int = 25,
        preset: str = "grpo+tis", costs: Costs = Costs(), slots: int = 64, **settings: Any,
    ) -> None:  # fmt: skip
        self.mode, self.costs, self.slots, self.seed = mode, costs, slots, seed
        self.config = run_config(policy, mode, seed, steps, preset, costs, settings)
        torch.manual_seed(seed)
        (base,) = load_policies(self.config)
        algos = stages.load_algorithms(self.config)
        self.policies = stages.make_policies(self.config, algos, [base], AsyncExitStack())
        self.learned: Any = base.model
        self.served: Any = copy.deepcopy(base.model)
        self.codec = Codec(base.tokenizer)
        self.chat = Chat(base.tokenizer, self.codec)
        self.engine = Engine(
            self.served,
            eos=[] if costs.length else end_tokens(base.model, base.tokenizer),
            max_batch=64,
            max_context=384 if costs.length is None else costs.length[3] + 192,
            threads=1,
            deliver=self.deliver,
        )
        self.tasks = TaskSampler(self.config, load_attribute("tasks.py:train", STAFF, key="train"))
        self.database = load_attribute("database.py:connect", STAFF, key="agent")()
        self.prompt = load_attribute("policy.py:PROMPT", STAFF, key="agent")
        self.tools = json.dumps(load_attribute("policy.py:TOOLS", STAFF, key="agent")).encode()
        self.groups, self.width = self.config.algorithm.groups, self.config.algorithm.group_size
        self.now, self.events, self.order = 0.0, list[Any](), count()
        self.asked = self.version = self.running = 0
        self.queue: deque[tuple[int, NewRollout]] = deque()
        self.owners: dict[GenerationRequest, Play] = {}
        self.ended: dict[int, list[Play]] = defaultdict(list)
        self.stepping = False
        self.batch: list[list[Play]] = []  # that is being trained
        self.held: list[Play] | None = None  # those that wait for an update
        # What is measured:
        self.committed: list[float] = []  # when each step was
        self.done: list[tuple[float, float]] = []  # when each rollout ended, and its reward
        self.calls: list[tuple[GenerationRequest, TokenUpdate]] = []  # that were trained
        self.weights = [self.snapshot()]  # by version
        self.pauses: list[float] = []  # seconds of wall clock
        self.max_lag = 0  # of tokens that were trained
        self.fed, self.computing = 0, 0.0

    def run(self) -> VirtualRun:
        self.ask()
        while self.version < self.config.steps:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    # -- rollouts
    def ask(self) -> None:
        while self.asked < floor((self.version + self.mode.ahead + 1) * self.groups):
            step, place = divmod(self.asked, self.groups)
            asked = self.tasks.rollouts(step)[place * self.width : (place + 1) * self.width]
            self.queue.extend((self.asked, new) for new in asked)
            self.asked += 1
        while self.queue and self.running < self.slots:
            number, new = self.queue.popleft()
            self.running += 1
            asked = {"role": "user", "content": new.task["input"]}
            self.call(Play(new, number, [{"role": "system", "content": self.prompt}, asked]))

    def call(self, play: Play) -> None:
        if self.held is not None:
            self.held.append(play)
            return
        prompt = self.chat.prompt(json.dumps(play.messages).encode(), self.tools, b"{}")
        key = f"{self.seed}/{play.new.id}/{len(play.calls)}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        request = GenerationRequest(
            np.asarray(prompt, np.int32),
            self.config.sampling,
            int.from_bytes(digest, "big"),
            lambda update: None,
            stop=self.stop_at_length(key),
        )
        self.owners[request] = play
        self.engine.submit(request)
        self.kick()

    def stop_at_length(self, key: str) -> Callable[[int], bool] | None:
        if self.costs.length is None:
            return None
        mean, sigma, least, most = self.costs.length
        length = min(most, max(least, round(lognormal(mean, sigma, key))))
        seen = count(1)
        return lambda token: next(seen) == length

    def deliver(self, updates: TokenUpdates) -> None:
        for request, update in updates:
            play = self.owners.pop(request)
            play.calls.append((request, update))
            if self.costs.length:  # nothing to learn, but something to train
                play.reward = float(update.tokens[0] % 2)
                goes_on = len(play.calls) < self.costs.calls
            else:
                goes_on = self.answer(play, update)
            if goes_on and self.costs.tool:
                key = self.seed, play.group, play.new.index, len(play.calls)
                self.after(lognormal(*self.costs.tool, *key), partial(self.call, play))
            else:
                self.finish(play)

    def answer(self, play: Play, update: TokenUpdate) -> bool:
        """Look up what was asked for, or score the answer. Returns whether a call follows."""
        text, calls = ToolParser().whole(self.codec.decode(update.tokens))
        if update.finish == "stop" and calls and len(play.calls) < CALLS:
            functions = [{"type": "function", "function": asdict(call.function)} for call in calls]
            play.messages.append({"role": "assistant", "content": text, "tool_calls": functions})
            found = self.look_up(calls[0].function.arguments)
            play.messages.append({"role": "tool", "content": found})
            return True
        right = not calls and text.strip() == play.new.task["answer"]
        play.reward = float(update.finish == "stop" and right)
        return False

    def look_up(self, arguments: str) -> str:
        try:
            rows = self.database.execute(json.loads(arguments)["sql"]).fetchall()
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            return f"error: {error}"
        return "\n".join(", ".join(map(str, row)) for row in rows) or "no rows"

    def finish(self, play: Play) -> None:
        self.running -= 1
        self.done.append((self.now, play.reward))
        self.ended[play.group].append(play)
        self.after(0.0, self.go_on)

    def go_on(self) -> None:
        self.ask()
        self.learn()

    # -- the engine
    def run_commands(self) -> None:
        while not self.engine.commands.empty():
            self.engine.commands.get()()

    def kick(self) -> None:
        """Begin a step of the engine, unless one runs."""
        engine = self.engine
        self.run_commands()
        if self.stepping or not (engine.rows.n or engine.waiting):
            return
        self.stepping = True
        with torch.inference_mode():
            engine._admit()
        rows = engine.rows
        before = (rows.known[: rows.n] - rows.length[: rows.n] - 1).sum()
        fed = min(int(before), PREFILL_TOKENS) + rows.n
        costs = self.costs
        seconds = costs.step + costs.per_row * rows.n + costs.per_token * fed
        self.fed += fed
        self.computing += seconds
        self.after(seconds, self.end_step)

    def end_step(self) -> None:
        self.stepping = False
        with torch.inference_mode():
            self.engine._step()
        self.update_if_drained()
        self.kick()

    # -- the learner
    def learn(self) -> None:
        first = self.version * self.groups
        numbers = range(first, first + self.groups) if self.mode.asked else sorted(self.ended)
        ready = [n for n in numbers if len(self.ended[n]) == self.width][: self.groups]
        if self.batch or len(ready) < self.groups:
            return
        self.batch = [self.ended.pop(number) for number in ready]
        if self.mode.in_flight:
            self.after(self.costs.update, self.update)
        else:
            self.held = []
            self.update_if_drained()

    def update_if_drained(self) -> None:
        if self.held is not None and not self.owners and not self.updating:
            self.updating = True
            self.after(self.costs.update, self.update)

    updating = False

    def update(self) -> None:
        groups = [self.group(plays) for plays in self.batch]
        with torch.inference_mode(False), torch.enable_grad():
            self.policies.update(self.version, groups)
        self.note_lags(groups)
        self.version += 1
        self.weights.append(weights := self.snapshot())

        @torch.no_grad()
        def copy_weights() -> None:
            for name, weight in self.served.state_dict().items():
                weight.copy_(weights[name])

        swap = self.engine.swap(0, self.version, copy_weights)
        self.run_commands()
        self.pauses.append(swap.result())
        self.committed.append(self.now)
        held, self.held, self.batch, self.updating = self.held or (), None, [], False
        for play in held:
            self.call(play)
        self.go_on()
        self.kick()

    def snapshot(self) -> dict[str, Any]:
        return {name: weight.clone() for name, weight in self.learned.state_dict().items()}

    def note_lags(self, groups: list[Group]) -> None:
        for call in (call for g in groups for row in g.rollouts for call in row.transitions):
            versions = [version for _, version in call.spans] or [call.version or 0]
            self.max_lag = max(self.max_lag, self.version - min(versions))

    def group(self, plays: list[Play]) -> Group:
        rollouts = []
        for play in sorted(plays, key=lambda play: play.new.index):
            new = play.new
            self.calls += play.calls
            calls = [
                Transition(
                    id=f"{new.id}/{number}",
                    attempt=new.id,
                    index=number,
                    prompt=int32(request.prompt),
                    completion=int32(update.tokens),
                    logprobs=float32(update.logprobs),
                    version=update.spans[0][1],
                    spans=list(update.spans) if len(update.spans) > 1 else [],
                    sampling=self.config.sampling,
                    finish=str(update.finish),
                )
                for number, (request, update) in enumerate(play.calls)
            ]
            rollouts.append(
                Rollout(
                    id=new.id, run=new.run, group=new.group, index=new.index, task=new.task,
                    purpose=new.purpose, state=RolloutState.SUCCEEDED, step=new.step, attempts=1,
                    attempt=new.id, result="", failure=None,
                    rewards=[Reward(value=play.reward)], transitions=calls,
                )
            )  # fmt: skip
        first = rollouts[0]
        return Group(id=first.group, run=first.run, step=first.step, rollouts=rollouts)

    # -- what is reported
    @property
    def per_step(self) -> float:
        """Seconds of a step, once the start is over."""
        first = max(1, len(self.committed) // 5)
        return (self.committed[-1] - self.committed[first - 1]) / (len(self.committed) - first)

    def seconds_to(self, reward: float) -> float:
        """When the mean of the last `WINDOW` rollouts that ended was so high; inf: never."""
        rewards = np.array([value for _, value in self.done])
        means = np.convolve(rewards, np.full(WINDOW, 1 / WINDOW), "valid")
        above = np.flatnonzero(means >= reward)
        return self.done[int(above[0]) + WINDOW - 1][0] if above.size else float("inf")

    def last_reward(self, steps: int = 4) -> float:
        since = self.committed[-1 - steps]
        return float(np.mean([reward for time, reward in self.done if time > since]))

    def workload(self) -> Workload:
        """What the simulator is told about such a run."""
        sizes = np.array([len(update.tokens) for _, update in self.calls], np.float64)
        costs, total = self.costs, len(self.calls)
        reading = costs.per_token * (self.fed - sizes.sum()) / total
        mean, sigma = costs.tool or (0.0, 0.0)
        return Workload(
            groups=self.groups,
            group_size=self.width,
            ready=True,
            slots=self.slots,
            calls=total / (len(self.committed) * self.groups * self.width),
            tokens=float(sizes.mean()),
            token_sigma=float(np.sqrt(np.log1p(sizes.var() / sizes.mean() ** 2))),
            tool=mean,
            tool_sigma=sigma,
            decode=costs.step,
            per_call=costs.per_row + costs.per_token,
            prompt=float(reading),
            update=costs.update,
        )


def run_config(
    policy: Path, mode: Mode, seed: int, steps: int, preset: str, costs: Costs, more: dict[str, Any]
) -> RunConfig:
    algorithm = {"max_staleness": mode.ahead, "preset": preset} | more
    if mode.ahead:
        algorithm["async_sampling"] = "in_flight" if mode.in_flight else "drained"
        algorithm["group_order"] = "requested" if mode.asked else "completed"
    given = [f"algorithm.{key}={json.dumps(value)}" for key, value in algorithm.items()]
    if costs.length:
        given.append(f"sampling.max_tokens={costs.length[3]}")
    given += [f"steps={steps}", f"seed={seed}", f"policy.model={policy}", "learner.threads=1"]
    return load(STAFF / "run.toml", [*given, f"output={policy.parent / 'run'}"])


def make_policy(folder: Path, seed: int) -> Path:
    """The warm-started model of the example; made once for a seed in a folder."""
    made = folder / f"policy-{seed}"
    if not made.is_dir():
        load_attribute("policy.py:build", STAFF, key="policy.build")(made, seed)
    return made
