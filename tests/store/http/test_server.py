"""What the server answers to whom, whatever it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.exceptions import HTTPException

from agentrl.core import asgi
from agentrl.core import asgi as asgi_server
from agentrl.core.errors import StoreError
from agentrl.core.values import json_values
from agentrl.store import base, open_store
from agentrl.store.http import serve, server
from agentrl.store.http.wire import MSGPACK, VERBS, KeyScope
from agentrl.store.records import Pruned
from agentrl.store.sql.runs import REPLIES_KEPT
from tests.store.http.conftest import ADMIN

ROLLOUT = {"id": "g/0", "run": "run", "group": "g", "index": 0, "task": {}}


JSON = {"content-type": "application/json"}
INVALID = (422, "invalid")


def refused(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert error["message"].endswith(".")
    return answer.status_code, error["code"]


def claimed(admin: httpx.Client) -> dict:
    admin.post("/v1/enqueue", json={"rollouts": [ROLLOUT]})
    return admin.post("/v1/claim", json={"n": 1, "runner": "r", "lease": 60}).json()[0]


def transition(attempt: str, **more) -> dict:
    base = {"id": "t", "attempt": attempt, "index": 0, "prompt": [1, 2], "completion": [3]}
    return {"transitions": [{**base, "logprobs": [-1], **more}]}


# -- keys ------------------------------------------------------------------------------------------


def test_without_a_known_key_nothing_is_answered(admin):
    for key in ("", "Bearer", "Bearer admin", "Basic admin-secret", "Bearer \xff"):
        headers = {"authorization": key.encode("latin-1")}
        for path in ("cursor", "batch", "traces"):
            answer = admin.post(f"/v1/{path}", json={}, headers=headers)
            assert refused(answer) == (401, "unauthorized"), (key, path)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{admin.base_url}/healthz").status_code == 200


def test_a_runner_may_only_do_what_runners_do(runner):
    allowed = {"claim", "heartbeat", "finish", "add_transitions", "add_spans"}
    allowed |= {"run", "steps", "trace", "policies", "cursor", "wait"}
    allowed |= {"judgement", "add_judgements", "put_images"}
    for name in VERBS:
        status = runner.post(f"/v1/{name}", json={"unknown": 1}).status_code
        assert status == (422 if name in allowed else 403), name
    calls = [{"verb": "runs", "arguments": {}}, {"verb": "cursor", "arguments": {}}]
    results = runner.post("/v1/batch", json={"calls": calls}).json()["results"]
    assert results[0]["error"]["code"] == "forbidden"
    assert results[1]["result"] > 0


def test_without_keys_only_who_calls_it_this_machine_is_answered(serving, tmp_path):
    hosts = {"localhost": 200, "127.0.0.1:80": 200, "[::1]": 200, "[::1]:80": 200}
    hosts |= {"evil.example:80": 403, "evil.example": 403, "localhost.example": 403}
    with serving(f"sqlite:///{tmp_path / 'store.db'}") as address:
        for host, status in hosts.items():
            for path in ("cursor", "batch", "traces"):
                answer = httpx.post(
                    f"{address}/v1/{path}",
                    json={"calls": []} if path == "batch" else {},
                    headers={"host": host},
                )
                assert answer.status_code == status, (host, path)


def test_the_protocol_says_what_a_runner_may_read():
    (sentence,) = re.findall(r"need: (.*?);", base.__doc__, re.DOTALL)
    does = {"claim", "heartbeat", "finish", "add_transitions", "add_spans"}
    reads = {name for name, verb in VERBS.items() if KeyScope.RUNNER in verb.scopes} - does
    assert set(re.findall(r"`(\w+)`", sentence)) == reads


# -- bad input -------------------------------------------------------------------------------------


def test_what_cannot_be_read(admin):
    for body in (b"", b"{", b"\xff", b'"\\ud800', b"{}{}"):
        answer = admin.post("/v1/cursor", content=body, headers=JSON)
        assert refused(answer) == (400, "malformed"), body
    nested = b'{"run": "deep", "config": {"a": ' + b"[" * 100_000
    answer = admin.post("/v1/open_run", content=nested, headers=JSON)
    assert refused(answer) == (400, "malformed")


def test_arguments_that_are_not_the_verbs(admin):
    right = {"n": 1, "runner": "r", "lease": 60}
    wrong = {"unknown": 1}, {"n": "1"}, {"n": 1.5}, {"n": 0}, {"lease": -1}, {"n": 10**40}
    no_claim_id = {"timeout": 5}
    for arguments in ([], {}, *(right | more for more in (*wrong, no_claim_id))):
        assert refused(admin.post("/v1/claim", json=arguments)) == INVALID, arguments
    assert admin.post("/v1/claim", json=right).json() == []


WRONG_TRANSITIONS = [
    {"prompt": [2**31]}, {"prompt": [-(2**31) - 1]}, {"prompt": [1.5]}, {"prompt": "AQID"},
    {"prompt": [True]}, {"logprobs": []}, {"logprobs": [-1, -1]}, {"logprobs": [1e300]},
    {"logprobs": [None]}, {"index": 2**70}, {"sampling": {"temperatur": 1}},
]  # fmt: skip


def test_a_wrong_transition_leaves_nothing(admin):
    attempt = claimed(admin)["id"]
    for wrong in WRONG_TRANSITIONS:
        body = transition(attempt, **wrong)
        body["transitions"].insert(0, transition(attempt, id="good")["transitions"][0])
        assert refused(admin.post("/v1/add_transitions", json=body)) == INVALID, wrong
        trace = admin.post("/v1/trace", json={"rollout": "g/0"}).json()
        assert trace["transitions"] == [], wrong


def test_binary_tokens_are_whole_numbers(admin):
    body = transition(claimed(admin)["id"])
    body["transitions"][0] |= {"completion": b"\1\0\0\0", "logprobs": b"\0\0\0\0"}
    for tokens, status in ((b"123", 422), ([1], 422), (None, 422), ("1234", 422), (b"1234", 200)):
        body["transitions"][0]["prompt"] = tokens
        content, headers = msgspec.msgpack.encode(body), {"content-type": MSGPACK}
        answer = admin.post("/v1/add_transitions", content=content, headers=headers)
        assert answer.status_code == status, tokens
        found = msgspec.msgpack.decode(answer.content)
        assert found == [True] if status == 200 else found["error"]["code"] == "invalid"


def test_a_fault_of_the_server_is_said_to_its_caller(admin, monkeypatch):
    async def counts(self, run):
        raise KeyError(run)

    monkeypatch.setattr("agentrl.store.sql.store.SqlStore.counts", counts)
    answer = admin.post("/v1/counts", json={"run": "run"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "error")
    assert "counts failed in the store's server (KeyError: 'run')" in error["message"]
    calls = [{"verb": "counts", "arguments": {"run": "run"}}, {"verb": "runs", "arguments": {}}]
    failed, fine = admin.post("/v1/batch", json={"calls": calls}).json()["results"]
    assert failed["error"] == error
    assert fine["result"] == ["run"]


def test_an_answer_that_has_no_form_in_the_encoding_is_a_typed_error(admin, tmp_path):
    claimed(admin)
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as conn, conn:
        conn.execute("update rollouts set task = ?", (f'{{"x": {10**30}}}',))  # by an older version
    headers, arguments = {"content-type": MSGPACK}, msgspec.msgpack.encode({"run": "run"})
    answer = admin.post("/v1/rollouts", content=arguments, headers=headers)
    error = msgspec.msgpack.decode(answer.content)["error"]
    assert (answer.status_code, error["code"]) == (500, "error")
    assert "application/msgpack" in error["message"]
    calls = [{"verb": "rollouts", "arguments": {"run": "run"}}, {"verb": "runs", "arguments": {}}]
    body = msgspec.msgpack.encode({"calls": calls})
    answer = admin.post("/v1/batch", content=body, headers=headers)
    refused, fine = msgspec.msgpack.decode(answer.content)["results"]
    assert refused["error"]["code"] == "error"
    assert fine["result"] == ["run"]
    assert admin.post("/v1/rollouts", json={"run": "run"}).json()[0]["task"] == {"x": 10**30}


def test_an_impossible_reward(admin):
    attempt = claimed(admin)["id"]
    for value in ("NaN", "Infinity", "1e999", "null"):
        outcome = f'{{"attempt": "{attempt}", "fence": 1, "rewards": [{{"value": {value}}}]}}'
        answer = admin.post("/v1/finish", content=f'{{"outcomes": [{outcome}]}}', headers=JSON)
        assert answer.status_code in (400, 422), value
        assert admin.post("/v1/counts", json={"run": "run"}).json()["running"] == 1, value


def test_a_missing_number_of_credit_is_null(admin):
    attempt = claimed(admin)
    admin.post("/v1/add_transitions", json=transition(attempt["id"]))
    outcome = {"attempt": attempt["id"], "fence": 1}
    admin.post("/v1/finish", json={"outcomes": [outcome]})
    admin.post("/v1/claim_groups", json={"run": "run", "epoch": 1, "n": 1, "timeout": 0})
    numbers = {name: [0.5] for name in ("baseline", "gate", "weight", "psi")}
    credit = {"transition": "t", "policy": "policy", "advantage": [None, 1.0], **numbers}
    commit = {
        "run": "run", "epoch": 1, "step": 0, "groups": [ROLLOUT["group"]], "versions": {},
        "checkpoint": "", "metrics": {}, "credits": [credit],
    }  # fmt: skip
    answer = admin.post("/v1/commit_step", json={"commit": commit})
    assert answer.status_code == 200, answer.text
    assert admin.post("/v1/credits", json={"rollout": ROLLOUT["id"]}).json() == [credit]
    lost = transition(attempt["id"], id="u", logprobs=[None])
    assert refused(admin.post("/v1/add_transitions", json=lost)) == (422, "invalid")


def test_routes_methods_and_types(admin):
    assert refused(admin.post("/v1/steal", json={})) == (404, "unknown")
    assert refused(admin.get("/nothing")) == (404, "unknown")
    answer = admin.get("/v1/claim")
    assert refused(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    assert refused(admin.post("/v1/cursor", content=b"{}")) == (415, "unsupported")
    pickle = {"content-type": "application/x-pickle"}
    assert refused(admin.post("/v1/cursor", content=b"N.", headers=pickle)) == (415, "unsupported")


def test_a_body_has_a_limit_whether_or_not_it_says_its_size(admin):
    headers = {"content-type": "application/json"}
    large = b" " * (2**20 + 1)
    for content in (large, iter([large[: 2**19]] * 3)):
        answer = admin.post("/v1/cursor", content=content, headers=headers)
        assert refused(answer) == (413, "too_large")
    bomb = {"content-encoding": "gzip", "content-type": "application/x-protobuf"}
    answer = admin.post("/v1/traces", content=gzip.compress(large), headers=bomb)
    assert refused(answer) == (413, "too_large")


def test_rows_with_many_short_texts_are_stored(serving, tmp_path):
    """As `agentrl data import` sends 500 long conversations: hundreds of thousands of values."""
    chat = [{"role": "user", "content": f"hello there {n}"} for n in range(110_000)]
    with (
        serving(f"sqlite:///{tmp_path / 'store.db'}", f"admin:{ADMIN}") as url,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN}"}) as client,
    ):
        assert client.post("/v1/open_run", json={"run": "run", "config": {}}).status_code == 200
        sent = {"run": "run", "kind": "chats", "documents": {"a": chat}}
        assert json_values(json.dumps(sent).encode(), 10**9) > 500_000
        answer = client.post("/v1/put_documents", json=sent)
        assert answer.status_code == 200, answer.text


async def test_a_body_of_more_values_than_rows_can_have_is_refused(monkeypatch):
    monkeypatch.setattr(server, "MAX_VALUES", 1000)
    await server.check_values(b"[" + b"[]," * 800 + b"1]", json_values)
    with pytest.raises(HTTPException, match="more than 1,000 strings, lists and objects"):
        await server.check_values(b"[" + b"[]," * 1100 + b"1]", json_values)


def test_the_rest_of_a_refused_body_and_the_next_request_may_come_at_once(admin):
    host, port = admin.base_url.host, admin.base_url.port
    key = admin.headers.get("authorization", "")
    head = (
        "POST /v1/cursor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: {key}\r\nContent-Length: {{}}\r\n\r\n"
    )
    refused_size, rest = 2**20 + 1, 200 * 1024
    with socket.create_connection((host, port), timeout=20) as client:
        client.sendall(head.format(refused_size).encode() + b" " * (refused_size - rest))
        assert b" 413 " in client.recv(4096)
        client.sendall(b" " * rest + head.format(3 * rest).encode() + b" " * 10)
        client.sendall(b" " * (3 * rest - 10))
        answer = b""
        while b"\r\n\r\n" not in answer and (part := client.recv(4096)):
            answer += part
    assert b" 400 " in answer.splitlines()[0], answer  # blanks are no JSON, but a whole request


HEAD = b"POST /v1/cursor HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\n{}"


MALFORMED = [
    WHOLE.replace(b"host:", b"content-length: 2\r\nhost:"),
    WHOLE.replace(b"host:", b"content-length: 7\r\nhost:"),
    WHOLE.replace(b"host:", b"transfer-encoding: chunked\r\nhost:"),
    WHOLE.replace(b"host:", b"host :"),
    WHOLE.replace(b"localhost", b"local\rhost"),
    WHOLE.replace(b"localhost", b"local\0host"),
    WHOLE.replace(b"length: 2", b"length: +2"),
]


def test_a_malformed_request_ends_its_connection(address):
    """Another server in front might read another request in it."""
    host, port = address.removeprefix("http://").split(":")
    for other in MALFORMED:
        keyed = other.replace(b"host", b"authorization: Bearer admin-secret\r\nhost", 1)
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(keyed)
            answer = b""
            while part := client.recv(4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 400 "), (other, answer)


def test_calls_sent_at_once_are_answered_in_order(address):
    """However they are cut: whole ones, halves, and one that is refused between them."""
    host, port = address.removeprefix("http://").split(":")
    keyed = WHOLE.replace(b"host:", b"authorization: Bearer admin-secret\r\nhost:")
    sent = keyed + keyed + keyed.replace(b"{}", b"[]") + keyed
    for cut in (0, 10, 60, len(WHOLE) - 1):
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(sent[: len(keyed) + cut])
            client.sendall(sent[len(keyed) + cut :])
            answer = b""
            while answer.count(b"HTTP/1.1 ") < 4 or not answer.endswith(b"\r\n\r\n0"):
                part = client.recv(4096)
                assert part, (cut, answer)
                answer += part
        statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
        assert statuses == [b"200", b"200", b"422", b"200"], cut


# -- batches, repeats and waits --------------------------------------------------------------------


@contextlib.contextmanager
def half_a_request(address: str) -> Iterator[socket.socket]:
    """For whose other half the server waits: it has said so."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as half:
        half.sendall(
            b"POST /v1/cursor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert b" 100 " in half.recv(1024)
        yield half


def test_half_a_body_is_not_waited_for_without_end(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MAX_SILENCE", 0.05)
    with serving(f"sqlite:///{tmp_path / 'store.db'}") as address, half_a_request(address) as half:
        assert b" 503 " in half.recv(1024)


def test_an_address_has_so_many_idle_connections_and_no_other_pays_for_them(monkeypatch):
    monkeypatch.setattr(asgi, "MAX_IDLE", 2)
    limits, closed = asgi.ConnectionLimits(5), list[str]()

    def enter(name: str) -> Any:
        def abort() -> None:
            closed.append(name)
            limits.left(connection)

        connection: Any = Mock(address=name[0], transport=Mock(abort=abort))
        limits.entered(connection)
        return connection

    limits.busy(enter("a0"))
    for name in ("b1", "a1", "a2", "a3", "a4"):
        enter(name)
    assert closed == ["a1", "a2"]
    enter("b2")
    enter("c1")  # one more than there may be in all, and others have more of them
    assert closed == ["a1", "a2", "a3"]


def test_half_a_request_does_not_keep_the_server_from_ending(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(asgi_server, "SHUTDOWN_GRACE", 1)
    with contextlib.ExitStack() as stack:
        with serving(f"sqlite:///{tmp_path / 'store.db'}") as address:
            half = stack.enter_context(half_a_request(address))
            given_up = threading.Timer(15, half.shutdown, (socket.SHUT_RDWR,))
            given_up.start()
        assert given_up.is_alive()
        given_up.cancel()


def test_a_batch_answers_each_verb_in_order(admin):
    calls = [
        {"verb": "enqueue", "arguments": {"rollouts": [ROLLOUT]}},
        {"verb": "nonsense", "arguments": {}},
        {"verb": "finish", "arguments": transition("x")},
        {"verb": "settled", "arguments": {"group": "g"}},
        {"verb": "claim", "arguments": {"n": 1, "runner": "r", "lease": 60}},
        {"verb": "vacuum", "arguments": []},
    ]
    results = admin.post("/v1/batch", json={"calls": calls}).json()["results"]
    codes = [answer.get("error", {}).get("code") for answer in results]
    assert codes == [None, "invalid", "invalid", "invalid", None, "invalid"]
    assert results[0] == {"result": 1}
    assert results[4]["result"][0]["rollout"]["id"] == "g/0"
    assert admin.post("/v1/batch", json={"calls": [calls[0]] * 1025}).status_code == 422


def test_the_answers_of_a_batch_have_a_limit(admin):
    config = {"long": "x" * 2**19}
    assert admin.post("/v1/open_run", json={"run": "long", "config": config}).status_code == 200
    read = {"verb": "run", "arguments": {"run": "long"}}
    late = {"verb": "open_run", "arguments": {"run": "late", "config": {}}}
    results = admin.post("/v1/batch", json={"calls": [read] * 3 + [late]}).json()["results"]
    codes = [result.get("error", {}).get("code") for result in results]
    assert codes == [None, None, "too_large", "too_large"]
    assert "late" not in admin.post("/v1/runs", json={}).json()


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_key_is_known_to_the_next_server(database, serving, clock, tmp_path, request):
    file = f"sqlite:///{tmp_path / 'store.db'}"
    url = file if database == "sqlite" else request.getfixturevalue("postgres")()
    calls = [
        ("open_run", {"run": "run", "config": {"x": 1}}),
        ("enqueue", {"rollouts": [ROLLOUT, {**ROLLOUT, "id": "g/1", "index": 1}]}),
        ("cancel", {"rollouts": ["g/0"]}),
    ]

    def answers(key: str = "k") -> list:
        headers = {"idempotency-key": key}
        with serving(url, clock=clock) as address, httpx.Client(base_url=address) as client:
            return [client.post(f"/v1/{verb}", json=b, headers=headers).json() for verb, b in calls]

    first = answers()
    assert (first[0]["epoch"], *first[1:]) == (1, 2, 1)
    assert answers() == first
    calls[2] = "cancel", {"rollouts": ["g/1"]}
    assert answers()[2]["error"]["code"] == "conflict"
    clock.now += REPLIES_KEPT + 1
    later = answers("other")
    assert (later[0]["epoch"], *later[1:]) == (2, 0, 1)
    with serving(url, clock=clock) as address:
        stats = httpx.post(f"{address}/v1/stats", json={}).json()
    assert stats["rows"]["requests"] == len(later)


async def test_a_long_call_in_progress_is_joined_by_its_repeat(serving, tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.store.http.wire.POLL", 0.5)
    calls, done = list[int](), threading.Event()

    async def vacuum(self) -> None:
        calls.append(1)
        await asyncio.to_thread(done.wait, 10)

    monkeypatch.setattr("agentrl.store.sql.store.SqlStore.vacuum", vacuum)
    with serving(f"sqlite:///{tmp_path / 'store.db'}") as address:
        headers = {"idempotency-key": "k"}
        async with httpx.AsyncClient(base_url=address, headers=headers) as client:
            for _ in range(2):
                assert (await client.post("/v1/vacuum", json={})).status_code == 202
            done.set()
            async with asyncio.timeout(10):
                while (answer := await client.post("/v1/vacuum", json={})).status_code == 202:
                    pass
            assert (answer.status_code, answer.json(), len(calls)) == (200, None, 1)


def test_a_claim_whose_caller_went_away_takes_nothing(admin):
    body = {"n": 1, "runner": "r", "lease": 60, "claim_id": "c", "timeout": 20}
    with pytest.raises(httpx.ReadTimeout):
        admin.post("/v1/claim", json=body, timeout=0.2)
    admin.post("/v1/enqueue", json={"rollouts": [ROLLOUT]})
    other = {"n": 1, "runner": "s", "lease": 60, "claim_id": "d", "timeout": 20}
    assert admin.post("/v1/claim", json=other).json()[0]["rollout"]["id"] == "g/0"


def test_a_wait_that_takes_long_is_asked_again(admin, monkeypatch):
    monkeypatch.setattr("agentrl.store.http.wire.POLL", 0.05)
    cursor = admin.post("/v1/cursor", json={}).json()
    answer = admin.post("/v1/wait", json={"cursor": cursor})
    assert (answer.status_code, answer.content) == (202, b"")
    assert admin.post("/v1/wait", json={"cursor": cursor, "timeout": 0.01}).json() == cursor


# -- the document ----------------------------------------------------------------------------------


def test_the_document_describes_every_verb(admin):
    document = admin.get("/openapi.json").json()
    assert {f"/v1/{name}" for name in VERBS} < document["paths"].keys()
    transition = document["components"]["schemas"]["Transition"]["properties"]
    assert transition["prompt"]["items"]["maximum"] == 2**31 - 1
    assert transition["logprobs"]["items"] == {"type": "number"}


CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    not_a_server_error,
]


def without_tuples(schema):
    """Schemathesis writes `prefixItems` as draft 4 does and then refuses it in an answer."""
    if isinstance(schema, dict):
        schema = {name: without_tuples(part) for name, part in schema.items()}
        if several := schema.pop("prefixItems", None):
            schema["items"] = {"anyOf": several}
    return [without_tuples(part) for part in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("examples", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_schemathesis_finds_no_flaw(admin, monkeypatch, examples):
    monkeypatch.setattr("agentrl.store.http.wire.POLL", 0.02)
    document = without_tuples(httpx.get(f"{admin.base_url}/openapi.json").json())
    schema = openapi.from_dict(document)
    schema.config.update(base_url=str(admin.base_url))
    key = {"authorization": admin.headers["authorization"]}
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == len(VERBS) + 4  # batch, traces, healthz and the document
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue  # there is nothing in them to get wrong

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def probe(case: schemathesis.Case) -> None:
                case.call_and_validate(headers=key, checks=CHECKS)

            probe()


# -- retention -------------------------------------------------------------------------------------


async def test_a_served_store_prunes_itself(tmp_path, kit):
    async with open_store(str(tmp_path / "store.db")) as store:
        epoch = (await store.open_run("run", {})).epoch
        retention = serve.Retention(keep_last=1, older_than=None, every=0.01)
        keeping = asyncio.create_task(retention.keep(store))
        for step in range(3):
            await store.enqueue(kit.group(f"g{step}", 2))
            for attempt in await store.claim(2, runner="r", lease=60):
                await store.finish([kit.good(attempt)])
            (group,) = await store.claim_groups("run", epoch, 1)
            await store.commit_step(kit.step(step, [group.id], epoch))
        async with asyncio.timeout(20):
            while len(await store.rollouts("run")) > 2:
                await store.wait(await store.cursor(), timeout=0.05)
        await serve.ended(keeping)
        assert {row.group for row in await store.rollouts("run")} == {"g2"}
        assert (await store.counts("run")).succeeded == 6


async def test_a_served_store_prunes_itself_after_any_error(caplog):
    """Only the first of its tries fails."""
    tried = asyncio.Event()

    class Failing:
        errors = iter([StoreError("what nobody foresaw")])

        async def prune(self, **_: object) -> Pruned:
            if error := next(self.errors, None):
                raise error
            tried.set()
            return Pruned()

    keeping = asyncio.create_task(serve.Retention(1, None, every=0.0).keep(Failing()))
    async with asyncio.timeout(20):
        await tried.wait()
    await serve.ended(keeping)
    assert "nothing was pruned: what nobody foresaw" in caplog.text
