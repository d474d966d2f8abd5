"""Nothing that an agent says is lost in the prompt, whatever roles the policy's template knows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jinja2
import pytest
from aiohttp import web

from agentrl.core.config import PolicyConfig, RunConfig
from agentrl.core.processes import PHASE
from agentrl.runners.apis.base import UntranslatableError
from agentrl.runners.gateway.request import ModelRequest
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.templates import PromptRule, find_rule
from agentrl.runners.main import run_features
from tests.runners.gateway.templates import QWEN25, TEMPLATES, render, text_of
from tests.runners.harnesses.stored import HARNESSES, as_chat, stored

AS_SENT = RunConfig(policy=PolicyConfig(unsupported_roles="as_sent"))
DEVELOPER = {"role": "developer", "content": "be brief"}
USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}


async def rule_of(template: str) -> PromptRule:
    async def count(messages: list[dict[str, Any]]) -> int | None:
        try:
            return len(render(template, messages).split())
        except jinja2.TemplateError:
            return None

    return await find_rule(count, "policy")


@cache
def requests() -> list[tuple[str, ModelRequest]]:
    """All stored requests as chat completions."""
    return [
        (f"{harness} {request.call}", as_chat(request))
        for harness in HARNESSES
        for request in stored(harness)
    ]


def lost(template: str, rule: PromptRule, call: ModelRequest) -> list[str]:
    """The beginnings of messages that are not in the rendered prompt."""
    prompt = render(template, rule.apply(call.messages), call.tools)
    starts = [text_of(message)[:200].strip() for message in call.messages]
    return [start for start in starts if start not in prompt]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_every_message_of_every_harness_is_in_the_prompt(name: str) -> None:
    rule = await rule_of(TEMPLATES[name])
    assert rule.lost == frozenset()
    assert len(requests()) > 30
    for about, call in requests():
        assert lost(TEMPLATES[name], rule, call) == [], about


def test_without_a_rule_instructions_are_lost() -> None:
    losing = {
        about.partition(" ")[0] for about, call in requests() if lost(QWEN25, PromptRule(), call)
    }
    assert losing == {"codex"}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("qwen2.5", PromptRule(leading="system", later="system")),
        ("qwen3", PromptRule(leading="system", later="system")),
        ("qwen3.5", PromptRule(leading="system", later="user")),
        ("llama3", PromptRule(split=True)),
    ],
)
async def test_the_rule_of_a_template(name: str, rule: PromptRule) -> None:
    assert await rule_of(TEMPLATES[name]) == rule


def test_what_a_rule_does() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    rule = PromptRule(leading="system", later="user", split=True)
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    both = {"role": "assistant", "content": "wait", "tool_calls": calls}
    parts = SYSTEM | {
        "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " kind"}]
    }
    assert rule.apply([DEVELOPER, parts, USER, DEVELOPER, both]) == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        USER,
        {"role": "user", "content": "be brief"},
        {"role": "assistant", "content": "wait"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    assert rule.apply([SYSTEM | {"name": "x"}, USER]) == [SYSTEM | {"name": "x"}, USER]
    with pytest.raises(UntranslatableError, match=r"messages\[1\]"):
        rule.apply([DEVELOPER, {"role": "system", "content": [image]}])


# -- in front of a server --------------------------------------------------------------------------


async def ask(gateway: Gateway, active: Any, *messages: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=20) as http:
        body = {"model": "m", "messages": messages, "max_tokens": 4}
        return await http.post("/chat/completions", json=body)


def uses(bench: Any, template: str) -> list[Any]:
    """The fake model counts the tokens of prompts by this template; returns what it counted."""
    counted: list[Any] = []

    def tokenize(body: Any) -> web.Response:
        counted.append(body["messages"])
        try:
            return web.json_response({"count": len(render(template, body["messages"]).split())})
        except jinja2.TemplateError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)

    bench.model.tokenize = tokenize
    return counted


async def test_a_policy_reads_what_its_template_would_lose(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(PHASE, "agentrl.runner")
    counted = uses(bench, QWEN25)
    active = bench.gateway.register(await bench.attempt())
    assert (await ask(bench.gateway, active, USER)).status_code == 200
    assert counted == []  # any template shows that
    assert (await ask(bench.gateway, active, DEVELOPER, SYSTEM, USER)).status_code == 200
    merged = {"role": "system", "content": "be brief\n\nbe kind"}
    assert bench.model.requests[-1]["messages"] == [merged, USER]
    asked = len(counted)
    assert (await ask(bench.gateway, active, DEVELOPER, USER)).status_code == 200
    assert len(counted) == asked  # once per server
    assert caplog.text.count("instructions at the beginning become one system message") == 1
    trace = await bench.store.trace(active.attempt.rollout.id)
    assert trace.transitions[1].messages == [DEVELOPER, SYSTEM, USER]  # as the agent sent them
    headers = {"x-api-key": active.key}
    body = {"model": "m", "messages": [USER, SYSTEM, USER], "system": "be brief"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        assert (await http.post("/messages/count_tokens", json=body)).status_code == 200
    assert counted[-1][0]["role"] == "system"


async def test_text_that_would_vanish_is_refused(bench: Any) -> None:
    """A template that shows what is said last loses all instructions."""
    uses(bench, "{{ messages[-1].role }} {{ messages[-1].content }}")
    active = bench.gateway.register(await bench.attempt())
    refused = await ask(bench.gateway, active, SYSTEM, USER)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith("messages[0]: the chat template of the policy does not show")
    assert 'policy.unsupported_roles = "as_sent"' in message
    assert bench.model.requests == []


async def test_messages_go_as_they_come_if_the_run_file_says_so(bench: Any) -> None:
    uses(bench, QWEN25)
    gateway = Gateway(bench.store, "test", features=run_features(bench.store, AS_SENT))
    gateway.start()
    try:
        active = gateway.register(await bench.attempt())
        assert (await ask(gateway, active, DEVELOPER, USER)).status_code == 200
        assert bench.model.requests[-1]["messages"] == [DEVELOPER, USER]
    finally:
        gateway.close()


async def test_a_server_that_does_not_count(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench.model.tokenize = lambda body: web.Response(status=404)
    active = bench.gateway.register(await bench.attempt())
    assert (await ask(bench.gateway, active, DEVELOPER, USER)).status_code == 200
    assert bench.model.requests[-1]["messages"] == [DEVELOPER, USER]
    assert "messages go as they come" in caplog.text


async def test_the_embedded_server_shows_a_developer(store: Any, tiny_llama_dir: Path) -> None:
    from agentrl.algorithms.engines.embedded.server import EmbeddedServer
    from agentrl.algorithms.model.load import load_model
    from agentrl.core.types import NewRollout, PolicyVersion

    model, tokenizer = load_model(str(tiny_llama_dir), "float32", "cpu")
    tokenizer.chat_template = QWEN25
    server = EmbeddedServer(model, tokenizer, name="tiny")
    await server.start()
    gateway = Gateway(store, "test", features=run_features(store, RunConfig()))
    try:
        async with server.updating():
            await server.publish(1)
        version = PolicyVersion(
            run="test", policy="policy", version=1, base_url=server.base_url, model=server.model
        )
        await store.publish(version)
        gateway.start()
        await store.enqueue([NewRollout(id="r", run="test", group="g", index=0, task={})])
        (attempt,) = await store.claim(1, runner="x", lease=60.0, run="test")
        active = gateway.register(attempt)
        assert (await ask(gateway, active, DEVELOPER, USER)).status_code == 200
        (row,) = (await store.trace("r")).transitions
        assert "be brief" in tokenizer.decode(row.prompt)
    finally:
        gateway.close()
        await server.close()


# -- sampling --------------------------------------------------------------------------------------


async def test_max_tokens_are_those_that_fit(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As vLLM does it: a prompt and max_tokens beyond the context are refused."""
    bench.model.max_length = 100
    answered = bench.model.whole

    async def strict(request: web.Request, body: Any) -> web.Response | None:
        wanted = body.get("max_tokens") or body.get("max_completion_tokens")
        if len(json.dumps(body["messages"])) + wanted > 100:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return web.json_response(answered(body, request.path))

    bench.model.then(*[strict] * 4)
    active = bench.gateway.register(await bench.attempt())
    size = len(json.dumps([USER]))
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        body = {"model": "m", "messages": [USER], "max_completion_tokens": 64000}
        for _ in range(2):
            assert (await http.post("/chat/completions", json=body)).status_code == 200
        assert len(bench.model.requests) == 3  # only the first call is refused
        sent = bench.model.requests[-1]
        assert (sent["max_tokens"], "max_completion_tokens" in sent) == (100 - size, False)
        body["messages"] = [USER | {"content": "x" * 100}]
        assert (await http.post("/chat/completions", json=body)).status_code == 400
    trace = await bench.store.trace(active.attempt.rollout.id)
    assert [row.sampling.max_tokens for row in trace.transitions] == [100 - size] * 2
    assert caplog.text.count(f"at most the {100 - size} tokens that its prompt leaves") == 1


@pytest.mark.parametrize("force", [False, True])
async def test_sampling_may_be_forced(
    bench: Any, force: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from agentrl.core.types import Sampling

    sampling = Sampling(temperature=0.7, override_agent=force)
    active = bench.gateway.register(await bench.attempt(sampling=sampling))
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        asked = {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_tokens": 9}
        for _ in range(2):
            await http.post("/chat/completions", json={"model": "m", "messages": [USER]} | asked)
    sent = bench.model.requests[0]
    row, _ = (await bench.store.trace(active.attempt.rollout.id)).transitions
    said = "overrules the run file's sampling with temperature = 0.0, top_p = 0.5, top_k = 3; "
    assert caplog.text.count(said) == (not force)
    if force:
        assert (sent["temperature"], sent["top_p"], sent.get("top_k", 0)) == (0.7, 1.0, 0)
    else:
        assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0, 0.5, 3)
    assert sent["max_tokens"] == 9
    assert row.sampling.temperature == sent["temperature"]
    assert row.sampling.top_p == sent["top_p"]
    assert row.sampling.top_k == sent.get("top_k", 0)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("reads", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("translated", [False, True])
async def test_reasoning_is_counted_whatever_its_name(
    bench: Any, name: str, reads: str, translated: bool
) -> None:
    """vLLM 0.30 renames reasoning_content in a chat completion, but not in /tokenize."""
    thought, limit = "x" * 500, 1000

    def size(messages: Any, names: tuple[str, ...]) -> int:
        texts = [message.get("content") or "" for message in messages]
        thoughts = [next(filter(None, map(message.get, names)), "") for message in messages]
        return len("".join(texts + thoughts))

    answered = bench.model.whole

    async def strict(request: web.Request, body: Any) -> web.Response | None:
        wanted = body.get("max_tokens") or body.get("max_completion_tokens")
        if size(body["messages"], ("reasoning", "reasoning_content")) + wanted > limit:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return web.json_response(answered(body, request.path))

    def tokenize(body: Any) -> web.Response:
        count = size(body["messages"], (reads,))
        return web.json_response({"count": count, "max_model_len": limit})

    bench.model.tokenize = tokenize
    bench.model.then(*[strict] * 4)
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}]
    turn = {"role": "assistant", "content": "yes"}
    turn |= (
        {"content": [*blocks, {"type": "text", "text": "yes"}]} if translated else {name: thought}
    )
    path = "/messages" if translated else "/chat/completions"
    body = {"model": "m", "messages": [USER, turn, USER], "max_tokens": 800}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    sent = bench.model.requests[-1]
    assert sent["max_tokens"] == limit - 500 - len("yes" + 2 * USER["content"])
    assert len({"reasoning", "reasoning_content"} & sent["messages"][1].keys()) == 1


async def test_what_vllm_gives_its_template_is_counted(bench: Any) -> None:
    asked = []

    def tokenize(body: Any) -> web.Response:
        asked.append(body)
        return web.json_response({"count": 1, "max_model_len": 100})

    async def refuse(request: web.Request, body: Any) -> web.Response | None:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    bench.model.tokenize = tokenize
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    body = {"model": "m", "messages": [USER], "max_tokens": 800, "chat_template": "t"}
    body |= {
        "reasoning_effort": "none",
        "documents": [{"text": "d"}],
        "continue_final_message": True,
    }
    body |= {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "stop": ["x"]}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        bench.model.then(refuse)
        for extra in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
            assert (await http.post("/chat/completions", json=body | extra)).status_code == 200
    settings = {"reasoning_effort": "none", "documents": [{"text": "d"}]}
    assert asked[0] == {
        "model": "tiny",
        "messages": [USER],
        "chat_template": "t",
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"a": 1, "enable_thinking": False} | settings,
    }
    assert asked[1]["chat_template_kwargs"] == {"enable_thinking": True} | settings
