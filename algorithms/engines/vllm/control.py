"""What is asked of vLLM by who has the key: through the gate before it, each within its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from agentrl.algorithms.engines.vllm.child import CONTROL, SERVER
from agentrl.algorithms.engines.vllm.serving import HOLD, VllmHost
from agentrl.algorithms.engines.vllm.weight_sync import LostError
from agentrl.errors import PolicyError
from agentrl.types import Json


@dataclass(frozen=True, slots=True)
class VllmClient:
    """Asks all servers of a host that are up to date, or one."""

    host: VllmHost
    timeout: float  # seconds
    server: str = ""

    @property
    def urls(self) -> Sequence[str]:
        return (self.server,) if self.server else self.host.servers

    def only(self, server: str) -> VllmClient:
        """The same for one server, up to date or not."""
        return replace(self, server=server)

    async def post(self, path: str, body: Json = None, *, missing: bool = False) -> list[Any]:
        """What each server answered; missing: 404 is an answer too.

        Raises PolicyError for a refusal and for silence, LostError where it may be dying."""
        return await self._request("POST", path, body, missing)

    async def ask(self, url: str, method: str, path: str, body: Json = None) -> Any:
        """What one server answered."""
        return (await self.only(url)._request(method, path, body, False))[0]

    async def _request(self, method: str, path: str, body: Json, missing: bool) -> list[Any]:
        headers = {CONTROL.decode(): self.host.key}
        if self.server:
            headers[SERVER.decode()] = self.server
        # A new connection each: updates block this loop for longer than vLLM keeps idle ones.
        limit = aiohttp.ClientTimeout(total=self.timeout)
        async with aiohttp.ClientSession(headers=headers, timeout=limit) as session:
            try:
                url = self.host.url + path
                async with session.request(method, url, json=body) as reply:
                    answer = await reply.read()
            except TimeoutError:
                what = "calls in flight did not end" if path == HOLD else "no answer"
                raise PolicyError(
                    f"vLLM: {path}: {what} within {self.timeout:g} s (engine.vllm.timeout)"
                ) from None
            except aiohttp.ClientError as error:
                raise LostError(f"{path}: {error}") from None
        if reply.status != 200 and not (missing and reply.status == 404):
            words = f"{path}: {reply.status} {answer[:300].decode(errors='replace')}"
            if reply.status >= 500:  # of its own, or because its engine is dying
                raise LostError(words)
            raise PolicyError(f"vLLM refused {words}; {self.host.last_words()}")
        answers = msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else None
        return answers if isinstance(answers, list) else [answers]
