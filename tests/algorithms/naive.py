"""Credit over calls as loops over Python lists: one number per call, NaN = missing."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, stdev

from .worlds import NAN, Play

Plays = list[Play]


def rewards_of(play: Play, name: str) -> list[float]:
    if name == "outcome":
        return [NAN] * (len(play.calls) - 1) + [play.outcome]
    return [call.rewards[name] for call in play.calls]


def returns(rewards: list[float], gamma: float) -> list[float]:
    out = []
    for i in range(len(rewards)):
        later = [(j, r) for j, r in enumerate(rewards) if j >= i and r == r]
        out.append(sum(r * gamma ** (j - i) for j, r in later) if later else NAN)
    return out


def compare(keys: list[object], x: list[float], std: bool) -> list[float]:
    members = defaultdict(list)
    for key, value in zip(keys, x, strict=True):
        if value == value:
            members[key].append(value)
    out = []
    for key, value in zip(keys, x, strict=True):
        others = members[key]
        if value != value or len(set(others)) < 2:
            out.append(0.0)
            continue
        centred = value - fmean(others)
        centred = 0.0 if abs(centred) < 1e-9 else centred
        scale = stdev(others) if std else 0.0
        out.append(centred / (scale + 1e-6 * min(1.0, 100 * scale)) if std else centred)
    return out


def naive_histories(plays: Plays, name: str, gamma: float, depth: int, std: bool) -> list[float]:
    x = [g for play in plays for g in returns(rewards_of(play, name), gamma)]
    seen = [
        (play.group, tuple(c.state for c in reversed(play.calls[: i + 1])))
        for play in plays
        for i in range(len(play.calls))
    ]
    total, share = [0.0] * len(x), [0.0] * len(x)
    for k in range(depth + 1):
        keys: list[object] = [
            (group, states[: k + 1] + (None,) * (k + 1 - len(states))) for group, states in seen
        ]
        for i, a in enumerate(compare(keys, x, std)):
            if a:
                total[i], share[i] = total[i] + (k + 1) * a, share[i] + k + 1
    return [
        NAN if x[i] != x[i] else total[i] / share[i] if share[i] else 0.0 for i in range(len(x))
    ]


def naive_gae(plays: Plays, name: str, gamma: float, lam: float) -> list[float]:
    out = []
    for play in plays:
        r, v = list(rewards_of(play, name)), [call.rewards["v"] for call in play.calls]
        if play.calls[-1].truncated and r[-1] != r[-1]:
            r[-1] = v[-1]  # cut off without a reward: all that is known of the return
        known = returns(r, 1.0)
        advantage, last = [0.0] * len(r), 0.0
        for i in reversed(range(len(r))):
            after = v[i + 1] if i + 1 < len(r) else 0.0
            last = (0.0 if r[i] != r[i] else r[i]) + gamma * after - v[i] + gamma * lam * last
            advantage[i] = last
        out += [NAN if g != g else a for g, a in zip(known, advantage, strict=True)]
    return out


def naive_peers(plays: Plays, name: str, gamma: float, lam: float) -> list[float]:
    """Lambda-returns with the mean returns of other rollouts in the same state as values, and
    returns for the share that states and actions do not explain; minus means of the returns of
    other rollouts, weighted by the squared norms of their scores."""
    at = [(u, i) for u, play in enumerate(plays) for i in range(len(play.calls))]
    call = [plays[u].calls[i] for u, i in at]
    g, total = (
        [x for play in plays for x in returns(rewards_of(play, name), rate)] for rate in (gamma, 1)
    )
    share = naive_explained(plays, name)
    mixed = [share * one + (1 - share) * other for one, other in zip(g, total, strict=True)]
    norm = [max(c.tokens * (1 - math.exp(c.logprob)) ** 2, 1e-6) for c in call]

    def of_others(c: int, x: list[float], w: list[float], by: str) -> float:
        same = [
            d
            for d in range(len(at))
            if at[d][0] != at[c][0]
            and plays[at[d][0]].group == plays[at[c][0]].group
            and (by != "state" or call[d].state == call[c].state)
            and (by != "turn" or at[d][1] == at[c][1])
            and x[d] == x[d]
        ]
        return sum(w[d] * x[d] for d in same) / sum(w[d] for d in same) if same else NAN

    one = [1.0] * len(at)
    target: list[float] = []
    for u, play in enumerate(plays):
        ours = [c for c in range(len(at)) if at[c][0] == u]
        given = rewards_of(play, name)
        n = len(ours)
        v = [of_others(c, g, one, "state") for c in ours]
        last = max((i for i in range(n) if v[i] == v[i]), default=n)
        worth = [g[c] for c in ours]
        if play.calls[-1].truncated and last < n and worth[last] != worth[last]:
            worth[: last + 1] = [0.0] * (last + 1)  # known, by the value of the last state
            given = [*given[:last], v[last], *given[last + 1 :]]
        r = [0.0 if value != value else value for value in given]
        base = [of_others(c, g, one, "group") for c in ours]
        aims = [NAN] * n
        for i in reversed(range(n)):
            if base[i] != base[i] or worth[i] != worth[i]:
                aims[i] = NAN if worth[i] != worth[i] else math.inf  # nothing to compare with
                continue
            later = [j for j in range(i + 1, n) if v[j] == v[j]]
            j = later[0] if later else n
            aims[i] = sum(gamma ** (k - i) * r[k] for k in range(i, j))
            if later:
                aims[i] += gamma ** (j - i) * ((1 - lam) * v[j] + lam * aims[j])
        target += aims

    best = [of_others(c, mixed, norm, "group") for c in range(len(at))]
    best = [0.0 if value != value else value for value in best]
    for by in ("turn", "state"):
        differs = [of_others(c, mixed, norm, by) - best[c] for c in range(len(at))]
        compared = [c for c in range(len(at)) if differs[c] == differs[c] and mixed[c] == mixed[c]]
        squares = sum(norm[c] * differs[c] ** 2 for c in compared)
        fit = sum(norm[c] * differs[c] * (mixed[c] - best[c]) for c in compared)
        fit = min(max(fit / squares, 0.0), 1.0) if squares > 1e-12 else 0.0
        best = [b + fit * (0.0 if d != d else d) for b, d in zip(best, differs, strict=True)]
    out = []
    for c, aim in enumerate(target):
        if aim != aim or aim == math.inf:
            out.append(NAN if aim != aim else 0.0)
            continue
        x = share * aim + (1 - share) * (total[c] if total[c] == total[c] else aim)
        a = x - best[c]
        out.append(0.0 if abs(a) < 1e-9 else a)
    return out


def naive_explained(plays: Plays, name: str) -> float:
    """Share of the variance of last rewards that the last state and action explain."""
    known = [
        u
        for u, play in enumerate(plays)
        if rewards_of(play, name)[-1] == rewards_of(play, name)[-1]
    ]
    x = [rewards_of(plays[u], name)[-1] for u in known]
    group: list[object] = [plays[u].group for u in known]
    last = [plays[u].calls[-1] for u in known]
    did: list[object] = [
        (g, c.role, c.state, ("own", u) if c.node is None else c.node)
        for u, g, c in zip(known, group, last, strict=True)
    ]

    def variance(by: list[object]) -> float:
        same = [[v for v, one in zip(x, by, strict=True) if one == key] for key in set(by)]
        squares = sum((v - fmean(values)) ** 2 for values in same for v in values)
        return squares / (len(x) - len(same)) if len(x) > len(same) else math.inf

    if variance(did) == math.inf:
        return 0.0
    return max(0.0, 1 - variance(did) / variance(group)) if variance(group) > 1e-12 else 1.0


def naive_components(
    x: list[float],
    wide: list[object],
    narrow: list[object],
    errors: float = 0.0,
    every: float | None = None,
) -> tuple[float, float]:
    """Variance within narrow groups and between them, by the sums of squares of the textbook.
    every: that within where no narrow group has two members."""
    nested: dict[object, dict[object, list[float]]] = {}
    for value, outer, inner in zip(x, wide, narrow, strict=True):
        nested.setdefault(outer, {}).setdefault(inner, []).append(value)
    kept = [list(inner.values()) for inner in nested.values() if len(inner) > 1]
    members = [group for groups in kept for group in groups]
    n, free = sum(map(len, members)), sum(len(group) - 1 for group in members)
    inside = sum((v - fmean(group)) ** 2 for group in members for v in group)
    within = inside / free if free else every or 0.0
    outside, unit = 0.0, float(n)
    for groups in kept:
        values = [v for group in groups for v in group]
        outside += sum(len(group) * (fmean(group) - fmean(values)) ** 2 for group in groups)
        unit -= sum(len(group) ** 2 for group in groups) / len(values)
    compared = len(members) - len(kept)
    outside -= (compared + errors * math.sqrt(2 * compared)) * within
    return within, max(0.0, outside / unit) if n else 0.0


def naive_batch_td(plays: Plays, name: str, gamma: float) -> list[float]:
    g = [x for play in plays for x in returns(rewards_of(play, name), gamma)]
    at = [(u, i) for u, play in enumerate(plays) for i in range(len(play.calls))]
    known = [c for c in range(len(at)) if g[c] == g[c]]
    call = [plays[u].calls[i] for u, i in at]
    group = [plays[u].group for u, _ in at]
    state: list[object] = [(group[c], call[c].role, call[c].state) for c in range(len(at))]
    turn: list[object] = [(group[c], call[c].role, i) for c, (_, i) in enumerate(at)]
    past: list[object] = []
    for c, (_, i) in enumerate(at):
        done = call[c - 1].node if i and call[c - 1].node is not None else c - 1
        past.append((past[c - 1], done, state[c]) if i else state[c])

    def mean(x: list[float], by: list[object], c: int, own: bool = True) -> tuple[float, int]:
        same = [x[d] for d in known if by[d] == by[c] and (own or at[d][0] != at[c][0])]
        return (fmean(same) if same else 0.0), len(same)

    def drawn(n: int, within: float, between: float) -> float:
        return n * between / (n * between + within) if n * between else 0.0

    def components(x: list[float], wide: list[object], narrow: list[object]) -> tuple[float, float]:
        return naive_components(*([y[c] for c in known] for y in (x, wide, narrow)))  # type: ignore[arg-type]

    apart: list[object] = [*zip(turn, state, strict=True)]
    history, timed = components(g, state, past), components(g, state, apart)
    many = len(set(group))
    x = list(g)
    for _ in range(max(len(play.calls) for play in plays)):
        v = [0.0] * len(at)
        for c in known:
            (ours, n), (now, m), (all_, _) = mean(g, past, c), mean(x, apart, c), mean(x, state, c)
            v[c] = all_ + drawn(m, timed[0], timed[1] * many) * (now - all_)
            v[c] += drawn(n, history[0], history[1] * many) * (ours - v[c])
        r = [y for play in plays for y in rewards_of(play, name)]
        for c in known:
            goes_on = c + 1 in known and at[c + 1][0] == at[c][0]
            x[c] = (0.0 if r[c] != r[c] else r[c]) + (gamma * v[c + 1] if goes_on else 0.0)
    missed = [one - other for one, other in zip(g, x, strict=True)]
    did: list[object] = [(state[c], call[c].node or ("own", c)) for c in range(len(at))]
    found: dict[object, tuple[float, float]] = {}
    every = components(missed, apart, did)[0]
    for one in {turn[c] for c in known}:
        inside = [c for c in known if turn[c] == one]
        parts = ([y[c] for c in inside] for y in (missed, apart, did))
        found[one] = naive_components(*parts, errors=3.0, every=every)  # type: ignore[arg-type]
    corrected = list(x)
    for c in known:
        (more, n), (all_, _) = mean(missed, did, c), mean(missed, state, c)
        corrected[c] += drawn(n, *found[turn[c]]) * (more - all_)
    x = corrected
    noise = components(x, turn, state)
    out = [NAN] * len(at)
    for c in known:
        base, others = mean(g, list(group), c, own=False)
        of_turn, n = mean(x, turn, c, own=False)
        base = of_turn if n else base
        of_state, n = mean(x, state, c, own=False)
        out[c] = x[c] - base - drawn(n, *noise) * (of_state - base) if others else 0.0
    return out


def naive_hindsight(plays: Plays, gamma: float) -> list[float]:
    """Returns of calls in hindsight, before they are compared; log-probs in hindsight are `w`."""
    out = []
    for play in plays:
        p = [math.exp(call.rewards["w"] / 5) for call in play.calls]
        known = [x for x in p if x == x]
        for x, g in zip(p, returns(rewards_of(play, "outcome"), gamma), strict=True):
            ratio = 1.0 if x != x else min(max(x / fmean(known), 0.8), 1.2)
            out.append(ratio * g)
    return out


def naive_tree(plays: Plays, both: bool) -> list[float]:
    def node(g: int, u: int, i: int) -> object:
        call = plays[u].calls[i]
        return (g, u, i) if call.node is None else (g, call.node)

    def mean(us: list[int]) -> float:
        values = [plays[u].outcome for u in us if plays[u].outcome == plays[u].outcome]
        return fmean(values) if values else NAN

    through = defaultdict(list)
    for u, play in enumerate(plays):
        for i in range(len(play.calls)):
            through[node(play.group, u, i)].append(u)
    out = []
    for u, play in enumerate(plays):
        root = mean([w for w, other in enumerate(plays) if other.group == play.group])
        parent = root
        for i in range(len(play.calls)):
            us = through[node(play.group, u, i)]
            value = mean(us)
            leaves = sum(plays[w].outcome == plays[w].outcome for w in us)
            step = value - parent
            if both and leaves:
                step = (step + value - root) / math.sqrt(leaves)
            out.append(step if play.outcome == play.outcome else NAN)
            parent = value
    return out


def naive_siblings(plays: Plays) -> list[float]:
    def node(u: int, i: int) -> object:
        call = plays[u].calls[i]
        return (u, i) if call.node is None else call.node

    def place(u: int, i: int) -> object:
        return (plays[u].group, node(u, i - 1) if i else None)

    def value(group: int, name: object) -> float:
        ends = [
            play.outcome
            for u, play in enumerate(plays)
            if play.group == group and name in [node(u, i) for i in range(len(play.calls))]
        ]
        known = [end for end in ends if end == end]
        return fmean(known) if known else NAN

    places = [(u, i) for u, play in enumerate(plays) for i in range(len(play.calls))]
    drawn = defaultdict(list)  # the samples of a place
    for u, i in places:
        if not plays[u].calls[i].repeats and not math.isnan(value(plays[u].group, node(u, i))):
            drawn[place(u, i)].append(node(u, i))
    out = []
    for u, i in places:
        others, own = list(drawn[place(u, i)]), value(plays[u].group, node(u, i))
        if node(u, i) in others:
            others.remove(node(u, i))
        alone = set(others) <= {node(u, i)}
        baseline = own if alone else fmean(value(plays[u].group, name) for name in others)
        centred = own - baseline
        centred = 0.0 if abs(centred) < 1e-9 else centred
        out.append(centred if plays[u].outcome == plays[u].outcome else NAN)
    return out


def naive_bi_level(plays: Plays, values: list[float], name: str) -> list[float]:
    out, position = [], 0
    for play in plays:
        r, tokens = rewards_of(play, name), [call.tokens for call in play.calls]
        v = [
            [values[position + sum(tokens[:i]) + k] for k in range(n)] for i, n in enumerate(tokens)
        ]
        position += sum(tokens)
        if play.calls[-1].truncated and r[-1] != r[-1]:
            r = [*r[:-1], v[-1][-1]]
        known, following, result = returns(r, 1.0), NAN, []
        for i in reversed(range(len(r))):
            reward = 0.0 if r[i] != r[i] else r[i]
            after = 0.0 if i + 1 == len(r) else v[i + 1][-1]
            a = reward + 0.9 * after - v[i][-1]
            a += 0.0 if i + 1 == len(r) else 0.9 * 0.8 * following
            following = a
            inner = [a]
            for k in reversed(range(tokens[i] - 1)):
                inner.insert(0, 0.7 * v[i][k + 1] - v[i][k] + 0.7 * 0.8 * inner[0])
            result[:0] = [x if known[i] == known[i] else NAN for x in inner]
        out += result
    return out


def naive_hiper(plays: Plays, part: str) -> list[float]:
    """Every call acts; those in state 0 begin a segment."""
    gamma, lam, out = 0.9, 0.8, []
    for play in plays:
        r, known = rewards_of(play, "p"), returns(rewards_of(play, "p"), 1.0)
        n = len(r)
        high = [c.rewards["w"] if c.state == 0 else NAN for c in play.calls]
        low = [c.rewards["v"] for c in play.calls]
        a_low, a_high = [0.0] * n, [NAN] * n
        starts = [i for i in range(n) if play.calls[i].state == 0]
        for i in reversed(range(n)):
            reward = 0.0 if r[i] != r[i] else r[i]
            if i + 1 == n:
                a_low[i] = reward - low[i]
            elif i + 1 in starts:
                a_low[i] = reward + gamma * high[i + 1] - low[i]
            else:
                a_low[i] = reward + gamma * low[i + 1] - low[i] + gamma * lam * a_low[i + 1]
        for k, i in reversed(list(enumerate(starts))):
            end = starts[k + 1] if k + 1 < len(starts) else n
            gain = sum(gamma ** (j - i) * r[j] for j in range(i, end) if r[j] == r[j])
            a_high[i] = gain - high[i]
            if end < n:
                decay = gamma ** (end - i)
                a_high[i] += decay * high[end] + decay * lam * a_high[end]
        chosen = a_low if part == "low" else a_high
        out += [a if g == g else NAN for g, a in zip(known, chosen, strict=True)]
    return out
