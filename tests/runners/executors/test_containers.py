"""What docker is asked, and what its troubles are."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind
from agentrl.runners.executors import containers
from agentrl.runners.executors.containers import Containers
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.executors.keeper import owner_of
from agentrl.runners.workspace.folders import Workspace, Workspaces

OUTSIDE = {"host": "0.0.0.0", "executor": "container"}
OWN = {"image": "me/agent:1", "network": "agents"}
DOCKER = OWN | {"cli": "docker"}
PRINT = "import os, json; print(json.dumps(dict(os.environ)))"


def configured(agent: dict[str, Any], **runner: Any) -> RunConfig:
    runner = OUTSIDE | {"container": OWN} | runner
    return resolve({"name": "test", "agent": agent, "runner": runner}, source="test")


def options(line: list[str]) -> dict[str, str]:
    """What a line of docker's says before the image or the container."""
    return dict(pairwise(line))


def asked(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def container_of(line: list[str]) -> str:
    """In which container a line runs a program."""
    return line[line.index("/bin/sh") - 1]


async def gone(log: Path, container: str) -> None:
    """Wait until a container is removed."""
    while not any(  # noqa: ASYNC110 - nothing tells
        line[:2] == ["rm", "--force"] and container in line for line in asked(log)
    ):
        await asyncio.sleep(0.01)


async def test_what_docker_is_asked(
    bench: Any, make: Any, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "hush")
    config = configured(
        {"command": [sys.executable, "-Sc", PRINT], "pass_env": ["MY_*"], "folder": "/app"},
        memory_mb=300,
        container=OWN | {"options": ["--cap-drop=ALL"]},
    )
    executor = await make("container", config=config)
    (rollout,) = await bench.run(executor, {"input": "x"})
    lines = asked(docker)
    assert lines[0][0] == "version"
    (agent,) = (line for line in lines if line[0] == "exec")
    name = container_of(agent)
    (run,) = (line for line in lines if line[0] == "run" and name in line)
    place, started = run.index("me/agent:1"), options(run)
    assert started["--label"].startswith("agentrl.owner=")
    for option in ("--memory=300m", "--pids-limit=512", "--cap-drop=ALL"):
        assert option in run[:place]
    assert (started["--network"], started["--add-host"]) == (
        "agents",
        "host.docker.internal:host-gateway",
    )
    assert options(agent)["--workdir"] == "/app"
    assert agent[-3:] == config.agent.command
    assert "--detach" in run
    port = bench.gateway.base_url.rpartition(":")[2]
    assert rollout.result["OPENAI_BASE_URL"] == f"http://host.docker.internal:{port}"
    assert (rollout.result["MY_SECRET"], rollout.result["AGENTRL_TASK"]) == ("hush", '"x"')
    told = " ".join([*run, *agent])
    assert not [secret for secret in ("hush", rollout.result["OPENAI_API_KEY"]) if secret in told]
    assert "PATH" not in [*run, *agent]
    await gone(docker, name)


async def test_a_workspace_is_mounted_and_tested_in_a_container(
    bench: Any, docker: Path, tmp_path: Path
) -> None:
    data = {
        "name": "test",
        "agent": {"command": [sys.executable, "-Sc", PRINT]},
        "runner": {**OUTSIDE, "container": OWN | {"network": "host"}},
        "workspace": {"source": "task.files", "sandbox": "container"},
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
    shared, started = Path(rollout.result["HOME"]).parent.parent, dict[bool, dict[str, str]]()
    for line in asked(docker):
        if line[0] == "run":
            started["--detach" in line] = options(line)
    agents, tests = started[True], started[False]
    (agent,) = (options(line) for line in asked(docker) if line[0] == "exec")
    assert Path(agent["--workdir"]).parent.parent == shared
    own, inside, _ = agents["--volume"].split(":")
    assert Path(inside) == shared
    assert Path(own).parent == shared / "containers"  # it sees no other workspace
    folder = Path(agent["--workdir"]).parent
    assert tests["--volume"] == f"{folder}:{folder}"
    assert tests["--workdir"] == f"{folder}/repo"
    assert tests["--network"] == "none"
    assert tests["--label"] == f"agentrl.owner={owner_of(os.getpid())}"


async def test_the_agents_variables_are_not_those_of_docker(
    bench: Any, make: Any, docker: Path
) -> None:
    env = {"PATH": "/nowhere", "HOME": "/agent", "DOCKER_DOWN": "1", "DOCKER_LOG": "/no/log"}
    config = configured({"command": [sys.executable, "-Sc", PRINT], "env": env | {"TWO": "a\nb"}})
    (rollout,) = await bench.run(await make("container", config=config), {"input": "x"})
    assert rollout.result.items() >= (env | {"TWO": "a\nb"}).items()
    assert "/nowhere" not in " ".join(chain.from_iterable(asked(docker)))


async def test_on_the_hosts_network_the_gateway_is_local(bench: Any, make: Any) -> None:
    config = configured(
        {"command": [sys.executable, "-Sc", PRINT]},
        host="127.0.0.1",
        container=OWN | {"network": "host"},
    )
    (rollout,) = await bench.run(await make("container", config=config), {"input": "x"})
    assert rollout.result["OPENAI_BASE_URL"] == bench.gateway.base_url


async def test_a_container_that_ran_out_of_time_is_removed(
    bench: Any, make: Any, docker: Path
) -> None:
    executor = await make("container", config=configured({"command": ["sleep", "3600"]}))
    (rollout,) = await bench.run(executor, {"input": "x"}, timeout=3.0)
    assert rollout.failure.kind is ErrorKind.TIMEOUT
    (agent,) = (line for line in asked(docker) if line[0] == "exec")
    await gone(docker, container_of(agent))


async def test_what_docker_itself_breaks_is_not_the_agents_failure(
    bench: Any, make: Any, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "WARM", 0)
    executor = await make("container", config=configured({"command": ["cat"]}))
    down = docker.with_name("docker.log.down")
    down.touch()
    try:
        (rollout,) = await bench.run(executor, {"input": "x"}, error_reward=-1.0)
    finally:
        down.unlink()
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
        await make("container", config=configured({"command": ["cat"]}, container=DOCKER))
    assert "\n" not in str(e.value)


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs the docker command line")
async def test_the_real_docker_without_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    config = configured({"command": ["cat"]}, container=DOCKER)
    executor = make_executor(config, root=tmp_path, gateway="http://127.0.0.1:1/v1", runner="test")
    with pytest.raises(ConfigError, match="docker does not work here; start its daemon, or"):
        await executor.start()
    await executor.close()


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        ({"container": {}}, r"runner\.container\.image is missing"),
        ({"agent_env": {"HOME": "a\nb"}}, r"agent\.env: HOME has several lines"),
        ({"container": {"image": "a", "cli": "no-such-cli"}}, "no program 'no-such-cli'"),
    ],
)
async def test_what_the_user_can_mend(make: Any, runner: Any, says: str) -> None:
    env = runner.pop("agent_env", {})
    with pytest.raises(ConfigError, match=says):
        await make("container", config=configured({"command": ["cat"], "env": env}, **runner))


@pytest.mark.parametrize(
    ("info", "ignored"),
    [
        ({"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True}, ""),
        ({"MemoryLimit": False, "CpuCfsQuota": True, "PidsLimit": False}, "memory and processes"),
        ({"host": {"cgroupControllers": [], "security": {"rootless": False}}}, ""),
        (
            {"host": {"cgroupControllers": [], "security": {"rootless": True}}},
            "memory and cores and processes",
        ),
        (
            {"host": {"cgroupControllers": ["memory", "pids"], "security": {"rootless": True}}},
            "cores",
        ),
    ],
)
async def test_limits_that_an_engine_ignores_are_said(
    docker: Path, caplog: pytest.LogCaptureFixture, info: dict[str, Any], ignored: str
) -> None:
    """As a user of rootless podman has them: the engine itself goes on with a warning."""
    info["DockerRootDir"] = str(docker.parent)
    docker.with_name("docker.log.info").write_text(json.dumps(info))
    containers = Containers("docker")
    await containers.start()
    await containers.close()
    said = "docker here ignores limits of "
    assert (f"{said}{ignored}," in caplog.text) if ignored else (said not in caplog.text)
