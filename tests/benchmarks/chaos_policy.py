"""One of the policy servers of `chaos`: python -m tests.benchmarks.chaos_policy MODEL HOST PORT

The embedded server on a checkpoint in a process of its own, which answers those control requests of
vLLM's that a fleet at `engine.vllm.urls` sends where weights come as checkpoints ("reload"). It
starts in seconds, where vLLM takes half a minute of two cores and 3 GB, more than the time between
two faults; and after every start it serves the checkpoint it was given at first, as vLLM does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from aiohttp.typedefs import Handler
from safetensors.torch import load_file

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.engines.vllm.delivery import COMPLETIONS
from agentrl.algorithms.engines.vllm.process import MIN_VLLM
from agentrl.algorithms.engines.vllm.protocol import INIT
from agentrl.algorithms.model.load import load_model
from agentrl.core.http import listen

NAME = "embedded server behind engine.vllm.urls"


class PolicyUrl(EmbeddedServer):
    """Answers as a vLLM does that was started without adapters and without a transfer engine."""

    reloads = 0

    async def _listen(self) -> None:
        @web.middleware
        async def control(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._control(request, handler)

        app = self._routes.app(control)
        self._runner, url = await listen(app, self._host, self._port)
        self._admission.requests.release()
        self._admission.engine.start()
        self.base_url = f"{url}/v1"

    async def _control(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        body: Any = await request.json() if request.can_read_body else {}
        match request.path:
            case "/version":
                return web.json_response({"version": ".".join(map(str, MIN_VLLM))})
            case "/is_paused":
                return web.json_response({"is_paused": False})
            case "/reset_prefix_cache":  # a reload has emptied it
                return web.json_response({"success": True})
            case "/collective_rpc":
                assert body["method"] == "reload_weights"
                await self._reload(Path(body["kwargs"]["weights_path"]))
                return web.json_response({"results": [None]})
            case _ if request.path == INIT:
                return web.json_response({"error": "No weight transfer."}, status=500)
            case _ if request.path == COMPLETIONS and "prompt_logprobs" in body:
                rows = await asyncio.to_thread(self._scored, body["prompt"])
                return web.json_response({"choices": [{"prompt_logprobs": [None, *rows]}]})
        return await handler(request)

    async def _reload(self, folder: Path) -> None:
        model, _ = self._learned
        weights = await asyncio.to_thread(load_file, folder / "model.safetensors")
        async with self.updating():
            model.load_state_dict(weights, strict=False)  # embeddings are there once where tied
            self.reloads += 1
            await self.publish(self.reloads)

    @torch.no_grad()
    def _scored(self, prompt: list[int]) -> list[dict[str, dict[str, float]]]:
        model, _ = self._learned
        row = torch.tensor(prompt)
        logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        found = logprobs.gather(1, row[1:, None])[:, 0].tolist()
        return [{str(id): {"logprob": each}} for id, each in zip(prompt[1:], found, strict=True)]


async def main(model: str, host: str, port: str) -> None:
    torch.set_num_threads(1)
    server = PolicyUrl(*load_model(model, device="cpu"), host=host, port=int(port))
    await server.start()
    await server.wait_for_failure()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
