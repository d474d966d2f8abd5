"""Credit over calls as loops over Python lists: one number per call, NaN = missing."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from .worlds import NAN, Call, Play

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


@dataclass
class Known:
    """A call with a return whose group has another rollout with one."""

    number: int  # among all calls
    rollout: int
    turn: int
    call: Call
    group: int
    state: object
    action: object
    prompt: object
    r: float
    g: float = 0.0
    after: Known | None = None

    @property
    def norm(self) -> float:
        return max(self.call.tokens * (1 - math.exp(self.call.logprob)) ** 2, 1e-6)

    @property
    def chance(self) -> float:
        return math.exp(self.call.tokens * self.call.logprob)


def naive_known(plays: Plays, name: str, gamma: float) -> list[Known]:
    scored = [u for u, play in enumerate(plays) if any(r == r for r in rewards_of(play, name))]
    found, number = list[Known](), 0
    for u, play in enumerate(plays):
        rewards, ours, before = rewards_of(play, name), list[Known](), ()  # type: ignore[var-annotated]
        last = max((i for i, r in enumerate(rewards) if r == r), default=-1)
        others = [w for w in scored if w != u and plays[w].group == play.group]
        for i, call in enumerate(play.calls):
            said = ("own", u, i) if call.node is None else call.node
            if i <= last and others:
                r = 0.0 if rewards[i] != rewards[i] else rewards[i]
                state, prompt = (call.role, call.state), (call.role, before)
                ours.append(Known(number, u, i, call, play.group, state, said, prompt, r))
            before, number = said, number + 1  # type: ignore[assignment]
        for one, following in pairwise(ours):
            one.after = following
        found += ours
    if gamma == 1 and not any(c.r for c in found if c.after):
        for group in {c.group for c in found}:
            ends = [c for c in found if c.group == group and not c.after]
            lowest, largest = min(c.r for c in ends), max(abs(c.r) for c in ends)
            for c in ends:
                c.r = c.r - lowest if c.r - lowest > 1e-6 * largest else 0.0
    for c in reversed(found):
        c.g = c.r + (gamma * c.after.g if c.after else 0.0)
    return found


def naive_values(calls: list[Known], x: list[float]) -> list[float]:
    """Mean of the other rollouts in the state, moved along a line by how late it is; NaN: none."""
    late, off = [0.0] * len(x), [0.0] * len(x)
    for i, c in enumerate(calls):
        same = [j for j, d in enumerate(calls) if (d.group, d.state) == (c.group, c.state)]
        late[i] = c.turn - fmean(calls[j].turn for j in same)
        off[i] = x[i] - fmean(x[j] for j in same)
    values = []
    for c in calls:
        rest = [j for j, d in enumerate(calls) if d.rollout != c.rollout]
        same = [j for j in rest if (calls[j].group, calls[j].state) == (c.group, c.state)]
        if not same:
            values.append(NAN)
            continue
        moving = [j for j in rest if abs(late[j]) > 1e-12]
        slope = naive_fit([(late[j], off[j], 1.0) for j in rest], len(moving) - 1)
        earlier = c.turn - fmean(calls[j].turn for j in same)
        values.append(fmean(x[j] for j in same) + slope * earlier)
    return values


def naive_fit(points: list[tuple[float, float, float]], freedom: int) -> float:
    """Slope of weighted least squares through 0, by the share that noise does not explain."""
    squares = sum(w * x * x for x, _, w in points)
    if squares < 1e-20:
        return 0.0
    slope = sum(w * x * y for x, y, w in points) / squares
    rest = sum(w * (y - slope * x) ** 2 for x, y, w in points) / max(freedom, 1)
    return slope * max(0.0, 1 - rest / (slope * slope * squares)) if slope else 0.0


def naive_explained(calls: list[Known]) -> float:
    """Adjusted R squared of returns by state and action, with one more degree of freedom."""
    cells: dict[object, list[float]] = defaultdict(list)
    groups: dict[object, list[float]] = defaultdict(list)
    for c in calls:
        cells[c.group, c.state, c.action].append(c.g)
        groups[c.group].append(c.g)

    def inside(parts: dict[object, list[float]]) -> float:
        return sum((x - fmean(part)) ** 2 for part in parts.values() for x in part)

    freedom = len(calls) - len(groups)
    if not freedom or inside(groups) < 1e-20:
        return 0.0
    each = inside(groups) / freedom
    left = (inside(cells) + each) / (len(calls) - len(cells) + 1)
    met = sum(len(part) for part in cells.values() if len(part) > 1) / len(calls)
    return max(0.0, 1 - left / each) * met


def naive_effects(calls: list[Known], missed: list[float]) -> list[float]:
    """Trust at each call: 1 where actions explain no more of what is missed than by chance."""
    stages = [int(math.log2(c.turn + 1)) for c in calls]

    def square(members: list[int], said: str) -> float:
        """Squared norm of the sum of missed times score of these calls."""
        found = 0.0
        for context, stage in {(getattr(calls[i], said), stages[i]) for i in members}:
            seen = [
                i for i, c in enumerate(calls)
                if (getattr(c, said), stages[i]) == (context, stage) and c.norm > 1e-6
            ]  # fmt: skip
            here = [i for i in members if i in seen]
            total = sum(missed[i] for i in here)
            for action in {calls[i].action for i in here}:
                found += sum(missed[i] for i in here if calls[i].action == action) ** 2
            found -= 2 * total * sum(missed[i] * calls[i].chance for i in here)
            found += total**2 * fmean([calls[i].chance for i in seen] or [0.0])
        return found

    def noise(members: list[int], said: str) -> float:
        """Sum over groups of n times the variance of a rollout's sum of missed times score."""
        result = 0.0
        for group in {c.group for c in calls}:
            n = len({c.rollout for c in calls if c.group == group})
            ours = [i for i in members if calls[i].group == group]
            each = [
                square([i for i in ours if calls[i].rollout == u], said)
                for u in {c.rollout for c in calls if c.group == group}
            ]
            result += (n * sum(each) - square(ours, said)) / (n - 1)
        return result

    def fading(members: list[int], said: str, low: float, high: float) -> float:
        found = square(members, said)
        ratio = found / max(noise(members, said), 1e-300) if found > 0 else 0.0
        return min(max((high - ratio) / (high - low), 0.0), 1.0)

    every = list(range(len(calls)))
    overall = min(fading(every, said, 1.25, 2.5) for said in ("state", "prompt"))
    at = {
        stage: min(
            fading([i for i in every if stages[i] == stage], said, 1.5, 3.0)
            for said in ("state", "prompt")
        )
        for stage in set(stages)
    }
    return [min(overall, at[stage]) for stage in stages]


def naive_plain(calls: list[Known]) -> list[float]:
    """Mean of the others' returns at the same turn, or at their last call."""
    out = []
    for c in calls:
        others = list[float]()
        for u in {d.rollout for d in calls if d.group == c.group} - {c.rollout}:
            theirs = [d for d in calls if d.rollout == u]
            others.append(theirs[min(c.turn, len(theirs) - 1)].g)
        out.append(fmean(others))
    return out


def naive_peers(plays: Plays, name: str, gamma: float, lam: float) -> list[float]:
    """Lambda-returns with the values of states where the batch shows that these can be trusted,
    returns elsewhere; minus the mean of the others' returns, moved towards the state's value."""
    out = [
        0.0 if any(r == r for r in rewards_of(play, name)[i:]) else NAN
        for play in plays for i in range(len(play.calls))
    ]  # fmt: skip
    calls = naive_known(plays, name, gamma)
    if not calls:
        return out
    place = {c.number: i for i, c in enumerate(calls)}
    value, aim = naive_values(calls, [c.g for c in calls]), [0.0] * len(calls)
    for i, c in reversed(list(enumerate(calls))):
        aim[i] = c.r
        if c.after:
            v, more = value[place[c.after.number]], aim[place[c.after.number]]
            aim[i] += gamma * (more if v != v else (1 - lam) * v + lam * more)
    missed = [c.g - a for c, a in zip(calls, aim, strict=True)]
    centred = []
    for c, m in zip(calls, missed, strict=True):
        same = [
            missed[i] for i, d in enumerate(calls)
            if (d.group, d.state) == (c.group, c.state) and d.rollout != c.rollout
        ]  # fmt: skip
        centred.append(m - (fmean(same) if same else 0.0))
    ends, before = ([c for c in calls if (c.after is None) == last] for last in (True, False))
    before = [c for c in before if c.after and c.after.after is None]
    shown = min(naive_explained(some) if some else 0.0 for some in (ends, before))
    shown = min(max((shown - 0.15) / (0.5 - 0.15), 0.0), 1.0)
    trust = naive_effects(calls, centred)
    x = [c.g - shown * t * m for c, t, m in zip(calls, trust, missed, strict=True)]
    base = naive_plain(calls)
    moved = [
        0.0 if v != v else v - b for v, b in zip(naive_values(calls, x), base, strict=True)
    ]  # fmt: skip
    rollouts = len({c.rollout for c in calls})
    for i, c in enumerate(calls):
        points = [
            (moved[j], x[j] - base[j], d.norm)
            for j, d in enumerate(calls) if d.rollout != c.rollout
        ]  # fmt: skip
        fit = min(max(naive_fit(points, rollouts - 2), 0.0), 1.0)
        a = x[i] - base[i] - fit * moved[i]
        largest = max(abs(y) for y, d in zip(x, calls, strict=True) if d.group == c.group)
        out[c.number] = a if abs(a) > 1e-6 * largest else 0.0
    return out


def naive_auto(plays: Plays, name: str, gamma: float, lam: float) -> list[float]:
    """The credit of peers on GRPO's scale: over the standard deviation of returns in the group,
    every rollout with the same weight."""
    factor = []
    for play in plays:
        each = [
            [g for g in returns(rewards_of(other, name), 1.0) if g == g]
            for other in plays if other.group == play.group
        ]  # fmt: skip
        each = [g for g in each if g]
        n, mean = len(each), fmean(map(fmean, each)) if each else 0.0
        square = sum(fmean((x - mean) ** 2 for x in g) for g in each) / (n - 1) if n > 1 else 0.0
        scale = math.sqrt(square) + 1e-6
        factor += [(n - 1) / n / scale if square > 1e-12 else 0.0] * len(play.calls)
    credit = naive_peers(plays, name, gamma, lam)
    return [a * f for a, f in zip(credit, factor, strict=True)]


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
