"""What each harness sends is understood, answered and recorded exactly, without the harness."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.algorithms.data.merge import merge
from agentrl.core.config import RunConfig
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.harness import load_preset
from agentrl.runners.main import run_features
from tests.runners.conftest import Bench, FakeModel, ids
from tests.runners.gateway.templates import text_of
from tests.runners.harnesses.fillers import PHRASES, SYLLABLES, is_json
from tests.runners.harnesses.stored import HARNESSES, StoredRequest, as_chat, stored

SAID = "It is é done."
FILLER = re.compile(f"({'|'.join(SYLLABLES)}){{2}}")
OURS = ("arguments", "command", "prompt")
EVERY = [
    pytest.param(harness, request, id=f"{harness}-{request.call}")
    for harness in HARNESSES
    for request in stored(harness)
]


async def send(bench: Bench, active: ActiveAttempt, request: StoredRequest) -> httpx.Response:
    url = bench.gateway.base_url.removesuffix("/v1") + request.path
    headers = {k: v.replace("KEY", active.key) for k, v in request.headers.items()}
    async with httpx.AsyncClient(timeout=10) as client:
        return await client.post(url, json=request.body, headers=headers)


@pytest.mark.parametrize(("harness", "request_"), EVERY)
async def test_a_call_is_answered_and_recorded_exactly(
    bench: Bench, tmp_path: Path, harness: str, request_: StoredRequest
) -> None:
    bench.model.answer = lambda body: {"role": "assistant", "content": SAID}
    rules = load_preset(harness, tmp_path).match
    bench.gateway.attempts.features = run_features(bench.store, RunConfig(), rules)
    active = bench.gateway.register(await bench.attempt(), sealed=True)
    answer = await send(bench, active, request_)
    assert answer.status_code == 200, answer.text
    streams = request_.body.get("stream") or "streamGenerateContent" in request_.path
    kind = "text/event-stream" if streams else "application/json"
    assert answer.headers["content-type"].startswith(kind)
    trace = await bench.store.trace(active.attempt.rollout.id)
    (call,) = trace.transitions
    assert call.exact
    assert call.role == request_.role
    assert call.policy == ("policy@side" if call.role == "side" else "policy")
    assert list(call.prompt) == ids(json.dumps(bench.model.requests[-1]["messages"]))
    assert list(call.completion) == ids(SAID)
    assert list(call.logprobs) == [-0.5] * len(ids(SAID))


async def test_a_side_call_is_learned_from_only_by_a_policy_that_it_is_mapped_to(
    bench: Bench, tmp_path: Path
) -> None:
    """Batches hold the calls of a policy's own name."""
    title = next(one for one in stored("opencode") if one.role == "side")
    rules = load_preset("opencode", tmp_path).match
    bench.gateway.attempts.features = run_features(bench.store, RunConfig(), rules)
    for mapped, policy in (({}, "policy@side"), ({"side": "policy"}, "policy")):
        bench.gateway.router.roles = mapped
        active = bench.gateway.register(await bench.attempt(), sealed=True)
        assert (await send(bench, active, title)).status_code == 200
        trace = await bench.store.trace(active.attempt.rollout.id)
        assert [(call.role, call.policy) for call in trace.transitions] == [("side", policy)]


def rendered(messages: list[dict[str, Any]]) -> str:
    """A prompt without tools; the ids of calls are not shown, as in every chat template."""
    parts = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said = [[call["name"], call["arguments"]] for call in calls]
        parts.append(json.dumps([message["role"], text_of(message), said]) + "\n")
    return "".join(parts)


@pytest.mark.parametrize("harness", HARNESSES)
@pytest.mark.parametrize("role", ["agent", "subagent"])
async def test_a_conversation_is_one_row(bench: Bench, harness: str, role: str) -> None:
    """Each harness gives back what the model said, tool calls included, so that the tokens of a
    call begin with those of the one before."""
    calls = [request for request in stored(harness) if request.role == role]
    if not calls:
        pytest.skip("it makes no such calls")
    model: Any = bench.model
    model.prompt = lambda body: {"prompt_token_ids": ids(rendered(body["messages"]))}
    model.tokens = lambda text, body, chat: FakeModel.tokens(
        bench.model, rendered([model.answer(body)]), body, chat
    )
    active = bench.gateway.register(await bench.attempt(), sealed=True)
    for request, following in zip(calls, [*calls[1:], None], strict=True):
        said: dict[str, Any] = {"role": "assistant", "content": SAID}
        if following is not None:
            begun = len(as_chat(request).messages)
            said = {"content": None} | as_chat(following).messages[begun]
            if calls_made := said.get("tool_calls"):
                said["tool_calls"] = [as_written(call, request) for call in calls_made]
        model.answer = lambda body, said=said: said
        request.body.pop("stream", None)
        path = request.path.replace("streamGenerateContent?alt=sse", "generateContent")
        answer = await send(bench, active, replace(request, path=path))
        assert answer.status_code == 200, answer.text
    trace = await bench.store.trace(active.attempt.rollout.id)
    assert len(trace.transitions) == len(calls)
    assert len(merge(trace.transitions)) == 1


def as_written(call: dict[str, Any], request: StoredRequest) -> dict[str, Any]:
    """As a model may write it: with other white space than the JSON of a harness, unless its API
    has the harness give back the text itself."""
    function = call["function"]
    if "responses" in request.path:
        return call
    return call | {"function": function | {"arguments": f" {function['arguments']}"}}


@pytest.mark.parametrize("harness", HARNESSES)
def test_no_sentence_of_a_harness_is_stored(harness: str) -> None:
    for request in stored(harness):
        for text in texts(request.body):
            for phrase in PHRASES:
                text = text.removeprefix(phrase)
            assert all(FILLER.fullmatch(word) for word in text.split()), text


def texts(value: Any, key: str = "") -> Iterator[str]:
    """Those of more than two words, but for arguments of tool calls, which our script wrote."""
    inner = value.items() if isinstance(value, dict) else ((key, item) for item in value)
    for name, item in inner:
        if isinstance(item, str) and name not in OURS and is_json(item):
            item = json.loads(item)
        if isinstance(item, dict | list):
            yield from texts(item, name)
        elif isinstance(item, str) and len(item.split()) > 2 and name not in OURS:
            yield item
