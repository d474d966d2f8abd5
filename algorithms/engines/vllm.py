"""The policy server of vLLM, in a child process or on servers that somebody else started.

Owns a folder with the weights that are served, which are written there at every publish; adapters
are written alone and loaded by name where that is possible. Always true: weights change only while
the gate before vLLM is held (see `vllm_child`), so every answer comes from the one version it names
and no version changes within a call; after a publish that failed the gate stays held. A server that
ends is brought up again with the newest published weights under the same URL, and calls that were
in flight fail as on a lost connection.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from math import inf, isnan
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from agentrl.algorithms.engines.vllm_child import CONTROL
from agentrl.algorithms.engines.vllm_serving import HOLD, OPEN, Host, Learned, Serving
from agentrl.errors import PolicyError
from agentrl.types import POLICY

log = logging.getLogger(__name__)
RESTARTS = 3  # between two publishes, before the server is given up
GRACE = 15.0  # seconds after a failed request until a server that died of it must have ended


class _LostError(Exception):
    """A request failed as it does on a server that is dying."""


class VllmServer:
    """A PolicyServer whose weights are a copy of the learner's."""

    def __init__(
        self,
        learned: Learned,
        host: Host,
        *,
        folder: Path,
        timeout: float = 60.0,
        tolerance: float = 1e-3,
    ) -> None:
        """timeout: seconds that calls in flight have to end before an update, and that vLLM has to
        take it. tolerance: of the log-probs that are compared after each publish. Servers that
        somebody else started must find `folder` under the same path."""
        self.model = POLICY
        self.base_url = ""
        self._learned, self._host = learned, host
        self._folder, self._timeout, self._tolerance = folder, timeout, tolerance
        self._serving = Serving(folder / "weights-0", folder / "tokenizer")
        self._written = 0  # directories of weights so far
        self._held = self._wrong = self._hot = False
        self._up, self._death = asyncio.Event(), asyncio.Event()
        self._failed: PolicyError | None = None
        self._restarts = 0
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve the learner's current weights as version 0. Raises PolicyError when vLLM does not
        come up, or serves something else."""
        try:
            await self._host.probe()
            self._write_first()
            log.info("vLLM gets new weights by %s.", self._serving.mechanism)
            await self._host.start(self._serving)
            for policy in self._serving.versions:
                await self._check(policy)
            await self._check_temperature(self.model)
        except _LostError:
            await self.close()
            raise PolicyError(f"vLLM failed at its first call; {self._host.last_words()}") from None
        except BaseException:
            await self.close()
            raise
        self.base_url = f"{self._host.url}/v1"
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
            if not self._wrong:  # else the calls that wait would be answered with those weights
                await self._reach(self._open)

    async def publish(self, version: int, policy: str | None = None) -> None:
        """From now on serve the learner's current weights as `version`.

        Raises PolicyError where vLLM's log-probs differ from the learner's afterwards, and for
        a policy that it does not serve. No call is answered then until a publish succeeds."""
        policy = policy or self.model
        if policy not in self._serving.versions:
            served = ", ".join(map(repr, self._serving.versions))
            raise PolicyError(f"vLLM serves the policy {served}, and not {policy!r}")
        if not self._held:
            async with self.updating():
                await self.publish(version, policy)
            return
        self._wrong = True
        # Once it is written, a server that is started again comes up with the new weights.
        old = self._write(policy)
        self._serving.versions[policy] = version
        await self._reach(lambda: self._load(policy))
        self._wrong = False
        self._restarts = 0
        if old is not None:
            shutil.rmtree(old)

    async def add(self, policy: str, version: int) -> None:
        """Also serve the adapter of this name, which the learner has by now. Call inside
        `updating`. Raises PolicyError where adapters cannot be loaded by name."""
        if not self._hot:
            raise PolicyError(
                f"vLLM serves {self.model!r} with all its weights, and {policy!r} beside it needs "
                "adapters that are loaded by name; train adapters (policy.lora.rank), or set "
                "engine.kind = 'embedded'"
            )
        self._serving.versions[policy] = version
        self._write(policy)
        await self._reach(lambda: self._load(policy))

    async def remove(self, policy: str) -> None:
        """Serve such a policy no more. Call inside `updating`."""
        del self._serving.versions[policy]
        weights = self._serving.adapters.pop(policy)
        await self._reach(lambda: self._unload(policy))
        shutil.rmtree(weights)

    async def close(self) -> None:
        """Stop the child, or leave the servers alone. A second time does nothing."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        await self._host.stop()
        for weights in self._folder.glob("weights-*"):
            shutil.rmtree(weights)

    def _write_first(self) -> None:
        for weights in self._folder.glob("weights-*"):  # of a run that was killed
            shutil.rmtree(weights)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._learned.save_tokenizer(self._serving.tokenizer)
        self._hot = bool(self._learned.adapters) and self._host.hot
        if not self._hot:
            if len(self._learned.adapters) > 1:
                raise PolicyError(
                    "vLLM cannot load adapters by name here, so it serves one policy, and not "
                    f"{', '.join(self._learned.adapters)}; see the servers' own log for why"
                )
            self.model = self._host.name
            self._serving.versions = {self.model: 0}
            self._learned.save(self._serving.weights)
            return
        assert self._learned.save_base is not None
        self.model = self._learned.adapters[0]
        self._learned.save_base(self._serving.weights)
        self._serving.versions = dict.fromkeys(self._learned.adapters, 0)
        for name in self._learned.adapters:
            self._write(name)

    def _write(self, policy: str) -> Path | None:
        """The learner's weights of a policy into a new directory, which is served from now on;
        what it replaces is returned."""
        self._written += 1
        path, serving = self._folder / f"weights-{self._written}", self._serving
        if self._hot:
            assert self._learned.save_adapter is not None
            self._learned.save_adapter(policy, path)
            old = serving.adapters.get(policy)
            serving.adapters[policy] = path
            return old
        self._learned.save(path)
        old, serving.weights = serving.weights, path
        return old

    async def _hold(self) -> None:
        await self._post(HOLD)

    async def _open(self) -> None:
        await self._post(f"{OPEN}?{self._serving.query()}")

    async def _load(self, policy: str) -> None:
        """The newest weights of a policy into a running server, behind its held gate."""
        await self._hold()  # a server that was just started again is open
        for path, body in self._serving.loads(policy):
            await self._post(path, body)
        # What was computed with the old weights must not answer for the new ones.
        if not all(reset["success"] for reset in await self._post("/reset_prefix_cache")):
            raise PolicyError("vLLM did not give up its prefix cache after a weight update")
        await self._check(policy)

    async def _unload(self, policy: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": policy})

    async def _check(self, policy: str) -> None:
        """Raises PolicyError where vLLM's log-probs are not the learner's."""
        probe = list(self._learned.probe)
        body = {"model": policy, "prompt": probe, "max_tokens": 1, "prompt_logprobs": 0}
        answers = await self._post("/v1/completions", body | {"temperature": 1.0})
        learned = self._learned.score(self._learned_as(policy), probe)
        for answer in answers:
            self._compare(policy, answer["choices"][0]["prompt_logprobs"][1:], learned)

    async def _check_temperature(self, policy: str) -> None:
        """Raises PolicyError where log-probs are not of what is sampled from."""
        probe = list(self._learned.probe)
        body = {"model": policy, "prompt": probe, "max_tokens": 8, "temperature": 2.0, "seed": 0}
        body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        for answer in await self._post("/v1/completions", body):
            choice = answer["choices"][0]
            tokens, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            scored = self._learned.score(self._learned_as(policy), probe + tokens)
            colder = scored[-len(tokens) :]
            if all(abs(a - b) <= self._tolerance for a, b in zip(served, colder, strict=True)):
                raise PolicyError(
                    "vLLM tells log-probs of another distribution than it samples from; start it "
                    "with --logprobs-mode processed_logprobs"
                )

    def _learned_as(self, policy: str) -> str:
        """The name of a policy in the learner; a server that somebody else started has its own."""
        return policy if self._hot else next(iter(self._learned.adapters), POLICY)

    def _compare(self, policy: str, rows: list[dict[str, Any]], learned: list[float]) -> None:
        served = [next(iter(row.values()))["logprob"] for row in rows]
        gaps = [abs(a - b) for a, b in zip(served, learned, strict=True)]
        worst = max(range(len(gaps)), key=lambda i: inf if isnan(gaps[i]) else gaps[i])
        if not gaps[worst] <= self._tolerance:
            raise PolicyError(
                f"vLLM serves other weights than the learner's after publishing version "
                f"{self._serving.versions[policy]}: log-prob {served[worst]:.6f} against "
                f"{learned[worst]:.6f}, tolerance {self._tolerance:g} (engine.vllm.tolerance)"
            )

    async def _reach(self, work: Callable[[], Awaitable[None]]) -> None:
        """`work` on a server that is up, and again on the next one if it dies in the meantime."""
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
                    raise PolicyError(f"vLLM: {error}; {self._host.last_words()}") from None

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> list[Any]:
        """What each server answered."""
        headers = {CONTROL.decode(): self._host.key}
        # A new connection each: updates block this loop for longer than vLLM keeps idle ones.
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            try:
                async with session.post(self._host.url + path, json=body) as reply:
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
            raise PolicyError(f"vLLM refused {words}; {self._host.last_words()}")
        answers = msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else None
        return answers if isinstance(answers, list) else [answers]

    async def _keep(self) -> None:
        """Start the server again whenever it ends, and say when it is up or given up."""
        while self._failed is None:
            await self._host.ended()
            self._up.clear()
            self._death.set()
            self._death = asyncio.Event()
            await self._restart()
            self._up.set()

    async def _restart(self) -> None:
        words = self._host.last_words()
        while self._restarts < RESTARTS:
            self._restarts += 1
            try:
                await self._host.start(self._serving)
                return
            except PolicyError as error:
                words = str(error)
        self._failed = PolicyError(f"vLLM ended {RESTARTS + 1} times in one step; {words}")
