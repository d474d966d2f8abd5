"""A stand-in for a vLLM server that is managed elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web


class FakeVllm:
    """Answers as vLLM does, and lists the updates it was asked for."""

    def __init__(self) -> None:
        self.version, self.dev, self.lora, self.name, self.key = "0.30.0", True, True, "base", ""
        self.backend = ""
        self.status = 200  # of updates
        self.well = True
        self.updates: list[str] = []
        self.asleep: set[str] = set()
        self.adapters: dict[str, str] = {}  # their folders
        self.asked: list[tuple[str, str]] = []  # model and salt of each call
        self.spans = False
        self.hanging = False
        self.hang = asyncio.Event()
        self.hang.set()
        self.calls = 0
        self.answer = asyncio.Event()
        self.answer.set()
        self.port = 0
        self.runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
        self.runner = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        allowed = not self.key or request.headers.get("authorization") == f"Bearer {self.key}"
        if request.path.startswith("/v1/") and not allowed:
            return web.Response(status=401)
        if request.path in ("/collective_rpc", "/v1/completions") and self.asleep - {"kv_cache"}:
            return web.Response(status=500)
        if request.path.startswith("/v1/c") and self.asleep:
            return web.Response(status=500)
        match request.path:
            case "/sleep" | "/wake_up":
                self.updates.append(request.path_qs)
                woken = {request.query["tags"]} if "tags" in request.query else set()
                self.asleep = self.asleep - woken if woken else {"weights", "kv_cache"}
                return web.Response(status=200)
            case "/is_sleeping":
                return web.json_response({"is_sleeping": bool(self.asleep)})
            case "/pause" | "/resume":
                await self.wait()
                self.updates.append(request.path_qs)
                return web.json_response({})
            case "/health":
                return web.Response(status=200 if self.well else 503)
            case "/version":
                return web.json_response({"version": self.version})
            case "/is_paused" | "/reset_prefix_cache":
                return web.json_response({"success": True}, status=200 if self.dev else 404)
            case "/init_weight_transfer_engine":
                names = {"ipc": "IPCWeightTransferEngine", "nccl": "NCCLWeightTransferEngine"}
                named = f"Invalid init_info for {names.get(self.backend)}: "
                told = named if self.backend else "Weight transfer not configured."
                return web.json_response({"error": {"message": told}}, status=500)
            case "/v1/models":
                cards = [{"id": "policy", "parent": self.name}, {"id": self.name}]
                return web.json_response({"data": cards})
            case "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" if not self.lora:
                return web.Response(status=404)
            case "/v1/unload_lora_adapter":
                known = self.adapters.pop((await request.json())["lora_name"], None)
                return web.Response(status=404 if known is None else 200)
            case "/v1/load_lora_adapter":
                body = await request.json()
                if "lora_name" not in body:
                    return web.Response(status=400)
                self.adapters[body["lora_name"]] = body["lora_path"]
                return web.Response(status=200)
            case "/agentrl/spans":
                if request.query_string:
                    self.updates.append(request.path_qs)
                return web.json_response({}, status=200 if self.spans else 404)
            case "/collective_rpc":
                await self.wait()
                self.updates.append((await request.json())["method"])
                return web.json_response({"by": self.port}, status=self.status)
        body = await request.json()
        if "prompt" in body:
            return web.json_response({"choices": [self.scored(body)]})
        self.calls += 1
        self.asked.append((body.get("model", ""), body.get("cache_salt", "")))
        await self.answer.wait()
        return web.json_response({"path": request.path})

    async def wait(self) -> None:
        """While it hangs."""
        self.hanging = not self.hang.is_set()
        await self.hang.wait()
        self.hanging = False

    def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        """Every token has a log-prob of -1; of what is sampled at temperature 2, -2."""
        rows = [None, *({"7": {"logprob": -1.0}} for _ in body["prompt"][1:])]
        sampled = {"token_ids": [7, 7], "logprobs": {"token_logprobs": [-2.0, -2.0]}}
        return {"prompt_logprobs": rows, **sampled}
