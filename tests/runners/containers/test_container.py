"""What docker is asked, and what its troubles are."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.workspace.folders import Workspace, Workspaces
from agentrl.types import ErrorKind

OUTSIDE = {"host": "0.0.0.0", "executor": "container"}
PRINT = "import os, json; print(json.dumps(dict(os.environ)))"


def configured(agent: dict[str, Any], **runner: Any) -> RunConfig:
    runner = OUTSIDE | {"container": {"image": "me/agent:1"}} | runner
    return resolve({"name": "test", "agent": agent, "runner": runner}, source="test")


def asked(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def test_what_docker_is_asked(
    bench: Any, make: Any, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    config = configured(
        {"command": [sys.executable, "-Sc", PRINT], "pass_env": ["MY_*"], "folder": "/app"},
        memory_mb=300,
        container={"image": "me/agent:1", "network": "agents", "options": ["--cap-drop=ALL"]},
    )
    executor = await make("container", config=config)
    (rollout,) = await bench.run(executor, {"input": "x"})
    version, run = asked(docker)
    assert version[0] == "version"
    image = run.index("me/agent:1")
    assert run[: run.index("--env-file")] == [
        *("run", "--rm", "--interactive", "--init"),
        *("--name", f"agentrl-{rollout.attempt}"),
    ]
    for option in ("--memory=300m", "--network", "--workdir", "--cap-drop=ALL"):
        assert option in run[:image]
    assert "host.docker.internal:host-gateway" in run[:image]
    assert run[image + 1 :] == config.agent.command
    port = bench.gateway.base_url.rpartition(":")[2]
    assert rollout.result["OPENAI_BASE_URL"] == f"http://host.docker.internal:{port}"
    assert (rollout.result["MY_SECRET"], rollout.result["AGENTRL_TASK"]) == ("hush", '"x"')
    told = " ".join(run)
    assert not [secret for secret in ("hush", rollout.result["OPENAI_API_KEY"]) if secret in told]
    assert "PATH" not in run


async def test_a_workspace_is_mounted_and_tested_in_a_container(
    bench: Any, docker: Path, tmp_path: Path
) -> None:
    data = {
        "name": "test",
        "agent": {"command": [sys.executable, "-Sc", PRINT]},
        "runner": {**OUTSIDE, "container": {"image": "me/agent:1", "network": "host"}},
        "workspace": {"source": "task.files", "sandbox": "container", "folder": str(tmp_path)},
    }
    config, url = resolve(data, source="test"), bench.gateway.base_url
    executor = make_executor(config, root=tmp_path, gateway=url, runner="test")
    spaces = Workspaces(config, root=tmp_path, gateway=url)
    await executor.start()
    await spaces.start()

    async def verify(workspace: Workspace) -> float:
        done = await workspace.run([sys.executable, "-Sc", PRINT])
        return float(json.loads(done.stdout)["HOME"] == str(workspace.home))

    try:
        task = {"input": "x", "files": {"a": "x"}}
        (rollout,) = await bench.run(executor, task, verifier=verify, workspaces=spaces)
    finally:
        await executor.close()
        await spaces.close()
    assert rollout.failure is None
    assert rollout.reward() == 1.0
    agent, tests = (line for line in asked(docker) if line[0] == "run")
    folder = str(Path(rollout.result["HOME"]).parent)
    for line in (agent, tests):
        assert line[line.index("--volume") + 1] == f"{folder}:{folder}"
        assert line[line.index("--workdir") + 1] == f"{folder}/repo"
    assert tests[tests.index("--network") + 1] == "none"


async def test_the_agents_variables_are_not_those_of_docker(
    bench: Any, make: Any, docker: Path
) -> None:
    env = {"PATH": "/nowhere", "HOME": "/agent", "DOCKER_DOWN": "1", "DOCKER_LOG": "/no/log"}
    config = configured({"command": [sys.executable, "-Sc", PRINT], "env": env | {"TWO": "a\nb"}})
    (rollout,) = await bench.run(await make("container", config=config), {"input": "x"})
    assert rollout.result.items() >= (env | {"TWO": "a\nb"}).items()
    assert "/nowhere" not in " ".join(asked(docker)[-1])


async def test_on_the_hosts_network_the_gateway_is_local(bench: Any, make: Any) -> None:
    config = configured(
        {"command": [sys.executable, "-Sc", PRINT]},
        host="127.0.0.1",
        container={"image": "agent", "network": "host"},
    )
    (rollout,) = await bench.run(await make("container", config=config), {"input": "x"})
    assert rollout.result["OPENAI_BASE_URL"] == bench.gateway.base_url


async def test_a_container_that_ran_out_of_time_is_removed(
    bench: Any, make: Any, docker: Path
) -> None:
    executor = await make("container", config=configured({"command": ["sleep", "3600"]}))
    (rollout,) = await bench.run(executor, {"input": "x"}, timeout=0.3)
    assert rollout.failure.kind is ErrorKind.TIMEOUT
    assert asked(docker)[-1] == ["rm", "--force", f"agentrl-{rollout.attempt}"]


async def test_what_docker_itself_breaks_is_not_the_agents_failure(
    bench: Any, make: Any, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = await make("container", config=configured({"command": ["cat"]}))
    monkeypatch.setenv("DOCKER_DOWN", "1")
    (rollout,) = await bench.run(executor, {"input": "x"}, error_reward=-1.0)
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert "Is the docker daemon running?" in rollout.failure.message
    assert (rollout.attempts, rollout.rewards) == (3, [])


async def test_a_daemon_that_is_down_is_one_sentence(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_DOWN", "1")
    with pytest.raises(
        ConfigError, match=r"start its daemon, or.*Is the docker daemon running"
    ) as e:
        await make("container", config=configured({"command": ["cat"]}))
    assert "\n" not in str(e.value)


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command line")
async def test_the_real_docker_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    config = configured({"command": ["cat"]})
    executor = make_executor(config, root=tmp_path, gateway="http://127.0.0.1:1/v1", runner="test")
    with pytest.raises(ConfigError, match="docker does not work here; start its daemon, or"):
        await executor.start()
    await executor.close()


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        ({"container": {}}, r"runner\.container\.image is missing"),
        ({"agent_env": {"HOME": "a\nb"}}, r"agent\.env: HOME has several lines"),
        ({"host": "127.0.0.1"}, r"runner\.host = '127\.0\.0\.1': a container cannot reach"),
        ({"host": "127.0.0.2"}, r"a container cannot reach"),
        ({"container": {"image": "a", "cli": "no-such-cli"}}, "no program 'no-such-cli'"),
    ],
)
async def test_what_the_user_can_mend(make: Any, runner: Any, says: str) -> None:
    env = runner.pop("agent_env", {})
    with pytest.raises(ConfigError, match=says):
        await make("container", config=configured({"command": ["cat"], "env": env}, **runner))
