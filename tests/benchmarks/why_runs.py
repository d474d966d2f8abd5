"""Runs of known fate, for `tests.benchmarks.why`: real trainings of a tiny model, each in seconds.

RUNS were there when the rules were written; HELD_OUT were run once, after them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.algorithms.engines.embedded import engine
from agentrl.algorithms.engines.embedded import server as embedded
from agentrl.algorithms.train import main
from agentrl.core.config import resolve
from agentrl.core.errors import TrainingError
from agentrl.runners.main import RunnerThread
from tests.benchmarks import why_worlds as w
from tests.tiny_models import qwen2

LEARNED = "it learned"
# How the first reason of each fate begins.
SAID: dict[str, tuple[str, ...]] = {
    "learned": (LEARNED,),
    "flat": ("groups are flat", "the verifier gives one reward to all"),
    "collapsed": ("the policy collapsed", "the learning rate is too high"),
    "missing rewards": ("rewards are missing",),
    "bypassed gateway": ("the agent makes no call",),
    "rate too high": ("the learning rate is too high", "the policy collapsed"),
    "rate too low": ("the learning rate is too low",),
    "too weak": ("the model does not get better",),
    "truncated": ("answers are cut off",),
    "hacking": ("the reward is exploited",),
    "mismatch": ("sampler and learner differ",),
    "stale": ("the lag is too high",),
    "duplicates": ("training tasks repeat",),
    "leak": ("held-out tasks are training tasks",),
    "noise": ("the verifier is noisy",),
    "rare": ("success is rare",),
}


@dataclass(frozen=True, kw_only=True)
class Fate:
    """A run, and what became of it."""

    kind: str
    name: str
    verify: w.Verifier
    agent: w.Agent = w.once
    train: Sequence[w.Task] = field(default_factory=lambda: w.words(64, "train"))
    heldout: Sequence[w.Task] = field(default_factory=lambda: w.words(40, "heldout"))
    steps: int = 12
    algorithm: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, int] = field(default_factory=dict)  # its shape
    seed: int = 0
    start: str = ""  # the run whose policy it begins with, by kind and name
    learns: bool = False  # in spite of the fault
    patch: Callable[[], Any] = nullcontext

    @property
    def place(self) -> str:
        """The name of its folder."""
        return f"{self.kind} {self.name}".replace(" ", "-")


def play(fate: Fate, folder: Path) -> str:
    """Train in this process; returns the URL of the store."""
    folder.mkdir(parents=True)
    given: dict[str, Any] = {
        "name": "r", "root": str(folder), "output": str(folder / "out"), "steps": fate.steps,
        "agent": {"path": "agent.py:agent"}, "seed": fate.seed,
        "tasks": {
            "train": w.write(folder / "train.jsonl", fate.train),
            "heldout": w.write(folder / "heldout.jsonl", fate.heldout),
        },
        "policy": {"model": str(model_of(fate, folder)), "device": "cpu"},
        "learner": {"threads": 1}, "eval": {"temperature": 1.0, "samples": 0},
        "runner": {"concurrency": 64},
    }  # fmt: skip
    for key, table in fate.settings.items():
        given[key] = {**given.get(key, {}), **table} if isinstance(table, dict) else table
    given["algorithm"] = {
        "preset": "grpo",
        "lr": 6e-3,
        "max_kl": 0.0,
    } | fate.algorithm
    given["sampling"] = {"max_tokens": 2} | fate.sampling
    config = resolve(given, source=fate.name)
    runner = RunnerThread(config.store, "r", agent=fate.agent, verifier=fate.verify)
    runner.start()

    async def train() -> None:
        async with asyncio.timeout(300):
            await main.run(config)

    try:
        with fate.patch():
            asyncio.run(train())
    except TrainingError:  # ended early: its steps could not be used
        pass
    finally:
        runner.stop()
    return config.store


def model_of(fate: Fate, folder: Path) -> Path:
    if not fate.start:
        return qwen2(folder / "model", seed=fate.seed, **fate.model)
    before = next(one for one in fates() if one.place == fate.start.replace(" ", "-"))
    if not (place := folder.with_name(before.place)).is_dir():
        play(before, place)
    return (place / "out" / "checkpoints" / "best").resolve()


# -- faults of the servers
@contextmanager
def old_weights() -> Iterator[None]:
    """The sampler never gets the weights that are learned."""
    made = embedded.EmbeddedServer.__init__

    def init(self: Any, model: Any, *given: Any, **named: Any) -> None:
        made(self, copy.deepcopy(model), *given, **named)

    with mock.patch.object(embedded.EmbeddedServer, "__init__", init):
        yield


def other_logprobs(sd: float) -> Callable[[], Any]:
    """The sampler's log-probs are not those that it sampled from."""
    import torch

    sample = engine.sample

    def noisy(*given: Any) -> Any:
        tokens, logprobs = sample(*given)
        return tokens, logprobs + sd * torch.randn_like(logprobs)

    @contextmanager
    def patch() -> Iterator[None]:
        from agentrl.algorithms.engines.embedded import engine

        with mock.patch.object(engine, "sample", noisy):
            yield

    return patch


def fates() -> list[Fate]:
    return [
        # learned
        Fate(kind="learned", name="fast", verify=w.first_in(20)),
        Fate(kind="learned", name="fast, graded, rloo", verify=w.graded(), steps=10,
             algorithm={"preset": "rloo"}, sampling={"max_tokens": 3}, seed=1),
        Fate(kind="learned", name="slow", verify=w.first_in(25, "b"), steps=24,
             algorithm={"lr": 2.5e-3}),
        Fate(kind="learned", name="slow adapter", verify=w.first_in(30, "c"), steps=20,
             algorithm={"lr": 2e-2}, settings={"policy": {"lora": {"rank": 4}}}),
        Fate(kind="learned", name="noisy verifier", verify=w.flipped(w.first_in(30, "d"), 0.2),
             steps=20),
        Fate(kind="learned", name="noisy, small groups", verify=w.shaken(w.graded("e"), 0.3),
             steps=40, algorithm={"preset": "rloo", "groups": 4, "group_size": 4},
             sampling={"max_tokens": 3}),
        Fate(kind="learned", name="55 to 100 %", verify=w.first_in(55, "f"), steps=16),
        Fate(kind="learned", name="55 to 100 %, two calls", verify=w.first_in(55, "g"),
             agent=w.twice, steps=14, algorithm={"preset": "reinforce++"}, seed=2),
        Fate(kind="learned", name="from high, a little", verify=w.first_in(80, "h"), steps=24,
             heldout=w.words(200, "heldout"), algorithm={"lr": 1e-3}),
        Fate(kind="learned", name="a fifth fails", verify=w.first_in(30, "i"), steps=14,
             agent=w.sometimes(0.1, w.fails)),
        # flat
        Fate(kind="flat", name="reward by task", verify=w.task_alone(50)),
        Fate(kind="flat", name="always 1", verify=lambda task, result: 1.0, steps=6,
             algorithm={"preset": "rloo"}),
        # collapsed
        Fate(kind="collapsed", name="a good model", start="learned fast", verify=w.first_in(20),
             steps=8, algorithm={"lr": 0.3}),
        Fate(kind="collapsed", name="a good model, entropy", start="learned 55 to 100 %",
             verify=w.first_in(55, "f"), steps=10, seed=3,
             algorithm={"preset": "rloo", "lr": 2e-2, "options": {"entropy": 5.0}}),
        # missing rewards
        Fate(kind="missing rewards", name="half", verify=w.seldom(w.first_in(20), 60, "style"),
             steps=6),
        Fate(kind="missing rewards", name="almost all",
             verify=w.seldom(w.graded(), 92, "length"), steps=6, algorithm={"preset": "rloo"}),
        # bypassed gateway
        Fate(kind="bypassed gateway", name="half", verify=w.first_in(30), steps=8, learns=True,
             agent=w.sometimes(0.5, w.from_elsewhere)),
        Fate(kind="bypassed gateway", name="all", verify=w.first_in(40), steps=8,
             agent=w.sometimes(1.0, w.from_elsewhere), algorithm={"preset": "rloo"}),
        # rate
        Fate(kind="rate too high", name="ten times", verify=w.first_in(30, "m"),
             algorithm={"lr": 1.0, "max_kl": 0.05}, steps=8),
        Fate(kind="rate too high", name="unlimited", verify=w.by_colour("n"),
             train=w.colours(64, "t"), heldout=w.colours(40, "h"), steps=10, seed=4,
             algorithm={"preset": "rloo", "lr": 0.5}),
        Fate(kind="rate too low", name="of a large model", verify=w.first_in(30, "o"),
             algorithm={"lr": 1e-6}),
        Fate(kind="rate too low", name="adapter", verify=w.graded("p"), steps=8,
             algorithm={"lr": 1e-5, "preset": "rloo"}, settings={"policy": {"lora": {"rank": 4}}}),
        # too weak
        Fate(kind="too weak", name="small model", verify=w.by_word("q"),
             train=w.words(400, "t"), steps=16,
             model={"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}),
        Fate(kind="too weak", name="parity of letters", steps=14, seed=5,
             verify=lambda task, result: float(
                 bool(result) and sum(map(ord, task["input"])) % 2 == ord(result[0]) % 2),
             train=w.words(400, "t2"), algorithm={"preset": "rloo"}),
        # truncated
        Fate(kind="truncated", name="cut off counts 0", verify=w.first_in(50, "r"),
             agent=w.only_whole, sampling={"max_tokens": 4}, steps=8),
        Fate(kind="truncated", name="whole ones score more", steps=8,
             verify=lambda task, result: 0.2 * (result[:1] == "+" and len(result) > 30),
             agent=w.marked_if_whole, algorithm={"preset": "rloo"}, sampling={"max_tokens": 12}),
        # hacking
        Fate(kind="hacking", name="another reward is trained",
             verify=w.with_proxy(w.against(w.graded("s")), w.graded("s")), steps=14,
             algorithm={"options": {"reward": "proxy"}}, sampling={"max_tokens": 3}),
        Fate(kind="hacking", name="held-out has no loophole", steps=14,
             heldout=w.words(60, "heldout", strict=True), algorithm={"preset": "rloo"},
             verify=w.strict_held_out(w.against(w.first_in(30, "t")), w.first_in(30, "t"))),
        # mismatch
        Fate(kind="mismatch", name="old weights", verify=w.first_in(20, "u"), patch=old_weights,
             algorithm={"lr": 1e-2}, steps=12),
        Fate(kind="mismatch", name="other log-probs", verify=w.first_in(10, "v"), steps=8,
             patch=other_logprobs(1.0), algorithm={"preset": "rloo+tis", "lr": 2e-3}),
        # stale
        Fate(kind="stale", name="four behind", verify=w.graded("w"), steps=5,
             heldout=w.words(20, "heldout"), sampling={"max_tokens": 4},
             algorithm={"lr": 3e-2, "preset": "grpo+tis", "max_staleness": 4.0, "groups": 2,
                        "group_size": 5}),
        Fate(kind="stale", name="ready first", verify=w.first_in(30, "x"), steps=6,
             agent=w.slow(0.2, 0.5), heldout=w.words(20, "heldout"),
             algorithm={"lr": 5e-2, "preset": "rloo+tis", "max_staleness": 6.0, "groups": 3,
                        "group_size": 4, "group_order": "completed",
                        "async_sampling": "in_flight"}),
        # tasks
        Fate(kind="duplicates", name="four of 64", verify=w.by_word("Y"),
             train=w.words(4, "t") * 16, steps=24),
        Fate(kind="duplicates", name="one of ten is new", verify=w.by_word("z"), steps=16,
             train=[*w.words(2, "a") * 29, *w.words(6, "b")], algorithm={"preset": "rloo"}),
        Fate(kind="leak", name="the same file", verify=w.first_in(20, "A"),
             train=w.words(40, "heldout"), heldout=w.words(40, "heldout")),
        Fate(kind="leak", name="half of it", verify=w.by_word("B"), steps=24, seed=6,
             train=w.words(16, "one"), heldout=w.words(30, "one"), algorithm={"preset": "rloo"}),
        # noise
        Fate(kind="noise", name="coin", verify=w.flipped(w.first_in(20, "C"), 0.48), steps=14),
        Fate(kind="noise", name="spread", verify=w.shaken(w.graded("D"), 1.0, 0.1), steps=12,
             algorithm={"preset": "rloo"}, sampling={"max_tokens": 1}),
        # rare
        Fate(kind="rare", name="3 %", verify=w.first_in(3, "E"), steps=6,
             algorithm={"group_size": 4, "lr": 5e-4}),
        Fate(kind="rare", name="second letter", verify=w.first_in(5, "F", at=1), steps=6, seed=7,
             algorithm={"preset": "rloo", "lr": 5e-4, "groups": 12, "group_size": 4}),
    ]  # fmt: skip


def held_out_fates() -> list[Fate]:
    """Made and run once, when the rules were finished."""
    return [
        Fate(kind="learned", name="dr-grpo, one token", verify=w.first_in(35, "ha"), steps=14,
             algorithm={"preset": "dr-grpo", "lr": 8e-3}, sampling={"max_tokens": 1}, seed=11),
        Fate(kind="learned", name="cispo, from 70 %", verify=w.first_in(70, "hb"), steps=18,
             algorithm={"preset": "cispo"}, seed=12),
        Fate(kind="learned", name="graded, two calls, noise", steps=20, agent=w.twice,
             verify=w.shaken(w.graded("hc"), 0.2), algorithm={"preset": "reinforce++"}, seed=13),
        Fate(kind="flat", name="a number by task", seed=14, steps=8,
             verify=lambda task, result: w.bucket(task["input"]) / 100,
             algorithm={"preset": "rloo"}),
        Fate(kind="missing rewards", name="70 %", steps=8, seed=15,
             verify=w.seldom(w.first_in(40, "hd"), 70, "fluency"),
             algorithm={"preset": "dr-grpo"}),
        Fate(kind="rate too high", name="gspo, undone", verify=w.graded("he"), steps=8, seed=16,
             algorithm={"preset": "gspo", "lr": 3.0, "max_kl": 0.05}),
        Fate(kind="truncated", name="only whole answers, graded", agent=w.only_whole, steps=6,
             verify=w.graded("hf"), sampling={"max_tokens": 6}, seed=17,
             algorithm={"preset": "dr-grpo"}),
        Fate(kind="mismatch", name="half a nat", verify=w.first_in(8, "hg"), steps=6, seed=18,
             patch=other_logprobs(0.5), algorithm={"lr": 1e-3}),
        Fate(kind="noise", name="coin, colours", seed=19, steps=14,
             verify=w.flipped(w.by_colour("hh"), 0.5), train=w.colours(64, "c"),
             heldout=w.colours(40, "d"), algorithm={"preset": "dr-grpo"}),
        Fate(kind="leak", name="a third", verify=w.first_in(30, "hi"), seed=20, steps=14,
             train=w.words(60, "e"), heldout=[*w.words(14, "e"), *w.words(26, "f")],
             algorithm={"preset": "cispo"}),
    ]  # fmt: skip
