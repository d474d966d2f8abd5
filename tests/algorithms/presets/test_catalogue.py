"""Every preset of the short list against its published loss, and names and options of all."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import compute_advantages, loss_terms
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.errors import ConfigError, TrainingError
from tests.algorithms.presets.padded import (
    CHECKS,
    CUT,
    PPO,
    Case,
    Losses,
    Padded,
    Surrogate,
    centred,
    clip,
    constant,
    current,
    differs,
    members,
    over_batch,
    padded,
    plain,
    raw,
    row_means,
    row_sums,
    sequence_clip,
    tokens,
    tokens_of,
    weighted,
    whiten,
    zscore,
)
from tests.algorithms.presets.plays import checked
from tests.algorithms.worlds import Call, Play, world


def imitated(least: float, best: int = 12) -> Callable[[Padded], dict[int, float]]:
    """1 for the `best` best rollouts of each group whose reward is at least `least`."""

    def advantage(data: Padded) -> dict[int, float]:
        ranked = (sorted(group, key=lambda row: -row[1])[:best] for group in members(data))
        return {u: 1.0 for group in ranked for u, r in group if r >= least}

    return advantage


def leave_one_out(data: Padded) -> dict[int, float]:
    return {
        u: r - statistics.fmean(x for v, x in group if v != u) if len(group) > 1 else 0.0
        for group in members(data)
        for u, r in group
    } | {u: 0.0 for group in members(data) if not differs(group) for u, _ in group}


def alive_only(data: Padded) -> dict[int, float]:
    keep = {u for group in members(data) if differs(group) for u, _ in group}
    return {u: a for u, a in zscore(data).items() if u in keep}


def dapo_shaped(data: Padded) -> dict[int, float]:
    """Length penalty from 4 to 6 tokens, no cut-off rollouts, judged by the raw reward."""
    lengths = [tokens_of(data, u) for u in range(len(data.group))]
    shaped = [r - min(max(n - 4, 0) / 2, 1.0) for r, n in zip(data.reward, lengths, strict=True)]
    last = {u: r for r, u in enumerate(data.rollout)}
    keep = {u for group in members(data) if differs(group) for u, _ in group}
    keep -= {u for u, r in last.items() if r in CUT}
    return {u: a for u, a in zscore(data, shaped).items() if u in keep}


def nothing(data: Padded) -> dict[int, float]:
    return dict.fromkeys(range(len(data.group)), 0.0)


def truncated(other: str, hi: float) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        rho = (p.detach() - (o if other == "o" else b)).exp()
        return -rho.clamp(max=hi) * a * p

    return loss


def to_teacher(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
    return 0.5 * (p - (o - 0.2)) ** 2


def penalised(surrogate: Surrogate, beta: float) -> Surrogate:
    def loss(p: Tensor, o: Tensor, b: Tensor, a: float) -> Tensor:
        q = o - 0.1
        return surrogate(p, o, b, a) + beta * ((q - p).exp() - 1 - (q - p))

    return loss


def per(unit: Callable[[Padded, int], int]) -> Callable[[Padded, Losses], Tensor]:
    def average(data: Padded, losses: Losses) -> Tensor:
        parts: dict[int, list[Tensor]] = {}
        for r, x in losses.items():
            parts.setdefault(unit(data, r), []).append(x)
        return torch.stack([torch.cat(part).mean() for part in parts.values()]).mean()

    return average


rollouts = per(lambda data, r: data.rollout[r])


prompts = per(lambda data, r: data.group[data.rollout[r]])


def group_mean(batch: Batch) -> Tensor:
    """A credit function of the user's."""
    return GroupRelative()(batch)


CASES: dict[str, Case] = {
    "reinforce": (raw, plain, row_sums, {}),
    "reinforce++": (whiten(raw), PPO, tokens, {}),
    "rloo": (leave_one_out, plain, row_sums, {}),
    "sft": (lambda data: dict.fromkeys(range(12), 1.0), plain, tokens, {}),
    "rft": (imitated(1.0), plain, tokens, {}),
    "rft best": (imitated(0.2, 2), plain, tokens, {"least": 0.2, "best": 2}),
    "grpo": (zscore, PPO, row_means, {}),
    "grpo mean-only": (centred, PPO, row_means, {"std": False}),
    "grpo dual": (zscore, clip(0.2, 0.3, 1.5), row_means, {"clip_high": 0.3, "clip_dual": 1.5}),
    "grpo kl": (zscore, penalised(PPO, 0.04), row_means, {"kl": 0.04}),
    "grpo style": (lambda data: zscore(data, data.style), PPO, row_means, {"reward": "style"}),
    "dr-grpo": (centred, PPO, constant, {}),
    "dapo": (alive_only, clip(0.2, 0.28), tokens, {}),
    "scalerl": (lambda data: over_batch(data, survivors=True), truncated("b", 5), prompts, {}),
    "gspo": (zscore, sequence_clip(3e-4, 4e-4), row_means, {}),
    "cispo": (zscore, truncated("o", 5), tokens, {}),
    "agl-v1": (zscore, PPO, rollouts, {}),
    "distill": (nothing, to_teacher, tokens, {}),
    "grpo+distill": (
        zscore,
        lambda p, o, b, a: PPO(p, o, b, a) + 0.5 * to_teacher(p, o, b, a),
        row_means,
        {"distill_beta": 0.5},
    ),
    "dapo overlong": (
        dapo_shaped,
        clip(0.2, 0.28),
        tokens,
        {"overlong_limit": 6, "overlong_cache": 2, "drop_truncated": True},
    ),
    "grpo+tis": (zscore, weighted(PPO, lambda d: d.exp().clamp(max=2)), row_means, {}),
    "grpo+behaviour": (zscore, lambda p, o, b, a: PPO(p, b, b, a), row_means, {}),
    "grpo+icepop": (
        zscore,
        weighted(PPO, lambda d: d.exp() * (d.exp() >= 0.9) * (d.exp() <= 1.1)),
        row_means,
        {"icepop_low": 0.9, "icepop_high": 1.1},
    ),
    "grpo+credit": (centred, PPO, row_means, {"credit": f"{__name__}:group_mean"}),
    "rloo+decoupled": (leave_one_out, weighted(plain, lambda d: d.exp()), row_sums, {}),
}


test_its_loss_is_the_published_one = checked(CASES, CHECKS)


def test_options_reach_the_preset_and_its_modifiers() -> None:
    algo = make("grpo+tis", {"clip_high": 0.28, "clip_low": 0, "tis_cap": 3})
    assert algo.gates[0].fn == Clip(0.0, 0.28)
    assert "hi=3.0" in repr(algo.gates[1].fn)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, r"algorithm\.preset: no preset 'grop'; did you mean 'grpo'\?"),
        ("", {}, r"algorithm\.preset: no preset ''; valid: agent-r1"),
        ("grpo+tsi", {}, r"no modifier \+tsi for 'grpo'; did you mean 'tis'\?"),
        ("grpo+", {}, r"no modifier \+ for 'grpo'; valid"),
        ("grpo", {"clip_hihg": 0.3}, r"algorithm\.options\.clip_hihg: .* 'clip_high'\?"),
        (
            "rloo",
            {"clip_high": 0.3},
            r"options\.clip_high: no option of 'rloo'; valid: entropy, reward",
        ),
        ("grpo", {"tis_cap": 2.0}, r"options\.tis_cap: no option of 'grpo'"),
        ("grpo", {"clip_high": inf}, r"options\.clip_high = inf: .*<= 1000000"),
        ("grpo+tis", {"algo": 1}, r"algorithm\.options\.algo: "),
        ("grpo", {"clip_high": "0.3"}, r"algorithm\.options\.clip_high = '0\.3': Expected `float`"),
        ("grpo", {"std": 1}, r"algorithm\.options\.std = 1: Expected `bool`"),
        ("grpo", {"clip_low": -0.1}, r"algorithm\.options\.clip_low = -0\.1: .*>= 0"),
        ("grpo", {"kl": nan}, r"algorithm\.options\.kl = nan"),
        ("dr-grpo", {"length": 0}, r"algorithm\.options\.length = 0"),
        ("grpo", {"kl": 0.04}, r"'grpo' needs the log-probs of a reference model"),
        ("scalerl+tis", {}, r"correct for the sampler twice, by Truncate\(lo=0\.0, hi=5\.0\) and"),
    ],
)
def test_what_is_not_understood_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options)


def test_the_rewards_it_reads_are_part_of_an_algorithm() -> None:
    assert make("rloo", {}).rewards == ("outcome",)
    assert make("rloo", {"reward": "style"}).rewards == ("style",)


def test_a_reward_that_no_rollout_has_is_refused() -> None:
    algo = make("grpo", {"reward": "stile"})
    with pytest.raises(TrainingError, match=r"none of 12 rollouts has a reward 'stile'.*'style'"):
        current(algo, padded(0))


@pytest.mark.parametrize(
    "name",
    ["ppo", "reinforce++", "rft", "mt-grpo", "dpo"],
)
@pytest.mark.parametrize("reward", ["role:tact", "transition:score"])
def test_rewards_of_roles_and_calls_are_not_taken_for_those_of_rollouts(
    name: str, reward: str
) -> None:
    refuses_rewards_of_more_than_rollouts(name, reward)


def refuses_rewards_of_more_than_rollouts(name: str, reward: str) -> None:
    """They were read at the places of rollouts: the number of another role or call."""
    algo = make(name, {"reward": reward}, streams=("old", "sampler", "reference", "values"))
    calls = [Call(role=role, rewards={"score": 1.0, "turn": 0.0}) for role in ("a", "b")]
    plays = [Play(calls, tact={"a": x, "b": -x}, greedy=x > 0) for x in (1.0, 0.0)]
    batch = world(*plays, values=[0.0] * 4)
    zeros = torch.zeros(4)
    with pytest.raises(TrainingError, match=f"one reward per rollout, and '{reward}' has 4 values"):
        loss_terms(algo, batch, GivenLogProbs(old=zeros, reference=zeros))


def test_a_reward_of_the_only_role_is_one_of_rollouts() -> None:
    batch = world(*(Play([Call(), Call()], outcome=x, tact={"agent": x}) for x in (1.0, 0.0)))
    of_roles, of_rollouts = (
        compute_advantages(make("reinforce++", {"reward": reward}), batch)
        for reward in ("role:tact", "outcome")
    )
    assert of_roles.tolist() == of_rollouts.tolist()


def test_a_plain_credit_function_keeps_its_reward_beside_that_of_a_filter(tmp_path: Path) -> None:
    (tmp_path / "mine_credit.py").write_text("def mine(batch): return batch.rewards['style']\n")
    options = {"credit": "mine_credit.py:mine", "credit_reward": "style"}
    assert make("dapo+credit", options, root=tmp_path).rewards == ("style", "outcome")
    assert make("grpo+credit", options, root=tmp_path).rewards == ("style",)
