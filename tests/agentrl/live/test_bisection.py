"""A session that the learner cannot train is found and discarded; nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import httpx
import pytest
import torch

from agentrl.core.errors import AgentRLError, Invalid, PolicyError, TrainingError, Unavailable
from agentrl.core.types import Rollout
from agentrl.live.bisection import MAX_LONE_FAILURES, StepBisection


def rows(*names: str) -> list[Rollout]:
    return [cast(Rollout, SimpleNamespace(group=name)) for name in names]


class Learner:
    """Processes that train the sessions of a store, of which each may end."""

    def __init__(self, folder: Path, names: Iterable[str], fails: Callable[[list[str]], Any]):
        self.folder, self.names, self.fails = folder, [*names], fails
        self.step, self.trained, self.discarded = 0, list[str](), list[str]()
        self.tries: list[int] = []
        self.held = ""

    async def process(self) -> None:
        bisection = StepBisection(self.folder)
        while self.names:
            last = bisection.failed()
            self.discarded += [name for name in self.names if name in last.twice]
            self.names = [name for name in self.names if name not in self.discarded]
            again = [n for n in self.names if n in last.once and self.step > last.step]
            ready = [name for name in self.names if name not in last.once][:8]
            if not (again or ready):
                return
            self.held = bisection.hold_reason(self.names)
            if self.held:
                return
            chosen = [row.group for row in bisection.bisect(self.step, rows(*again[:1] or ready))]
            self.tries.append(len(chosen))
            if error := self.fails(chosen):
                raise error
            self.trained += chosen
            self.names = [name for name in self.names if name not in chosen]
            self.step += 1

    async def run(self, most: int = 100) -> None:
        for _ in range(most):
            try:
                return await asyncio.create_task(self.process())
            except Exception:  # noqa: BLE001 - the supervisor starts it again
                await asyncio.sleep(0)
        raise AssertionError("it never ends")


NAMES = [f"s{n:02d}" for n in range(20)]


def raising(*bad: str) -> Callable[[list[str]], Exception | None]:
    return lambda chosen: KeyError("bad") if {*chosen} & {*bad} else None


@pytest.mark.parametrize(
    "bad",
    [
        ["s00"],
        ["s05"],
        ["s19"],
        ["s07", "s08"],
        ["s01", "s02", "s03"],
        ["s00", "s01", "s02", "s03"],
        ["s00", "s01", "s02", "s03", "s12", "s13"],
        NAMES[::2],
    ],
)
async def test_sessions_that_raise_are_found_and_the_others_are_trained(
    tmp_path: Path, bad: list[str]
) -> None:
    learner = Learner(tmp_path, [*NAMES, "last"], raising(*bad))
    await learner.run()
    assert sorted(learner.discarded + learner.names) == bad
    assert sorted(learner.trained) == sorted({*NAMES, "last"} - {*bad})
    # The last one that raised alone waits for another session to be trained.
    assert len(learner.names) <= MAX_LONE_FAILURES


async def test_an_error_of_all_sessions_loses_none_and_ends_with_its_cause(tmp_path: Path) -> None:
    learner = Learner(tmp_path, NAMES, lambda chosen: KeyError("always"))
    await learner.run()
    assert "not because of them" in learner.held
    assert learner.discarded == learner.trained == []
    assert len(learner.names) == 20
    learner.fails, learner.held = lambda chosen: None, ""
    StepBisection(tmp_path).file.unlink()
    await learner.run()
    assert (learner.trained, learner.held) == (NAMES, "")


async def test_one_that_raised_once_is_trained_if_it_can_be_later(tmp_path: Path) -> None:
    raised: list[list[str]] = []

    def fails(chosen: list[str]) -> Exception | None:
        passing = "s02" in chosen and ["s02"] not in raised
        raised.extend([chosen] if passing else [])
        return KeyError("for a while") if passing else None

    learner = Learner(tmp_path, NAMES, fails)
    await learner.run()
    assert raised[-1] == ["s02"]
    assert (sorted(learner.trained), learner.discarded) == (NAMES, [])


def memory_ran_out() -> Exception:
    """As the learner says it, which wraps torch's error."""
    try:
        try:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        except RuntimeError:
            raise TrainingError("the update ran out of memory") from None
    except TrainingError as error:
        return error


NOT_THEIRS = [
    Unavailable("away"),
    asyncio.CancelledError(),
    OSError("disk full"),
    torch.OutOfMemoryError("CUDA out of memory"),
    memory_ran_out(),
    AgentRLError("judges.kind: http://judge/v1 is unreachable"),
    aiohttp.ServerDisconnectedError(),
    httpx.ReadError("closed"),
    ExceptionGroup("parts of a step", [httpx.ReadError("closed")]),
]


@pytest.mark.parametrize("error", NOT_THEIRS, ids=lambda error: type(error).__name__)
async def test_what_no_session_causes_blames_none(tmp_path: Path, error: Exception) -> None:
    ends = iter([error] * 12)
    learner = Learner(tmp_path, NAMES, lambda chosen: next(ends, None))
    for _ in range(12):
        await asyncio.wait([asyncio.create_task(learner.process())])
    await learner.run()
    assert learner.trained == NAMES
    assert learner.tries[:12] == [8] * 12


def damaged_picture() -> Exception:
    """As vision decodes one: a sentence in place of the error of a library, which is an OSError."""
    try:
        try:
            raise OSError("image file is truncated")
        except OSError:
            raise ValueError("an image of the session is damaged") from None
    except ValueError as error:
        return error


THEIRS = [
    Invalid("a reward is not finite"),
    PolicyError("too long"),
    TrainingError("the judge answered 400: too long"),
    damaged_picture(),
    ExceptionGroup("parts of a step", [KeyError("x"), ValueError("y")]),
]


@pytest.mark.parametrize("error", THEIRS, ids=lambda error: type(error).__name__)
async def test_errors_about_data_blame_sessions(tmp_path: Path, error: Exception) -> None:
    learner = Learner(tmp_path, NAMES, lambda chosen: error if "s03" in chosen else None)
    await learner.run()
    assert learner.discarded == ["s03"]
    assert [file.name for file in tmp_path.iterdir()] == ["failed.json"]
