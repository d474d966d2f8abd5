"""Harbor's folders as Harbor's documentation describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind
from agentrl.tasks import harbor, run_tests
from agentrl.tasks.harbor_format import (
    UnsupportedTask,
    digest_of,
    read_task,
    resolved,
    task_folders,
)
from agentrl.tasks.rewards import NoRewardError, read_rewards, with_outcome
from tests.agentrl.harbor.folders import write_task

STEPS = """multi_step_reward_strategy = "final"
artifacts = ["/app/all"]
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 40
env = { A = "1", B = "2" }
[environment]
docker_image = "debian:12"
allow_internet = false
memory = "2G"
storage_mb = 300
cpus = 1.5
[[steps]]
name = "one"
min_reward = 0.5
artifacts = [{ source = "/app/own", exclude = ["*.log"] }]
[steps.verifier]
environment_mode = "separate"
env = { B = "3" }
[[steps]]
name = "two"
[steps.agent]
timeout_sec = 5
user = 1000
"""


def test_ids_are_paths(tmp_path: Path) -> None:
    for name in ("a/x", "b/x", "c"):
        write_task(tmp_path / name)
    write_task(tmp_path / "c" / "tests" / "fixture")  # a task's own files
    assert [*task_folders(tmp_path)] == ["a/x", "b/x", "c"]
    assert [*task_folders(tmp_path / "c")] == ["c"]
    assert [task["id"] for task in harbor(str(tmp_path))] == ["a/x", "b/x", "c"]


def test_a_task_of_several_steps_is_read(tmp_path: Path) -> None:
    steps: dict[str, Any] = {
        f"steps/{name}/instruction.md": f"Do {name}." for name in ("one", "two")
    }
    steps |= {"steps/two/tests/test.sh": "x", "steps/two/solution/solve.sh": "x"}
    folder = write_task(tmp_path, {"task.toml": STEPS, "environment/Dockerfile": None, **steps})
    task = read_task(folder, "t")
    one, two = task.steps
    assert (task.image.name, task.network, task.about.environment.limits) == (
        *("debian:12", "no-network", (2048, 300)),
    )
    assert [one.instruction, two.instruction] == ["Do one.", "Do two."]
    assert [one.seconds, two.seconds, one.user, two.user] == [30.0, 5.0, None, 1000]
    assert [dict(one.min_reward), dict(two.min_reward)] == [{"reward": 0.5}, {}]
    assert one.verifier.env == {"A": "1", "B": "3"}
    assert [one.verifier.timeout_sec, two.verifier.timeout_sec] == [40.0, 40.0]
    assert one.judge is not None
    assert two.judge is None
    assert [artifact.source for artifact in one.artifacts] == [
        "/logs/artifacts",
        "/app/all",
        "/app/own",
    ]
    assert [test.relative_to(folder).as_posix() for test in two.tests] == [
        "tests",
        "steps/two/tests",
    ]
    assert [step.solution.relative_to(folder).as_posix() for step in task.steps] == [
        *("solution", "steps/two/solution")
    ]


def test_a_verifier_with_a_dockerfile_of_its_own_brings_its_tests(tmp_path: Path) -> None:
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    for name, tests in (("plain", None), ("own", "FROM scratch\n")):
        folder = write_task(tmp_path / name, {"task.toml": separate, "tests/Dockerfile": tests})
        judge = read_task(folder, name).steps[0].judge
        assert judge is not None
        where = "tests" if tests else "environment"
        assert (judge.has_tests, judge.image.folder) == (bool(tests), folder / where)


def test_a_canary_is_not_for_the_agent(tmp_path: Path) -> None:
    marked = "<!-- harbor-canary GUID 1 -->\n\nDo it.\n# canary stays here\n"
    task = read_task(write_task(tmp_path, {"instruction.md": marked}), "t")
    assert task.steps[0].instruction == "Do it.\n# canary stays here\n"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"task.toml": "[environment"}, "is not a Harbor task"),
        ({"task.toml": "[agent]\ntimeout_sec = 'soon'"}, "timeout_sec"),
        ({"task.toml": "[environment]\nnetwork_mode = 'sometimes'"}, "network_mode"),
        ({"task.toml": "[environment]\nmemory = 'much'"}, "write it as '2G'"),
        ({"task.toml": "[[steps]]\nname = '../x'"}, "name of a step"),
        ({"task.toml": "artifacts = ['/app/../etc']"}, "leads out"),
        ({"instruction.md": None}, "instruction.md"),
        ({"tests/test.sh": None}, "no tests/test.sh"),
        ({"environment/Dockerfile": None}, "write environment/Dockerfile"),
    ],
)
def test_what_is_written_wrongly_is_said(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read_task(write_task(tmp_path, changed), "t")
    assert not isinstance(error.value, UnsupportedTask)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"environment/docker-compose.yaml": "services: {}"}, "several containers"),
        ({"task.toml": "[environment]\nos = 'Windows'", "tests/test.sh": None}, "for Windows"),
        ({"task.toml": "[environment]\ngpus = 1"}, "GPU"),
        ({"task.toml": "[environment]\nnetwork_mode = 'allowlist'"}, "limits its network"),
        ({"task.toml": "[agent]\nnetwork_mode = 'no-network'"}, "another network"),
        ({"task.toml": "[[environment.mcp_servers]]\nname = 'x'"}, "MCP"),
        ({"task.toml": "artifacts = [{source = '/x', service = 'db'}]"}, "several containers"),
        ({"trajectory.json": "{}"}, "earlier conversation"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedTask, match=f"the Harbor task 'a/t' .*{says}"):
        read_task(write_task(tmp_path, changed), "a/t")


def test_a_digest_is_of_names_bits_and_bytes(tmp_path: Path) -> None:
    folder = write_task(tmp_path, {"environment/logo.png": b"\x89PNG\xff"})
    seen = {digest_of(folder)}
    assert {
        digest_of(write_task(tmp_path / "copy", {"environment/logo.png": b"\x89PNG\xff"}))
    } == seen
    (folder / "tests" / "__pycache__").mkdir()
    (folder / "tests" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder / "copy").rename(tmp_path.parent / f"{tmp_path.name}-copy")
    assert {digest_of(folder)} == seen
    for change in ("bytes", "name", "bit"):
        if change == "bytes":
            (folder / "environment" / "logo.png").write_bytes(b"\x89PNG\xfe")
        elif change == "name":
            (folder / "instruction.md").rename(folder / "instruction.txt")
        else:
            (folder / "tests" / "test.sh").chmod(0o755)
        assert digest_of(folder) not in seen
        seen.add(digest_of(folder))


def test_variables_are_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_HERE", "h")
    monkeypatch.delenv("HARBOR_GONE", raising=False)
    given = {"A": "${HARBOR_HERE}", "B": "${HARBOR_GONE:-d}", "C": "x${HARBOR_HERE}", "D": ""}
    found = {"A": "h", "B": "d", "C": "x${HARBOR_HERE}", "D": ""}
    assert resolved(given, ["HARBOR_*"]) == found
    with pytest.raises(ConfigError, match="HARBOR_GONE, which is not set here"):
        resolved({"A": "${HARBOR_GONE}"}, ["HARBOR_*"])


def test_variables_are_given_only_if_the_run_file_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_HERE", "secret")
    assert resolved({"A": "${HARBOR_HERE:-d}"}, ["OTHER"]) == {"A": "d"}
    with pytest.raises(ConfigError, match=r'environment_options\.variables = \["HARBOR_HERE"\]'):
        resolved({"A": "${HARBOR_HERE}"}, ())


@pytest.mark.parametrize(
    "link", ["instruction.md", "environment", "environment/data", "tests/more", "a/b", "loop"]
)
def test_links_stay_in_their_folder(tmp_path: Path, link: str) -> None:
    folder, other = write_task(tmp_path / "task"), tmp_path / "other"
    write_task(other, {"instruction.md": "the runner's own text"})
    (folder / "tests" / "same.sh").symlink_to("test.sh")
    read_task(folder, "task")
    place = folder / link
    place.parent.mkdir(exist_ok=True)
    if place.is_dir():
        place.rename(tmp_path / "moved")
    place.unlink(missing_ok=True)
    place.symlink_to(other / link if (other / link).exists() else "../../other")
    with pytest.raises(ConfigError, match=f"the link {link} leads out of its folder"):
        read_task(folder, "task")


def test_rewards_are_read() -> None:
    both = {"reward.txt": "0.5\n", "reward.json": '{"reward": 1, "style": 0.25}'}
    assert with_outcome(read_rewards(both)) == {"outcome": 1.0, "style": 0.25}
    assert with_outcome(read_rewards({"reward.txt": " 0.5\n"})) == {"outcome": 0.5}
    assert with_outcome({"right": 1.0}) == {"outcome": 1.0}
    assert with_outcome({"a": 1.0, "b": 0.0}, "b") == {"outcome": 0.0, "a": 1.0}
    with pytest.raises(NoRewardError, match="none is named 'reward'"):
        with_outcome({"a": 1.0, "b": 0.0})


@pytest.mark.parametrize(
    "texts",
    [
        {}, {"reward.txt": ""}, {"reward.txt": "nan"}, {"reward.txt": "good"},
        {"reward.txt": "1", "reward.json": ""}, {"reward.json": "{}"}, {"reward.json": "[1]"},
        {"reward.json": '{"reward": "1"}'}, {"reward.json": '{"reward": NaN}'},
        {"reward.json": '{"reward": 1e999}'}, {"reward.json": '{"reward": {"a": 1}}'},
        {"reward.json": '{"reward": null}'}, {"reward.json": f'{{"reward": 1{"0" * 400}}}'},
    ],
)  # fmt: skip
def test_what_is_no_reward_is_none(texts: dict[str, str]) -> None:
    with pytest.raises(NoRewardError):
        read_rewards(texts)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"environment/Dockerfile": "FROM scratch\nRUN pip install x\n"}, "RUN in its Dockerfile"),
        ({"tests/test.sh": "cat /app/hello.txt\n"}, "/app in tests/test.sh"),
        ({"tests/check.py": 'open("/root/x")\n'}, "/root in tests/check.py"),
        ({"tests/test.sh": "apt-get install -y curl\n"}, "apt-get in tests/test.sh"),
        ({"environment/logo.png": b"\x89PNG\xff"}, "not text"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, "verifier's container"),
        ({"task.toml": "[environment]\ndocker_image = 'x'"}, "an image"),
        ({"task.toml": "[environment]\ngpus = 1"}, "GPU"),
    ],
)
async def test_without_containers_a_task_that_needs_one_fails_and_is_never_scored(
    play: Any, tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    write_task(tmp_path / "fit")
    write_task(tmp_path / "unfit", changed)
    fit, unfit = harbor(str(tmp_path))
    agent = "call('x'); open('hello.txt', 'w').write('hello')"
    (good,) = await play(agent, fit, verifier=run_tests)
    (bad,) = await play(agent, unfit, verifier=run_tests)
    assert (good.failure, good.reward()) == (None, 1.0)
    assert bad.failure.kind is ErrorKind.VERIFIER
    assert bad.rewards == []
    assert says in bad.failure.message
    assert "use environment = 'harbor:FOLDER'" in bad.failure.message


async def test_without_containers_several_rewards_are_read(play: Any, tmp_path: Path) -> None:
    said = """echo '{"reward": 0.5, "style": 1}' > /logs/verifier/reward.json\n"""
    write_task(tmp_path, {"tests/test.sh": said})
    (rollout,) = await play("call('x')", *harbor(str(tmp_path)), verifier=run_tests)
    assert rollout.failure is None
    assert (rollout.reward(), rollout.reward("style")) == (0.5, 1.0)
