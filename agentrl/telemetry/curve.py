"""The learning curve of a run as a picture, `curve.png`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.types import StepRow

FUNCTIONS = "eval/function/"  # metrics of `eval.functions`


def save_curve(config: RunConfig, steps: list[StepRow]) -> Path | None:
    """Save reward per step (also per role, if there are several) and held-out scores as
    `curve.png`; None if nothing was trained. The first step's reward is at 1, and the score of the
    untrained policy at 0."""
    committed = [row for row in steps if row.committed and "reward/mean" in row.metrics]
    if not committed:
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    means = [row.metrics["reward/mean"] for row in committed]
    spread = [row.metrics.get("reward/std", 0.0) for row in committed]
    x = [row.step + 1 for row in committed]
    low = [mean - std / 2 for mean, std in zip(means, spread, strict=True)]
    high = [mean + std / 2 for mean, std in zip(means, spread, strict=True)]
    axes.fill_between(x, low, high, alpha=0.15, linewidth=0)
    at = f"at temperature {config.sampling.temperature:g}"
    axes.plot(x, means, label=f"training reward, {at} (mean ± half a deviation)")
    for role, points in reward_curves(committed).items():
        curve = [(step + 1, reward) for step, reward in points]
        axes.plot(*zip(*curve, strict=True), "--", linewidth=1, label=f"{role} (training)")
    held_out = {"eval/score": measured_how(config, steps), "eval/sampled": "at temperature 1"}
    labels = {name: f"held-out, {how}" for name, how in held_out.items()}
    for name, label in {**labels, **function_names(steps)}.items():
        if held := [(row.step, row.metrics[name]) for row in steps if name in row.metrics]:
            axes.plot(
                *zip(*held, strict=True), "o:" if name == "eval/sampled" else "o-", label=label
            )
    axes.set(xlabel="steps", ylabel="reward", title=config.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path = Path(config.output, "curve.png")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def measured_how(config: RunConfig, steps: Sequence[StepRow]) -> str:
    """How held-out scores are measured: greedy or sampled, and on how many tasks."""
    at = config.eval.temperature
    counted = {row.metrics["eval/tasks"] for row in steps if "eval/tasks" in row.metrics}
    how = f"at temperature {at:g}" if at else "greedy"
    return f"{how}, {' or '.join(f'{n:.0f}' for n in sorted(counted))} tasks" if counted else how


def function_names(steps: Sequence[StepRow]) -> dict[str, str]:
    """Metric -> label of the metrics of `eval.functions`."""
    names = {name for row in steps for name in row.metrics if name.startswith(FUNCTIONS)}
    return {name: name.removeprefix(FUNCTIONS) for name in sorted(names)}


def reward_curves(steps: list[StepRow]) -> dict[str, list[tuple[int, float]]]:
    """Role -> learning curve as (step, mean reward); empty for a single role."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in steps:
        for name, value in row.metrics.items():
            if name.startswith("role/") and name.endswith("/reward"):
                role = name.removeprefix("role/").removesuffix("/reward")
                found.setdefault(role, []).append((row.step, value))
    return found
