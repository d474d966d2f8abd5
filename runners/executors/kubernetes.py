"""A Kubernetes Job for each rollout.

Owns: the Jobs labelled with this runner, and one watch for all of them.
Always true: a Job runs one pod once (`backoffLimit: 0`) and is deleted when its attempt runs out of
time or is stopped. When its runner is killed, it ends by itself (`activeDeadlineSeconds`), or the
runner that has the rollout's next attempt deletes it.
The result is what the pod logs, stdout and stderr alike, or what it writes to
`AGENTRL_RESULT_FILE` (at most 4 KiB, Kubernetes' limit). There is no stdin.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec

from agentrl.config import AgentConfig, KubernetesRunnerConfig
from agentrl.errors import ConfigError
from agentrl.runners.executors import contract, input_of, out_of_time
from agentrl.runners.executors.contract import FailedAttemptError, SandboxExecutor
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.types import ErrorKind, Json

try:
    import kubernetes_asyncio as kubernetes
    import yaml  # type: ignore[import-untyped]
    from kubernetes_asyncio.client.exceptions import ApiException
except ImportError as error:
    raise ConfigError(
        "runner.executor = 'kubernetes' needs the extra kubernetes: pip install agentrl[kubernetes]"
    ) from error

log = logging.getLogger("agentrl.runner")
ANSWER = 4.0  # seconds that the API may take past an attempt's deadline
MARGIN = 30  # seconds past the attempt's deadline after which Kubernetes itself ends a Job
RECONNECT = 1.0  # seconds until a watch that broke is opened again
RESULT_FILE = "/dev/termination-log"  # Kubernetes reads it into the pod's status
RUNNER, RUN, ROLLOUT = "agentrl/runner", "agentrl/run", "agentrl/rollout"  # labels
DELETE: dict[str, Any] = {"propagation_policy": "Background", "grace_period_seconds": 0}
UNREACHABLE = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


class KubernetesExecutor(SandboxExecutor):
    """Runs `agent.command`, or else the image's own, in `runner.kubernetes.image`."""

    def __init__(
        self,
        agent: AgentConfig,
        runner: KubernetesRunnerConfig,
        *,
        root: Path,
        gateway: str,
        name: str,
        run: str,
    ) -> None:
        """`gateway` is the base URL for agents on this machine, `name` that of this runner; `run`
        is the same for all runners of a run, and for no other that shares the namespace."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.agent, self.runner, self.config = agent, runner, runner.kubernetes
        self.gateway = contract.reachable_url(gateway, runner, "")
        self.template = _template(self.config.template, root)
        if not (self.config.image or _container(deepcopy(self.template)).get("image")):
            raise ConfigError("runner.kubernetes.image is missing: which image holds the agent?")
        self.label, self._run = _label(name), _label(run)
        self._ended: dict[str, asyncio.Future[bool]] = {}  # job -> whether it succeeded
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        configuration = kubernetes.client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and not self.config.context:
                load = cast("Callable[..., None]", kubernetes.config.load_incluster_config)
                load(client_configuration=configuration)
            else:
                await kubernetes.config.load_kube_config(
                    context=self.config.context or None, client_configuration=configuration
                )
        except kubernetes.config.ConfigException as error:
            message = f"runner.kubernetes: there is no usable kubeconfig: {error}"
            raise ConfigError(message) from None
        self._client = kubernetes.client.ApiClient(configuration)
        self._jobs = kubernetes.client.BatchV1Api(self._client)
        self._pods = kubernetes.client.CoreV1Api(self._client)
        try:
            await self._jobs.list_namespaced_job(self.config.namespace, limit=1)
        except UNREACHABLE as error:
            await self._client.close()
            raise ConfigError(
                f"runner.kubernetes: cannot list Jobs in namespace {self.config.namespace!r}:"
                f" {_reason(error)}"
            ) from None
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
            await self._client.close()

    async def _execute(self, active: ActiveAttempt, span: str) -> Json:
        try:
            async with asyncio.timeout(active.left + ANSWER):
                return await self._run_job(active, span)
        except UNREACHABLE as error:
            message = f"Kubernetes: {_reason(error)}"
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, message) from None

    async def _run_job(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        if len(task) > contract.LARGEST_VARIABLE:
            message = f"the task's input has {len(task)} bytes, more than a Job can be given"
            raise FailedAttemptError(ErrorKind.AGENT, message)
        job = self.manifest(active, span, task)
        name = job["metadata"]["name"]
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        delete = True
        try:
            if active.attempt.fence > 1:  # a killed runner may have left the Job of its attempt
                await self._delete_earlier(active)
            await self._jobs.create_namespaced_job(self.config.namespace, cast("Any", job))
            await asyncio.wait({ended}, timeout=active.left)
            if not ended.done():
                raise await self._timed_out(active, name)
            delete = False
            return await self._read(name)
        finally:
            del self._ended[name]
            if delete:
                await asyncio.shield(self._delete(name))

    def manifest(self, active: ActiveAttempt, span: str, task: bytes) -> dict[str, Any]:
        """The Job of one attempt: the user's template, completed."""
        job = deepcopy(self.template)
        labels = {RUNNER: self.label, RUN: self._run, ROLLOUT: _label(active.attempt.rollout.id)}
        metadata = job.setdefault("metadata", {})
        metadata["name"] = f"agentrl-{active.id}"
        metadata.setdefault("labels", {}).update(labels)
        spec = job.setdefault("spec", {})
        spec |= {"backoffLimit": 0, "ttlSecondsAfterFinished": self.config.ttl}
        spec["activeDeadlineSeconds"] = math.ceil(active.left) + MARGIN
        container = _container(job)
        pod = spec["template"]
        pod.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        pod["spec"]["restartPolicy"] = "Never"
        pod["spec"].setdefault("automountServiceAccountToken", False)  # the model is all it reaches
        pod["spec"].setdefault("enableServiceLinks", False)
        variables = contract.matching(os.environ, self.agent.pass_env) | self.agent.env
        variables |= contract.attempt_environment(active, self.gateway, span, task)
        variables["AGENTRL_RESULT_FILE"] = RESULT_FILE
        given = [{"name": key, "value": value} for key, value in variables.items()]
        container["env"] = [*container.get("env", []), *given]
        container["terminationMessagePath"] = RESULT_FILE
        container["terminationMessagePolicy"] = "FallbackToLogsOnError"
        container |= {"image": self.config.image} if self.config.image else {}
        container |= {"command": self.argv} if self.argv else {}
        container |= {"workingDir": self.agent.folder} if self.agent.folder else {}
        if self.runner.memory_mb:
            limits = container.setdefault("resources", {}).setdefault("limits", {})
            limits["memory"] = f"{self.runner.memory_mb}Mi"
        return job

    async def _watch(self) -> None:
        """Note when each Job ends. A watch begins with the state of all of them."""
        while True:
            try:
                async with kubernetes.watch.Watch() as watch:
                    jobs, own = self._jobs.list_namespaced_job, f"{RUNNER}={self.label}"
                    events = watch.stream(jobs, self.config.namespace, label_selector=own)
                    async for event in events:
                        self._note_end(event["raw_object"], deleted=event["type"] == "DELETED")
            except Exception as error:  # noqa: BLE001 - without it no attempt would ever end
                log.warning("watching Jobs failed, trying again: %s", _reason(error))
            await asyncio.sleep(RECONNECT)

    def _note_end(self, job: dict[str, Any], *, deleted: bool) -> None:
        ended = self._ended.get(job["metadata"]["name"])
        if ended is None or ended.done():
            return
        for condition in job.get("status", {}).get("conditions") or ():
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                ended.set_result(condition["type"] == "Complete")
                return
        if deleted:
            ended.set_result(False)

    async def _read(self, job: str) -> Json:
        """The result of a Job that ended, from its pod."""
        pod = await self._pod(job)
        ended = _state(pod, "terminated")
        if pod is None or ended is None:
            message = f"Job {job} ended without a pod that ran: somebody deleted it"
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, message)
        written = ended.get("message") or ""
        if ended.get("reason") == "OOMKilled":
            message = f"the agent was killed for using more than {self.runner.memory_mb} MB"
            raise FailedAttemptError(ErrorKind.AGENT, message, written)
        contract.check_exit(ended["exitCode"], written)
        result = written or await self._log(pod)
        if len(result) > contract.LARGEST_RESULT:
            raise contract.too_large("its log")
        return contract.parse_result(result)

    async def _timed_out(self, active: ActiveAttempt, job: str) -> FailedAttemptError:
        """Whether the agent ran too long, or its pod never started."""
        late, pod = out_of_time(active), await self._pod(job)
        waiting = _state(pod, "waiting")
        if pod is not None and waiting is None:
            return FailedAttemptError(late.kind, late.message)
        why = f": {waiting.get('reason')}: {waiting.get('message', '')}" if waiting else ""
        message = f"the pod of Job {job} did not start in time{why}"
        return FailedAttemptError(ErrorKind.LOST_RUNNER, message)

    async def _pod(self, job: str) -> dict[str, Any] | None:
        found = await self._pods.list_namespaced_pod(
            self.config.namespace, label_selector=f"job-name={job}"
        )
        pods = self._client.sanitize_for_serialization(found)["items"]
        return pods[0] if pods else None

    async def _log(self, pod: dict[str, Any]) -> str:
        answer: Any = await self._pods.read_namespaced_pod_log(
            pod["metadata"]["name"],
            self.config.namespace,
            container=pod["status"]["containerStatuses"][0]["name"],
            limit_bytes=contract.LARGEST_RESULT + 1,
            _preload_content=False,  # else the client turns a log that is JSON into a Python repr
        )
        async with answer:
            return str(await answer.text(errors="replace"))

    async def _delete(self, job: str) -> None:
        with suppress(*UNREACHABLE):  # the Job has a deadline of its own
            async with asyncio.timeout(ANSWER):
                await self._jobs.delete_namespaced_job(job, self.config.namespace, **DELETE)

    async def _delete_earlier(self, active: ActiveAttempt) -> None:
        labels = f"{RUN}={self._run},{ROLLOUT}={_label(active.attempt.rollout.id)}"
        await self._jobs.delete_collection_namespaced_job(
            self.config.namespace, label_selector=labels, **DELETE
        )


def _template(name: str, root: Path) -> dict[str, Any]:
    if not name:
        return {"apiVersion": "batch/v1", "kind": "Job"}
    try:
        found = yaml.safe_load((root / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"runner.kubernetes.template = {name!r}: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != "Job":
        raise ConfigError(f"runner.kubernetes.template = {name!r}: it is not one Job")
    return found


def _container(job: dict[str, Any]) -> dict[str, Any]:
    """The first container, which is the agent's."""
    pod = job.setdefault("spec", {}).setdefault("template", {}).setdefault("spec", {})
    containers = pod.setdefault("containers", [])
    if not containers:
        containers.append({"name": "agent"})
    found: dict[str, Any] = containers[0]
    return found


def _state(pod: dict[str, Any] | None, state: str) -> dict[str, Any] | None:
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or [{}]
    found: dict[str, Any] | None = statuses[0].get("state", {}).get(state)
    return found


def _label(text: str) -> str:
    """Labels allow few characters and no more than 63 of them."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _reason(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return str(error) or type(error).__name__
