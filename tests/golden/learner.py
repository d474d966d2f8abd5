"""Metrics and gradients of training steps of the embedded learner: `learner.jsonl`.

Each case is a step by the path that a run takes: groups are prepared, credited and packed, the
weights get one optimizer step. The model is small and in float64, and has no random weight.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden import access, batches, files
from tests.golden.tiny import wave

BASE: dict[str, Any] = {"lr": 1e-3, "groups": 4, "group_size": 1}
STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("text", {"preset": "grpo"}, {}),
    "grpo in small packs": ("text", {"preset": "grpo"}, {"learner": {"token_budget": 32}}),
    "grpo as a trie": ("text", {"preset": "grpo"}, {"learner": {"packing": "trie"}}),
    "auto": ("process", {"preset": "auto"}, {}),
    "two epochs of two": ("text", {"preset": "grpo", "epochs": 2, "minibatches": 2}, {}),
    "entropy": ("text", {"preset": "reinforce++", "options": {"entropy": 0.05}}, {}),
    "dapo": ("text", {"preset": "dapo"}, {}),
    "corrected": ("process", {"preset": "gspo+tis"}, {}),
    "penalty": ("process", {"preset": "grpo", "options": {"kl": 0.1}}, {}),
    "top tokens": ("text", {"preset": "dppo-topk", "options": {"k": 4}}, {}),
    "team": ("team", {"preset": "dr-mas"}, {}),
    "branches": ("branches", {"preset": "tree-grpo"}, {}),
    "pairs": ("pairs", {"preset": "dpo"}, {}),
    "no reference": ("pairs", {"preset": "simpo"}, {}),
    "imitation": ("text", {"preset": "sft"}, {}),
    "clipped": ("text", {"preset": "grpo", "max_grad_norm": 0.01, "weight_decay": 0.1}, {}),
}
REFERRED = {"penalty", "pairs"}  # to a reference model
TIMED = re.compile(r"^(time|memory|utilisation)/|seconds|/s$|bytes")
RELATIVE = 1e-4  # log-probs are float32 between the float64 model and the loss


def fill(number: int, shape: Any) -> Tensor:
    values = wave(*shape, pace=1.1 + 0.3 * number, shift=number)
    return 1 + 0.1 * values if len(shape) == 1 else 0.4 * values


def along(weights: Mapping[str, Tensor]) -> list[float]:
    flat = torch.cat([weights[name].flatten().double() for name in sorted(weights)])
    return [float(flat.norm()), *(float(flat @ wave(len(flat), pace=p)) for p in (0.9, 2.9))]


def step(name: str, kind: str, algorithm: dict[str, Any], tables: dict[str, Any]) -> files.Case:
    settings = {"algorithm": BASE | algorithm, **tables}
    settings["learner"] = {"threads": 1} | tables.get("learner", {})
    groups = access.groups_of(batches.stored()[kind])
    with tempfile.TemporaryDirectory() as folder:
        metrics, gradient, weights = access.trained(
            settings, groups, fill, Path(folder), reference=name in REFERRED
        )
    before = {name: fill(i, x.shape) for i, (name, x) in enumerate(weights.items())}
    moved = {name: x - before[name] for name, x in weights.items()}
    return {
        "metrics": {name: x for name, x in metrics.items() if not TIMED.search(name)},
        "gradient": along(gradient) if gradient else None,
        "moved": float(torch.cat([x.flatten() for x in moved.values()]).norm()),
    }


def cases() -> Iterator[tuple[str, files.Case]]:
    for name, spec in STEPS.items():
        yield name, step(name, *spec)


if __name__ == "__main__":
    torch.set_num_threads(1)
    files.main("learner", cases)
