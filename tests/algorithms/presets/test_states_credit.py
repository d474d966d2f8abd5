"""Calls compared in the same state, against naive credit and published losses."""

from __future__ import annotations

import random
from statistics import fmean

import torch

from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from tests.algorithms.naive import naive_batch_td, naive_histories
from tests.algorithms.presets.limits import binary
from tests.algorithms.presets.plays import Case, checked, tokens
from tests.algorithms.worlds import Call, Play, world

CASES: dict[str, Case] = {
    "hgpo": (
        tokens(lambda plays: naive_histories(plays, "outcome", 0.95, 2, False)), "token", "rows", {}
    ),
    "rloo+hgpo": (
        tokens(lambda plays: naive_histories(plays, "outcome", 0.9, 1, True)), "none", "sums",
        {"hgpo_gamma": 0.9, "hgpo_depth": 1, "hgpo_norm": "std"},
    ),
    "batch-td": (
        tokens(lambda plays: naive_batch_td(plays, "p", 0.9)), "token", "rows",
        {"reward": "transition:p", "gamma": 0.9},
    ),
    "gspo+batch-td": (
        tokens(lambda plays: naive_batch_td(plays, "outcome", 1.0)), "row", "rows", {}
    ),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)


def test_batch_td_is_unbiased_where_states_show_what_matters() -> None:
    """All groups of three rollouts; how often the action was 1 decides, and is seen."""
    names = ["rloo", "batch-td"]
    exact, ours = binary(
        names, lambda path: float(sum(path) >= 2), lambda path: (len(path), sum(path)), 3, 3
    )
    assert torch.allclose(ours.mean(0), exact.mean(0), atol=0.012)  # by how far actions seem missed
    assert ours.var(0).sum() < 0.9 * exact.var(0).sum()


def test_batch_td_is_no_worse_than_broadcast_where_states_show_nothing() -> None:
    exact, ours = binary(["rloo", "batch-td"], lambda path: float(sum(path) >= 2), len, 3, 3)
    assert torch.allclose(ours.mean(0), exact.mean(0), atol=1e-3)
    assert ours.var(0).sum() <= exact.var(0).sum()


def test_batch_td_knows_how_late_it_is_where_states_do_not_show_it() -> None:
    """Three steps lead to the goal and six calls may be made, each with a remark, so that no
    history occurs twice. After three calls at the start only a step can still win, once in four."""
    dice, plays, calls = random.Random(0), list[Play](), list[tuple[int, int, int]]()
    for _ in range(256):
        place, said = 0, list[Call]()
        while len(said) < 6 and place < 3:
            step = dice.randrange(2)
            calls.append((len(said), place, step))
            said.append(Call(state=place, node=f"{place}/{step}/{dice.randrange(9)}"))
            place += step
        plays.append(Play(said, float(place == 3)))
    ours = compute_advantages(make("batch-td", {}), world(*plays)).tolist()
    stay, go = (
        fmean(a for a, at in zip(ours, calls, strict=True) if at == (3, 0, step)) for step in (0, 1)
    )
    assert 0.15 < go - stay < 0.35


def test_batch_td_credits_the_call_that_decided_where_later_states_do_not_show_it() -> None:
    """Sixteen rollouts of six calls of four actions, of which the third alone decides."""
    dice = random.Random(0)
    done = [[dice.randrange(4) for _ in range(6)] for _ in range(16)]
    plays = [
        Play([Call(state=n, node=f"{n}/{a}") for n, a in enumerate(path)], float(path[2] == 1))
        for path in done
    ]
    ours, broadcast = (
        compute_advantages(make(name, {}), world(*plays)).view(16, 6)
        for name in ("batch-td", "rloo")
    )
    right = torch.tensor([path[2] == 1 for path in done])
    assert ours[right, 2].mean() - ours[~right, 2].mean() > 0.9
    idle = [0, 1, 3, 4, 5]
    assert ours[:, idle].square().mean() < 0.5 * broadcast[:, idle].square().mean()
