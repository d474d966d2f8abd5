"""The processes of a simulated run: an algorithm with a policy server, and runners with a gateway.

Their code is the library's: training loop, collector, checkpoints, worker, execution, gateway,
store. Only what computes is a stand-in: a learner that folds its groups into a digest, a model
whose answers depend only on the conversation, an agent of two calls, and its verifier. Each answer
has a serial number in its log-prob, by which the invariants recognise it.
"""

from __future__ import annotations

import asyncio
import contextvars
import gzip
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.engines.base import RequestHold
from agentrl.algorithms.objective.core import ReferenceControl
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.algorithms.train import stages
from agentrl.algorithms.train.features import LoadedRun, ServedRun
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.algorithms.train.metrics import group_metrics
from agentrl.algorithms.train.policies import PolicySet
from agentrl.algorithms.train.saving import HeldoutEvaluator
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import policy_by_role
from agentrl.core.types import ENDED, POLICY, Attempt, Credit, Group, Json, NewRollout, float32
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors import ExecutionResult
from agentrl.runners.gateway.attribution import ActiveAttempt, AttemptRegistry
from agentrl.runners.gateway.server import Endpoints, Gateway, _abort_calls
from agentrl.runners.gateway.upstream import Router, Upstream
from agentrl.runners.main import Worker, run_features
from agentrl.runners.scoring import Verifier
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.http.client import Connections
from agentrl.store.http.keys import KeyFile
from agentrl.store.http.server import StoreApp
from agentrl.store.sql.store import SqlStore
from tests.simulation.loop import LANE, Lane, SimulatedLoop, Violation, chained

if TYPE_CHECKING:
    from tests.simulation.world import World

KEYS = {"admin": "admin-key-1", "runner": "runner-key-1", "reader": "reader-key-1"}
TURNS = 2  # calls of an agent
SERIAL = 2.0**-20  # the log-prob of an answer's tokens is its serial number times -SERIAL


# -- learning --------------------------------------------------------------------------------------


class Fold:
    """The state of the learner: a digest of all that it was given, and the groups of each step."""

    def __init__(self) -> None:
        self.digest, self.reference = "", ""
        self.steps: list[list[str]] = []

    def dump(self) -> Json:
        return {"digest": self.digest, "reference": self.reference, "steps": self.steps}

    def restore(self, data: Json) -> None:
        self.digest, self.reference = data["digest"], data["reference"]
        self.steps = [[*groups] for groups in data["steps"]]

    def finish(self, step: int) -> None:
        """Update the reference, as every second step does."""
        if step % 2:
            self.reference = self.digest

    def summary(self) -> str:
        return f"{self.digest}/{self.reference}"

    def add(self, groups: Sequence[Group]) -> None:
        content = [self.digest, self.reference, [folded(group) for group in groups]]
        self.digest = blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
        self.steps = [*self.steps, [group.id for group in groups]]


def expected(config: RunConfig, tasks: list[dict[str, Json]], empty: int | None = None) -> str:
    """The digest after an undisturbed run, computed from nothing but the tasks. empty: a step
    without usable rollouts; the reference that is due in it is updated in the next one."""
    fold, sampler, due = Fold(), TaskSampler(config, tasks), list[int]()
    for step in range(config.steps):
        due.append(step)
        if step == empty:
            continue
        groups: dict[str, list[Any]] = {}
        for row in sampler.rollouts(step):
            groups.setdefault(row.group, []).append(played(row))
        fold.add(
            [cast(Group, SimpleNamespace(id=id, rollouts=rows)) for id, rows in groups.items()]
        )
        for due_step in reversed(due):
            fold.finish(due_step)
        due.clear()
    return fold.summary()


def played(row: NewRollout) -> Any:
    texts, calls = [row.task["input"]], []
    for _ in range(TURNS):
        prompt = "\n".join(texts).encode()
        digest = blake2b(prompt, digest_size=4).digest()
        calls.append(SimpleNamespace(prompt=[*prompt], completion=[*digest]))
        texts += [digest.hex(), "more"]
    value = score(row.task, digest.hex())
    return SimpleNamespace(id=row.id, rewards=[SimpleNamespace(value=value)], transitions=calls)


def folded(group: Group) -> Json:
    """What a learner sees of a group, without log-probs, which contain the serial numbers."""
    return [group.id] + [
        [
            row.id,
            [reward.value for reward in row.rewards],
            [[*map(int, call.prompt), *map(int, call.completion)] for call in row.transitions],
        ]
        for row in group.rollouts
    ]


@dataclass
class FoldingUpdater:
    """In place of `Updater`, with a real state."""

    config: RunConfig
    fold: Fold = field(default_factory=Fold)
    state: AlgorithmState = field(default_factory=AlgorithmState)
    limit: Any = None
    teacher: Any = None

    def __post_init__(self) -> None:
        self.state.parts["fold"] = self.fold
        self.algo = SimpleNamespace(rewards=("outcome",), name="fold")
        self.learner = SimpleNamespace(rest=lambda: None, save=self.save, load=self.load)
        self.preprocessor = SimpleNamespace(step_rewards=[])
        self.reference_control = ReferenceControl(SimpleNamespace(finish=self.fold.finish))  # type: ignore[arg-type]
        self.recorder = SimpleNamespace(stored=lambda: self._credits)
        self._credits: list[Credit] = []

    def update(self, step: int, groups: Sequence[Group], number: int) -> dict[str, float]:
        self.fold.add(groups)
        self.reference_control.finish(step)
        rollouts = [row for group in groups for row in group.rollouts]
        calls = [call for row in rollouts for call in row.transitions]
        numbers = {name: float32([0.5]) for name in ("advantage", "baseline", "gate", "weight")}
        self._credits = [
            Credit(transition=call.id, policy=POLICY, psi=float32([0.5]), **numbers)
            for call in calls
        ]
        usable = float(sum(not row.failure for row in rollouts))
        return group_metrics(groups) | {"rollouts/usable": usable, "tokens": float(len(calls))}

    def save(self, directory: Path) -> None:
        (directory / "model.txt").write_text(self.fold.digest)

    def load(self, directory: Path) -> None: ...


class SimulatedServer:
    """A policy server, whose answers depend only on the conversation."""

    model, in_flight = "model", True

    def __init__(self, world: World) -> None:
        self.world, self.process = world, world.system.here()
        self.hold = RequestHold()
        self.base_url = f"http://{self.process.name}.{self.process.pid}/v1"
        self.version = 0

    async def start(self) -> None:
        self.world.network.servers[self.base_url] = self
        self.hold.release()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        await self.hold.hold()
        try:
            yield
        finally:
            self.hold.release()

    async def publish(self, version: int, policy: str | None = None) -> None:
        self.version = version

    async def wait_for_failure(self) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.world.network.servers.pop(self.base_url, None)

    async def answer(self, body: bytes) -> tuple[dict[str, str], bytes]:
        await self.hold.wait_released()
        with self.hold.call():
            version = self.version
            await asyncio.sleep(self.world.loop.random.random() * 0.3)
        request = json.loads(body)
        conversation = "\n".join(str(message["content"]) for message in request["messages"])
        digest = blake2b(conversation.encode(), digest_size=4).digest()
        number = self.world.next_serial()
        if not self.world.invariants.owns(self.process):
            self.world.of_former_owners.add(number)
        answer = {
            "id": f"call-{number}",
            "object": "chat.completion",
            "model": "model",
            "prompt_token_ids": [*conversation.encode()],
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": f"{digest.hex()} #{number}"},
                    "token_ids": [*digest],
                    "logprobs": {
                        "content": [{"token": "x", "logprob": -number * SERIAL}] * len(digest)
                    },
                }
            ],
        }
        headers = {"content-type": "application/json", "x-policy-version": str(version)}
        if request.get("stream"):
            headers["content-type"] = "text/event-stream"
        return headers, json.dumps(answer).encode()


async def algorithm(world: World, config: RunConfig) -> None:
    """What `algorithms.train.main.run` does, with the stand-ins."""
    async with AsyncExitStack() as closing:
        opened = await stages.open_run(config, closing)
        updater = FoldingUpdater(config)
        policies = PolicySet(config, {POLICY: updater}, updater.state)  # type: ignore[dict-item]
        world.began(opened.state)
        state = await stages.resume_run(opened.store, config, opened.state, policies)
        fields = {**vars(opened), "state": state}
        loaded = LoadedRun(**fields, models=[], policies=policies)  # no network, so no estimates
        serving = PolicyServers(config, [])
        server = SimulatedServer(world)
        serving._servers[POLICY], serving._versions[POLICY] = server, 0  # type: ignore[assignment]
        await serving.start()
        closing.push_async_callback(serving.close)
        server.version = serving._versions[POLICY] = policies.versions(state.step)[POLICY]
        live = ServedRun(**vars(loaded), serving=serving)
        source = Collector(config, live.store, state.epoch, TaskSampler(config, world.tasks))
        evaluator = HeldoutEvaluator(
            config, live.store, state.epoch, state.identity, world.heldout, live.candidate
        )
        await serving.during(TrainingLoop(live, source, evaluator, []).run())
        await live.store.log(config.name, config.steps, {ENDED: 1.0}, epoch=state.epoch)


async def store_server(world: World) -> None:
    """What a process of `agentrl store serve` does."""
    async with open_store(world.file) as store:
        await cast(SqlStore, store).extend_leases()
        keys, run = Path(world.folder, "keys"), world.config.name
        keys.write_text(
            f"admin:{KEYS['admin']}\nrunner@{run}:{KEYS['runner']}\n"
            f"reader@{run}:{KEYS['reader']};until=2099-01-31  # of views\n"
        )
        world.network.store = world.system.here(), StoreApp(store, KeyFile(keys))
        await asyncio.Event().wait()


# -- playing ---------------------------------------------------------------------------------------


class SimulatedGateway(Gateway):
    """The gateway without its socket: requests are handed to its application, in its own thread."""

    def __init__(
        self, world: World, store: Store, config: RunConfig, features: Sequence[Any] = ()
    ) -> None:
        self.world, self.process = world, world.system.here()
        self._loop: Any = world.loop
        features = features or run_features(store, config)
        self.base_url, self.port = "http://gateway/v1", 0
        self.attempts = AttemptRegistry(roles=policy_by_role(config), features=features)
        self.router = Router(store, config.name, roles=policy_by_role(config), models=["model"])
        self._store, self._features = store, features
        self.context = contextvars.Context()
        self.context.run(LANE.set, Lane(self.process))

    async def serve(self) -> None:
        await asyncio.wrap_future(self.spawn(self._begin()))

    async def _begin(self) -> None:
        self.upstream = Upstream(self.router)
        await self.upstream.session.close()
        self.upstream.session = ModelClient(self.world)  # type: ignore[assignment]
        self.app = web.Application()
        for feature in self._features:
            feature.add_to(self.app, self.upstream)
        Endpoints(self.attempts, self.router, self.upstream, self._store).add_to(self.app)
        self.app.freeze()
        self.following = asyncio.get_running_loop().create_task(self.router.follow())

    def spawn(self, work: Any) -> Any:
        return chained(self._loop, work, self.context)

    async def stop(self) -> None:
        async def end() -> None:
            self.following.cancel()
            await asyncio.gather(*map(_abort_calls, self.attempts.active()))

        await asyncio.wrap_future(self.spawn(end()))

    def post(
        self, key: str, path: str, body: Json, headers: Mapping[str, str] = {}, writer: Any = None
    ) -> asyncio.Task[web.StreamResponse]:
        """Hand a request to the application; cancelling the task is the client's disconnection."""
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        request = make_request(
            self._loop, path, json.dumps(body).encode(), authorization | {**headers}, writer
        )
        work = self.app._handle(request)
        return self._loop.create_task(work, context=self.context.copy())


def make_request(
    loop: SimulatedLoop, path: str, body: bytes, more: Mapping[str, str], writer: Any
) -> web.Request:
    headers = CIMultiDict({"content-type": "application/json", "content-length": str(len(body))})
    headers.extend(more)
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    message = RawRequestMessage(
        "POST", path, aiohttp.HttpVersion11, CIMultiDictProxy(headers), raw, False, None, False,
        False, URL(path),
    )  # fmt: skip
    protocol: Any = SimpleNamespace(
        transport=None, ssl_context=None, peername=None, sockname=None, _reading_paused=False,
        pause_reading=lambda **more: None, resume_reading=lambda **more: None,
    )  # fmt: skip
    payload = aiohttp.StreamReader(protocol, 2**16, loop=loop)
    payload.feed_data(body)
    payload.feed_eof()
    return web.Request(
        message,
        payload,
        protocol,
        writer,
        None,
        loop,
        client_max_size=2**28,  # type: ignore[arg-type]
    )


class ModelClient:
    """In place of the gateway's `aiohttp.ClientSession`."""

    def __init__(self, world: World) -> None:
        self.world = world

    @asynccontextmanager
    async def post(self, url: str, *, data: Any, **more: Any) -> AsyncIterator[Any]:
        base = url.partition("/v1")[0] + "/v1"
        from tests.simulation import live

        headers, body = await self.world.network.ask_model(base, data)

        async def iter_any() -> AsyncIterator[bytes]:
            if headers["content-type"] == "text/event-stream":
                async for event in live.events(self.world, json.loads(body)):
                    if base not in self.world.network.servers:
                        raise aiohttp.ClientConnectionError("reset")
                    yield event
            else:
                yield body

        yield SimpleNamespace(
            status=200, headers=CIMultiDict(headers), content_type=headers["content-type"], url=url,
            content=SimpleNamespace(iter_any=iter_any),
        )  # fmt: skip


@dataclass
class Agents:
    """The executor: an agent of two calls, which repeats a call that fails."""

    world: World
    gateway: SimulatedGateway
    sealed: bool = False
    limit: int | None = None

    async def start(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        messages = [{"role": "user", "content": active.attempt.rollout.task["input"]}]
        serials = []
        for _ in range(TURNS):
            answer = await self._ask(active.id, messages)
            word, _, number = answer.partition(" #")
            serials.append(int(number))
            messages += [
                {"role": "assistant", "content": word},
                {"role": "user", "content": "more"},
            ]
        if self.world.schedule.shape.http:
            await self._send_spans(active.id)
        if active.attempt.rollout.step == self.world.schedule.shape.empty:
            raise RuntimeError("the agent fails")
        return ExecutionResult(result={"said": word, "serials": serials})

    async def _send_spans(self, attempt: str) -> None:
        """Send spans as an OpenTelemetry SDK does; they may be lost. Some are compressed, and some
        come with a span of no attempt."""
        draw = self.world.loop.random
        traces = [attempt, "f" * 32] if draw.random() < 0.3 else [attempt]
        times = {"startTimeUnixNano": "1000", "endTimeUnixNano": "2000"}
        spans = [
            {"traceId": trace, "spanId": trace[:16], "name": "agent", **times} for trace in traces
        ]
        body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
        key = f"authorization: Bearer {KEYS['runner']}\r\n"
        if draw.random() < 0.5:
            body, key = gzip.compress(body, mtime=0), f"{key}content-encoding: gzip\r\n"
        head = f"POST /v1/traces HTTP/1.1\r\ncontent-type: application/json\r\n{key}".encode()
        connections = Connections("http://store")
        with suppress(OSError):
            answer = await connections.post(head, body, 5.0)
            if answer.status not in (200, 503):
                raise Violation(f"the span of {attempt} is refused: {answer}")
        connections.close()

    async def _ask(self, attempt: str, messages: Json) -> str:
        while True:
            answer = self.gateway.post(
                attempt, "/v1/chat/completions", {"model": "model", "messages": messages}
            )
            try:
                patience = self.world.patience()
                done, _ = await asyncio.wait((answer,), timeout=patience)
            finally:
                answer.cancel()
            if done and not answer.cancelled():
                response: Any = answer.result()
                if response.status == 200:
                    return self._content(response)
                if response.status in (401, 403, 404):
                    raise RuntimeError(f"refused: {response.body!r}")
            await asyncio.sleep(0.2)

    @staticmethod
    def _content(response: Any) -> str:
        return str(json.loads(response.body)["choices"][0]["message"]["content"])


async def verify(task: Mapping[str, Json], result: Json) -> float:
    return score(task, result["said"])


def score(task: Mapping[str, Json], answer: str) -> float:
    return (len(answer) + int(answer[:2], 16) + len(task["input"])) / 300


class SimulatedWorker(Worker):
    """Checks that it receives every attempt that was claimed for it."""

    world: World

    async def _claim_and_start(self, stop: asyncio.Event) -> None:
        unknown = self._unknown()
        await super()._claim_and_start(stop)
        lost = sorted(unknown & self._unknown())
        if lost and self._failed is None:  # else it ends, and what it had is claimed again
            raise Violation(f"attempt {lost[0]} was claimed for {self.name}, which never got it")

    async def _claim(self, n: int) -> list[Attempt]:
        attempts = await super()._claim(n)
        if len(attempts) > n:
            raise Violation(f"{self.name} has claimed {len(attempts)} rollouts, not {n}")
        self.world.delivered.update(attempt.id for attempt in attempts)
        return attempts

    def _unknown(self) -> set[str]:
        claimed = self.world.invariants.claimed_by(self.name)
        return claimed - self.world.delivered  # it drops what it was told is lost


async def opened(store: Store, run: str) -> None:
    """Wait until a run is open."""
    while await store.run(run) is None:  # noqa: ASYNC110 - its store says it
        await asyncio.sleep(0.5)


async def runner(world: World, config: RunConfig, name: str) -> None:
    """What `runners.main.start_runner` does, with the stand-ins."""
    stop = asyncio.Event()
    async with open_store(config.store) as store:
        await opened(store, config.name)
        gateway = SimulatedGateway(world, store, config)
        await gateway.serve()
        agents = Agents(world, gateway)
        execution = AttemptRunner(store, gateway, agents, Verifier(verify), config.agent)
        worker = SimulatedWorker(config.name, execution, config.runner, name=name)
        worker.world = world
        try:
            await worker.run(stop)
        finally:
            await gateway.stop()
