"""Plays a public task: trains on it by the command line, scores constant replies, and runs TRL
beside it. Every arm returns figures in which each held-out task keeps its own place."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from agentrl.algorithms.verdict import evaluation
from agentrl.algorithms.why import findings
from agentrl.core.config import RunConfig, load
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.types import Purpose, Rollout, Transition
from agentrl.environments import hosted
from agentrl.environments.hosted import Reply
from agentrl.environments.runner import stage
from agentrl.store import open_store
from tests.benchmarks.public.tasks import Public
from tests.benchmarks.real_model import cpu_seconds, differences

ROOT = Path(__file__).parents[3]
RUNS = Path(__file__).parent / "run_files"
Figures = dict[str, Any]
Judged = tuple[float, bool, bool]  # the environment's reward; right, strictly and leniently
MORE_TOKENS = 4
HELD_OUT = 230  # tasks, of which 200 are left when questions repeat or were trained
SHOWN = 40  # demonstrations


def settings(task: Public, model: str, more: Iterable[str] = ()) -> list[str]:
    """What the command line adds to the run file. Raises LookupError without its packages."""
    python = ROOT / ".environments" / task.plugin / "bin" / "python"
    if not python.exists():
        raise LookupError(f"make .environments/{task.plugin}/.installed")
    required = [f"policy.model={model}", f"environment_options.python={python}"]
    return [*required, f"eval.tasks={HELD_OUT}", "eval.samples=0", *more]


def config_of(task: Public, model: str) -> RunConfig:
    return load(RUNS / f"{task.name}.toml", settings(task, model))


def named_of(config: RunConfig) -> EnvironmentName:
    return EnvironmentName.read(config.environment, dict(config.environment_options), config.root)


def train(
    task: Public, model: str, seed: int, folder: Path, more: Iterable[str] = (), kind: str = ""
) -> Figures:
    """A training run, which continues where it was interrupted. Without steps it is only evaluated.
    `kind` is added to its name."""
    output = folder / f"{task.name}-{seed}{kind}"
    overrides = settings(task, model, [f"output={output}", f"name={output.name}", *more])
    if task.teacher:
        overrides.append(f"warmup.data={demonstrations(task, model, folder)}")
    run_file = str(RUNS / f"{task.name}.toml")
    command = [sys.executable, "-m", "agentrl", "train", run_file, f"seed={seed}", *overrides]
    cpu = list[float]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(f"{task.name}, seed {seed}: {line}", end="", file=sys.stderr)
            if line.startswith("step "):
                cpu.append(cpu_seconds(run.pid))
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    figures = asyncio.run(stored(task, load(Path(run_file), overrides).store, output.name))
    return figures | ({"cpu_per_step": median(differences(cpu))} if len(cpu) > 1 else {})


def demonstrations(task: Public, model: str, folder: Path) -> Path:
    """Conversations that show the form of an answer, by a script, whatever it earns."""
    file = folder / f"{task.name}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        script = f"{Path(__file__).with_name('teachers.py')}:{task.teacher}"
        words = ["--script", script, "--count", str(SHOWN), "--least", "-1", "--out", str(file)]
        run_file, overrides = str(RUNS / f"{task.name}.toml"), settings(task, model)
        overrides.append(f"output={folder / f'{task.name}-shown'}")
        command = [sys.executable, "-m", "agentrl", "demonstrate", run_file, *overrides, *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return file


async def stored(task: Public, url: str, name: str) -> Figures:
    """What a run has stored: both evaluations of the held-out tasks whose questions were not
    trained, and what `agentrl why` says."""
    async with open_store(url, readonly=True) as store:
        steps = await store.steps(name)
        scored = [row.step for row in steps if "eval/score" in row.metrics]
        rows = [await evaluation(store, name, step, "score") for step in (scored[0], scored[-1])]
        first = [row for row in await store.rollouts(name, purpose=Purpose.TRAIN) if not row.index]
        calls = await store.calls([row.id for row in (*rows[0], *rows[-1], *first)])
        [verdict] = await findings(store, name)
    trained = {question_of(calls[row.id]) for row in first}
    before, after = (
        {question_of(calls[row.id]): row for row in evaluation_rows} for evaluation_rows in rows
    )
    kept = [key for key in before if key and key in after and key not in trained]
    ends = {"before": before, "after": after}
    return {
        when: columns(judged(task, end[key], calls[end[key].id]) for key in kept)
        for when, end in ends.items()
    } | {
        "left_out": len(rows[0]) - len(kept), "steps": sum(row.committed for row in steps),
        "peak_mb": max(row.metrics.get("memory/process_peak_mb", 0.0) for row in steps),
        "why": verdict["said"], "reasons": [text for text, _ in verdict["reasons"]],
        "answers": Counter(turns(calls[after[key].id])[-1][1] for key in kept).most_common(3),
        "tasks": [after[key].task for key in kept], "questions": kept,
    }  # fmt: skip


def question_of(calls: Sequence[Transition]) -> str:
    """The question of a rollout: the last message of its first call."""
    return text(calls[0].messages[-1]) if calls else ""


def judged(task: Public, row: Rollout, calls: Sequence[Transition]) -> Judged:
    """A failed rollout has no reward, and is not right."""
    reward = row.reward() if row.failure is None else 0.0
    return (reward, *task.judge(row.task, turns(calls)))


def turns(calls: Sequence[Transition]) -> list[tuple[str, str]]:
    """The last message to the model, and its answer, of each call."""
    return [(text(call.messages[-1]), text(call.answer or {})) for call in calls]


def text(message: dict[str, Any]) -> str:
    """The content of a message, or its tool calls as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return json.dumps(calls) if calls else str(message.get("content") or "")


def columns(rows: Iterable[Judged]) -> Figures:
    judged_rows = list(rows)
    return {
        "reward": [round(reward, 4) for reward, *_ in judged_rows],
        "strict": "".join("01"[strict] for _, strict, _ in judged_rows),
        "lenient": "".join("01"[lenient] for *_, lenient in judged_rows),
    }


def without_model(task: Public, model: str, run: Figures) -> Figures:
    """The reward, and how often the reply is right, for as many numbers as fit into a
    reply, and for the best constant: the commonest right answer of these questions."""
    config = config_of(task, model)
    pairs = [*zip(run["questions"], run["tasks"], strict=True)]
    answers = Counter(task.truth(question, row) for question, row in pairs)
    numbers = " ".join(map(str, range(config.sampling.max_tokens // 2)))
    replies = {"digits": numbers, "common": task.form.format(answers.most_common(1)[0][0])}

    async def play(reply: str) -> list[Judged]:
        async with stage(named_of(config)) as on:
            done = [await on.play(row, always(reply)) for _, row in pairs]
        rows = zip(pairs, done, strict=True)
        return [
            (episode.outcome or 0.0, *task.judge(row, turns(episode.calls)))
            for (_, row), episode in rows
        ]

    return {
        name: columns(asyncio.run(play(reply))) | {"reply": reply}
        for name, reply in replies.items()
    }


def always(text: str) -> Reply:
    async def reply(*_: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    return reply


def trl(task: Public, model: str, seed: int, folder: Path, python: str, run: Figures) -> Figures:
    """The same training by TRL, in a Python that has it and the environment's package; the warm-up
    is ours, whose adapter it continues."""
    config = config_of(task, model)
    task_settings = {
        "model": config.model_path(), "steps": config.steps, "seed": seed, "prompt": "",
        "train": hosted.tasks(named_of(config), "train"), "heldout": run["tasks"], "answers": True,
        "verifier": str(Path(__file__).with_name("trl_reward.py")),
        "adapter": str(folder / f"{task.name}-{seed}" / "warmup") if task.teacher else "",
        "max_tokens": config.sampling.max_tokens, "groups": config.algorithm.groups,
        "group_size": config.algorithm.group_size, "lr": config.algorithm.lr,
        "rank": config.policy.lora.rank, "alpha": config.policy.lora.alpha,
        "dtype": config.policy.dtype, "threads": config.learner.threads,
    }  # fmt: skip
    file = folder / f"trl-{task.name}-{seed}.json"
    file.write_text(json.dumps(task_settings))
    script = Path(__file__).parents[1] / "trl_real_model.py"
    done = subprocess.run(
        [python, str(script), str(file)], stdout=subprocess.PIPE, text=True, check=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    pairs = [*zip(run["questions"], run["tasks"], strict=True)]
    for when in ("before", "after"):
        rows = zip(
            pairs, figures.pop(f"answers_{when}"), figures.pop(f"rewards_{when}"), strict=True
        )
        figures[when] = columns(
            (reward, *task.judge(row, [(question, reply)]))
            for (question, row), reply, reward in rows
        )
    return figures
