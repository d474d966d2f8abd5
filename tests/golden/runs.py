"""What `why`, `explain`, `show`, `compare` and `metrics` print of ten stored runs: `runs.jsonl`.

The runs are written through the store's protocol, from the stories below: no model is trained.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden import access, files
from tests.golden.normal import normal

Record = dict[str, Any]
STORE = "sqlite:///FOLDER/runs/fallen/store.db"  # of one of the runs
QUESTIONS = ("Where is it warm?", "What is 7 * 6?", "Who leads sales?", "Sort 3 1 2.")


def call(
    draw: random.Random, prompt: list[int], see: list[Record], say: str, **more: Any
) -> Record:
    n = 2 + len(say) % 3
    return {
        "prompt": prompt,
        "completion": [draw.randrange(100, 200) for _ in range(n)],
        "logprobs": [-round(draw.uniform(0.1, 2.0), 3) for _ in range(n)],
        "messages": see,
        "answer": {"role": "assistant", "content": say},
        "version": more.pop("version", 1),
        **more,
    }


def user(text: str) -> Record:
    return {"role": "user", "content": text}


def rollout(run: str, group: int, index: int, calls: list[Record], **more: Any) -> Record:
    name = f"{run}/train/g{group:07d}"
    return {
        "id": f"{name}/{index:04d}",
        "group": name,
        "index": index,
        "calls": calls,
        "task": {"input": QUESTIONS[group % 4], "id": f"t{group}"},
        "result": "done",
        **more,
    }


def outcome(value: float, note: str = "") -> list[Any]:
    return ["rollout", "outcome", None, value, note]


def evaluated(run: str, step: int, values: list[float], group: str = "score") -> list[Record]:
    """The held-out rollouts of an evaluation."""
    draw, name = random.Random(f"{run} {step}"), f"{run}/eval/{step:06d}/{group}"
    return [
        {
            "id": f"{name}/{i:04d}",
            "group": name,
            "index": i,
            "purpose": "eval",
            "step": step,
            "task": {"input": f"held-out {i}", "id": f"h{i}"},
            "temperature": 0.0,
            "result": "x",
            "calls": [call(draw, [7, i], [user(f"held-out {i}")], "x")],
            "rewards": [outcome(value)],
        }
        for i, value in enumerate(values)
    ]


def one_call(run: str, step: int, rewards: list[float | None], **more: Any) -> list[Record]:
    """A group of rollouts of one call each."""
    draw = random.Random(f"{run} train {step}")
    return [
        rollout(
            run,
            step,
            i,
            [
                call(
                    draw,
                    [5, step],
                    [user(QUESTIONS[step % 4])],
                    f"answer {i}",
                    version=step,
                    **more,
                )
            ],
            step=step,
            rewards=[] if value is None else [outcome(value)],
        )
        for i, value in enumerate(rewards)
    ]


BASE: Record = {
    "steps": 6,
    "policy": {"model": "model"},
    "agent": {"path": "agent.py:agent"},
    "tasks": {"train": "tasks.py:train", "heldout": "tasks.py:heldout"},
    "algorithm": {"preset": "grpo", "groups": 1, "group_size": 4, "lr": 1e-4},
}


def measured(**changes: float) -> Record:
    """The metrics of a step in which nothing is wrong."""
    usual = {
        "reward/mean": 0.5,
        "reward/std": 0.4,
        "reward/sampled_mean": 0.5,
        "advantage/std": 0.9,
        "groups/frac_zero_std": 0.0,
        "rollouts": 4.0,
        "rollouts/usable": 4.0,
        "rollouts/failed": 0.0,
        "update/steps": 1.0,
        "update/kl": 0.01,
        "update/grad_norm": 0.7,
        "lr": 1e-4,
        "policy/entropy": 1.2,
        "policy/clip_fraction": 0.02,
        "completion/truncated": 0.0,
        "tokens/completion": 12.0,
        "calls/inexact": 0.0,
        "calls": 4.0,
        "sampler/ess": 0.99,
        "logprob_difference/mean": 0.001,
        "staleness/version_mean": 0.0,
        "staleness/withheld": 0.0,
        "reward/missing": 0.0,
    }
    return usual | {name.replace("__", "/"): value for name, value in changes.items()}


def curve(name: str, scores: list[float], **more: Any) -> Record:
    """A run whose held-out score is measured before the first step and after each."""
    steps = []
    for step, score in enumerate(scores[1:]):
        rewards = [score, min(1.0, score + 0.2), max(0.0, score - 0.2), score]
        steps.append(
            (one_call(name, step, rewards), measured(reward__mean=score, reward__std=0.14))
        )
    evals = {step: scored(name, step, score) for step, score in enumerate(scores)}
    return {"name": name, "settings": BASE | more, "steps": steps, "evals": evals}


def scored(name: str, step: int, score: float) -> tuple[list[Record], Record]:
    values = [1.0 if i < round(score * 10) else 0.0 for i in range(10)]
    spread = 0.15
    metrics = {
        "eval/score": score,
        "eval/score_low": max(0.0, score - spread),
        "eval/score_high": min(1.0, score + spread),
    }
    return evaluated(name, step, values), metrics


def learned() -> Record:
    return curve("learned", [0.1, 0.3, 0.5, 0.6, 0.8, 0.9, 0.9])


def risen_and_fallen() -> Record:
    """Of .1 -> .9 -> .3 two sentences are possible."""
    run = curve("fallen", [0.1, 0.5, 0.9, 0.9, 0.6, 0.4, 0.3])
    run["settings"] = run["settings"] | {"seed": 3}
    return run


def flat() -> Record:
    steps = [
        (
            one_call("flat", step, [1.0] * 4),
            measured(
                reward__mean=1.0,
                reward__std=0.0,
                groups__frac_zero_std=1.0,
                advantage__std=0.0,
                update__steps=0.0,
            ),
        )
        for step in range(6)
    ]
    return {"name": "flat", "settings": BASE, "steps": steps, "evals": {0: scored("flat", 0, 0.5)}}


def unrewarded() -> Record:
    steps = [
        (
            one_call("unrewarded", step, [None, None, 1.0, None]),
            measured(rollouts__usable=1.0, reward__missing=0.75),
        )
        for step in range(4)
    ]
    return {"name": "unrewarded", "settings": BASE | {"steps": 4}, "steps": steps, "evals": {}}


def failing() -> Record:
    """Three of four rollouts fail, in four ways."""
    kinds = [
        (
            "agent_error",
            "KeyError: 'city'",
            "Traceback (most recent call last):\n  File \"agent.py\", line 3\nKeyError: 'city'\n",
        ),
        ("timeout", "the agent ran for longer than 60 seconds", ""),
        ("no_model_call", "the agent made no call", ""),
    ]
    steps = []
    for step in range(4):
        group = one_call("failing", step, [1.0, None, None, None])
        for i, failure in enumerate(kinds, 1):
            group[i] |= {"failure": failure, "result": None}
            if failure[0] == "no_model_call":
                group[i]["calls"] = []
        failed = {f"rollouts/failed/{kind}": 1.0 for kind, _, _ in kinds}
        steps.append((group, measured(rollouts__usable=1.0, rollouts__failed=3.0) | failed))
    return {"name": "failing", "settings": BASE | {"steps": 4}, "steps": steps, "evals": {}}


def truncated() -> Record:
    steps = []
    for step in range(6):
        group = one_call("truncated", step, [0.0, 0.0, 0.0, 1.0], finish="length")
        group[3]["calls"][0]["finish"] = "stop"
        metrics = measured(completion__truncated=0.75, reward__mean=0.25, reward__std=0.5)
        steps.append((group, metrics))
    return {"name": "truncated", "settings": BASE, "steps": steps, "evals": {}}


def too_fast() -> Record:
    """The learning rate is too high, and ratios are clipped."""
    steps = [
        (
            one_call("fast", step, [0.2, 0.1, 0.0, 0.4]),
            measured(
                update__kl=2.5 + step,
                policy__clip_fraction=0.8,
                policy__entropy=1.2 - step / 6,
                old__kl=3.0,
                update__grad_norm=90.0,
                reward__mean=0.18,
                reward__std=0.17,
            ),
        )
        for step in range(6)
    ]
    changed = BASE | {"algorithm": BASE["algorithm"] | {"lr": 0.1, "minibatches": 2, "epochs": 4}}
    return {"name": "fast", "settings": changed, "steps": steps, "evals": {}}


def team() -> Record:
    """Two roles with rewards of their own, calls with tools, a note of the verifier, and credit."""
    draw, steps = random.Random("team"), []
    for step in range(3):
        group = []
        for i in range(4):
            first = [{"role": "system", "content": "Plan."}, user(QUESTIONS[step])]
            tool = {
                "id": "c1",
                "type": "function",
                "function": {"name": "query", "arguments": '{"sql": "SELECT 1"}'},
            }
            plan = call(draw, [3, step, 1], first, "I plan.", role="planner", version=step)
            plan["answer"] = {"role": "assistant", "content": None, "tool_calls": [tool]}
            plan["tools"] = [{"type": "function", "function": {"name": "query", "parameters": {}}}]
            second = [
                *first,
                plan["answer"],
                {"role": "tool", "content": "1", "tool_call_id": "c1"},
            ]
            solve = call(draw, [3, step, 1, 4], second, f"It is {i}.", role="solver", version=step)
            solve["spans"] = [(0, step), (1, step + 1)]
            rewards = [
                outcome(i / 3, "close" if i else ""),
                ["role", "outcome", "planner", i / 4, ""],
                ["role", "outcome", "solver", 1 - i / 4, ""],
                ["transition", "process", 0, 0.5, "a good plan"],
                ["transition", "process", 1, -0.25 * i, ""],
            ]
            spans = [
                ("plan", "chain", {"node": "planner"}),
                ("query", "tool", {"input.value": "SELECT 1"}),
            ]
            group.append(
                rollout(
                    "team",
                    step,
                    i,
                    [plan, solve],
                    step=step,
                    rewards=rewards,
                    spans=spans,
                    result={"answer": i},
                )
            )
        steps.append((group, measured(reward__mean=0.5, **{"calls": 8.0})))
    algorithm = {
        "preset": "streams+per-role",
        "options": {"streams": {"outcome": {"norm": "std"}, "process": {"scope": "transition"}}},
    }
    settings = BASE | {"steps": 3, "algorithm": BASE["algorithm"] | algorithm}
    numbers = {
        "advantage": [0.5],
        "baseline": [0.5],
        "gate": [1.0],
        "weight": [0.25],
        "psi": [0.125],
    }
    credit = {f"team/train/g0000000/0000/call/{i}": numbers for i in (0, 1)}
    return {"name": "team", "settings": settings, "steps": steps, "evals": {}, "credits": credit}


def stale() -> Record:
    steps = [
        (
            one_call("stale", step, [0.2, 0.6, 0.4, 0.4]),
            measured(
                staleness__version_mean=3.5,
                sampler__ess=0.2,
                staleness__withheld=20.0,
                tokens__completion=24.0,
            ),
        )
        for step in range(6)
    ]
    algorithm = BASE["algorithm"] | {"preset": "grpo+tis", "max_staleness": 4.0}
    return {
        "name": "stale",
        "settings": BASE | {"algorithm": algorithm},
        "steps": steps,
        "evals": {},
    }


def not_begun() -> Record:
    """A run without a step, with one evaluation."""
    return {"name": "new", "settings": BASE, "steps": [], "evals": {0: scored("new", 0, 0.4)}}


STORIES = (
    learned,
    risen_and_fallen,
    flat,
    unrewarded,
    failing,
    truncated,
    too_fast,
    team,
    stale,
    not_begun,
)


async def write(story: Record, url: str, folder: Path) -> None:
    async with access.RunWriter(url, story["name"], story["settings"], folder) as writer:
        for step in range(len(story["steps"]) + 1):
            if step in story["evals"]:
                rollouts, metrics = story["evals"][step]
                await writer.play(rollouts)
                await writer.log(step, metrics)
            if step < len(story["steps"]):
                rollouts, metrics = story["steps"][step]
                await writer.play(rollouts)
                await writer.commit(step, metrics, story.get("credits") if step == 0 else None)


def commands(stories: list[Record]) -> Iterator[list[str]]:
    """Every form of the commands, of every run."""
    names = [story["name"] for story in stories]
    for name in names:
        yield ["why", name]
        yield ["metrics", name]
        yield ["compare", "learned", name]
    yield ["metrics", "learned", "--csv"]
    yield ["metrics", "team", "--json"]
    yield ["compare", *names]
    yield ["compare", *names, "--json"]
    yield ["compare", "nothing"]
    yield ["why", "nothing"]
    for story in stories:
        first = story["steps"][0][0] if story["steps"] else story["evals"][0][0]
        for record in first[: 4 if story["name"] in ("team", "failing") else 1]:
            yield ["show", record["id"]]
            yield ["explain", record["id"]]
    for words in (["why"], ["compare", "fallen"], ["metrics"]):
        yield [*words, "learned", "--store", STORE.replace("fallen", "learned")]
    yield ["show", "fallen/train/g0000000/0000", "--store", STORE]
    yield ["explain", "fallen/train/g0000000/0000", "--store", STORE]
    yield ["show", "team/train/g0000000/0001", "--prompt"]
    yield ["show", "team/train/nothing"]
    yield ["explain", "team/train/g0000000/0000", "--tokens"]
    yield ["explain", "learned/train/g0000002/0001", "--tokens"]
    yield ["explain", "learned/eval/000000/score/0000"]
    yield ["explain", "nothing/train/g0000000/0000"]


def cases() -> Iterator[tuple[str, files.Case]]:
    stories = [make() for make in STORIES]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for story in stories:
            own = folder / "runs" / story["name"]
            own.mkdir(parents=True)
            asyncio.run(write(story, f"sqlite:///{own / 'store.db'}", folder))
        for words in commands(stories):
            given = [word.replace("FOLDER", str(folder)) for word in words]
            printed = access.command(*given, folder=folder)
            yield (
                " ".join(words),
                {"exit": printed.code, "text": normal(printed.text, folder).splitlines()},
            )


if __name__ == "__main__":
    files.main("runs", cases)
