"""`agentrl env` and `agentrl eval --environment`, with an environment that needs no package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.core import plugins
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.errors import ConfigError
from agentrl.environments import hosted
from agentrl.environments import packages as command_install
from agentrl.environments.packages import message_of

SOURCE = '''
import random
from agentrl.environments import Environment, Episode


class Guess(Environment):
    """Guess a number. You have three tries."""

    limit = 5

    def __init__(self, what, low=1, mood="fair"):
        self.what, self.low, self.mood = what, low, mood

    def tasks(self, split):
        seed = random.randrange(2**40) if self.mood == "moody" else 7
        seed += 100 * (split == "heldout")
        for n in range(3):
            yield {"id": f"{split}-{n}", "input": {"seed": n + seed}}

    def open(self, input):
        return Game(self.low + input["seed"] % 5, self.mood)

    def solution(self, input):
        known = [str(self.low + input["seed"] % 5)]
        known = {"agent": known} if self.mood == "roles" else known
        return None if self.mood == "silent" else known


class Game(Episode):
    tools = [{"type": "function", "function": {"name": "hint", "parameters": {}}}]

    def __init__(self, number, mood):
        self.number, self.mood, self.tries = number, mood, 0

    def reset(self):
        return "Guess a number."

    def step(self, reply):
        if self.mood == "broken":
            raise KeyError("board")
        if reply.get("tool_calls"):
            return f"It is {self.number}.", None, False
        self.tries += 1
        right = (reply["content"].strip() == str(self.number)) != (self.mood == "wrong")
        return "Right" if right else "Wrong", float(right), right or self.tries == 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guesses.py").write_text(SOURCE)
    sys.modules.pop("guesses", None)
    return tmp_path


def run(*arguments: str, told: str = "") -> Any:
    command = ["doctor", "--environment"] if arguments[0] == "check" else ["env", arguments[0]]
    done = CliRunner().invoke(cli, [*command, *arguments[1:]], input=told)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


SUMS = """
from agentrl.environments import Environment

class Sums(Environment):
    def tasks(self, split):
        first = 0 if split == "train" else 16
        for n in range(first, first + 20):
            wrong = n % 3 * (self.what == "wrong")
            asked = f"What is {n} + 2 * 3?"
            yield {"id": f"{split}-{n}", "input": asked, "answer": str(n + 6 + wrong)}

    def __init__(self, what):
        self.what = what

    def verify(self, task, result):
        return float(result.strip() == task["answer"])
"""


def test_held_out_questions_that_are_trained_are_left_out_and_counted(here: Path) -> None:
    (here / "sums.py").write_text(SUMS)
    done = run("check", "sums.py:Sums:x")
    said = (
        "warn 4 of 20 held-out tasks ask what a training task asks: they are left out, and 16 are"
    )
    assert said in done.output
    assert "contradict" not in done.output
    named = EnvironmentName.read("sums.py:Sums:x", {})
    assert len(hosted.tasks(named, "heldout")) == 16
    assert len(hosted.tasks(named, "train")) == 20


def test_an_answer_key_that_contradicts_arithmetic_is_named(here: Path) -> None:
    (here / "sums.py").write_text(SUMS)
    said = run("check", "sums.py:Sums:wrong").output
    assert "warn 27 of 40 answers contradict arithmetic, such as 'What is 1 + 2 * 3?' is 7" in said
    rows: list[Any] = [{"input": "2 + 2 = ?", "answer": x} for x in ("4", "5")]
    assert "1 questions have several answers" in next(command_install.contradictions(rows))
    mixed = "Calculate -( 7 * -8 )."
    (text,) = command_install.contradictions(
        [{"input": mixed, "answer": "56"}, {"input": "x = 3 + 4, y = 2 + 1, x?", "answer": "1"},
         {"input": "3 + 4 is", "answer": "9"}]
    )  # fmt: skip
    assert text.startswith("1 of 2 answers contradict arithmetic")


@pytest.mark.parametrize("options", [["low=4"], ["mood=roles"]])
def test_what_a_good_environment_is_told(here: Path, options: Sequence[str]) -> None:
    done = run("check", "guesses.py:Guess:x", *options, "--tasks", "2")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "ok   it can be made: it has open",
        "ok   3 of train and 3 of heldout tasks survive JSON",
        "ok   ids are unique, and another process makes the same tasks",
        "ok   a model that only says 'I do not know.' gets outcome 0 after 3 calls",
        "ok   ground truth of 4 tasks scores 1",
    ]


@pytest.mark.parametrize(
    ("mood", "code", "says"),
    [
        ("moody", 1, "fail tasks('train') is not the same in another process, where task"),
        ("silent", 0, "warn the plug-in has no ground truth"),
        ("broken", 1, "fail ground truth of task 'train-0': EpisodeError: guesses.py:Guess"),
        ("wrong", 1, "fail ground truth of 6 tasks scores 1, no more than a model that knows"),
    ],
)
def test_what_a_bad_environment_is_told(here: Path, mood: str, code: int, says: str) -> None:
    done = run("check", "guesses.py:Guess:x", f"mood={mood}")
    assert done.exit_code == code, done.output
    assert says in done.output


def test_check_for_programs(here: Path) -> None:
    found = json.loads(run("check", "guesses.py:Guess:x", "--json").stdout)
    assert found["ok"]
    assert (found["tasks"], found["ground_truth"]) == ({"train": 3, "heldout": 3}, 1.0)
    assert found["rollouts_per_s"] > 0
    found = json.loads(run("check", "guesses.py:Guess:x", "nothing=1", "--json").stdout)
    assert not found["ok"]
    assert "unexpected keyword argument 'nothing'" in found["lines"][0]


def test_a_rollout_by_hand(here: Path) -> None:
    (here / "run.toml").write_text(
        'environment = "guesses.py:Guess:x"\nenvironment_options.low = 2\npolicy.model = "m"\n'
    )
    for name in (["guesses.py:Guess:x", "low=2"], ["run.toml"]):
        told = '9\n/call hint {\n/call hint\n{"role": "assistant", "content": "5"}\n'
        done = run("show", *name, "--task", "train-1", "--play", told=told)
        assert done.exit_code == 0, done.output
        for line in (
            "3 tasks of train, 3 tasks of heldout", '  train-2  {"seed":9}',
            "user: Guess a number.", "tools: hint  (/call NAME {...})", "user: Wrong",
            "{ is not a JSON object: ", "user: It is 5.",
            "outcome 1 after 3 calls; rewards of steps: 0, 1",
        ):  # fmt: skip
            assert line in done.output, (line, done.output)
        assert done.output.count("user: Guess a number.") == 1
    assert "Guess a number." not in run("show", "guesses.py:Guess:x").output  # no terminal


def test_a_rollout_by_hand_that_is_left(here: Path) -> None:
    done = run("show", "guesses.py:Guess:x", "--play", told="9\n")
    assert done.exit_code == 1
    assert "Aborted!" in done.output
    assert "Traceback" not in done.output


def test_what_show_cannot_show(here: Path) -> None:
    with pytest.raises(ConfigError, match="has no task 'train-9'; did you mean"):
        run("show", "guesses.py:Guess:x", "--task", "train-9")
    with pytest.raises(ConfigError, match='write it as "PLUGIN:WHAT"'):
        run("show", "guesses")
    (here / "run.toml").write_text('[policy]\nmodel = "m"\n')
    with pytest.raises(ConfigError, match=r"run\.toml has no environment"):
        run("show", "run.toml")


def test_lines_as_messages() -> None:
    call = message_of('/call move {"to": 1}')["tool_calls"][0]["function"]  # type: ignore[index,call-overload]
    assert call == {"name": "move", "arguments": '{"to": 1}'}
    assert message_of("/calls")["content"] == "/calls"
    with pytest.raises(ValueError, match="is not a JSON object"):
        message_of("/call move 3")


def test_list(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    points = [("guess", "guesses:Guess"), ("lost", "nothing_of_this:Lost")]
    known = EntryPoints(EntryPoint(*point, "agentrl.environments") for point in points)
    monkeypatch.setattr(plugins, "plugin_points", lambda group: known)
    first, second, third = run("show").output.splitlines()
    assert first.split(maxsplit=1) == ["guess", "Guess a number"]
    assert second.split() == ["needs", "nothing"]
    assert third.startswith("lost            cannot be imported: ")
    assert "No module named 'nothing_of_this'" in third


def test_eval_of_an_environment_on_a_server(here: Path, answering: str) -> None:
    command = [sys.executable, "-m", "agentrl", "eval", "--environment", "guesses.py:Guess:x"]
    done = subprocess.run(
        [*command, "--model", answering, "eval.tasks=2", "environment_options.low=0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "scoring 2 held-out tasks" in done.stdout
    assert "50.0%" in done.stdout  # it always says 2, and the numbers are 2 and 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give RUN_FILE, or --environment PLUGIN:WHAT --model URL"),
        (["--environment", "a:b"], "--model is missing"),
        (["run.toml", "--environment", "a:b"], "remove run.toml"),
        (["run.toml", "--model", "m"], "--model needs --environment"),
        (["run.toml", "--crossplay", "--ablate", "a"], "--crossplay or --ablate"),
        (["run.toml", "--crossplay", "--samples", "2"], "held-out tasks of a RUN_FILE"),
        (["run.toml", "--games", "2"], "--every and --games go with --crossplay"),
        (["run.toml", "--json"], "--fresh and --json go with"),
        (["run.toml", "one", "two"], "one checkpoint at a time"),
        (["--environment", "a:b", "--model", "http://127.0.0.1:9/v1"], "give --model-name"),
        (["--environment", "a:b", "--model", "m", "--model-name", "x"], "'m' is not one"),
    ],
)
def test_what_eval_needs(here: Path, arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, ["eval", *arguments])
    assert says in f"{done.output} {done.exception}"


@pytest.fixture
def answering() -> Any:
    """A server of one model that always says 2."""
    from tests.agentrl.environments.served import serving

    with serving("2") as url:
        yield url


class Pip:
    """Records programs in the place of pip; the resolution wants `resolved`."""

    def __init__(self, resolved: Sequence[str], config: str = "") -> None:
        self.resolved, self.config, self.ran = resolved, config, list[list[str]]()

    def __call__(self, command: Sequence[str], problem: str, **variables: str) -> str:
        self.ran.append([*command[1:], *(f"{k}={v}" for k, v in variables.items())])
        if "venv" in command:
            folder = Path(command[-1])
            (folder / "bin").mkdir(parents=True)
            (folder / "bin/python").symlink_to(sys.executable)
            (folder / "pyvenv.cfg").touch()
        if "config" in command:
            return self.config
        found = [{"metadata": {"name": name}} for name in self.resolved]
        return json.dumps({"install": found}) if "--dry-run" in command else ""


@pytest.fixture
def needy(here: Path) -> Path:
    source = "from agentrl.environments import Environment\n\nclass Needy(Environment):\n"
    source += (
        "    requires = ('a-game==1.2', '--no-deps old-game==3')\n\n    def verify(self): ...\n"
    )
    (here / "needing.py").write_text(source)
    sys.modules.pop("needing", None)
    return here


@pytest.mark.parametrize("config", ["", "global.extra-index-url='x'"])
@pytest.mark.parametrize("resolved", [["a-game"], ["a-game", "Torch"]])
def test_what_install_runs(
    needy: Path, monkeypatch: pytest.MonkeyPatch, resolved: list[str], config: str
) -> None:
    pip = Pip(resolved, config)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setattr(command_install, "_run", pip)
    monkeypatch.setattr(command_install, "torch_version", lambda: "9.1")
    monkeypatch.setattr(command_install, "own_requirement", lambda: ["-e", "/checkout"])
    done = run("install", "needing.py:Needy")
    assert "Done." in done.output
    pip_install = ["-m", "pip", "install", "--disable-pip-version-check", "-q"]
    torch = "Torch" in resolved
    pinned = [
        [
            *pip_install,
            "torch==9.1",
            *(["PIP_EXTRA_INDEX_URL=" + command_install.CPU] * (not config)),
        ]
    ]
    assert [one for one in pip.ran if "--dry-run" not in one and "config" not in one] == [
        ["-m", "venv", ".venv-needing"],
        *(pinned if torch else []),
        [*pip_install, *(["torch==9.1"] if torch else []), "-e", "/checkout", "a-game==1.2"],
        [*pip_install, "--no-deps", "old-game==3"],
        ["-P", "-c", "import agentrl.environments.helper"],
    ]
    run("install", "needing.py:Needy")
    assert sum("venv" in one for one in pip.ran) == 1


def test_what_install_cannot_do(needy: Path) -> None:
    (needy / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine exists and is not a virtual environment"):
        run("install", "needing.py:Needy", "--into", "mine")
    with pytest.raises(ConfigError, match="there is no file"):
        run("install", "absent.py:Needy")
    with pytest.raises(ConfigError, match="cannot be made with none/python: No such file"):
        run("install", "needing.py:Needy", "--python", "none/python")


def test_install_takes_agentrl_as_it_is_here() -> None:
    own = command_install.own_requirement()
    assert own[0] == "-e" or "agentrl" in own[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_interpreter(here: Path) -> None:
    """Needs an index of packages, for what agentrl itself requires."""
    done = run("install", "guesses.py:Guess")
    assert "Done." in done.output
    done = run("check", "guesses.py:Guess:x")
    assert ".venv-guesses/bin/python: it has open" in done.output
    assert done.exit_code == 0, done.output
    listed = subprocess.run(
        [".venv-guesses/bin/python", "-m", "pip", "list"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch" not in listed.stdout
