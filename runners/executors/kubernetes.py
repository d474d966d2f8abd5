"""The Kubernetes executor: a Job for each attempt.

Owns: the Jobs labelled with this runner, and one watch for all of them.
Invariant: a Job runs one pod once (`backoffLimit: 0`) and is deleted when its attempt times out or
is stopped. If its runner is killed, the Job ends at its own deadline (`activeDeadlineSeconds`), or
the runner of the rollout's next attempt deletes it.
The result is the pod's log, stdout and stderr together, or the content of `AGENTRL_RESULT_FILE` (at
most 4 KiB, a limit of Kubernetes). There is no stdin.
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

from agentrl.core.config import AgentConfig
from agentrl.core.config.infrastructure import KubernetesRunnerConfig
from agentrl.core.errors import ConfigError, install_command
from agentrl.core.types import ErrorKind, Json
from agentrl.runners import executors
from agentrl.runners.executors import command, input_of, out_of_time
from agentrl.runners.executors.command import FailedAttemptError, SandboxExecutor, matching
from agentrl.runners.gateway.attribution import ActiveAttempt

try:
    import kubernetes_asyncio as kubernetes
    import yaml  # type: ignore[import-untyped]
    from kubernetes_asyncio.client.exceptions import ApiException
except ImportError as error:
    raise ConfigError(
        f"runner.executor = 'kubernetes' needs an extra: {install_command('kubernetes')}"
    ) from error

log = logging.getLogger("agentrl.runner")
API_GRACE = 4.0  # seconds past an attempt's deadline for the Kubernetes API to respond
JOB_GRACE = 30  # seconds past the attempt's deadline until Kubernetes itself ends a Job
KEPT = 300  # seconds for which Kubernetes keeps a finished Job, for inspection
WATCH_PAUSE = 1.0  # seconds until a broken watch is opened again
RESULT_FILE = "/dev/termination-log"  # Kubernetes copies it to the pod's status
RUNNER, RUN, ROLLOUT = "agentrl/runner", "agentrl/run", "agentrl/rollout"  # labels
DELETE: dict[str, Any] = {"propagation_policy": "Background", "grace_period_seconds": 0}
UNREACHABLE = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


class KubernetesExecutor(SandboxExecutor):
    """Runs `agent.command`, by default the image's own command, in `runner.kubernetes.image`."""

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
        """`gateway`: base URL for agents on this machine. `name`: this runner. `run`: identifies
        the run in the namespace, equal for all its runners."""
        self.argv = shlex.split(agent.command) if isinstance(agent.command, str) else agent.command
        self.agent, self.runner, self.config = agent, runner, runner.kubernetes
        self.gateway = command.reachable_url(gateway, runner, "")
        self.template = _template(self.config.template, root)
        self.namespace: str = self.template.get("metadata", {}).get("namespace", "default")
        if not (self.config.image or _container(deepcopy(self.template)).get("image")):
            raise ConfigError("runner.kubernetes.image is missing: set the agent's image")
        self.label, self._run = _label(name), _label(run)
        self._ended: dict[str, asyncio.Future[bool]] = {}  # job -> whether it succeeded
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        configuration = kubernetes.client.Configuration()
        try:
            if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
                load = cast("Callable[..., None]", kubernetes.config.load_incluster_config)
                load(client_configuration=configuration)
            else:
                await kubernetes.config.load_kube_config(client_configuration=configuration)
        except kubernetes.config.ConfigException as error:
            message = f"runner.kubernetes: there is no usable kubeconfig: {error}"
            raise ConfigError(message) from None
        self._client = kubernetes.client.ApiClient(configuration)
        self._jobs = kubernetes.client.BatchV1Api(self._client)
        self._pods = kubernetes.client.CoreV1Api(self._client)
        try:
            await self._jobs.list_namespaced_job(self.namespace, limit=1)
        except UNREACHABLE as error:
            await self._client.close()
            raise ConfigError(
                f"runner.kubernetes: cannot list Jobs in namespace {self.namespace!r}:"
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
            async with asyncio.timeout(active.left + API_GRACE):
                return await self._run_job(active, span)
        except UNREACHABLE as error:
            message = f"Kubernetes: {_reason(error)}"
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, message) from None

    async def _run_job(self, active: ActiveAttempt, span: str) -> Json:
        task = msgspec.json.encode(input_of(active))
        if len(task) > command.MAX_VARIABLE_BYTES:
            message = f"the task's input has {len(task)} bytes, too many for a Job's environment"
            raise FailedAttemptError(ErrorKind.AGENT, message)
        job = self.manifest(active, span, task)
        name = job["metadata"]["name"]
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        delete = True
        try:
            if active.attempt.fence > 1:  # a killed runner may have left a Job behind
                await self._delete_earlier(active)
            await self._jobs.create_namespaced_job(self.namespace, cast("Any", job))
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
        """Build the Job of one attempt from the user's template."""
        job = deepcopy(self.template)
        labels = {RUNNER: self.label, RUN: self._run, ROLLOUT: _label(active.attempt.rollout.id)}
        metadata = job.setdefault("metadata", {})
        metadata["name"] = f"agentrl-{active.id}"
        metadata.setdefault("labels", {}).update(labels)
        spec = job.setdefault("spec", {})
        spec["backoffLimit"] = 0
        spec.setdefault("ttlSecondsAfterFinished", KEPT)
        spec["activeDeadlineSeconds"] = math.ceil(active.left) + JOB_GRACE
        container = _container(job)
        pod = spec["template"]
        pod.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        pod["spec"]["restartPolicy"] = "Never"
        pod["spec"].setdefault("automountServiceAccountToken", False)  # no access to Kubernetes
        pod["spec"].setdefault("enableServiceLinks", False)
        variables = matching(os.environ, self.agent.pass_env) | self.agent.env
        variables |= command.attempt_environment(active, self.gateway, span, task, variables)
        variables["AGENTRL_RESULT_FILE"] = RESULT_FILE
        env_list = [{"name": key, "value": value} for key, value in variables.items()]
        container["env"] = [*container.get("env", []), *env_list]
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
        """Record the end of each Job. A new watch first reports the state of all Jobs."""
        while True:
            try:
                async with kubernetes.watch.Watch() as watch:
                    jobs, selector = self._jobs.list_namespaced_job, f"{RUNNER}={self.label}"
                    events = watch.stream(jobs, self.namespace, label_selector=selector)
                    async for event in events:
                        self._note_end(event["raw_object"], deleted=event["type"] == "DELETED")
            except Exception as error:  # noqa: BLE001 - without a watch no attempt would end
                log.warning("watching Jobs failed, trying again: %s", _reason(error))
            await asyncio.sleep(WATCH_PAUSE)

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
        """Return the result of an ended Job, from its pod."""
        pod = await self._pod(job)
        ended = _state(pod, "terminated")
        if pod is None or ended is None:
            message = f"Job {job} ended without a pod that ran: it was deleted"
            raise FailedAttemptError(ErrorKind.LOST_RUNNER, message)
        written = ended.get("message") or ""
        if ended.get("reason") == "OOMKilled":
            message = f"the agent was killed for using more than {self.runner.memory_mb} MB"
            raise FailedAttemptError(ErrorKind.AGENT, message, written)
        command.check_exit(ended["exitCode"], written)
        result = written or await self._log(pod)
        if len(result.encode()) > executors.MAX_RESULT_BYTES:
            raise command.too_large("its log")
        return command.parse_result(result)

    async def _timed_out(self, active: ActiveAttempt, job: str) -> FailedAttemptError:
        """Build the failure of a Job past its deadline: too slow, or its pod never started."""
        late, pod = out_of_time(active), await self._pod(job)
        waiting = _state(pod, "waiting")
        if pod is not None and waiting is None:
            return FailedAttemptError(late.kind, late.message)
        why = f": {waiting.get('reason')}: {waiting.get('message', '')}" if waiting else ""
        message = f"the pod of Job {job} did not start in time{why}"
        return FailedAttemptError(ErrorKind.LOST_RUNNER, message)

    async def _pod(self, job: str) -> dict[str, Any] | None:
        response = await self._pods.list_namespaced_pod(
            self.namespace, label_selector=f"job-name={job}"
        )
        pods = self._client.sanitize_for_serialization(response)["items"]
        return pods[0] if pods else None

    async def _log(self, pod: dict[str, Any]) -> str:
        answer: Any = await self._pods.read_namespaced_pod_log(
            pod["metadata"]["name"],
            self.namespace,
            container=pod["status"]["containerStatuses"][0]["name"],
            limit_bytes=executors.MAX_RESULT_BYTES + 1,
            _preload_content=False,  # otherwise the client converts a JSON log to a Python repr
        )
        async with answer:
            return str(await answer.text(errors="replace"))

    async def _delete(self, job: str) -> None:
        with suppress(*UNREACHABLE):  # the Job's own deadline ends it later
            async with asyncio.timeout(API_GRACE):
                await self._jobs.delete_namespaced_job(job, self.namespace, **DELETE)

    async def _delete_earlier(self, active: ActiveAttempt) -> None:
        labels = f"{RUN}={self._run},{ROLLOUT}={_label(active.attempt.rollout.id)}"
        await self._jobs.delete_collection_namespaced_job(
            self.namespace, label_selector=labels, **DELETE
        )


def _template(name: str, root: Path) -> dict[str, Any]:
    if not name:
        return {"apiVersion": "batch/v1", "kind": "Job"}
    try:
        job = yaml.safe_load((root / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"runner.kubernetes.template = {name!r}: {error}") from None
    if not isinstance(job, dict) or job.get("kind") != "Job":
        raise ConfigError(f"runner.kubernetes.template = {name!r}: it must be a single Job")
    return job


def _container(job: dict[str, Any]) -> dict[str, Any]:
    """Return the first container, which runs the agent; create it if there is none."""
    pod = job.setdefault("spec", {}).setdefault("template", {}).setdefault("spec", {})
    containers = pod.setdefault("containers", [])
    if not containers:
        containers.append({"name": "agent"})
    first: dict[str, Any] = containers[0]
    return first


def _state(pod: dict[str, Any] | None, state: str) -> dict[str, Any] | None:
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or [{}]
    details: dict[str, Any] | None = statuses[0].get("state", {}).get(state)
    return details


def _label(text: str) -> str:
    """Hash a text to a label value, which has at most 63 characters of a small set."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _reason(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return str(error) or type(error).__name__
