"""How soon the guard takes back what is worse: simulated candidates, and seconds with a real store.

200 candidates of each kind of worse, against a serving version of which 200 sessions are
known; their outcomes are known `DELAY` sessions late, what their calls show at once. `back <kind>`
is the share that is rolled back, or dropped as worse, before it has served 50 sessions, `sessions
<kind>` the median, `alarms` the share of 200 equal ones that is rolled back within 200 sessions.
`alarms <when>`: the same of outcomes alone, in time: a session of the candidate begins every
`EVERY` seconds, and those that fail become known earlier or later than the others, because their
users complain at once and the others say nothing until `live.wait` has passed, or because they are
shorter or longer. `served <points>`: the sessions that began until a candidate was rolled back that
is so much lower, with outcomes that are known `live.wait` = `WAIT` seconds after their end, or of
sessions whose users complain at once.
`seconds`: from the third failed call in a store until the decision is stored, while no algorithm
process runs; median and largest of 20.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from agentrl.core.config.live import LiveConfig, PromotionConfig
from agentrl.core.types import SESSION, Purpose, Reward, Rollout, RolloutState
from agentrl.live.promotion import SeenCalls, broken, call_limits, outcome_limits
from agentrl.live.promotion import decide_promotions as decide
from agentrl.live.records import SOURCE, Lanes, policy_of
from agentrl.live.served import ServedSessions, refuted
from agentrl.store import open_store
from tests.agentrl.live.promotion.drawn import drawn, mark
from tests.agentrl.live.promotion.played import Shop, config
from tests.factories import call

CANDIDATES, SOON, USUAL = 200, 50, 200
EVERY, WAIT, IDLE = 20.0, 600.0, 60.0  # seconds; of the candidate's sessions, and as in [live]
# when -> seconds of a session that fails and of one that does not, and whether its user says so
WHEN: dict[str, tuple[float, float, bool]] = {
    "complainers first": (120.0, 120.0, True),
    "failures shorter": (30.0, 240.0, False),
    "failures longer": (240.0, 30.0, False),
}
DELAY = 5  # sessions of the candidate that go on before the outcome of one is known
ALPHA = PromotionConfig().alpha
# kind -> success of serving and candidate, and what a call of the candidate is like
WORSE: dict[str, tuple[float, float, dict[str, Any]]] = {
    "fails always": (0.8, 0.0, {"failing": 1.0}),
    "fails half": (0.8, 0.4, {"failing": 0.5}),
    "refuses half": (0.8, 0.4, {"refusing": 0.5}),
    "babbles": (0.8, 0.8, {"tokens": 200}),
    "50 points lower": (0.8, 0.3, {}),
    "40 points lower": (0.8, 0.4, {}),
    "30 points lower": (0.5, 0.2, {}),
    "20 points lower": (0.5, 0.3, {}),
}


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, (usual, success, how) in WORSE.items():
        ends = [back(seed, usual, success, SOON, **how) for seed in range(CANDIDATES)]
        known = [end for end in ends if end is not None]
        found[f"back {kind}"] = len(known) / CANDIDATES
        found[f"sessions {kind}"] = median(known) if known else None
    for when, how_known in WHEN.items():
        ends = [seen(seed, 0.7, 0.7, USUAL, *how_known) for seed in range(CANDIDATES)]
        found[f"alarms {when}"] = sum(end is not None for end in ends) / CANDIDATES
    for points in (0.3, 0.5):
        ends = [seen(seed, 0.8, 0.8 - points, USUAL, 120.0, 120.0) for seed in range(CANDIDATES)]
        found[f"served {100 * points:.0f} points"] = median(end or USUAL for end in ends)
        ends = [
            seen(seed, 0.8, 0.8 - points, USUAL, 120.0, 120.0, complains=True)
            for seed in range(CANDIDATES)
        ]
        found[f"served {100 * points:.0f} points, complaints"] = median(e or USUAL for e in ends)
    equal = [back(seed, 0.7, 0.7, USUAL, rare=0.05) for seed in range(CANDIDATES)]
    seconds = asyncio.run(_seconds())
    found["alarms"] = sum(end is not None for end in equal) / CANDIDATES
    return found | {"seconds_median": median(seconds), "seconds_most": max(seconds)}


def back(
    seed: int, usual: float, success: float, most: int, *, rare: float = 0.0, **how: float
) -> int | None:
    """After how many sessions a candidate is back; None: not before it has served `most`."""
    rng, allowed = np.random.default_rng([seed, int(100 * success), most]), LiveConfig().guard
    theirs, ours = _calls(0), _calls(1)
    _speak(theirs, rng, USUAL, failing=rare, refusing=rare)
    outcomes = [float(rng.random() < usual) for _ in range(USUAL)]
    lanes, outcome, shares = drawn(rng, most, share=0.1, base=usual, better=success - usual)
    down = refuted((~lanes, outcome, 1 - shares), 0.0, ALPHA / 2)
    worse = DELAY + int(lanes[:down].sum()) if down else most + 1
    own = outcome[lanes]
    for served in range(1, most):
        _speak(ours, rng, 1, **({"failing": rare, "refusing": rare} | how))
        known = own[: max(served - DELAY, 0)]
        limits = [
            *call_limits(allowed, ours, theirs),
            *outcome_limits(allowed, known, outcomes),
        ]
        if served >= worse or broken(limits, 0):
            return served
    return None


def seen(
    seed: int,
    usual: float,
    success: float,
    most: int,
    failed: float,
    good: float,
    complains: bool = False,
) -> int | None:
    """After how many sessions a candidate is back because of outcomes; None: not before `most`.
    failed, good: mean seconds of a session; complains: those that fail are labelled as explicit."""
    rng = np.random.default_rng([seed, int(100 * success), int(failed)])
    live = LiveConfig(wait=WAIT)
    served, lanes = ServedSessions(None, "shop", live, IDLE), Lanes(serving=0, candidate=1)  # type: ignore[arg-type]
    before = [float(rng.random() < usual) for _ in range(USUAL)]
    outcomes = (rng.random(most) < success).astype(float).tolist()
    began = [EVERY * number for number in range(most)]
    lasts = rng.exponential([good if outcome else failed for outcome in outcomes])
    ends = (np.array(began) + lasts).tolist()
    known = set[int]()
    for number in range(most):
        now = began[number]
        rows = [
            _session(began[one], outcomes[one], ends[one], now, complains)
            for one in range(number)
            if one not in known
        ]
        served.see(rows, now, lanes)
        known |= {one for one in range(number) if ends[one] + WAIT <= now}
        soon = before if complains else [1.0] * USUAL
        limits = [
            *outcome_limits(live.guard, served.outcomes(1, early=True), soon, early=True),
            *outcome_limits(live.guard, served.outcomes(1), before),
        ]
        if broken(limits, 0):
            return number
    return None


def _session(began: float, outcome: float, end: float, now: float, complains: bool) -> Rollout:
    vote = {"feedback": 0.0} if complains and not outcome else {}
    label = mark(end, explicit=bool(vote), posted=vote, delays=dict.fromkeys(vote, 0.3))
    over = {"rewards": [label, Reward(value=outcome, source=SOURCE)], "result": {"ended": end}}
    return Rollout(
        id=str(began), run="shop", group=str(began), index=0, purpose=Purpose.TRAIN, step=SESSION,
        task={"version": 1, "lane": "candidate", "began": began}, attempts=1, attempt=None,
        failure=None, state=RolloutState.SUCCEEDED if end <= now else RolloutState.RUNNING,
        **(over if end <= now else {"result": None}),
    )  # fmt: skip


def _calls(version: int) -> SeenCalls:
    return SeenCalls(policy_of(version))


def _speak(
    calls: SeenCalls,
    rng: np.random.Generator,
    n: int,
    *,
    failing: float = 0.0,
    refusing: float = 0.0,
    tokens: float = 40,
) -> None:
    for _ in range(n):
        refuses, fails = rng.random() < refusing, rng.random() < failing
        said = "" if fails else "I'm sorry, but I can't help." if refuses else "It is on its way."
        length = max(int(rng.gamma(4.0, tokens / 4)), 1)
        answer = {"role": "assistant", "content": said}
        calls.add([call(completion=[1] * length, policy=calls.policy, answer=answer)])


async def _seconds() -> list[float]:
    """With everything but the algorithm process: a store, the watch and calls that fail."""
    found = []
    for seed in range(20):
        with tempfile.TemporaryDirectory() as folder:
            settings = config(Path(folder), wait=0.0, share=0.5)
            async with open_store(settings.store) as store:
                live = await Shop(store, settings, seed=seed).opened(0)
                for _ in range(25):
                    await live.session(0.8)
                await live.offer(4)
                watch = asyncio.create_task(decide(store, settings))
                await _until(live, lambda events: len(events) == 2)
                for _ in range(3):
                    await live.session(lane="candidate", said="", ends=False)
                began = time.monotonic()
                await _until(live, lambda events: events[-1].kind == "rolled back")
                found.append(time.monotonic() - began)
                watch.cancel()
    return found


async def _until(live: Shop, met: Callable[[Any], bool]) -> None:
    cursor = await live.store.cursor()
    while not met((await live.state()).events):
        cursor = await live.store.wait(cursor, timeout=10.0)
