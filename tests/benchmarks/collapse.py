"""Whether a learning rate that is too high ends a run: tasks of examples/bench, without servers.

    python -m tests.benchmarks.collapse [--json] [--factors 2,4] [--seeds 101,102] [--max-kl NATS]

Agents, tasks, models and settings are those of the bench file, at multiples of the learning rate
that it reports; updates are those of `PolicySet`. Only the way from an agent to the policy is
shorter than in a run: the calls of a group are answered in this process, and the distribution after
the same tokens is computed once a step. A run has collapsed if in the last fifth of its steps less
than half of the answers have a form that the task knows. `--max-kl 0` undoes nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from msgspec.structs import asdict, replace

from agentrl.algorithms.model.chat import Codec
from agentrl.algorithms.model.load import end_tokens
from agentrl.algorithms.model.tool_formats import ToolParser
from agentrl.algorithms.train import stages as build
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.train.metrics import Metrics
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.core.loading import load_attribute, load_tasks
from agentrl.core.types import Group, Reward, Rollout, Transition, float32, int32
from tests import factories
from tests.benchmarks.bench import BenchPlan, Pair, read_bench
from tests.benchmarks.report import arguments

Agent = Callable[..., Any]
FILE = Path(__file__).parents[2] / "examples" / "bench" / "bench.toml"
RUNS = (("doors", "peers"), ("tower", "broadcast"), ("chain-4", "prime-implicit"))
LAST = 5  # the last step in so many tells how a run ends
_made: ContextVar[list[Transition]] = ContextVar("calls of the rollout that asks")


class Policy:
    """Answers calls with a model, as `tools.client` does over HTTP."""

    def __init__(self, loaded: LoadedModel, most: int, words: Sequence[str], seed: int) -> None:
        model, tokenizer = loaded.model, loaded.tokenizer
        self.model, self.tokenizer, self.codec = model, tokenizer, Codec(tokenizer)
        self.ends = set(end_tokens(model, tokenizer))
        self.most, self.words = most, words
        self.dice = torch.Generator().manual_seed(seed)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}  # log-probs of the next token
        self.running, self.waiting = 0, list[tuple[tuple[int, ...], asyncio.Future[Any]]]()
        self.good, self.asked = 0, 0  # answers in the form of the task, all

    async def complete(self, model: str, messages: list[Any], tools: Sequence[Any]) -> Any:
        shown = [
            m | {"tool_calls": [
                {"type": "function", "function": {**c["function"],
                 "arguments": json.loads(c["function"]["arguments"])}} for c in m["tool_calls"]
            ]} if m.get("tool_calls") else m for m in messages
        ]  # fmt: skip
        text = self.tokenizer.apply_chat_template(
            shown, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
        prompt = tuple(self.codec.encode(text))
        answered = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt, answered))
        self.answer_if_all_wait()
        tokens, logprobs = await answered
        made = _made.get()
        made.append(
            Transition(
                id=f"{id(made)}/{len(made)}", attempt="", index=len(made), prompt=int32(prompt),
                completion=int32(tokens), logprobs=float32(logprobs), role=model,
            )
        )  # fmt: skip
        content, calls = ToolParser().whole(self.codec.decode(tokens))
        self.asked += 1
        self.good += bool(calls) if tools else content.strip() in self.words
        found = [
            {"id": "call", "type": "function", "function": asdict(one.function)} for one in calls
        ]
        return {"role": "assistant", "content": content, "tool_calls": found}

    def answer_if_all_wait(self) -> None:
        if len(self.waiting) < self.running:
            return
        asked, self.waiting = self.waiting, []
        paths = [list(prompt) for prompt, _ in asked]
        logprobs: list[list[float]] = [[] for _ in asked]
        live = list(range(len(asked)))
        for _ in range(self.most):
            self.learn([tuple(paths[i]) for i in live])
            for i in live:
                p = self.known[tuple(paths[i])]
                token = int(torch.multinomial(p.exp(), 1, generator=self.dice))
                paths[i].append(token)
                logprobs[i].append(float(p[token]))
            live = [i for i in live if paths[i][-1] not in self.ends]
            if not live:
                break
        for (prompt, answered), path, own in zip(asked, paths, logprobs, strict=True):
            answered.set_result((path[len(prompt) :], own))

    @torch.no_grad()
    def learn(self, paths: Sequence[tuple[int, ...]]) -> None:
        """The distributions after these tokens, each once: many rollouts are at the same place."""
        new = [path for path in dict.fromkeys(paths) if path not in self.known]
        if not new:
            return
        longest = max(map(len, new))
        ids = torch.tensor([[*path, *[0] * (longest - len(path))] for path in new])
        logits = self.model(input_ids=ids, use_cache=False).logits
        last = logits[torch.arange(len(new)), torch.tensor([len(path) - 1 for path in new])]
        self.known |= dict(zip(new, last.double().log_softmax(-1), strict=True))


async def play(policy: Policy, agent: Agent, verify: Agent, task: Any, name: str, n: int) -> Group:
    """A group of n rollouts of a task, whose calls are answered together."""

    async def one(index: int) -> Rollout:
        made: list[Transition] = []
        _made.set(made)
        try:
            result = await agent(task["input"])
        finally:
            policy.running -= 1
            if policy.waiting:
                policy.answer_if_all_wait()
        both = len(inspect.signature(verify).parameters) > 1
        reward = Reward(value=float(verify(task, result) if both else verify(result)))
        id = f"{name}/{index}"
        calls = [replace(call, id=f"{id}/{call.index}", attempt=id) for call in made]
        return factories.rollout(id, calls, [reward], group=name, index=index, task=task)

    policy.running = n
    rollouts = await asyncio.gather(*(asyncio.create_task(one(i)) for i in range(n)))
    return Group(id=name, run="run", step=0, rollouts=list(rollouts))


def train(pair: Pair, factor: float, seed: int, limit: float | None, work: Path) -> list[Metrics]:
    """One run; the metrics of each step, and `form`, the share of answers that have one."""
    bench = read_bench(FILE)
    rate = bench.lrs_of(pair[0])[0] * factor
    config = BenchPlan(bench, FILE, work, {}).piece(pair, rate, seed).config
    config = replace(config, algorithm=replace(config.algorithm, max_kl=limit))
    folder, settings = Path(config.root), config.algorithm
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    shared: Any = importlib.import_module("tools")
    agent = load_attribute(config.agent.path, folder, key="agent")
    verify = load_attribute(config.verifier.path, folder, key="verifier")
    tasks = load_tasks(config.tasks.train, folder, key="tasks")
    random.seed(seed)
    torch.manual_seed(seed)
    steps: list[Metrics] = []
    with ExitStack() as stack:
        models = load_policies(config)
        made: Any = stack  # closes the learners
        policies = build.make_policies(config, build.load_algorithms(config), models, made)
        for step in range(config.steps):
            dice = random.Random(f"{seed}/{step}")
            policy = Policy(
                models[0], config.sampling.max_tokens, shared.WORDS, dice.randrange(2**31)
            )
            shared.client = policy
            chosen = dice.sample(tasks, settings.groups)
            groups = [
                asyncio.run(play(policy, agent, verify, task, f"{step}/{n}", settings.group_size))
                for n, task in enumerate(chosen)
            ]
            measured = policies.update(step, groups)
            steps.append({**measured, "form": policy.good / policy.asked})
    return steps


def outcome(steps: Sequence[Metrics]) -> dict[str, float]:
    """How a run ended, and how far its updates went."""
    last = steps[-max(1, len(steps) // LAST) :]
    kl = [step.get("update/kl", 0.0) for step in steps]
    form = fmean(step["form"] for step in last)
    return {
        "collapsed": float(form < 0.5), "form": form,
        "reward": fmean(step["reward/mean"] for step in last),
        "first": steps[0]["reward/mean"], "kl_median": median(kl), "kl_max": max(kl),
        "undone_steps": float(sum(step.get("update/undone", 0) > 0 for step in steps)),
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--factors", default="2,4")
    parser.add_argument("--seeds", default="101,102")
    parser.add_argument("--max-kl", type=float)
    asked = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as work:
        for task, preset in RUNS:
            for factor in map(float, asked.factors.split(",")):
                for seed in map(int, asked.seeds.split(",")):
                    name = f"{task} {preset} x{factor:g} seed {seed}"
                    steps = train((task, preset), factor, seed, asked.max_kl, Path(work))
                    found[name] = {k: round(x, 4) for k, x in outcome(steps).items()}
                    print(name, found[name], file=sys.stderr)
    collapsed = sum(run["collapsed"] for run in found.values())
    if asked.json:
        print(json.dumps({"runs": len(found), "collapsed": collapsed, "by_run": found}))
        return
    print("| run | collapsed | form | reward | undone steps |", "|---|---|---|---|---|", sep="\n")
    for name, run in found.items():
        print(f"| {name} | {run['collapsed']:g} | {run['form']:.2f} | {run['first']:.2f} to "
              f"{run['reward']:.2f} | {run['undone_steps']:g} |")  # fmt: skip


if __name__ == "__main__":
    main()
