"""Presets for agents against naive credit per call and published losses under autograd."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import compute_advantages, loss_terms, psi
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.catalogue import make
from agentrl.config import AlgorithmConfig
from agentrl.errors import ConfigError
from tests.algorithms.limits import binary
from tests.algorithms.naive import (
    compare,
    naive_auto,
    naive_batch_td,
    naive_bi_level,
    naive_gae,
    naive_hindsight,
    naive_hiper,
    naive_histories,
    naive_peers,
    naive_siblings,
    naive_tree,
    returns,
    rewards_of,
)
from tests.algorithms.worlds import NAN, Call, Play, random_plays, world

Plays = list[Play]
Naive = Callable[[Plays, list[float]], list[float]]
"""Rollouts and the critic's values per token to advantages per token; NaN: not in the loss."""


def tokens(per_call: Callable[[Plays], list[float]]) -> Naive:
    def spread(plays: Plays, values: list[float]) -> list[float]:
        sizes = [call.tokens for play in plays for call in play.calls]
        credit = per_call(plays)
        return [a for a, n in zip(credit, sizes, strict=True) for _ in range(n)]

    return spread


def copied(x: list[float], plays: Plays) -> list[float]:
    return [a for a, play in zip(x, plays, strict=True) for _ in play.calls]


def missing(a: list[float], x: list[float]) -> list[float]:
    return [NAN if value != value else credit for credit, value in zip(a, x, strict=True)]


def outcome(
    plays: Plays, std: bool = False, key: Callable[[Play, int], object] = lambda play, u: play.group
) -> list[float]:
    """Rollouts compared, per call."""
    x = [play.outcome for play in plays]
    keys = [key(play, u) for u, play in enumerate(plays)]
    return copied(missing(compare(keys, x, std), x), plays)


def calls(
    plays: Plays, x: list[float], key: Callable[[Play, int], object], std: bool = True
) -> list[float]:
    """Calls compared by a key of (rollout, number of the call)."""
    keys = [key(play, i) for play in plays for i in range(len(play.calls))]
    return missing(compare(keys, x, std), x)


def total(*terms: tuple[list[float], float]) -> list[float]:
    out = []
    for values in zip(*(a for a, _ in terms), strict=True):
        known = [(v, w) for v, (_, w) in zip(values, terms, strict=True) if v == v]
        out.append(sum(v * w for v, w in known) if known else NAN)
    return out


def white(a: list[float], eps: float = 1e-6) -> list[float]:
    known = [x for x in a if x == x]
    return [(x - fmean(known)) / (stdev(known) + eps) for x in a]


def per_outcome(plays: Plays) -> list[float]:
    return copied([play.outcome for play in plays], plays)


def process(plays: Plays) -> list[float]:
    return [call.rewards["p"] for play in plays for call in play.calls]


def ppo(plays: Plays, values: list[float]) -> list[float]:
    """Token by token, the reward at the last one of a rollout."""
    out: list[float] = []
    for play in plays:
        n = sum(call.tokens for call in play.calls)
        v, values = values[:n], values[n:]
        unknown = play.outcome != play.outcome and play.calls[-1].truncated
        a, last = [0.0] * n, 0.0
        for t in reversed(range(n)):
            r = (v[t] if unknown else play.outcome) if t == n - 1 else 0.0
            after = v[t + 1] if t < n - 1 else 0.0
            last = r + after - v[t] + 0.95 * last
            a[t] = last
        out += a
    return white(out, 1e-8)


def ragen(plays: Plays, values: list[float]) -> list[float]:
    return white(naive_bi_level(plays, values, "outcome"), 1e-8)


def hiper(plays: Plays) -> list[float]:
    return total((white(naive_hiper(plays, "low")), 1), (white(naive_hiper(plays, "high")), 1))


def prime(plays: Plays) -> list[float]:
    loo = []
    for play in plays:
        others = [
            o.outcome
            for o in plays
            if o is not play and o.group == play.group and o.outcome == o.outcome
        ]
        centred = play.outcome - fmean(others) if others else 0.0 * play.outcome
        loo.append(0.0 if abs(centred) < 1e-9 else centred)
    steps: list[float] = []
    for play in plays:
        means = []
        for other in plays:
            known = [r for r in rewards_of(other, "p") if r == r]
            if other is not play and other.group == play.group and known:
                means.append(fmean(known))
        own = rewards_of(play, "p")
        alone = not means or all(r != r for r in own)
        steps += returns([0.0 * r if alone else r - fmean(means) for r in own], 1.0)
    return total((copied(loo, plays), 1), (steps, 1))


def whole_prime(plays: Plays, values: list[float]) -> list[float]:
    return white(tokens(prime)(plays, values), 1e-8)


def faded(plays: Plays) -> list[float]:
    left = [len(play.calls) - 1 - i for play in plays for i in range(len(play.calls))]
    return [a * 0.5**n for a, n in zip(outcome(plays, True), left, strict=True)]


def roles(plays: Plays) -> list[float]:
    """A rollout counts once in each role that it has."""
    entries = [(play, role) for play in plays for role in sorted({c.role for c in play.calls})]
    x = [play.outcome for play, _ in entries]
    credit = compare([(play.group, role) for play, role in entries], x, True)
    by_role = {(id(p), role): a for (p, role), a in zip(entries, missing(credit, x), strict=True)}
    return [by_role[id(play), call.role] for play in plays for call in play.calls]


def agreeing(plays: Plays) -> list[float]:
    host = outcome(plays, True)
    g = [x for play in plays for x in returns(rewards_of(play, "p"), 0.9)]
    step = calls(plays, g, lambda play, i: play.group, False)
    gated = [
        NAN if a != a or h != h else a if a * h > 0 else 0.0
        for a, h in zip(step, host, strict=True)
    ]
    return total((host, 1), (gated, 0.5))


def hindsight(plays: Plays, gamma: float, weight: float) -> list[float]:
    host, q = outcome(plays, True), naive_hindsight(plays, gamma)
    corrections = calls(plays, q, lambda play, i: play.group)
    masked = [
        NAN if a != a or h != h else a if a >= 0 or h < 0 else 0.0
        for a, h in zip(corrections, host, strict=True)
    ]
    return total((host, 1), (masked, weight))


def gae(plays: Plays) -> list[float]:
    return white(naive_gae(plays, "outcome", 0.9, 0.8))


def turn(play: Play, i: int) -> object:
    return play.group, i


def role(play: Play, i: int) -> object:
    return play.group, play.calls[i].role


def role_and_turn(play: Play, i: int) -> object:
    return play.group, play.calls[i].role, i


def tree(play: Play, u: int) -> object:
    first = play.calls[0].node
    return u if first is None else (play.group, first)


def mt_grpo(plays: Plays) -> list[float]:
    """A rollout without a turn reward is compared by the sum of both."""
    both = total((outcome(plays, True), 1), (calls(plays, process(plays), turn), 0.5))
    x = [
        play.outcome + 0.5 * sum(r for c in play.calls if (r := c.rewards["p"]) == r)
        for play in plays
    ]
    summed = copied(missing(compare([play.group for play in plays], x, True), x), plays)
    without = [all(c.rewards["p"] != c.rewards["p"] for c in play.calls) for play in plays]
    mask = [none for play, none in zip(plays, without, strict=True) for _ in play.calls]
    return [s if none else b for s, b, none in zip(summed, both, mask, strict=True)]


def gigpo(plays: Plays) -> list[float]:
    return total((outcome(plays), 1), (naive_histories(plays, "outcome", 0.95, 0, False), 0.5))


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


def others(plays: Plays) -> list[float]:
    def centred(play: Play) -> float:
        rest = [o.outcome for o in plays if o is not play and o.group == play.group]
        known = [x for x in rest if x == x]
        a = play.outcome - fmean(known) if known else 0.0 * play.outcome
        return 0.0 if abs(a) < 1e-9 else a

    return copied([centred(play) for play in plays], plays)


def m_grpo(plays: Plays) -> list[float]:
    """The others' calls as M-GRPO has them: copied until every rollout has equally many."""
    entries = [play for play in plays if any(c.role == "actor" for c in play.calls)]
    x = [play.outcome for play in entries]
    lead = missing(compare([play.group for play in entries], x, True), x)
    by_play = {id(play): a for play, a in zip(entries, lead, strict=True)}
    copies: dict[int, list[float]] = {}
    for play in plays:
        known = [c.rewards["p"] for c in play.calls if c.role == "critic"]
        known = [r for r in known if r == r]
        for r in known:
            copies.setdefault(play.group, []).extend([r] * (60 // len(known)))
    out = []
    for play in plays:
        for call in play.calls:
            r, all = call.rewards["p"], copies.get(play.group, [])
            if call.role == "actor":
                out.append(by_play[id(play)])
            elif r != r:
                out.append(NAN)
            else:
                centred = r - fmean(all)
                flat = len(set(all)) < 2 or abs(centred) < 1e-9
                out.append(0.0 if flat else centred / (pstdev(all) + 1e-6))
    return out


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


GAE = {"value": "transition:v", "gamma": 0.9, "lam": 0.8}
STREAM = {"scope": "transition", "gamma": 0.9, "weight": 0.5, "gate": "agree"}
HIGH = {"high": "transition:high", "low": "transition:v", "gamma": 0.9, "lam": 0.8}
Case = tuple[Naive, str, str, Mapping[str, Any]]
"""Credit, clip (token, row, none), average (rows, tokens, sums), options."""
CASES: dict[str, Case] = {
    "ppo": (ppo, "token", "tokens", {}),
    "gigpo": (tokens(gigpo), "token", "rows", {"weight": 0.5}),
    "gspo+gigpo": (
        tokens(lambda plays: total(
            (outcome(plays, True), 1), (naive_histories(plays, "outcome", 0.95, 0, True), 1)
        )),
        "row", "rows", {"gigpo_norm": "std"},
    ),
    "hgpo": (
        tokens(lambda plays: naive_histories(plays, "outcome", 0.95, 2, False)), "token", "rows", {}
    ),
    "rloo+hgpo": (
        tokens(lambda plays: naive_histories(plays, "outcome", 0.9, 1, True)), "none", "sums",
        {"hgpo_gamma": 0.9, "hgpo_depth": 1, "hgpo_norm": "std"},
    ),
    "mt-grpo": (
        tokens(mt_grpo), "token", "rows", {"turn_reward": "transition:p", "weight": 0.5},
    ),
    "dr-mas": (tokens(lambda plays: calls(plays, per_outcome(plays), role)), "token", "rows", {}),
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
    "m-grpo": (tokens(m_grpo), "token", "pairs", {"main": "actor", "sub_reward": "transition:p"}),
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
    "grpo+equal": (
        tokens(lambda plays: outcome(plays, True)), "token", "roles",
        {"equal_units": ["role"]},
    ),
    "tree-grpo": (
        tokens(lambda plays: total((outcome(plays, True), 1), (outcome(plays, True, tree), 1))),
        "token", "rows", {},
    ),
    "gspo+tree": (
        tokens(lambda plays: total((outcome(plays, True), 1), (outcome(plays, True, tree), 0.5))),
        "row", "rows", {"tree_weight": 0.5},
    ),
    "auto": (tokens(lambda plays: naive_auto(plays, "outcome", 1.0, 0.5)), "token", "rows", {}),
    "auto process": (
        tokens(lambda plays: naive_auto(plays, "p", 0.9, 0.8)), "token", "rows",
        {"reward": "transition:p", "gamma": 0.9, "lam": 0.8},
    ),
    "auto none": (
        tokens(lambda plays: naive_peers(plays, "outcome", 1.0, 0.0)), "token", "rows",
        {"std": False, "lam": 0.0},
    ),
    "peers": (
        tokens(lambda plays: naive_peers(plays, "p", 0.9, 0.8)), "token", "rows",
        {"reward": "transition:p", "gamma": 0.9, "lam": 0.8},
    ),
    "batch-td": (
        tokens(lambda plays: naive_batch_td(plays, "p", 0.9)), "token", "rows",
        {"reward": "transition:p", "gamma": 0.9},
    ),
    "gspo+batch-td": (
        tokens(lambda plays: naive_batch_td(plays, "outcome", 1.0)), "row", "rows", {}
    ),
    "gspo+peers": (
        tokens(lambda plays: naive_peers(plays, "outcome", 1.0, 0.5)), "row", "rows", {}
    ),
    "hcapo": (
        tokens(lambda plays: hindsight(plays, 0.95, 1.0)), "token", "rows",
        {"hindsight_reward": "transition:w"},
    ),
    "gspo+hcapo": (
        tokens(lambda plays: hindsight(plays, 0.9, 0.5)), "row", "rows",
        {"hcapo_reward": "transition:w", "hcapo_gamma": 0.9, "hcapo_weight": 0.5},
    ),
    "treerl": (tokens(lambda plays: naive_tree(plays, True)), "token", "rows", {}),
    "vineppo": (tokens(naive_siblings), "token", "rows", {}),
    "c3": (tokens(naive_siblings), "token", "rows", {}),
    "treerl parent": (
        tokens(lambda plays: naive_tree(plays, False)), "token", "rows", {"how": "parent"}
    ),
    "agent-r1": (tokens(gae), "token", "rows", GAE),
    "turn-ppo": (tokens(gae), "token", "tokens", GAE),
    "pspo": (tokens(gae), "row", "rows", GAE),
    "reinforce+step-gae": (
        tokens(gae), "none", "sums",
        {"step_value": "transition:v", "step_gamma": 0.9, "step_lam": 0.8},
    ),
    "ragen": (ragen, "token", "tokens", {"gamma_high": 0.9, "gamma": 0.7, "lam": 0.8}),
    "hiper": (tokens(hiper), "token", "rows", HIGH | {"reward": "transition:p"}),
    "gspo+hiper": (
        tokens(hiper), "row", "rows",
        {f"hiper_{key}": value for key, value in HIGH.items()} | {"reward": "transition:p"},
    ),
    "archer": (tokens(process), "none", "sums", {"advantage": "transition:p"}),
    "prime": (whole_prime, "token", "tokens", {"process": "p"}),
    "istar": (
        tokens(lambda plays: total(
            (outcome(plays, True), 1),
            (calls(plays, process(plays), lambda play, i: play.group), 0.5),
        )),
        "token", "rows", {"process": "transition:p", "weight": 0.5},
    ),
    "streams": (
        tokens(agreeing), "token", "rows",
        {"streams": {"outcome": {"norm": "std"}, "p": STREAM}},
    ),
    "gspo+process": (tokens(agreeing), "row", "rows", {"process_streams": {"p": STREAM}}),
    "grpo+fade": (tokens(faded), "token", "rows", {"fade_gamma": 0.5}),
    "grpo+per-role": (tokens(roles), "token", "rows", {}),
    "dr-grpo+only": (
        tokens(lambda plays: [
            a if call.role == "critic" else NAN
            for a, call in zip(outcome(plays), (c for p in plays for c in p.calls), strict=True)
        ]),
        "token", "rows", {"only_roles": ["critic"], "length": 1},
    ),
}  # fmt: skip


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


def sample(seed: int) -> tuple[Plays, Batch]:
    plays = random_plays(seed)
    for play in plays:
        for call in play.calls:
            call.node = call.node and f"{play.group}:{call.node}"
            call.rewards = {**call.rewards, "high": call.rewards["w"] if call.state == 0 else NAN}
    n = sum(call.tokens for play in plays for call in play.calls)
    values = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return plays, world(*plays, values=values.tolist())


def test_peers_credits_every_call_where_no_state_is_seen_twice() -> None:
    """Also calls at turns that no other rollout reached. With a discount a call's return depends on
    how many follow, so that a short failure may be better than a long success."""
    plays = [
        Play([Call((u, i)) for i in range(n)], float(u % 2)) for u, n in enumerate((2, 9, 3, 4))
    ]
    a, discounted = (
        compute_advantages(make("peers", {"gamma": gamma}, streams=("old",)), world(*plays))
        for gamma in (1.0, 0.5)
    )
    for u, rollout in enumerate(a.split([2, 9, 3, 4])):
        assert rollout.tolist() == pytest.approx([2 / 3 if u % 2 else -2 / 3] * len(rollout))
    _, long, *_ = discounted.split([2, 9, 3, 4])
    assert long[0].item() == pytest.approx(0.5**8 - (0 + 0 + 0.5**3) / 3)
    assert long[-1].item() == pytest.approx(1 - (0 + 0 + 1) / 3)


@pytest.mark.parametrize("several", range(5))
def test_the_default_is_grpo_where_no_state_comes_again(several: int) -> None:
    """However many of the rollouts made several calls."""
    outcomes = enumerate((1.0, 0.0, 1.0, 0.5))
    plays = [
        Play([Call((n, i)) for i in range(2 if n < several else 1)], outcome)
        for n, outcome in outcomes
    ]
    default, grpo = (
        compute_advantages(make(name, {}, streams=("old",)), world(*plays))
        for name in (AlgorithmConfig().preset, "grpo")
    )
    assert torch.allclose(default, grpo, rtol=1e-12, atol=0)
    assert default.abs().min() > 0.1


def published(case: Case, plays: Plays, batch: Batch, p: Tensor, o: Tensor) -> Tensor:
    """-gradient of the loss in the log-probs; every call is a row."""
    naive, clip, average, options = case
    a = naive(plays, batch.values.tolist())
    leaf = p.clone().requires_grad_()
    rows: dict[int, list[Tensor]] = {}
    for t, call in enumerate(batch.token_transition.tolist()):
        if a[t] != a[t]:
            continue
        same = batch.token_transition == call
        lo, hi = (3e-4, 4e-4) if clip == "row" else (0.2, 0.2)
        lr = leaf[t] - o[t] if clip == "token" else (leaf - o)[same].mean()
        rho = lr.exp()
        if clip == "row":  # GSPO-token: the value of the row's ratio, the gradient of the token's
            rho = rho.detach() * (leaf[t] - leaf[t].detach()).exp()
        value = torch.minimum(rho * a[t], rho.clamp(1 - lo, 1 + hi) * a[t])
        rows.setdefault(call, []).append(leaf[t] * a[t] if clip == "none" else value)
    if average == "tokens":
        loss = torch.stack([x for row in rows.values() for x in row]).mean()
    elif average in ("pairs", "roles"):
        parts: dict[object, list[Tensor]] = {}
        for call, row in rows.items():
            role = int(batch.transition_role[call])
            pair = (int(batch.transition_rollout[call]), role)
            made = [torch.stack(row).mean()] if average == "pairs" else row
            parts.setdefault(pair if average == "pairs" else role, []).extend(made)
        loss = torch.stack([torch.stack(part).mean() for part in parts.values()]).mean()
    else:
        each = [torch.stack(row) for row in rows.values()]
        sums = average == "sums" or "length" in options
        loss = torch.stack([x.sum() if sums else x.mean() for x in each]).mean()
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_psi_is_minus_the_gradient_of_the_published_loss(name: str, seed: int) -> None:
    plays, batch = sample(seed)
    algo = make(name.split()[0], CASES[name][3], streams=("old", "sampler", "reference", "values"))
    draw = torch.Generator().manual_seed(seed)
    p, o = -torch.rand(2, batch.n_tokens, generator=draw, dtype=torch.float64)
    terms = loss_terms(algo, batch, GivenLogProbs(old=o))
    actual = psi(algo, terms, p, torch.arange(batch.n_tokens))
    expected = published(CASES[name], plays, batch, p, o)
    assert torch.allclose(actual, expected, rtol=1e-10, atol=1e-10)
    assert expected.abs().max() > 0


@pytest.mark.parametrize("name", CASES)
def test_hopeless_batches_give_no_nan(name: str) -> None:
    for outcome in (NAN, 0.0, 0.7):
        _, batch = sample(1)
        flat = {
            key: torch.full_like(x, outcome) if key in ("outcome", "transition:p") else x
            for key, x in batch.rewards.items()
        }
        batch.rewards.update(flat)
        algo = make(
            name.split()[0], CASES[name][3], streams=("old", "sampler", "reference", "values")
        )
        terms = loss_terms(algo, batch, GivenLogProbs(), fresh=True)
        p = batch.behaviour.double()
        assert psi(algo, terms, p, torch.arange(batch.n_tokens)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, r"'ppo' needs the values of a critic, which this run does not"),
        ("agent-r1", {"gamma": 1.5}, r"options\.gamma = 1\.5: .*<= 1"),
        ("streams", {}, r"algorithm\.options\.streams: required by 'streams'; set it"),
        ("magrpo", {"reward": "transition:p"}, r"in aligned mode .* is a reward of rollouts"),
        ("magrpo", {"mode": "cross", "reward": "outcome"}, r"in cross mode .* of transitions"),
        ("grpo+only", {}, r"algorithm\.options\.only_roles: required by 'grpo\+only'"),
        ("grpo+only", {"only_roles": []}, r"only_roles = \[\]: .*length >= 1"),
        ("grpo+gigpo", {"weight": 2.0}, r"options\.weight: no option of 'grpo\+gigpo'"),
        ("remax+per-role", {}, r"\+per-role cannot split a baseline or weight of whole rollouts"),
        (
            "streams",
            {"streams": {"p": {"wieght": 1.0}}},
            r"options\.streams\.p\.wieght: unknown; did you mean 'weight'\?",
        ),
        ("streams", {"streams": {"p": {"scope": "call"}}}, r"Invalid enum value 'call'"),
        (
            "streams",
            {"mix": "rewards", "streams": {"p": {"clip": 1.0}}},
            r"streams\.p\.clip: has no effect on streams mixed as rewards",
        ),
        (
            "streams",
            {"mix": "returns", "streams": {"p": {"gate": "agree"}}},
            r"streams\.p\.gate: has no effect on streams mixed as returns",
        ),
        ("streams", {"streams": {"p": {"potential": True}}}, r"set scope = 'transition'"),
        (
            "streams",
            {"streams": {"p": {"gate": "agree"}}},
            r"streams\.p\.outcome = 'outcome': there is no stream of that name",
        ),
        (
            "streams",
            {"gamma": 0.9, "streams": {"p": {}}},
            r"gamma and norm are those of a sum of returns or rewards",
        ),
    ],
)
def test_what_cannot_matter_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options)


def test_a_stream_may_be_one_that_a_step_lacks() -> None:
    streams = {"outcome": {}, "p": {"scope": "transition", "required": False}}
    algo = make("streams", {"streams": streams})
    assert (algo.rewards, algo.optional) == (("outcome", "transition:p"), ("transition:p",))
    algo = make("grpo+process", {"process_streams": {"p": streams["p"]}})
    assert (algo.rewards, algo.optional) == (("outcome", "transition:p"), ("transition:p",))


def test_what_an_algorithm_needs_of_a_run_is_read_off_its_record() -> None:
    assert make("remax", {}).greedy
    assert not make("grpo", {}).greedy
    assert make("ppo", {}, streams=("old", "sampler", "values")).critic
    assert not make("agent-r1", {"value": "transition:v"}).critic
