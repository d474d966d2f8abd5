"""Who may call a policy server: keys, certificates, and set-ups that would let anybody in."""

from __future__ import annotations

import json
import os
import ssl
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.train.serving import policy_server
from agentrl.core.access import Access, cross_site, read_key
from agentrl.core.config import RunConfig
from agentrl.core.config.infrastructure import EmbeddedEngineConfig
from agentrl.core.config.run_file import resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import PolicyVersion
from agentrl.runners.gateway.refusals import UpstreamError
from agentrl.runners.gateway.upstream import Router, Upstream

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ASKED = json.dumps(BODY).encode()
KEYS = "new-key old-key"


def server_of(model: Path, **settings: Any) -> Any:
    config = RunConfig(engine=EmbeddedEngineConfig(**settings))
    return policy_server(config, *load_model(model, device="cpu"))


async def test_who_sends_no_key_samples_nothing(
    tiny_model_dir: Path, certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_KEY", KEYS)
    server = server_of(tiny_model_dir, key_env="POLICY_KEY", **certificate)
    await server.start()
    try:
        assert server.base_url.startswith("https://127.0.0.1:")
        asked = {
            "none": {},
            "wrong": {"authorization": "Bearer guess"},
            "new": {"authorization": "Bearer new-key"},
            "old": {"x-api-key": "old-key"},
        }
        context = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        async with httpx.AsyncClient(verify=context) as http:
            url = f"{server.base_url}/chat/completions"
            found = {
                name: (await http.post(url, json=BODY, headers=headers)).status_code
                for name, headers in asked.items()
            }
            health = await http.get(server.base_url.replace("/v1", "/health"))
            refused = await http.post(server.base_url.replace("/v1", "/tokenize"), json=BODY)
        assert found == {"none": 401, "wrong": 401, "new": 200, "old": 200}
        assert health.status_code == 200
        assert (refused.status_code, "engine.key_env" in refused.text) == (401, True)
    finally:
        await server.close()


async def test_a_runner_calls_a_server_with_key_and_certificate(
    tiny_model_dir: Path, certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_KEY", KEYS)
    server = server_of(tiny_model_dir, key_env="POLICY_KEY", **certificate)
    await server.start()
    # What SSL_CERT_FILE names when the process starts, which this one has done already.
    trusting = ssl.create_default_context(cafile=certificate["ssl_certfile"])
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", trusting)
    routers = {key: Router(None, "run", key=key) for key in (server_key(), "gone")}  # type: ignore[arg-type]
    try:
        for key, router in routers.items():
            router.policies = {"policy": PolicyVersion("run", "policy", 0, server.base_url, "m")}
            upstream = Upstream(router)
            refused = pytest.raises(UpstreamError, match="401; correct its base_url or its API key")
            with refused if key == "gone" else nullcontext():
                route = await router.route("m", "")
                async with upstream.post(route, "chat/completions", ASKED, {}) as answer:
                    assert answer.status == 200
            await upstream.session.close()
    finally:
        await server.close()


def server_key() -> str:
    """That runners send."""
    return EmbeddedEngineConfig(key_env="POLICY_KEY").access.key


def test_beyond_this_machine_there_must_be_a_key() -> None:
    settings: dict[str, Any] = {"policy": {"model": "m"}, "engine": {"host": "10.0.0.2"}}
    with pytest.raises(ConfigError, match=r"engine\.host = '10\.0\.0\.2': anyone.*key_env"):
        resolve(settings, source="run.toml")
    settings["engine"]["key_env"] = "POLICY_KEY"
    assert resolve(settings, source="run.toml").engine.host == "10.0.0.2"


def test_what_is_missing_of_keys_and_certificates_is_a_sentence(
    certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY_KEY", " ")
    with pytest.raises(ConfigError, match="the environment has no POLICY_KEY; set it to the s"):
        read_key("POLICY_KEY", "engine.key_env", "the server's")
    assert read_key("", "engine.key_env", "the server's") == ""
    monkeypatch.setenv("OTHER_KEY", " sk-1\n")
    assert read_key("OTHER_KEY", "engine.key_env", "the server's") == "sk-1"
    with pytest.raises(ConfigError, match="belong together"):
        resolve({"engine": {"ssl_certfile": "a.pem"}}, source="run.toml")
    swapped = Access((), certificate["ssl_keyfile"], certificate["ssl_certfile"])
    for wrong in (swapped, Access((), "nowhere.pem", "nowhere.pem")):
        with pytest.raises(ConfigError, match=r"engine\.ssl_certfile = .*; name a certificate"):
            wrong.server_tls()
    assert os.environ["POLICY_KEY"] == " "


@pytest.mark.parametrize(
    ("method", "host", "kind", "origin", "status"),
    [
        ("GET", b"evil.example", b"", b"", 403),
        ("POST", b"127.0.0.1.evil.example:80", b"application/json", b"", 403),
        ("POST", b"localhost:80", b"multipart/form-data; boundary=x", b"null", 415),
        ("PUT", b"[::1]:80", b"TEXT/plain", b"", 415),
        ("DELETE", b"localhost", b"", b"http://evil.example", 415),
        ("POST", b"localhost", b"", b"", None),
        ("POST", b"127.0.0.1:8000", b"application/x-protobuf", b"http://evil.example", None),
        ("GET", b"[::1]", b"text/plain", b"http://evil.example", None),
    ],
)
def test_what_a_web_page_may_send(
    method: str, host: bytes, kind: bytes, origin: bytes, status: int | None
) -> None:
    refused = cross_site(method, host, kind, origin)
    assert (refused and refused[0]) == status


def test_a_header_with_a_key_is_not_of_a_page() -> None:
    form = b"application/x-www-form-urlencoded"  # as wget and curl send without an option
    assert cross_site("POST", b"localhost:80", form, has_key=True) is None
    assert cross_site("POST", b"evil.example", form, has_key=True) == cross_site(
        "POST", b"evil.example", b"application/json"
    )
