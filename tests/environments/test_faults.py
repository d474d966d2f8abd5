"""What a model does wrong is the model's failure: scored, or told to it, and no failed rollout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.environments.faults import faults
from tests.environments.openenv.served import served
from tests.environments.pages import ROOT, python, write_files

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent
PLAYED: dict[str, tuple[str, dict[str, Any]]] = {
    "bfcl": ("multi_turn_base", {}),
    "gymnasium": ("FrozenLake-v1", {"limit": 4}),
    "inspect": ("prices.py@prices", {"messages": 12}),
    "minigrid": ("MiniGrid-Empty-5x5-v0", {"limit": 4}),
    "openai-evals": ("crontab.dev.v0", {}),
    "openenv": ("", {"limit": 3}),
    "pettingzoo": ("classic.tictactoe_v3", {"opponents": "random"}),
    "reasoning-gym": ("chain_sum", {"size": 5, "heldout": 5}),
    "tau2": ("airline", {"max_steps": 8}),
    "textarena": ("FrozenLake-v0", {"limit": 4}),
    "textworld": ("games", {"limit": 3}),
    "verifiers": ("prices_env", {}),
    "verifiers-v1": ("words_taskset", {}),
}
# litellm, by which tau2 asks, and the server of verifiers before the model cannot read it.
FAILED = {("tau2", "deep call"), ("verifiers-v1", "deep call")}


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The run file's folder, and what is played there."""
    name = request.param
    what, folder = PLAYED[name][0], HERE / name
    if name == "openenv":
        with served(python(name), tmp_path) as (url, _):
            yield folder, url
        return
    if name == "textworld":
        made = "import sys, pathlib, tests.environments.textworld.figures as made;"
        made += "made.make_games(pathlib.Path(sys.argv[1]), 1)"
        subprocess.run([python(name), "-c", made, tmp_path], cwd=ROOT, check=True)
        folder = tmp_path
    if name == "verifiers":
        folder = write_files(name, tmp_path).parent
    yield folder, what


@pytest.mark.parametrize(
    ("name", "place"), [(name, name) for name in PLAYED], indirect=["place"], ids=str
)
def test_what_a_model_does_wrong_fails_no_rollout(name: str, place: tuple[Path, str]) -> None:
    folder, what = place
    given = [str(folder), f"{name}:{what}", json.dumps(PLAYED[name][1])]
    command = [python(name), "-m", "tests.environments.faults", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert found.keys() == faults([]).keys()
    for fault, ended in found.items():
        if (name, fault) in FAILED:
            assert ended["outcome"] is None
            assert f"{name}:{what}" in ended["problem"]
        else:
            assert (ended["problem"], ended["outcome"] is None) == ("", False), (fault, ended)
