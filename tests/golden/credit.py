"""psi of presets for agents on random rollouts of few states, and of `peers` and `auto` in small
worlds: `credit.jsonl`.

More branches of the code than the batches of `presets` reach: rewards of calls and rollouts are
missing, roles mix, states recur, rollouts share their first calls or have a single one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from tests.algorithms import worlds
from tests.algorithms.credit.test_peers import WORLDS, several
from tests.golden import access, files
from tests.golden.tiny import wave

SEEDS = range(3)
P, TACT = {"reward": "transition:p"}, {"reward": "role:tact"}
GAE = {"value": "transition:v", "gamma": 0.9, "lam": 0.8}
HIGH = {"high": "transition:high", "low": "transition:v", "gamma": 0.9, "lam": 0.8}
STREAM = {"scope": "transition", "gamma": 0.9, "weight": 0.5, "gate": "agree"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("agent-r1", GAE),
    ("pspo", GAE),
    ("turn-ppo", GAE),
    ("reinforce+step-gae", {f"step_{key}": value for key, value in GAE.items()}),
    ("ragen", {"gamma_high": 0.9, "gamma": 0.7, "lam": 0.8}),
    ("hiper", HIGH | P),
    ("gspo+hiper", {f"hiper_{key}": value for key, value in HIGH.items()} | P),
    ("archer", {"advantage": "transition:p"}),
    ("gigpo", {"weight": 0.5}),
    ("gspo+gigpo", {"gigpo_norm": "std"}),
    ("hgpo", {}),
    ("rloo+hgpo", {"hgpo_gamma": 0.9, "hgpo_depth": 1, "hgpo_norm": "std"}),
    ("batch-td", P | {"gamma": 0.9}),
    ("gspo+batch-td", {}),
    ("auto", {}),
    ("auto", P | {"gamma": 0.9, "lam": 0.8}),
    ("auto", {"std": False, "lam": 0.0}),
    ("peers", P | {"gamma": 0.9, "lam": 0.8}),
    ("gspo+peers", {}),
    ("mt-grpo", {"turn_reward": "transition:p", "weight": 0.5}),
    ("prime", {"process": "p"}),
    ("istar", {"process": "transition:p", "weight": 0.5}),
    ("streams", {"streams": {"outcome": {"norm": "std"}, "p": STREAM}}),
    ("gspo+process", {"process_streams": {"p": STREAM}}),
    ("hcapo", {}),
    ("gspo+hcapo", {"hcapo_gamma": 0.9, "hcapo_weight": 0.5}),
    ("grpo+corrections", {"corrections_weight": 0.5}),
    ("grpo+self-distill", {"self_distill_beta": 2.0, "self_distill_limit": 0.4}),
    ("tree-grpo", {}),
    ("gspo+tree", {}),
    ("treerl", {}),
    ("treerl", {"how": "parent"}),
    ("vineppo", {}),
    ("c3", {}),
    ("at-grpo", {}),
    ("at-grpo", P | {"within": "prompt", "std": False}),
    ("magrpo", {}),
    ("magrpo", {"baseline": "max"}),
    ("magrpo", {"baseline": "loo"}),
    ("magrpo", {"baseline": "none"}),
    ("magrpo", P | {"mode": "cross"}),
    ("magrpo", P | {"mode": "cross", "baseline": "max"}),
    ("dr-mas", {}),
    ("m-grpo", {"main": "actor", "sub_reward": "transition:p"}),
    ("maporl", P | {"value": "transition:v"}),
    ("marti", P),
    ("sage", TACT),
    ("shapley", TACT),
    ("difference", TACT),
    ("difference", TACT | {"baseline": "none"}),
    ("grpo+per-role", {}),
    ("grpo+mean-by", {"mean_by_units": ["role"]}),
    ("grpo+call-discount", {"call_discount_gamma": 0.5}),
    ("dr-grpo+only", {"only_roles": ["critic"], "length": 1}),
]
PEERS = [
    ("outcome", {"gamma": 1.0, "lam": 0.5}),
    ("transition:p", {"gamma": 1.0, "lam": 0.0}),
    ("transition:p", {"gamma": 0.9, "lam": 1.0}),
    ("outcome", {"gamma": 0.0, "lam": 0.5}),
]


def plays(seed: int) -> list[worlds.Play]:
    """Random rollouts, whose nodes belong to a group, with what some presets read besides."""
    found = worlds.random_plays(seed)
    for play in found:
        for call in play.calls:
            call.node = call.node and f"{play.group}:{call.node}"
            w = call.rewards["w"]
            call.rewards = {**call.rewards, "high": w if call.state == 0 else worlds.NAN}
            call.rewards |= {"hindsight": w, "demonstrated": w, "told": w}
    return found


def repeated(seed: int) -> list[worlds.Play]:
    """Random rollouts of calls "a" and "b", of which many repeat those of others."""
    draw, found = random.Random(seed), worlds.random_plays(seed, size=8)
    known = set[tuple[int, str]]()
    for play in found:
        path = ""
        for call in play.calls:
            path += draw.choice("ab")
            call.node, call.prompt = f"{play.group}:{path}", f"{play.group}:{path[:-1]}"
            call.repeats = (play.group, path) in known and draw.random() < 0.7
            call.tokens = 0 if call.repeats else call.tokens
            known.add((play.group, path))
    return found


def psi(preset: str, options: dict[str, Any], played: list[worlds.Play]) -> list[float]:
    tokens = sum(call.tokens for play in played for call in play.calls)
    batch = worlds.world(*played, values=(wave(tokens, pace=0.37) / 2 + 0.5).tolist())
    old = wave(tokens, pace=3.3) - 1.5
    return access.psi(preset, options, batch, old + 0.4 * wave(tokens, pace=5.1), old).tolist()


def cases() -> Iterator[tuple[str, files.Case]]:
    for preset, options in CASES:
        text = " ".join(f"{key}={value}" for key, value in sorted(options.items()))
        for seed in SEEDS:
            yield f"{preset} {text} {seed}", {"psi": psi(preset, options, plays(seed))}
    for preset, options in (("vineppo", {}), ("treerl", {}), ("treerl", {"how": "parent"})):
        for seed in SEEDS:
            name = f"{preset} {options.get('how', '')} repeated {seed}"
            yield name, {"psi": psi(preset, options, repeated(seed))}
    for world in WORLDS:
        played = several(world, 1)
        played[3].outcome = worlds.NAN
        for reward, options in PEERS:
            for preset in ("peers", "auto"):
                given = options | {"reward": reward}
                text = " ".join(f"{key}={value}" for key, value in sorted(given.items()))
                yield f"{preset} in {world.__name__} {text}", {"psi": psi(preset, given, played)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    files.main("credit", cases)
