"""`make rlhf`: supervised fine-tuning, a reward model, PPO with it, and PPO that exploits it.

python examples/rlhf/rlhf.py [--seed 0] [--steps 40] [--json]

Writes runs/rlhf*/ and runs/rlhf/overoptimised.png in the working directory. The truth is the
verifier's held-out score, on which no policy is trained; the proxy is the reward model's mean
score."""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from agentrl.store import open_store

HERE = Path(__file__).parent
RUNS = {"with the KL penalty": "rlhf", "without it": "rlhf-free"}
COLUMNS = {
    "truth, held out": "eval/score", "truth, sampled": "reward/mean", "proxy": "reward/rm/mean",
    "agreement": "reward/rm/agreement", "KL": "reference/kl",
}  # fmt: skip


def agentrl(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "agentrl", *arguments], stdout=sys.stderr)


def finish(*children: subprocess.Popen[bytes]) -> None:
    if sum(child.wait() for child in children):  # `any` would not wait for all of them
        sys.exit("a stage failed: its message is above")


async def rows(run: str) -> list[dict[str, float]]:
    async with open_store(f"sqlite:///{Path.cwd()}/runs/{run}/store.db", readonly=True) as store:
        return [{"step": row.step, **row.metrics} for row in await store.steps(run)]


def table(found: dict[str, list[dict[str, float]]]) -> None:
    for title, steps in found.items():
        print(f"\n{title}\n{'step':>5}" + "".join(f"{name:>17}" for name in COLUMNS))
        for row in steps:
            if "eval/score" in row:
                near = {**steps[int(row["step"]) - 1], **row}  # the last row has no training step
                values = (near.get(key, float("nan")) for key in COLUMNS.values())
                print(f"{row['step']:>5}" + "".join(f"{value:>17.3f}" for value in values))


def picture(found: dict[str, list[dict[str, float]]], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(9, 3.5), sharey=True)
    for axis, (title, steps) in zip(axes, found.items(), strict=True):
        for name in ("truth, held out", "proxy", "agreement"):
            points = [(row["step"], row[key]) for row in steps if (key := COLUMNS[name]) in row]
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set(title=title, xlabel="step")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="0")
    parser.add_argument("--steps", default="40", help="of PPO")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seed, store = f"seed={given.seed}", f"sqlite:///{Path.cwd()}/runs/rlhf-samples/store.db"
    began = time.monotonic()
    finish(agentrl("train", f"{HERE}/samples.toml", seed, "--fresh", "-q"))
    # People compare answers to the same prompt: label the three pairs per prompt that differ most.
    mine = ["--how", "all", "--least", "0.25", "--per-group", "3", "--test", "0.2"]
    finish(agentrl("data", "mine", "pairs", "--run", "rlhf-samples", "--store", store, *mine))
    policy = ["policy.build=", f"policy.model={Path.cwd()}/runs/rlhf-samples/warmup", seed]
    finish(agentrl("reward-model", f"{HERE}/rm.toml", f"store={store}", *policy))
    prepared = time.monotonic()
    model = f"reward_models.rm.model={Path.cwd()}/runs/rlhf-rm/reward_model"
    ppo = ["train", f"{HERE}/run.toml", *policy, model, "--fresh", "-q", f"steps={given.steps}"]
    free = ["name=rlhf-free", "algorithm.options.kl_reward=1e-9"]
    finish(agentrl(*ppo), agentrl(*ppo, *free))  # at the same time, one on each core
    found = {title: asyncio.run(rows(run)) for title, run in RUNS.items()}
    if given.json:
        keys = ("eval/score", "reward/rm/mean")
        curves = {
            f"{title}: {key}": [row[key] for row in steps if key in row]
            for title, steps in found.items()
            for key in keys
        }
        seconds = [prepared - began, time.monotonic() - prepared]  # before PPO, PPO twice
        print(json.dumps({"seconds": seconds, **curves}))
        return
    table(found)
    picture(found, Path("runs/rlhf/overoptimised.png"))
    print(f"\n{time.monotonic() - began:.0f} s; picture: runs/rlhf/overoptimised.png")


if __name__ == "__main__":
    main()
