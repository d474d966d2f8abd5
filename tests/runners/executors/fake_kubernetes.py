"""An API server that knows Jobs, their pods and logs, and runs each Job as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

Object = dict[str, Any]
JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
PODS = "/api/v1/namespaces/{namespace}/pods"


@dataclass(eq=False)
class FakeKubernetes:
    jobs: dict[str, Object] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    states: dict[str, Object] = field(default_factory=dict)  # of the pods' containers
    deleted: list[str] = field(default_factory=list)
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    watchers: set[asyncio.Queue[Object | None]] = field(default_factory=set)
    refuse: int | None = None  # status of every answer
    silent: bool = False  # never answers
    unschedulable: bool = False
    server: TestServer | None = None

    async def start(self, folder: Path) -> Path:
        """The path of a kubeconfig for it."""
        app = web.Application(middlewares=[self.maybe_refuse])
        app.router.add_post(JOBS, self.create)
        app.router.add_get(JOBS, self.list)
        app.router.add_delete(JOBS, self.delete_many)
        app.router.add_delete(JOBS + "/{name}", self.delete)
        app.router.add_get(PODS, self.pods)
        app.router.add_get(PODS + "/{name}/log", self.log)
        self.server = TestServer(app, host="127.0.0.1")
        await self.server.start_server(shutdown_timeout=0.0)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": str(self.server.make_url("/"))}}],
            "users": [{"name": "fake", "user": {"token": "secret"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    async def stop(self) -> None:
        for queue in self.watchers:
            queue.put_nowait(None)
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        assert self.server is not None
        await self.server.close()

    @web.middleware
    async def maybe_refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer secret"
        if self.silent:
            await asyncio.Event().wait()
        if self.refuse is not None:
            return web.json_response({"kind": "Status", "code": self.refuse}, status=self.refuse)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def create(self, request: web.Request) -> web.Response:
        job = await request.json()
        name = job["metadata"]["name"]
        self.jobs[name] = job | {"status": {}}
        self.running[name] = asyncio.create_task(self.work(name))
        self.tell("ADDED", self.jobs[name])
        return web.json_response(job, status=201)

    async def work(self, name: str) -> None:
        """The Job's controller and its one pod."""
        if self.unschedulable:
            self.states[name] = {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}
            await asyncio.Event().wait()
        container = self.jobs[name]["spec"]["template"]["spec"]["containers"][0]
        memory = container.get("resources", {}).get("limits", {}).get("memory", "")
        limited = ["prlimit", f"--data={int(memory.removesuffix('Mi')) * 2**20}"] if memory else []
        self.states[name] = {"running": {}}
        process = await asyncio.create_subprocess_exec(
            *limited,
            *container["command"],
            env={item["name"]: item["value"] for item in container["env"]},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = await process.communicate()
        except asyncio.CancelledError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
            raise
        self.logs[name] = (stdout + stderr).decode()
        ended: Object = {"exitCode": process.returncode, "reason": "Completed"}
        if process.returncode:
            oom = b"MemoryError" in stderr
            ended |= {"reason": "OOMKilled" if oom else "Error", "message": stderr.decode()}
        self.states[name] = {"terminated": ended}
        kind = "Failed" if process.returncode else "Complete"
        self.jobs[name]["status"] = {"conditions": [{"type": kind, "status": "True"}]}
        self.tell("MODIFIED", self.jobs[name])

    def tell(self, kind: str, job: Object) -> None:
        for queue in self.watchers:
            queue.put_nowait({"type": kind, "object": job})

    def matching(self, request: web.Request) -> list[Object]:
        selector = request.query.get("labelSelector", "")
        wanted = dict(each.split("=") for each in selector.split(",") if each).items()
        return [job for job in self.jobs.values() if wanted <= job["metadata"]["labels"].items()]

    async def list(self, request: web.Request) -> web.StreamResponse:
        if not request.query.get("watch"):
            return web.json_response({"kind": "JobList", "items": self.matching(request)})
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        for job in self.matching(request):
            queue.put_nowait({"type": "ADDED", "object": job})
        self.watchers.add(queue)
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self.watchers.discard(queue)
        return response

    async def delete(self, request: web.Request) -> web.Response:
        await self.remove(request.match_info["name"])
        return web.json_response({"kind": "Status", "status": "Success"})

    async def delete_many(self, request: web.Request) -> web.Response:
        for job in self.matching(request):
            await self.remove(job["metadata"]["name"])
        return web.json_response({"kind": "Status", "status": "Success"})

    async def remove(self, name: str) -> None:
        if name not in self.jobs:
            raise web.HTTPNotFound
        self.deleted.append(name)
        self.running[name].cancel()
        await asyncio.wait({self.running[name]})
        self.tell("DELETED", self.jobs.pop(name))

    async def pods(self, request: web.Request) -> web.Response:
        name = request.query["labelSelector"].removeprefix("job-name=")
        if name not in self.states:
            return web.json_response({"kind": "PodList", "items": []})
        status = {"containerStatuses": [container_status(self.states[name])]}
        pod = {"metadata": {"name": f"{name}-pod"}, "status": status}
        return web.json_response({"kind": "PodList", "items": [pod]})

    async def log(self, request: web.Request) -> web.Response:
        text = self.logs[request.match_info["name"].removesuffix("-pod")].encode()
        limit = int(request.query.get("limitBytes", len(text)))
        return web.Response(body=text[:limit], content_type="text/plain")


def container_status(state: Object) -> Object:
    required = {"image": "agent", "imageID": "", "ready": False, "restartCount": 0}
    return required | {"name": "agent", "state": state}
