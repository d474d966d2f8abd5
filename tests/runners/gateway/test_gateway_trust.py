"""What an agent that runs elsewhere can reach with the key of its attempt, tried from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from agentrl.core.errors import ConfigError
from agentrl.core.http import MAX_SPANS_BYTES, MAX_TEXT_BYTES
from agentrl.runners.gateway.server import Gateway

BODY = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
SPAN = "00f067aa0ba902b7"


@pytest.fixture
async def http(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    url = bench.gateway.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
async def sealed(bench: Any) -> Any:
    return bench.gateway.register(await bench.attempt(), sealed=True)


@pytest.fixture
async def other(bench: Any) -> Any:
    return bench.gateway.register(await bench.attempt(), sealed=True)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def parent(attempt: str) -> dict[str, str]:
    return {"traceparent": f"00-{attempt}-{SPAN}-01"}


@pytest.mark.parametrize("api", ["chat/completions", "messages"])
async def test_its_own_key_opens_a_sealed_attempt(
    bench: Any, sealed: Any, http: httpx.AsyncClient, api: str
) -> None:
    for path, headers in (
        (f"/v1/{api}", bearer(sealed.key)),
        (f"/v1/{api}", {"x-api-key": sealed.key}),
        (f"/a/{sealed.id}/critic/v1/{api}", bearer(sealed.key)),
        (f"/v1/{api}", bearer(sealed.key) | parent(sealed.id)),
        (f"/v1/{api}", bearer(sealed.key) | parent("ab" * 16)),  # a trace of its own
    ):
        assert (await http.post(path, json=BODY, headers=headers)).status_code == 200
    found = (await bench.store.trace(sealed.attempt.rollout.id)).transitions
    assert [row.role for row in found] == ["agent", "agent", "critic", "agent", "agent"]
    assert not any("api-key" in str(sent) for sent in bench.model.headers)


async def test_nothing_else_does(
    bench: Any, sealed: Any, other: Any, http: httpx.AsyncClient
) -> None:
    route = "v1/chat/completions"
    for path, headers, status in (
        (f"/a/{sealed.id}/{route}", {}, 401),
        (f"/{route}", parent(sealed.id), 401),
        (f"/{route}", bearer(sealed.id), 401),
        (f"/{route}", bearer(sealed.key[:-1]), 401),
        (f"/{route}", {"authorization": "Bearer"}, 401),
        (f"/a/{other.id}/{route}", bearer(sealed.key), 403),
        (f"/{route}", bearer(sealed.key) | parent(other.id), 403),
    ):
        answer = await http.post(path, json=BODY, headers=headers)
        assert answer.status_code == status, (path, headers)
        assert sealed.key not in answer.text
        assert other.key not in answer.text
    assert bench.model.requests == []
    assert sealed.key not in repr(sealed)


async def test_a_key_ends_with_its_attempt(bench: Any, sealed: Any, http: Any) -> None:
    bench.gateway.unregister(sealed)
    for path in ("/v1/chat/completions", f"/a/{sealed.id}/v1/chat/completions", "/v1/traces"):
        answer = await http.post(path, json=BODY, headers=bearer(sealed.key))
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "attempt_ended"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/rewards"),
        ("POST", "/a/{id}/v1/rewards"),
        ("POST", "/v1/finish"),
        ("POST", "/v1/claim"),
        ("POST", "/v1/open_run"),
        ("GET", "/v1/runs"),
        ("GET", "/"),
        ("DELETE", "/v1/chat/completions"),
        ("GET", "/v1/traces"),
        ("POST", "/v1/../admin"),
        ("POST", "/a/{id}/x/y/v1/chat/completions"),
    ],
)
async def test_there_are_no_other_verbs(sealed: Any, http: Any, method: str, path: str) -> None:
    answer = await http.request(
        method, path.format(id=sealed.id), json=BODY, headers=bearer(sealed.key)
    )
    assert answer.status_code in (404, 405)
    assert "there is POST /v1/chat/completions" in answer.json()["error"]["message"]


async def test_beyond_loopback_only_keys_count(bench: Any, http: httpx.AsyncClient) -> None:
    wide = Gateway(bench.store, "test", host="0.0.0.0")
    wide.start()
    try:
        assert wide.base_url == f"http://127.0.0.1:{wide.port}/v1"
        attempt = await bench.attempt()
        active = wide.register(attempt)  # open, and still not reachable without its key
        url = f"{wide.base_url}/chat/completions"
        for headers in (bearer(active.id), parent(active.id), {}):
            assert (await http.post(url, json=BODY, headers=headers)).status_code == 401
            assert (await http.get(f"{wide.base_url}/models", headers=headers)).status_code == 401
        assert (await http.post(url, json=BODY, headers=bearer(active.key))).status_code == 200
    finally:
        wide.close()


async def export(gateway: Gateway, key: str, *attempts: str) -> None:
    """As a process does that has OTEL_EXPORTER_OTLP_ENDPOINT and _HEADERS in its environment."""
    endpoint = f"{gateway.base_url}/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, headers=bearer(key))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def work() -> None:
        for attempt in attempts:
            context = trace.SpanContext(
                int(attempt, 16), int(SPAN, 16), True, trace.TraceFlags(trace.TraceFlags.SAMPLED)
            )
            inside = trace.set_span_in_context(trace.NonRecordingSpan(context))
            with provider.get_tracer("t").start_as_current_span("step", context=inside):
                pass

    await asyncio.to_thread(work)


async def test_spans_are_taken_for_the_own_attempt_only(
    bench: Any, sealed: Any, other: Any
) -> None:
    await export(bench.gateway, sealed.key, sealed.id, other.id)
    (span,) = (await bench.store.trace(sealed.attempt.rollout.id)).spans
    assert (span.name, span.parent) == ("step", SPAN)
    assert (await bench.store.trace(other.attempt.rollout.id)).spans == []


async def test_a_batch_of_spans_may_repeat_conversations(sealed: Any, http: Any) -> None:
    """An export of 512 spans is larger than any call; more than MAX_SPANS_BYTES are refused."""

    def batch(characters: int) -> dict[str, Any]:
        text = {"key": "input.value", "value": {"stringValue": "x" * characters}}
        span = {
            "traceId": sealed.id, "spanId": SPAN, "name": "s", "attributes": [text],
            "startTimeUnixNano": "1", "endTimeUnixNano": "2",
        }  # fmt: skip
        return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}

    whole = await http.post("/v1/traces", json=batch(MAX_TEXT_BYTES), headers=bearer(sealed.key))
    assert whole.status_code == 200
    more = await http.post("/v1/traces", json=batch(MAX_SPANS_BYTES), headers=bearer(sealed.key))
    assert more.status_code == 413
    assert "bytes of spans: export fewer at a time" in more.text


async def test_rejected_spans_are_counted(sealed: Any, other: Any, http: Any) -> None:
    spans = [
        {
            "traceId": active.id,
            "spanId": SPAN,
            "name": "s",
            "startTimeUnixNano": "1",
            "endTimeUnixNano": "2",
        }
        for active in (sealed, other)
    ]
    body = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    answer = await http.post("/v1/traces", json=body, headers=bearer(sealed.key))
    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedSpans"] in (1, "1")
    junk = await http.post("/v1/traces", content=b"\x00junk", headers=bearer(sealed.key))
    assert junk.status_code == 400


def test_a_frozen_endpoint_without_its_key_is_a_config_error(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.core.config import UpstreamConfig

    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = UpstreamConfig(base_url="http://x/v1", key_env="JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"upstreams\.judge\.key_env.*JUDGE_KEY"):
        Gateway(bench.store, "test", upstreams={"judge": judge})


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("api-key", "KEY"),
        ("X-Goog-Api-Key", "KEY"),
        ("Authorization", "bearer KEY"),
        ("authorization", "BEARER   KEY"),
        ("authorization", "Bearer%20KEY"),
        ("authorization", "KEY"),
    ],
)
async def test_its_key_is_found_as_any_client_sends_it(
    bench: Any, sealed: Any, http: httpx.AsyncClient, header: str, value: str
) -> None:
    headers = {header: value.replace("KEY", sealed.key)}
    assert (await http.post("/v1/messages", json=BODY, headers=headers)).status_code == 200
    assert sealed.key not in str(bench.model.headers)


async def test_a_key_from_a_file_is_sent_without_its_newline(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.core.config import UpstreamConfig

    monkeypatch.setenv("JUDGE_KEY", "sk-judge\r\n")
    judge = UpstreamConfig(base_url=bench.model.base_url, key_env="JUDGE_KEY")
    gateway = Gateway(bench.store, "test", upstreams={"judge": judge})
    gateway.start()
    try:
        active = gateway.register(await bench.attempt())
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as client:
            headers = {"api-key": active.key}
            answer = await client.post(
                "/chat/completions", json=BODY | {"model": "judge"}, headers=headers
            )
        assert answer.status_code == 200
    finally:
        await asyncio.to_thread(gateway.close)
    (sent,) = bench.model.headers
    assert sent["authorization"] == "Bearer sk-judge"
    assert active.key not in str(sent)


@pytest.mark.parametrize("key", ["sk-a\nsk-b", "sk-\u00e9", "sk\x1ba"])
def test_a_key_that_no_header_may_have_is_a_config_error(
    bench: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    from agentrl.core.config import UpstreamConfig

    monkeypatch.setenv("JUDGE_KEY", key)
    judge = UpstreamConfig(base_url="http://x/v1", key_env="JUDGE_KEY")
    with pytest.raises(
        ConfigError, match=r"upstreams\.judge\.key_env: JUDGE_KEY has several lines"
    ):
        Gateway(bench.store, "test", upstreams={"judge": judge})
