"""The learner's page: its algorithm runs, and its table names what a step reports."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import agentrl.algorithms
from agentrl.algorithms.presets.registry import presets
from tests.algorithms.train.test_update import Recorder, group, updater
from tests.algorithms.worlds import Call, Play, world

FOLDER = Path(str(agentrl.algorithms.__file__)).parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_algorithm_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    try:
        exec(compile(block, "README.md", "exec", dont_inherit=True), names)
    finally:
        presets.pop("lenient", None)
    assert names["algo"].rewards == ("outcome",)
    batch = world(Play([Call()], 1.0), Play([Call()], 0.0))
    assert names["algo"].credit(batch).tolist() == [0.5, -0.125]


def test_the_table_names_what_a_step_reports() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    documented = [
        re.sub(r"<\w+>", "*", name) for cell in rows for name in re.findall(r"`([^`]+)`", cell)
    ]
    groups = [group(name, 1.0, 0.0, None) for name in "abcd"]
    reported = updater(Recorder(shift=0.1), minibatches=2, epochs=2).update(0, groups)
    assert {"old/kl", "sampler/ess", "reward/outcome/frac_solo"} < reported.keys()
    unknown = {n for n in reported if not any(fnmatchcase(n, pattern) for pattern in documented)}
    assert unknown == {"own"}  # the recorder's, as other learners may have


def test_the_modules_it_names_exist() -> None:
    for path in re.findall(r"`((?:\w+/)?\w+\.py)`", PAGE):
        assert (FOLDER / path).is_file() or (FOLDER / "learners" / path).is_file(), path
