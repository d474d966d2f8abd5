"""What a live run adds to the algorithm process."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.algorithm_process import added_features
from agentrl.core.config import resolve
from agentrl.core.config.derived import UNBOUNDED
from agentrl.live.source import NICENESS, Live, yield_to_answers


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads")
def test_the_learner_yields_to_answers() -> None:
    before = priority()
    with ThreadPoolExecutor(1, initializer=yield_to_answers) as pool:
        assert pool.submit(priority).result() == min(before + NICENESS, 19)
    assert priority() == before


def test_only_live_runs_learn_from_sessions() -> None:
    settings = {"policy": {"model": "x"}, "live": {"sessions": 4}}
    assert not any(
        isinstance(one, Live) for one in added_features(resolve(settings, source="test"))
    )
    config = resolve(settings | {"live": {"running": True, "sessions": 12}}, source="test")
    assert isinstance(added_features(config)[0], Live)
    algorithm = config.algorithm
    assert (algorithm.groups, algorithm.group_size, algorithm.min_group) == (12, 1, 1)
    assert (algorithm.async_sampling, algorithm.max_staleness) == ("in_flight", 4.0)
    assert (config.steps, config.checkpoint.every, config.sessions.idle) == (UNBOUNDED, 1, 60.0)
    assert not config.plays_rollouts
