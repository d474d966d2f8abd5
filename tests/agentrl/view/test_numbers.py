"""The numbers of a token on a page are those of the store and of `agentrl explain --tokens`."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agentrl.core.types import Credit, NewRollout, Outcome, Reward, StepCommit, float32, int32
from agentrl.explain import explain_rollout
from agentrl.store import open_store
from agentrl.view.pages import Pages
from tests.agentrl.view import filled
from tests.agentrl.view.filled import RUN

GROUP = f"{RUN}/train/g0000000"
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.just(math.nan)
TOKEN = re.compile(r"token (\d+) .*: advantage .*, gates (\S+), share (\S+), psi (\S+), log-prob")


@st.composite
def stored_calls(draw: st.DrawFn) -> list[tuple[int, dict[str, list[float]]]]:
    """Calls of so many tokens, with what a step stores of them: a number for each token, or one
    for all of them."""
    baselines, calls = draw(st.integers(0, 3)), []
    for n in [*draw(st.lists(st.integers(1, 6), max_size=3)), 7]:
        each = {name: draw(st.sampled_from([1, n])) for name in ("advantage", "gate", "psi")}
        each["baseline"] = baselines * draw(st.sampled_from([1, n]))
        columns = {
            name: draw(st.lists(NUMBERS, min_size=k, max_size=k)) for name, k in each.items()
        }
        calls.append((n, columns | {"weight": [0.5]}))
    return calls


async def fill(url: str, folder: Path, calls: list[tuple[int, dict[str, list[float]]]]) -> None:
    """A trained group of two rollouts with these calls, of which one succeeded."""
    async with open_store(url) as store:
        # A preset that remembers nothing: baselines of another would be what it remembers.
        settings = filled.config(folder, None, algorithm={"preset": "grpo"})
        state = await store.open_run(RUN, settings)
        await store.enqueue(
            [
                NewRollout(id=f"{GROUP}/{i:04}", run=RUN, group=GROUP, index=i, task={}, step=0)
                for i in range(2)
            ]
        )
        credits = []
        for attempt in await store.claim(2, runner="test", lease=60.0, run=RUN, timeout=5.0):
            for at, (n, arrays) in enumerate(calls):
                more: dict[str, Any] = {"completion": int32(range(n)), "prompt": int32([at])}
                more["logprobs"] = float32([-0.5] * n)
                call = filled.call(attempt, at, [{"role": "user", "content": str(at)}], **more)
                await store.add_transitions([call])
                columns = {name: float32(values) for name, values in arrays.items()}
                credits.append(Credit(transition=call.id, policy="policy", **columns))
            reward = Reward(value=float(attempt.rollout.index))
            done = Outcome(attempt=attempt.id, fence=attempt.fence, rewards=[reward])
            await store.finish([done])
        await store.claim_groups(RUN, state.epoch, 1, timeout=5.0)
        await store.commit_step(
            StepCommit(
                run=RUN, epoch=state.epoch, step=0, groups=[GROUP], versions={"policy": 1},
                checkpoint="000000", metrics={}, credits=credits,
            )
        )  # fmt: skip


def as_float32(values: list[float | None]) -> bytes:
    return float32([math.nan if x is None else x for x in values]).tobytes()


@given(calls=stored_calls())
@settings(
    max_examples=20, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
def test_numbers_of_random_stores(tmp_path_factory: pytest.TempPathFactory, calls: list) -> None:
    folder, id = tmp_path_factory.mktemp("store"), f"{GROUP}/0000"
    url = f"sqlite:///{folder / 'store.db'}"

    async def read() -> tuple[dict[str, Any], list[Credit], list[str]]:
        async with open_store(url, readonly=True) as store:
            shown = await Pages(store).tokens(id, range(len(calls)))
            credits = await store.credits(id)
        return shown, credits, await explain_rollout(url, id, tokens=True)

    asyncio.run(fill(url, folder, calls))
    shown, credits, lines = asyncio.run(read())
    assert len(credits) == len(calls)
    explained = iter(found.groups() for line in lines if (found := TOKEN.search(line)))
    for at, credit in enumerate(credits):
        values = shown[str(at)]
        for name in ("advantage", "gate", "weight", "psi"):
            assert as_float32(values[name]) == getattr(credit, name).tobytes()
        assert as_float32([x for row in values["baseline"] for x in row]) == (
            credit.baseline.tobytes()
        )
        for i, token in enumerate(values["ids"]):
            number, *written = next(explained)
            assert int(number) == token == i
            columns = [values[name] for name in ("gate", "weight", "psi")]
            numbers = [column[i % len(column)] for column in columns]
            assert written == ["missing" if x is None else f"{x:.6g}" for x in numbers]
    assert next(explained, None) is None
