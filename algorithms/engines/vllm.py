"""The policy server of one vLLM child process on this machine.

Owns the process, its port and a folder with the weights it serves, which are written there at every
publish. Always true: weights change only while the child's door is held (see `vllm_child`), so
every answer comes from the one version it names; a child that dies is started again with the newest
published weights on the same port, and calls that were in flight fail as on a lost connection.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf, isnan
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from agentrl.algorithms.engines.vllm_child import CONTROL, HOLD, OPEN
from agentrl.algorithms.engines.vllm_process import Settings, VllmProcess
from agentrl.errors import PolicyError

Export = Callable[[Path], None]
"""Writes the learner's current weights into a new directory, as a Hugging Face checkpoint."""
Score = Callable[[Sequence[int]], list[float]]
"""Token ids -> the learner's log-prob of each but the first, at temperature 1."""

RESTARTS = 3  # between two publishes, before the child is given up
GRACE = 15.0  # seconds after a failed request until a child that died of it must have ended


class _LostError(Exception):
    """A request failed as it does on a child that is dying."""


class VllmServer:
    """A PolicyServer whose weights are a copy of the learner's."""

    def __init__(
        self,
        export: Export,
        score: Score,
        probe: Sequence[int],
        settings: Settings,
        *,
        folder: Path,
        timeout: float = 60.0,
        tolerance: float = 1e-3,
    ) -> None:
        """probe: token ids whose log-probs are compared after each publish, and the difference that
        is tolerated. timeout: seconds that calls in flight have to end before an update, and that
        vLLM has to take it.

        Raises PolicyError where vLLM is missing or too old."""
        self.model = settings.name
        self.base_url = ""
        self._export, self._score, self._probe = export, score, list(probe)
        self._folder, self._timeout, self._tolerance = folder, timeout, tolerance
        self._process = VllmProcess(settings, folder / "vllm.log", secrets.token_hex(16))
        self._published = 0  # directories of weights so far
        self._weights = folder / "weights-0"
        self._version = 0
        self._held = False
        self._up, self._death = asyncio.Event(), asyncio.Event()
        self._failed: PolicyError | None = None
        self._restarts = 0
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the learner's current weights as version 0. Raises PolicyError when vLLM does not
        come up."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._export(self._weights)
        try:
            await self._process.start(self._weights, self._version)
            await self._check()
        except _LostError:
            await self.close()
            raise PolicyError(
                f"vLLM failed at its first call; {self._process.last_words()}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self.base_url = f"{self._process.url}/v1"
        self._up.set()
        self._keeper = asyncio.create_task(self._keep(), name="vllm-keeper")

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """While inside, weights may change: calls in flight have finished, new ones are held."""
        await self._reach(self._hold)
        self._held = True
        try:
            yield
        finally:
            self._held = False
            await self._reach(self._open)

    async def publish(self, version: int, policy: str | None = None) -> None:
        """From now on serve the learner's current weights as `version`.

        Raises PolicyError where vLLM's log-probs differ from the learner's afterwards, and for
        another policy than the one it serves."""
        if policy not in (None, self.model):
            raise PolicyError(f"vLLM serves the policy {self.model!r}, and not {policy!r}")
        if not self._held:
            async with self.updating():
                await self.publish(version)
            return
        self._published += 1
        weights = self._folder / f"weights-{self._published}"
        self._export(weights)
        # From here on a child that is started again comes up with the new weights.
        old, self._weights, self._version = self._weights, weights, version
        await self._reach(self._load)
        self._restarts = 0
        shutil.rmtree(old)

    async def close(self) -> None:
        """Stop the child. A second time does nothing."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._process.stop()
        for weights in self._folder.glob("weights-*"):
            shutil.rmtree(weights)

    async def _hold(self) -> None:
        await self._post(HOLD)

    async def _open(self) -> None:
        await self._post(f"{OPEN}?{self._version}")

    async def _load(self) -> None:
        """The newest weights into a running child, behind its held door."""
        await self._hold()  # a child that was just started again is open
        path = {"weights_path": str(self._weights)}
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
        # What was computed with the old weights must not answer for the new ones.
        if not (await self._post("/reset_prefix_cache"))["success"]:
            raise PolicyError("vLLM did not give up its prefix cache after a weight update")
        await self._check()

    async def _check(self) -> None:
        """Raises PolicyError where vLLM's log-probs are not the learner's."""
        body = {"model": self.model, "prompt": self._probe, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._post("/v1/completions", body | {"temperature": 1.0})
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        served = [next(iter(row.values()))["logprob"] for row in rows]
        learned = self._score(self._probe)
        gaps = [abs(a - b) for a, b in zip(served, learned, strict=True)]
        worst = max(range(len(gaps)), key=lambda i: inf if isnan(gaps[i]) else gaps[i])
        if not gaps[worst] <= self._tolerance:
            raise PolicyError(
                f"vLLM serves other weights than the learner's after publishing version "
                f"{self._version}: log-prob {served[worst]:.6f} against {learned[worst]:.6f}, "
                f"tolerance {self._tolerance:g} (engine.vllm.tolerance)"
            )

    async def _reach(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` on a child that is up, and again on the next one if it dies in the meantime."""
        while True:
            death = self._death
            await self._up.wait()  # the keeper sets it within the start's time-out
            if self._failed is not None:
                raise self._failed
            try:
                return await work()
            except _LostError as error:
                try:
                    async with asyncio.timeout(GRACE):
                        await death.wait()
                except TimeoutError:
                    raise PolicyError(f"vLLM: {error}; see {self._process.log}") from None

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {CONTROL.decode(): self._process.key}
        # A new connection each: updates block this loop for longer than vLLM keeps idle ones.
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            try:
                async with session.post(self._process.url + path, json=body) as reply:
                    answer = await reply.read()
            except TimeoutError:
                what = "calls in flight did not end" if path == HOLD else "no answer"
                raise PolicyError(
                    f"vLLM: {path}: {what} within {self._timeout:g} s (engine.vllm.timeout)"
                ) from None
            except aiohttp.ClientError as error:
                raise _LostError(f"{path}: {error}") from None
        if reply.status != 200:
            words = f"{path}: {reply.status} {answer[:300].decode(errors='replace')}"
            if reply.status >= 500:  # of its own, or because its engine is dying
                raise _LostError(words)
            raise PolicyError(f"vLLM refused {words}; see {self._process.log}")
        return msgspec.json.decode(answer) if answer else None

    async def _keep(self) -> None:
        """Start the child again whenever it ends, and say when it is up or given up."""
        while self._failed is None:
            await self._process.ended()
            self._up.clear()
            self._death.set()
            self._death = asyncio.Event()
            await self._restart()
            self._up.set()

    async def _restart(self) -> None:
        words = self._process.last_words()
        while self._restarts < RESTARTS:
            self._restarts += 1
            try:
                await self._process.start(self._weights, self._version)
                return
            except PolicyError as error:
                words = str(error)
        self._failed = PolicyError(f"vLLM ended {RESTARTS + 1} times in one step; {words}")
