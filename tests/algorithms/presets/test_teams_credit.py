"""Teams and self-play, against naive credit and published losses."""

from __future__ import annotations

import pytest

from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from tests.algorithms.naive import compare
from tests.algorithms.presets.plays import (
    Case,
    Plays,
    calls,
    checked,
    copied,
    missing,
    others,
    outcome,
    per_outcome,
    process,
    role,
    tokens,
    white,
)
from tests.algorithms.worlds import NAN, Call, Play, world


def faded(plays: Plays) -> list[float]:
    left = [len(play.calls) - 1 - i for play in plays for i in range(len(play.calls))]
    return [a * 0.5**n for a, n in zip(outcome(plays, True), left, strict=True)]


def role_and_turn(play: Play, i: int) -> object:
    return play.group, play.calls[i].role, i


def highest(plays: Plays) -> list[float]:
    def best(play: Play) -> float:
        known = [o.outcome for o in plays if o.group == play.group and o.outcome == o.outcome]
        return play.outcome - max(known, default=NAN)

    return copied([best(play) for play in plays], plays)


def best_answers(plays: Plays) -> list[float]:
    found: dict[object, list[float]] = {}
    x = process(plays)
    keys = [role(play, i) for play in plays for i in range(len(play.calls))]
    for k, value in zip(keys, x, strict=True):
        found.setdefault(k, []).extend([value] if value == value else [])
    return [value - max(found[k], default=NAN) for k, value in zip(keys, x, strict=True)]


def sage(plays: Plays, values: list[float]) -> list[float]:
    tact = [
        (call.role, play.tact[call.role]) for play in plays for call in play.calls
        for _ in range(call.tokens)
    ]  # fmt: skip
    each = {
        role: iter(white([x for r, x in tact if r == role], 1e-8)) for role in ("actor", "critic")
    }
    return [next(each[role]) for role, _ in tact]


def maporl(plays: Plays) -> list[float]:
    made = [(call.role, call.rewards["p"] - call.rewards["v"]) for p in plays for call in p.calls]
    each = {role: iter(white([x for r, x in made if r == role])) for role in ("actor", "critic")}
    return [next(each[role]) for role, _ in made]


def prompts(plays: Plays) -> list[float]:
    def node(play: Play, i: int) -> object:
        return (id(play), i) if play.calls[i].node is None else play.calls[i].node

    def place(play: Play, i: int) -> object:
        return play.group, play.calls[i].role, node(play, i - 1) if i else None

    return calls(plays, process(plays), place, False)


def tact(plays: Plays) -> list[float]:
    """Every role of every rollout has its reward, whether it made a call or not."""
    entries = [(play, role) for play in plays for role in ("actor", "critic")]
    x = [play.tact[role] for play, role in entries]
    credit = missing(compare([(play.group, role) for play, role in entries], x, False), x)
    by_role = {(id(p), role): a for (p, role), a in zip(entries, credit, strict=True)}
    return [by_role[id(play), call.role] for play in plays for call in play.calls]


CASES: dict[str, Case] = {
    "at-grpo": (
        tokens(lambda plays: calls(plays, per_outcome(plays), role_and_turn)), "token", "rows", {}
    ),
    "at-grpo prompt": (
        tokens(prompts), "token", "rows",
        {"reward": "transition:p", "within": "prompt", "std": False},
    ),
    "magrpo": (tokens(outcome), "none", "sums", {}),
    "magrpo max": (tokens(highest), "none", "sums", {"baseline": "max"}),
    "magrpo loo": (tokens(others), "none", "sums", {"baseline": "loo"}),
    "magrpo none": (tokens(per_outcome), "none", "sums", {"baseline": "none"}),
    "sage": (sage, "token", "tokens", {"reward": "role:tact"}),
    "maporl": (
        tokens(maporl), "token", "tokens", {"reward": "transition:p", "value": "transition:v"}
    ),
    "marti": (
        tokens(lambda plays: calls(plays, process(plays), role_and_turn)), "token", "rows",
        {"reward": "transition:p"},
    ),
    "magrpo cross": (
        tokens(lambda plays: calls(plays, process(plays), role, False)), "none", "sums",
        {"mode": "cross", "reward": "transition:p"},
    ),
    "magrpo cross max": (
        tokens(best_answers), "none", "sums",
        {"mode": "cross", "reward": "transition:p", "baseline": "max"},
    ),
    "shapley": (tokens(tact), "token", "rows", {"reward": "role:tact"}),
    "difference": (tokens(tact), "token", "rows", {"reward": "role:tact"}),
    "difference none": (
        tokens(lambda plays: [play.tact[call.role] for play in plays for call in play.calls]),
        "token", "rows", {"reward": "role:tact", "baseline": "none"},
    ),
    "grpo+mean-by": (
        tokens(lambda plays: outcome(plays, True)), "token", "roles",
        {"mean_by_units": ["role"]},
    ),
    "grpo+call-discount": (tokens(faded), "token", "rows", {"call_discount_gamma": 0.5}),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)


def test_an_episode_of_one_answer_may_have_the_reward_of_its_rollout() -> None:
    algo = make("maporl", {"reward": "outcome"}, streams=("old", "sampler", "values"))
    calls = [Call(role="a"), Call(role="b")]
    batch = world(Play(calls, outcome=1.0), Play(calls, outcome=0.0), values=[0.0] * 4)
    up = 0.5**0.5
    assert compute_advantages(algo, batch).tolist() == pytest.approx([up, up, -up, -up], rel=1e-5)
