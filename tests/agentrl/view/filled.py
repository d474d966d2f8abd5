"""A store with two runs in which everything occurs that a page can show, filled by the verbs."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from agentrl.algorithms.prompt_search import (
    Candidate,
    Reflection,
    add_reflection,
    candidate_id,
    put_candidates,
)
from agentrl.core.config.run_file import resolve
from agentrl.core.types import (
    Attempt,
    Branch,
    Credit,
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    PolicyVersion,
    PromptText,
    Purpose,
    Reward,
    Scope,
    Span,
    StepCommit,
    Transition,
    float32,
    int32,
)
from agentrl.store import open_store
from agentrl.store.records import Item, Side, digest_of

RUN, STEPS, SIZE = "run", 6, 4
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b> <!--"
SYSTEM = {"role": "system", "content": "Answer shortly."}
LONG = "0123456789" * 2000
TEXT = PromptText(component="solver", role="solver", seed="Answer.", text="Answer. Be brief.")
BETTER = replace(TEXT, text=f"Answer. Be polite. {HOSTILE}")
CANDIDATES = [candidate_id([text]) for text in (TEXT, BETTER)]
WORDS = [317, 70, 71, 220, 72, 73, 74, 300, 75, 76, 77, 78]  # ids of the tiny tokenizer


def config(folder: Path, model: Path | None, **more: object) -> dict:
    (folder / "agent.py").write_text("def agent(task): ...\ndef verify(task): return 1.0\n")
    data = {
        "name": RUN,
        "agent": {"path": str(folder / "agent.py:agent")},
        "verifier": {"path": str(folder / "agent.py:verify")},
        "tasks": {"train": str(folder / "tasks.jsonl")},
        "policy": {"model": str(model) if model else "not/there"},
    }
    return to_builtins(resolve(data | more, source="test"))


def call(attempt: Attempt, index: int, messages: list[dict], **more: object) -> Transition:
    n = len(WORDS)
    base: dict = {
        "prompt": int32(range(1, 5 + index)),
        "completion": int32(WORDS),
        "logprobs": float32([-0.01 * (i + 1) * (3 if i == 4 else 1) for i in range(n)]),
        "answer": {"role": "assistant", "content": f"answer {index} of {attempt.rollout.id}"},
        "version": 1,
        "started": 1_700_000_000.0 + index,
        "seconds": 0.5,
    }
    fields = base | more
    return Transition(
        id=f"{attempt.id}-{index}", attempt=attempt.id, index=index, messages=messages, **fields
    )


def credit(one: Transition, sign: float) -> Credit:
    n = len(one.completion)
    return Credit(
        transition=one.id,
        policy=one.policy,
        advantage=float32([math.nan, *[sign * (0.1 + i / 7) for i in range(n - 1)]]),
        baseline=float32([0.25, 0.125]),
        gate=float32([1.0]),
        weight=float32([1 / 3]),
        psi=float32([sign * i / 9 for i in range(n)]),
    )


def calls(attempt: Attempt, i: int) -> list[Transition]:
    """A planner's two calls with a tool between them, and a critic's own conversation."""
    user = {"role": "user", "content": HOSTILE if i == 0 else f"question {attempt.rollout.group}"}
    first = call(attempt, 0, [SYSTEM, user], role="planner")
    tool = {"role": "tool", "content": LONG if i == 1 else "42", "tool_call_id": "c"}
    second = call(attempt, 1, [SYSTEM, user, first.answer or {}, tool], role="planner")
    words = {"completion": int32([WORDS[i % 3], *WORDS[1:]])}
    critic = call(attempt, 2, [{"role": "user", "content": "Judge."}], role="critic", **words)
    return [first, second, critic]


def outcome(attempt: Attempt, i: int, made: list[Transition]) -> Outcome:
    if i == 3:
        failure = Failure(
            kind=ErrorKind.AGENT, message=f"boom {HOSTILE}", traceback="line 1\nline 2"
        )
        return Outcome(attempt=attempt.id, fence=attempt.fence, failure=failure)
    rows = [Reward(value=float(i % 2)), Reward(value=0.5, name="style", source="judge")]
    rows += [
        Reward(value=0.75, name="turn", scope=Scope.TRANSITION, target=made[0].id),
        Reward(value=-1.0, scope=Scope.ROLE, target="critic"),
    ]
    span = Span(
        id="00000000000000aa", attempt=attempt.id, parent=None, name="lookup", kind="tool",
        start=1_700_000_000_600_000_000, end=1_700_000_000_900_000_000,
    )  # fmt: skip
    result = {"html": HOSTILE, "i": i}
    return Outcome(
        attempt=attempt.id, fence=attempt.fence, rewards=rows, result=result, spans=[span]
    )


async def step(store, run: str, epoch: int, n: int, *, flat: bool = False) -> None:
    """One training step of one group."""
    group = f"{run}/train/g{n:07}"
    seats = {"critic": "policy@3"}
    rows = [
        NewRollout(
            id=f"{group}/{i:04}", run=run, group=group, index=i, task={"input": f"task {n}"},
            step=n, max_attempts=1, seats=seats if i == 1 else {},
            branch=Branch(rollout=f"{group}/0000", calls=1) if i == 2 else None,
        )
        for i in range(SIZE)
    ]  # fmt: skip
    await store.enqueue(rows)
    credits = []
    for attempt in await store.claim(SIZE, runner="test", lease=60.0, run=run, timeout=5.0):
        i = 0 if flat else attempt.rollout.index
        made = calls(attempt, attempt.rollout.index)
        await store.add_transitions(made)
        await store.finish([outcome(attempt, i, made)])
        if attempt.rollout.index < 2:
            credits += [credit(one, 1 - 2 * attempt.rollout.index) for one in made]
    await store.claim_groups(run, epoch, 1, timeout=5.0)
    metrics = {"reward/mean": n / STEPS, "grad_norm": 1 / (n + 1), "policy/entropy": math.nan}
    metrics |= {"selfplay/elo": 1000.0 + n, "selfplay/games": 4.0, "selfplay/seat/black": 0.5}
    if n >= 2:
        metrics |= {"selfplay/elo/policy@2": 990.0, "selfplay/win_rate/policy@2": 0.6}
    if n >= 4:
        metrics |= {"selfplay/elo/policy@4": 1010.0, "selfplay/win_rate/policy@4": 0.4}
    if n % 2 == 0:
        metrics |= {"eval/score": n / STEPS, "eval/function/depth": float(n)}
    await store.commit_step(
        StepCommit(
            run=run, epoch=epoch, step=n, groups=[group], versions={"policy": n + 1},
            checkpoint=f"{n:06}", metrics=metrics, credits=credits,
        )
    )  # fmt: skip


async def fill(url: str, folder: Path, model: Path | None, steps: int = STEPS) -> None:
    async with open_store(url) as store:
        for run, more in ((RUN, {}), ("other", {"algorithm": {"lr": 0.25}})):
            state = await store.open_run(run, config(folder, model, **more))
            for n in range(steps):
                await step(store, run, state.epoch, n, flat=n == 1)
            version = PolicyVersion(
                run=run, policy="policy", version=6, base_url="http://x/v1", model="policy"
            )
            await store.publish(version)
        queued = NewRollout(
            id="run/queued/0", run=RUN, group="run/queued", index=0, task={}, step=9, priority=-1
        )
        await store.enqueue([queued])
        await store.open_run("empty", {})


async def fill_evaluations(url: str) -> None:
    """Two evaluations of the run "other" on two held-out tasks: all wrong, then all right."""
    async with open_store(url) as store:
        for step, value in ((0, 0.0), (4, 1.0)):
            group = f"other/eval/{step:06}/score"
            asked = [
                NewRollout(
                    id=f"{group}/{i:04}", run="other", group=group, index=i, step=step,
                    task={"input": f"Name town {i}?"}, purpose=Purpose.EVAL, max_attempts=1,
                )
                for i in range(2)
            ]  # fmt: skip
            await store.enqueue(asked)
            for attempt in await store.claim(2, runner="t", lease=60.0, run="other", timeout=5.0):
                await store.add_transitions(calls(attempt, 0)[:1])
                row = [Reward(value=value)]
                one = Outcome(attempt=attempt.id, fence=attempt.fence, rewards=row)
                await store.finish([one])


async def fill_data(url: str) -> None:
    """A data set of two versions, of which the last has 13 items: a pair of two rollouts, labelled
    calls, a label, and imported pairs."""
    async with open_store(url) as store:
        await store.draft_dataset("likes", {"source": "old.jsonl"})
        await store.commit_dataset("likes", 1)
        version = await store.draft_dataset("likes", {"run": RUN, "how": "extremes"})
        good, bad = f"{RUN}/train/g0000003/0001", f"{RUN}/train/g0000003/0000"
        found = await store.calls([good, bad])
        sides = [Side(digest=digest_of(found[id]), rollout=id) for id in (good, bad)]
        base: Any = {"prompt": int32(), "completion": int32(), "logprobs": float32()}
        base |= {"attempt": "import", "index": 0, "exact": False}
        for i in range(12):
            answer = {"role": "assistant", "content": f"imported {i} {HOSTILE}"}
            asked = [SYSTEM, {"role": "user", "content": "Which one?"}]
            own = Transition(id=str(i), messages=asked, answer=answer, **base)
            sides.append(Side(digest=digest_of([own]), own=[own]))
        names = [side.digest for side in sides]
        pair = {"kind": "pair", "chosen": names[0], "rejected": names[1], "margin": 0.75}
        items = [Item(position=0, source=f"{good} {bad}", **pair)]
        items.append(Item(position=1, kind="steps", chosen=names[0], steps=[0.25, None, 1.0]))
        items.append(Item(position=2, kind="label", chosen=names[2], label=0.0, split="test"))
        items += [
            Item(position=i, kind="pair", chosen=names[i - 1], rejected=names[i])
            for i in range(3, 13)
        ]
        await store.add_items("likes", version, items, sides)
        await store.commit_dataset("likes", version)


async def fill_search(url: str, folder: Path) -> None:
    """A prompt search: its seed, the chosen candidate that was made from it, and their scores."""
    (folder / "solver.txt").write_text(TEXT.text)
    table = {"reflector": "teacher", "components": {"solver": "solver.txt"}, "validation": 3}
    more = {"name": "search", "prompts": table, "upstreams": {"teacher": {"text": "x"}}}
    base: Any = {"run": "search", "step": 0}
    seed, better = CANDIDATES
    async with open_store(url) as store:
        await store.open_run("search", config(folder, None, **more))
        first = Candidate(id=seed, parents=[], state="accepted", texts=[TEXT], **base)
        last = Candidate(
            id=better, parents=[seed], state="chosen", texts=[BETTER], reflection="q", **base
        )
        await put_candidates(store, "search", [first, last])
        said = Reflection(id="q", question=f"Why? {HOSTILE}", answer=BETTER.text, **base)
        await add_reflection(store, said)
        batches = [("000000/00000.", seed, 3, 0.25), ("000000/00001.", seed, 2, 0.0)]
        batches += [("000000/00002.", better, 3, 0.75), ("heldout/", better, 3, 0.5)]
        for place, candidate, n, value in batches:
            group = f"search/prompts/{place}{candidate}"
            asked = [
                NewRollout(
                    id=f"{group}/{i:04}", run="search", group=group, index=i, task={},
                    purpose=Purpose.EVAL, candidate=candidate,
                )
                for i in range(n)
            ]  # fmt: skip
            await store.enqueue(asked)
            for attempt in await store.claim(n, runner="t", lease=60.0, run="search", timeout=5.0):
                row = Reward(value=value, note=f"too short {HOSTILE}")
                one = Outcome(attempt=attempt.id, fence=attempt.fence, rewards=[row])
                await store.finish([one])


def finish(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, in a thread: Playwright keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def start(*arguments: str, **env: str) -> tuple[subprocess.Popen[str], str]:
    """The process of `agentrl view` and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", "view", *arguments, "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " at http" in line, line + process.stdout.read()
    return process, line.rpartition(" at ")[2].strip()


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.read()
    assert process.wait(10) == 0, said
    assert "Traceback" not in said, said
