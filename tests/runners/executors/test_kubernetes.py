"""The Jobs that are rendered, and what their pods can end like."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind, RolloutState
from agentrl.runners import executors
from agentrl.runners.executors import kubernetes as module

TEMPLATE = """
apiVersion: batch/v1
kind: Job
metadata: {labels: {team: research}}
spec:
  ttlSecondsAfterFinished: 60
  template:
    spec:
      serviceAccountName: agents
      containers:
        - name: agent
          image: me/agent:1
          env: [{name: FIRST, value: "1"}]
          resources: {requests: {cpu: 500m}}
        - {name: sidecar, image: proxy}
"""


def configured(root: Path, agent: dict[str, Any], **runner: Any) -> RunConfig:
    outside = {"executor": "kubernetes", "host": "0.0.0.0", "advertise": "127.0.0.1"}
    runner = outside | {"kubernetes": {"image": "agent"}} | runner
    data = {"name": "test", "root": str(root), "agent": agent, "runner": runner}
    return resolve(data, source="test")


def python(code: str) -> dict[str, Any]:
    return {"command": [sys.executable, "-Sc", code]}


async def test_the_job_of_an_attempt(
    bench: Any, make: Any, kubernetes: Any, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(TEMPLATE)
    config = configured(
        tmp_path,
        python("print(1)") | {"env": {"ADDED": "2"}, "folder": "/app"},
        memory_mb=300,
        kubernetes={"template": "job.yaml"},
    )
    executor = await make("kubernetes", config=config, root=tmp_path)
    (rollout,) = await bench.run(executor, {"input": "x"}, timeout=20.0)
    assert rollout.result == 1, rollout.failure
    ((name, job),) = kubernetes.jobs.items()
    assert name == f"agentrl-{rollout.attempt}"
    assert job["metadata"]["labels"] == {
        "team": "research",
        **job["spec"]["template"]["metadata"]["labels"],
    }
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 60)
    assert spec["activeDeadlineSeconds"] == 20 + module.JOB_GRACE
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "agents")
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    agent, sidecar = pod["containers"]
    assert sidecar == {"name": "sidecar", "image": "proxy"}
    assert (agent["image"], agent["workingDir"]) == ("me/agent:1", "/app")
    assert agent["command"] == config.agent.command
    assert agent["resources"] == {"requests": {"cpu": "500m"}, "limits": {"memory": "300Mi"}}
    env = {item["name"]: item["value"] for item in agent["env"]}
    port = bench.gateway.base_url.rpartition(":")[2]
    assert env["OPENAI_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert (env["FIRST"], env["ADDED"], env["AGENTRL_TASK"]) == ("1", "2", '"x"')
    assert "PATH" not in env  # the image has its own


async def test_a_template_may_ask_for_the_token_of_its_account(
    bench: Any, make: Any, tmp_path: Path
) -> None:
    account = "serviceAccountName: agents"
    asked = TEMPLATE.replace(account, f"{account}\n      automountServiceAccountToken: true")
    (tmp_path / "job.yaml").write_text(asked)
    config = configured(tmp_path, python(""), kubernetes={"template": "job.yaml"})
    executor = await make("kubernetes", config=config, root=tmp_path)
    active = bench.gateway.register(await bench.attempt(), sealed=True)
    job = executor.manifest(active, "0" * 16, b"null")
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


async def test_the_log_is_the_result(bench: Any, make: Any, tmp_path: Path) -> None:
    executor = await make(
        "kubernetes", config=configured(tmp_path, python("print('{\"a\": null}')"))
    )
    (rollout,) = await bench.run(executor, {"input": "x"})
    assert rollout.result == {"a": None}


async def test_a_log_of_too_many_bytes_is_no_result(
    bench: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight characters of two bytes: the API sends only the first eleven bytes."""
    monkeypatch.setattr(executors, "MAX_RESULT_BYTES", 10)
    code = "import sys; sys.stdout.buffer.write(bytes([195, 164] * 8))"
    executor = await make("kubernetes", config=configured(tmp_path, python(code)))
    (rollout,) = await bench.run(executor, {"input": "x"}, max_attempts=1)
    assert rollout.failure is not None
    assert "more than 10 bytes to its log" in rollout.failure.message


async def test_a_pod_that_never_began_is_not_the_agents_failure(
    bench: Any, make: Any, kubernetes: Any, tmp_path: Path
) -> None:
    kubernetes.unschedulable = True
    executor = await make("kubernetes", config=configured(tmp_path, python("")))
    (rollout,) = await bench.run(executor, {"input": "x"}, timeout=0.3, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert "ImagePullBackOff: no image" in rollout.failure.message
    assert kubernetes.jobs == {}


async def test_an_api_that_fails_is_not_the_agents_failure(
    bench: Any, make: Any, kubernetes: Any, tmp_path: Path
) -> None:
    executor = await make("kubernetes", config=configured(tmp_path, python("")))
    kubernetes.refuse = 503
    (rollout,) = await bench.run(executor, {"input": "x"}, error_reward=-1.0)
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert "503" in rollout.failure.message
    assert (rollout.attempts, rollout.rewards) == (3, [])


async def test_an_api_that_is_silent_holds_nobody_up(
    bench: Any, make: Any, kubernetes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "API_GRACE", 0.1)
    executor = await make("kubernetes", config=configured(tmp_path, python("")))
    kubernetes.silent = True
    (rollout,) = await bench.run(executor, {"input": "x"}, timeout=0.1, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert "TimeoutError" in rollout.failure.message


async def test_a_job_that_somebody_deletes_is_lost(
    bench: Any, make: Any, kubernetes: Any, hanging: Any
) -> None:
    executor = await make("kubernetes")
    (name,) = await bench.enqueue({"input": hanging.input | {"once": True}})
    stop = asyncio.Event()
    running = asyncio.create_task(bench.worker(executor).run(stop))
    assert await hanging.says() == "begun"
    (job,) = kubernetes.jobs
    kubernetes.states.pop(job)
    await kubernetes.remove(job)
    assert await bench.store.settled(f"g-{name}", timeout=30.0)
    stop.set()
    await running
    (rollout,) = await bench.store.rollouts("test")
    assert (rollout.state, rollout.attempts) == (RolloutState.SUCCEEDED, 2)


@pytest.mark.parametrize("event", [None, {"type": "ADDED", "object": {"metadata": {}}}])
async def test_a_watch_that_breaks_is_opened_again(
    bench: Any, make: Any, kubernetes: Any, monkeypatch: pytest.MonkeyPatch, event: Any
) -> None:
    monkeypatch.setattr(module, "WATCH_PAUSE", 0.01)
    executor = await make("kubernetes")
    (first,) = await bench.run(executor, {"input": {"do": "answer", "text": "x"}})
    for watcher in list(kubernetes.watchers):
        watcher.put_nowait(event)
    (second,) = await bench.run(executor, {"input": {"do": "answer", "text": "y"}})
    assert [first.result["said"], second.result["said"]] == ["x", "y"]


async def test_only_the_jobs_of_this_run_make_room_for_the_next_attempt(
    bench: Any, make: Any, kubernetes: Any, tmp_path: Path
) -> None:
    """Rollouts of another run in the namespace may be named like this one's."""
    config = configured(tmp_path, python(""))
    ours, theirs = (
        await make("kubernetes", config=config),
        await make("kubernetes", config=replace(config, store="sqlite:///elsewhere/store.db")),
    )
    active = bench.gateway.register(await bench.attempt(), sealed=True)
    for number, executor in enumerate((ours, theirs)):
        job = executor.manifest(active, "0" * 16, b"null")
        kubernetes.jobs[f"job-{number}"] = job
        job["metadata"]["name"] = f"job-{number}"
        kubernetes.running[f"job-{number}"] = asyncio.create_task(asyncio.Event().wait())
    await ours._delete_earlier(active)
    assert kubernetes.deleted == ["job-0"]


async def test_an_input_that_is_too_large_is_said(bench: Any, make: Any, tmp_path: Path) -> None:
    executor = await make("kubernetes", config=configured(tmp_path, python("")))
    (rollout,) = await bench.run(executor, {"input": "x" * 200_000})
    assert "200002 bytes, too many for a Job" in rollout.failure.message


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        ({"kubernetes": {}}, r"runner\.kubernetes\.image is missing"),
        ({"host": "127.0.0.1"}, "a kubernetes cannot reach"),
        ({"advertise": ""}, r"runner\.advertise is missing"),
        ({"kubernetes": {"template": "none.yaml"}}, "none.yaml"),
        ({"kubernetes": {"template": "pod.yaml"}}, "must be a single Job"),
    ],
)
async def test_what_the_user_can_mend(make: Any, tmp_path: Path, runner: Any, says: str) -> None:
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump({"kind": "Pod"}))
    with pytest.raises(ConfigError, match=says):
        await make("kubernetes", config=configured(tmp_path, python(""), **runner), root=tmp_path)


async def test_without_a_kubeconfig_there_is_one_sentence(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(location, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no usable kubeconfig"):
        await make("kubernetes", config=configured(tmp_path, python("")))


async def test_jobs_are_in_the_namespace_of_their_template(make: Any, tmp_path: Path) -> None:
    namespaced = TEMPLATE.replace("metadata: {", "metadata: {namespace: agents, ", 1)
    (tmp_path / "job.yaml").write_text(namespaced)
    config = configured(tmp_path, python(""), kubernetes={"template": "job.yaml"})
    executor = await make("kubernetes", config=config, root=tmp_path)
    assert executor.namespace == "agents"


async def test_a_server_that_refuses_is_one_sentence(
    make: Any, kubernetes: Any, tmp_path: Path
) -> None:
    kubernetes.refuse = 403
    with pytest.raises(ConfigError, match="cannot list Jobs in namespace 'default': 403"):
        await make("kubernetes", config=configured(tmp_path, python("")))
