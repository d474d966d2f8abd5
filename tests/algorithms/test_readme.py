"""The learner's page: its algorithm runs, and the table of metrics names what a step reports."""

from __future__ import annotations

import math
import pickle
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import agentrl.algorithms
from agentrl.algorithms.presets.declare import presets
from agentrl.algorithms.presets.registry import make
from agentrl.core.errors import ConfigError
from tests.algorithms.train.test_update import Recorder, group, updater
from tests.algorithms.worlds import Call, Play, world

FOLDER = Path(str(agentrl.algorithms.__file__)).parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def written() -> str:
    """The page's Python, one file."""
    return "".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))


def test_the_algorithm_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(\[algorithm\]\n.*?)```", PAGE, flags=re.DOTALL)
    used = [tomllib.loads(text)["algorithm"] for text in blocks if "mine.py" in text]
    (tmp_path / "mine.py").write_text(written())
    batch = world(Play([Call()], 1.0), Play([Call()], 0.0))
    try:
        for settings in used:
            algo = make(settings["preset"], settings["options"], root=tmp_path)
            assert algo.rewards == ("outcome",)
            assert algo.credit(batch).tolist() == [0.5, -0.25]
    finally:
        presets.pop("lenient", None)
        presets.pop("softer", None)
    assert len(used) == 2


def test_a_credit_with_a_setting_is_found_checked_and_pickled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(written())
    outcomes = 1.0, 0.0, math.nan
    batch = world(*(Play([Call()], 0.5, rewards={"tact": x}) for x in outcomes))
    try:
        for share in (0.25, 1.0):
            options = {"share": share, "reward": "tact"}
            algo = make("mine.py:softer", options, root=tmp_path)
            assert algo.rewards == ("tact",)
            sent = pickle.loads(pickle.dumps(algo.credit))
            found = algo.credit(batch)
            assert torch.equal(sent(batch)[:2], found[:2])
            assert found[2].isnan()
            assert float(found[1]) == -share * float(found[0])
        with pytest.raises(ConfigError, match="share"):
            make("mine.py:softer", {"share": 1.5}, root=tmp_path)
    finally:
        presets.pop("lenient", None)
        presets.pop("softer", None)


def test_what_presets_are_written_with_has_one_import() -> None:
    (table,) = re.findall(r"from `agentrl.algorithms`:\n\n(.*?)\n\n", PAGE, re.DOTALL)
    documented = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    names = " ".join(agentrl.algorithms.LAZY.values()).split()
    assert all(hasattr(agentrl.algorithms, name) for name in names)
    assert documented == set(names)


def test_the_table_names_what_a_step_reports() -> None:
    lines = METRICS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
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
        assert (FOLDER / path).is_file(), path
