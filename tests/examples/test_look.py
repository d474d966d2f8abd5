"""The example that looks: what its pages show, and short runs of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from agentrl.algorithms.vision.inputs import MIN_TRANSFORMERS
from agentrl.core.images import SCHEME
from agentrl.store import open_store
from tests import warm
from tests.benchmarks.look import KEYS, figures
from tests.examples.parts import EXAMPLES, modules

Parts = dict[str, ModuleType]
NAMES = ("charts", "agent", "tasks", "verifier", "policy")

trains = pytest.mark.skipif(
    Version(version("transformers")) < Version(MIN_TRANSFORMERS),
    reason=f"the extra `vision` needs transformers {MIN_TRANSFORMERS}",
)


@pytest.fixture(scope="module")
def look() -> Iterator[Parts]:
    pytest.importorskip("langchain")
    pytest.importorskip("PIL")
    with modules("look", *NAMES) as parts:
        yield parts


def pixels(png: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(BytesIO(png))).astype(int)


def highest(png: bytes, bars: int) -> tuple[int, Any]:
    """The number of the highest bar in a picture, and its colour."""
    seen = pixels(png)
    coloured = np.ptp(seen, 2) > 50
    row = int(coloured.any(1).argmax())
    column = int(np.flatnonzero(coloured[row]).mean())
    return column * bars // len(seen), seen[row, column]


def test_the_pictures_have_the_answer(look: Parts) -> None:
    charts, verify = look["charts"], look["verifier"].verify
    for task in look["tasks"].train[:30] + look["tasks"].heldout[:30]:
        number = task["input"]["report"]
        _, colour = highest(charts.page(number, charts.FRONT), len(charts.SHOPS))
        nearest = min(charts.SHOPS, key=lambda shop: abs(colour - charts.SHOPS[shop]).sum())
        day, _ = highest(charts.page(number, nearest), len(charts.DAYS))
        scores = [verify(task, f" {day}\n") for day in charts.DAYS]
        assert scores == [float(place == day) for place in range(len(charts.DAYS))]
        assert verify(task, " ".join(charts.DAYS)) == 0


def test_no_heldout_page_is_as_large_as_one_of_training(look: Parts) -> None:
    tasks, charts = look["tasks"], look["charts"]
    train, heldout = (
        {charts.report(task["input"]["report"]).size for task in some}
        for some in (tasks.train, tasks.heldout)
    )
    assert len(train) > 1
    assert len(heldout) > 1
    assert not train & heldout
    everything = tasks.train + tasks.heldout
    assert len({task["id"] for task in everything}) == len(everything)


def test_the_blind_agent_is_shown_grey_pictures_of_the_same_size(look: Parts) -> None:
    charts, agent = look["charts"], look["agent"]
    runtime = SimpleNamespace(state={"report": 7})
    for name in (charts.FRONT, "gold"):
        whole, grey = (
            pixels(charts.page(7, name)),
            pixels(charts.hidden(7)),
        )
        assert whole.shape == grey.shape
        assert np.ptp(whole) > 100
        assert np.ptp(grey) == 0
        assert agent.look.func(name, runtime) == agent.shown(charts.page(7, name))
        assert agent.look_at_nothing.func(name, runtime) == agent.shown(charts.hidden(7))
    for tool in (agent.look, agent.look_at_nothing):
        assert tool.func("attic", runtime) == "no such page"
        assert (tool.name, tool.description) == ("look", "Show a page.")
    assert "agentrl" not in Path(agent.__file__ or "").read_text()


SMALL = """\
import collections
import itertools

import policy

turns = collections.defaultdict(itertools.count)
verify = lambda task, result: next(turns[task["id"]]) % 2  # both of a group's rewards: it trains
policy.READINGS, policy.DEMONSTRATIONS, policy.STEPS = 0, 50, 120
build = policy.build
"""


@trains
@pytest.mark.slow  # it builds the policy
@pytest.mark.timeout(600)
async def test_two_steps(tmp_path: Path) -> None:
    """Every call is trained with its pictures, exactly as they were sampled."""
    pytest.importorskip("langchain")
    folder = shutil.copytree(EXAMPLES / "look", tmp_path / "look")
    (folder / "small.py").write_text(SMALL)
    small = ["steps=2", "algorithm.groups=2", "algorithm.group_size=2", "eval.tasks=2"]
    small += ["audit.before=false", "eval.samples=0", "runner.processes=1"]
    small += ["policy.build=small.py:build", "verifier.path=small.py:verify"]
    done = warm.run("-m", "agentrl", "train", "run.toml", f"output={tmp_path}", *small, cwd=folder)
    assert done.returncode == 0, done.stderr
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        steps = [row for row in await store.steps("look") if row.committed]
        assert [row.step for row in steps] == [0, 1]
        for row in steps:
            assert row.metrics["calls/images_unread"] == 0
            assert row.metrics["images/encoded"] > 2
            assert row.metrics["logprob_difference/max"] <= 2e-5
        rollouts = await store.rollouts("look", step=0)
        found = await store.calls([row.id for row in rollouts])
        calls = [call for some in found.values() for call in some]
        assert all(call.exact for call in calls)
        assert all(str(call.messages).count(SCHEME) == len(call.images) for call in calls)
        assert any(call.images for call in calls)


@trains
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_learns_and_its_blind_twin_does_not() -> None:
    pytest.importorskip("langchain")
    few = ("eval.tasks=80", "eval.every=40")
    blind = {"blind_": ("agent.path=agent.py:blind", "steps=15", *few)}
    found = figures([0], {"": few} | blind)
    assert set(found) == {prefix + key for prefix in ("", "blind_") for key in KEYS}
    assert found["before"][0] < 0.3
    assert found["before_sampled"][0] < 0.3
    assert found["after"][0] > 0.85
    assert found["after_sampled"][0] > 0.7
    assert found["blind_after"][0] < 0.35
