"""Where calls go: frozen endpoints by role or name, servers without token ids, held policies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from aiohttp import web

from agentrl.core.config import RunConfig, UpstreamConfig
from agentrl.core.types import ANY_ROLE, PolicyVersion
from agentrl.runners.executors.command import environment
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.upstream import Router
from agentrl.runners.main import run_features
from agentrl.runners.tracing.attempt_log import NAMES
from tests.runners.conftest import rows

MESSAGES = [{"role": "user", "content": "hello"}]
SECRET = "sk-judge-secret"


@pytest.fixture
async def judge(model: Any) -> AsyncIterator[Any]:
    """Somebody else's server, that gives no token ids."""
    judge = type(model)(knows_tokens=False, version=None)
    await judge.start()
    yield judge
    await judge.stop()


@pytest.fixture
async def gateway(
    bench: Any, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    config = UpstreamConfig(base_url=f"{judge.base_url}/", model="big", key_env="JUDGE_KEY")
    gateway = Gateway(
        bench.store,
        "test",
        upstreams={"judge": config, "mute": UpstreamConfig(text="no comment")},
        roles={"critic": "judge", "me": "policy", "guest": "mute"},
        features=run_features(bench.store, RunConfig()),
    )
    gateway.start()
    yield gateway
    await asyncio.to_thread(gateway.close)


@pytest.fixture
async def active(bench: Any, gateway: Gateway) -> Any:
    return gateway.register(await bench.attempt())


async def ask(
    gateway: Gateway, active: Any, role: str = "", model: str = "m", inside: str = "", **extra: Any
) -> httpx.Response:
    base = gateway.base_url.removesuffix("/v1")
    url = f"{base}/a/{active.id}{role and '/' + role}/v1/chat/completions"
    async with httpx.AsyncClient(timeout=20) as http:
        body = {"model": model, "messages": MESSAGES} | extra
        headers = {"traceparent": f"00-{active.id}-{'1' * 16}-01"}
        headers |= {"baggage": f"{NAMES}={quote(inside)}"} if inside else {}
        return await http.post(url, json=body, headers=headers)


@pytest.mark.parametrize(
    "odd", [{"n": "2"}, {"n": -1}, {"n": 2**40}, {"stream": True, "stream_options": [1]}], ids=str
)
async def test_a_fixed_answer_is_given_to_sound_requests_only(
    gateway: Gateway, active: Any, odd: Any
) -> None:
    answer = await ask(gateway, active, "guest", **odd)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith([*odd][-1])


@pytest.mark.parametrize(("role", "name"), [("critic", "m"), ("", "judge")])
async def test_a_frozen_endpoint_by_role_or_name(
    bench: Any, gateway: Gateway, judge: Any, active: Any, role: str, name: str
) -> None:
    answer = await ask(gateway, active, role, name, stop=["x"])
    assert answer.status_code == 200
    assert answer.json()["model"] == name
    sent, headers = judge.requests[0], judge.headers[0]
    assert sent.pop("return_token_ids")
    assert sent.pop("logprobs")
    assert sent == {"model": "big", "messages": MESSAGES, "stop": ["x"]}  # no sampling of ours
    assert headers["authorization"] == f"Bearer {SECRET}"
    assert "traceparent" not in headers
    assert SECRET not in str(answer.headers) + answer.text
    (row,) = await rows(bench, active)
    assert (row.policy, row.version, row.exact) == ("judge", None, False)
    assert row.role == (role or "agent")
    assert bench.model.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_one_text_for_every_call(
    bench: Any, gateway: Gateway, active: Any, stream: bool
) -> None:
    base = gateway.base_url.removesuffix("/v1")
    async with openai.AsyncOpenAI(base_url=f"{base}/a/{active.id}/guest/v1", api_key="x") as client:
        if stream:
            chunks = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            said = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
        else:
            both = await client.chat.completions.create(model="m", messages=MESSAGES, n=2)
            said, other = [choice.message.content for choice in both.choices]
            assert other == said
    assert said == "no comment"
    assert bench.model.requests == []
    made = await rows(bench, active)
    assert len(made) == (1 if stream else 2)
    for row in made:
        assert (row.policy, row.version, row.role, row.exact) == ("mute", None, "guest", False)
        assert row.answer == {"role": "assistant", "content": "no comment"}
        assert (row.messages, row.finish, row.repeats) == (MESSAGES, "stop", None)


async def test_a_text_is_no_embedding(bench: Any, gateway: Gateway, active: Any) -> None:
    url = f"{gateway.base_url.removesuffix('/v1')}/a/{active.id}/guest/v1/embeddings"
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(url, json={"model": "m", "input": "x"})
    assert answer.status_code == 502
    assert "'mute' has one text for every call, and none for embeddings" in answer.text


async def test_the_other_roles_are_the_policys(
    bench: Any, gateway: Gateway, judge: Any, active: Any
) -> None:
    await ask(gateway, active, "me", "judge")  # the role decides before the name
    await ask(gateway, active, "solver")
    assert [row.policy for row in await rows(bench, active)] == ["policy", "policy"]
    assert judge.requests == []


async def test_a_server_that_refuses_our_additions_is_asked_without(
    bench: Any, gateway: Gateway, judge: Any, active: Any
) -> None:
    async def strict(request: web.Request, body: Any) -> web.Response | None:
        if "return_token_ids" not in body:
            return None
        error = {"message": "Unrecognized request argument: return_token_ids"}
        return web.json_response({"error": error}, status=400)

    judge.then(*[strict] * 10)
    for _ in range(2):
        answer = await ask(gateway, active, "critic", temperature=0.25)
        assert answer.json()["choices"][0]["message"]["content"] == "echo hello"
    assert len(judge.requests) == 3  # it is remembered
    assert judge.requests[2] == {"model": "big", "messages": MESSAGES, "temperature": 0.25}
    found = await rows(bench, active)
    assert [row.exact for row in found] == [False, False]
    assert found[0].sampling.temperature == 0.25


async def strict_once(request: web.Request, body: Any) -> web.Response | None:
    if "return_token_ids" not in body:
        return None
    return web.json_response({"error": {"message": "not with these tools"}}, status=400)


async def test_one_refusal_of_a_policy_does_not_end_its_capture(
    bench: Any, gateway: Gateway, active: Any
) -> None:
    bench.model.then(strict_once, strict_once)
    for _ in range(2):
        assert (await ask(gateway, active)).status_code == 200
    assert [row.exact for row in await rows(bench, active)] == [False, True]


async def test_a_refusal_of_a_frozen_endpoint_is_forgotten(
    bench: Any, gateway: Gateway, judge: Any, active: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge.knows_tokens = True
    judge.then(strict_once, strict_once)
    await ask(gateway, active, "critic")
    await ask(gateway, active, "critic")
    monkeypatch.setattr("agentrl.runners.gateway.upstream.RECHECK_AFTER", 0.0)
    await ask(gateway, active, "critic")
    assert [row.exact for row in await rows(bench, active)] == [False, False, True]


async def test_a_server_that_gave_ids_is_not_asked_twice(
    bench: Any, gateway: Gateway, active: Any
) -> None:
    async def refuse(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    assert (await ask(gateway, active)).status_code == 200
    bench.model.then(refuse)
    assert (await ask(gateway, active)).status_code == 400
    assert (await ask(gateway, active)).status_code == 200
    assert len(bench.model.requests) == 3
    assert all(row.exact for row in await rows(bench, active))


@pytest.mark.parametrize("code", [401, 403, 307])
async def test_a_refused_key_is_not_the_agents_fault(
    bench: Any, gateway: Gateway, judge: Any, active: Any, code: int
) -> None:
    async def refuse(request: web.Request, body: Any) -> web.Response:
        error = {"message": f"Incorrect API key: {SECRET}"}
        return web.json_response({"error": error}, status=code, headers={"location": "/"})

    judge.then(refuse)
    answer = await ask(gateway, active, "critic")
    assert answer.status_code == 502
    assert "correct its base_url or its API key" in answer.json()["error"]["message"]
    assert SECRET not in answer.text
    assert SECRET not in str(active.failures)
    assert len(judge.requests) == len(active.failures) == 1


UPDATING = PolicyVersion(run="test", policy="policy", version=4, base_url="", model="tiny")


async def is_held(bench: Any, gateway: Gateway) -> None:
    """Until the gateway has read that the policy has no address."""
    while gateway.router.find("m", "agent") is not None:
        cursor = await bench.store.cursor()
        await bench.store.wait(cursor, timeout=0.05)


async def test_new_calls_wait_while_a_policy_has_no_address(
    bench: Any, gateway: Gateway, judge: Any, active: Any
) -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request, body: Any) -> None:
        entered.set()
        await release.wait()

    bench.model.then(wait)
    before = asyncio.create_task(ask(gateway, active))
    await entered.wait()
    await bench.store.publish(UPDATING)
    await asyncio.wait_for(is_held(bench, gateway), 10)
    held = asyncio.create_task(ask(gateway, active))
    assert (await ask(gateway, active, "critic")).status_code == 200  # frozen: never held
    release.set()
    assert (await before).status_code == 200
    assert len(bench.model.requests) == 1
    assert not held.done()
    await bench.move(bench.model, version=5)
    assert (await held).status_code == 200
    assert active.failures == {}


async def test_a_policy_published_without_an_address_is_held(
    bench: Any, gateway: Gateway, active: Any
) -> None:
    await ask(gateway, active)

    await bench.store.publish(UPDATING)
    await asyncio.wait_for(is_held(bench, gateway), 10)
    held = asyncio.create_task(ask(gateway, active))
    late = gateway.register(await bench.attempt(timeout=0.3))
    out_of_time = await ask(gateway, late)
    assert out_of_time.status_code == 504
    assert out_of_time.json()["error"]["code"] == "attempt_timeout"
    assert len(bench.model.requests) == 1
    await bench.move(bench.model, version=5)
    assert (await held).status_code == 200
    with contextlib.suppress(KeyError):
        assert late.failures.popitem()[1] == "no policy server was ready for this call"


async def test_embeddings_pass_through_unrecorded(
    bench: Any, gateway: Gateway, judge: Any, active: Any
) -> None:
    seen = []

    async def embed(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.Response(body=b'{ "data": [1.50] }', content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/embeddings", embed)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        await bench.store.publish(
            PolicyVersion(run="test", policy="embedder", version=0, base_url=base_url, model="e5")
        )
        headers = {"authorization": f"Bearer {active.id}"}
        async with httpx.AsyncClient(base_url=gateway.base_url) as http:
            while gateway.router.policies.get("embedder") is None:
                await bench.store.wait(await bench.store.cursor(), timeout=0.05)
            body = {"model": "embedder", "input": ["x"]}
            answer = await http.post("/embeddings", json=body, headers=headers)
            nobody = await http.post("/embeddings", json=body)
        assert answer.content == b'{ "data": [1.50] }'
        assert seen == [{"model": "e5", "input": ["x"]}]
        assert nobody.status_code == 401
        assert await rows(bench, active) == []
    finally:
        await runner.cleanup()


async def silent(value: str) -> str:
    return value


def judging(asynchronous: bool, model: str) -> Any:
    """A verifier that asks a model with a client as its SDK makes it."""
    ask = {"model": model, "messages": MESSAGES}

    async def verify(task: Any, result: str) -> float:
        async with openai.AsyncOpenAI() as client:
            answer = await client.chat.completions.create(**ask)
        return float(answer.choices[0].message.content == "echo hello")

    def verify_in_thread(task: Any, result: str) -> float:
        with openai.OpenAI() as client:
            answer = client.chat.completions.create(**ask)
        return float(answer.choices[0].message.content == "echo hello")

    return verify if asynchronous else verify_in_thread


# -- seats -----------------------------------------------------------------------------------------


@pytest.fixture
async def snapshot(bench: Any, gateway: Gateway, model: Any) -> AsyncIterator[Any]:
    """An earlier version of the policy, on a server of its own."""
    server = type(model)(version="2")
    await server.start()
    named = {"policy": "policy@2", "version": 2, "model": "policy@2"}
    await bench.store.publish(PolicyVersion(run="test", base_url=server.base_url, **named))
    async with asyncio.timeout(20):
        while "policy@2" not in gateway.router.policies:
            await bench.store.wait(await bench.store.cursor(), timeout=0.05)
    yield server
    await server.stop()


async def test_seats_come_before_the_run_file_and_the_models_name(
    bench: Any, gateway: Gateway, judge: Any, snapshot: Any
) -> None:
    seats = {"critic": "policy@2", "guest": "policy", "me": "judge", "agent": "policy@2"}
    active = gateway.register(await bench.attempt(seats=seats))
    for role, model in (("critic", "m"), ("guest", "policy@2"), ("me", "policy"), ("", "judge")):
        assert (await ask(gateway, active, role, model)).status_code == 200
    assert (len(snapshot.requests), len(bench.model.requests), len(judge.requests)) == (2, 1, 1)
    found = [(row.role, row.policy, row.version) for row in await rows(bench, active)]
    assert found == [
        ("critic", "policy@2", 2),
        ("guest", "policy", 7),
        ("me", "judge", None),
        ("agent", "policy@2", 2),
    ]
    plain = gateway.register(await bench.attempt())
    await ask(gateway, plain, "critic")
    assert [(row.role, row.policy) for row in await rows(bench, plain)] == [("critic", "judge")]


async def test_a_seat_makes_its_role_known(bench: Any, gateway: Gateway, snapshot: Any) -> None:
    active = gateway.register(await bench.attempt(seats={"opponent": "policy@2", "mute": "nobody"}))
    await ask(gateway, active, model="opponent")
    plain = gateway.register(await bench.attempt())
    await ask(gateway, plain, model="opponent")
    found = [(row.role, row.policy) for one in (active, plain) for row in await rows(bench, one)]
    assert found == [("opponent", "policy@2"), ("agent", "policy")]


async def test_a_seat_that_nobody_serves_is_named_and_waited_for(
    bench: Any, gateway: Gateway, model: Any
) -> None:
    active = gateway.register(await bench.attempt(seats={"opponent": "policy@9"}))
    held = asyncio.create_task(ask(gateway, active, "opponent"))
    async with asyncio.timeout(20):
        while not active.failures:  # what the attempt fails of, should its time be up now
            await bench.store.wait(await bench.store.cursor(), timeout=0.05)
    assert active.failures == {
        0: "no server has the policy 'policy@9', which plays the role 'opponent' here"
    }
    late = PolicyVersion(
        run="test", policy="policy@9", version=9, base_url=model.base_url, model="late"
    )
    await bench.store.publish(late)
    assert (await held).status_code == 200
    assert active.failures == {}
    assert [row.policy for row in await rows(bench, active)] == ["policy@9"]


async def test_a_verifier_plays_no_role(bench: Any, gateway: Gateway, judge: Any) -> None:
    mine = dataclasses.replace(bench, gateway=gateway)
    with environment(gateway.base_url):
        (rollout,) = await mine.run(
            silent, {"input": "x"}, verifier=judging(True, "judge"), seats={"agent": "policy"}
        )
    assert rollout.reward() == 1.0
    assert (len(judge.requests), len(bench.model.requests)) == (1, 0)


# -- verifiers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("open", [True, False])
async def test_a_verifier_asks_a_judge_unrecorded(
    bench: Any, gateway: Gateway, judge: Any, asynchronous: bool, open: bool
) -> None:
    async def agent(value: str) -> str:
        async with openai.AsyncOpenAI() as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        return value

    gateway.attempts.open = open  # beyond loopback, only sealed agents and verifiers get in
    mine = dataclasses.replace(bench, gateway=gateway)
    with environment(gateway.base_url):
        verifier = judging(asynchronous, "judge")
        (rollout,) = await mine.run(agent if open else silent, {"input": "x"}, verifier=verifier)
    assert rollout.failure is None
    assert rollout.reward() == 1.0
    assert judge.requests == [{"model": "big", "messages": MESSAGES}]
    assert "traceparent" not in judge.headers[0]
    assert len((await bench.store.trace(rollout.id)).transitions) == open
    assert gateway.attempts.active() == []


async def test_a_verifier_cannot_ask_what_is_trained(bench: Any, gateway: Gateway) -> None:
    mine = dataclasses.replace(bench, gateway=gateway)
    with environment(gateway.base_url):
        verifier = judging(True, "gpt-4o")
        (rollout,) = await mine.run(silent, {"input": "x"}, verifier=verifier, max_attempts=1)
    assert rollout.failure.kind == "verifier_error"
    assert "reaches the endpoints of [upstreams] only, and 'gpt-4o'" in rollout.failure.message
    assert bench.model.requests == []


@pytest.fixture
async def team(bench: Any) -> AsyncIterator[Gateway]:
    """A gateway of two policies, each for a role."""
    claimed = {"critic": "solver", "planner": "planner"}
    gateway = Gateway(
        bench.store,
        "test",
        roles=claimed,
        policies=["planner", "solver"],
        features=run_features(bench.store, RunConfig()),
    )
    for name in ("planner", "solver"):
        url = bench.model.base_url
        await bench.store.publish(
            PolicyVersion(run="test", policy=name, version=2, base_url=url, model=name)
        )
    gateway.start()
    yield gateway
    await asyncio.to_thread(gateway.close)


async def test_roles_and_names_find_their_policy(bench: Any, team: Gateway) -> None:
    active = team.register(await bench.attempt())
    for role, model in (("critic", "gpt-4o"), ("planner", "solver"), ("", "solver")):
        assert (await ask(team, active, role, model)).status_code == 200
    assert [row.policy for row in await rows(bench, active)] == ["solver", "planner", "solver"]
    assert [body["model"] for body in bench.model.requests] == ["solver", "planner", "solver"]
    assert active.failures == {}


async def test_a_role_that_no_policy_plays_is_refused_and_counted(
    bench: Any, team: Gateway
) -> None:
    active = team.register(await bench.attempt())
    refused = await ask(team, active, "referee", "gpt-4o")
    assert refused.status_code == 404
    sentence = refused.json()["error"]["message"]
    assert "no policy plays the role 'referee', which asks for the model 'gpt-4o'" in sentence
    assert "'critic' by 'solver', 'planner' by 'planner'" in sentence
    inside = await ask(team, active, "", "gpt-5", inside="model,judging")
    said = inside.json()["error"]["message"]
    assert "the role 'agent', inside of 'model', 'judging', which asks" in said
    assert list(active.failures.values()) == [sentence, said]
    assert await rows(bench, active) == []


async def test_a_run_without_a_policy_waits_for_none(bench: Any) -> None:
    """Who is mapped to an endpoint is answered, and everybody else refused, not held."""
    upstreams = {"far": UpstreamConfig(base_url=bench.model.base_url, model="m")}
    roles = {"critic": "far"}
    gateway = Gateway(
        bench.store,
        "alone",
        upstreams=upstreams,
        roles=roles,
        remote=True,
        features=run_features(bench.store, RunConfig()),
    )
    gateway.start()
    try:
        active = gateway.register(await bench.attempt())
        assert (await ask(gateway, active, "critic", "gpt-4o")).status_code == 200
        assert (await ask(gateway, active, "", "far")).status_code == 200
        refused = await ask(gateway, active, "planner", "gpt-4o")
    finally:
        await asyncio.to_thread(gateway.close)
    assert refused.status_code == 404
    sentence = refused.json()["error"]["message"]
    assert "no endpoint plays the role 'planner', which asks for the model 'gpt-4o'" in sentence
    assert "map it to one of 'far' in [roles], or set policy.model" in sentence
    assert list(active.failures.values()) == [sentence]


async def test_one_endpoint_may_answer_all_other_roles(bench: Any) -> None:
    """But not those that are mapped, nor calls that ask for another by its name."""
    upstreams = {
        name: UpstreamConfig(base_url=bench.model.base_url, model=name) for name in ("far", "near")
    }
    roles = {"critic": "near", ANY_ROLE: "far"}
    router = Router(bench.store, "alone", upstreams, roles, remote=True)
    for model, role, player in (
        ("gpt-4o", "agent", "far"), ("gpt-4o", "planner", "far"), ("", "agent", "far"),
        ("gpt-4o", "critic", "near"), ("near", "planner", "near"),
    ):  # fmt: skip
        route = router.find(model, role)
        assert route is not None
        assert route.policy == player
        assert router.why_unmapped(model, role) == ""
    assert Router(bench.store, "own", upstreams, roles).find("gpt-4o", "agent") is None


async def test_what_no_role_says_is_for_the_policy_and_not_for_its_snapshots(bench: Any) -> None:
    router = Router(bench.store, "test", policies=["hero"])
    router.policies = {
        name: PolicyVersion(run="test", policy=name, version=1, base_url="http://x/v1", model=name)
        for name in ("hero@000000", "hero", "hero@000010")
    }
    for model, player in (("gpt-4o", "hero"), ("hero@000010", "hero@000010")):
        route = router.find(model, "agent")
        assert route is not None
        assert route.policy == player


@pytest.mark.parametrize("asked", ["gpt-4o-mini", "100%s", 'a"b', "models/gemini-2.5-flash"])
async def test_a_policy_that_answers_for_another_model_says_so_once(
    bench: Any, caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    """A judge inside of the agent would train the policy on its own grading."""
    active = bench.gateway.register(await bench.attempt())
    active.roles = {"planner"}
    for name in (asked, "policy", "tiny", "planner", "", asked, "other"):
        for role in ("", "critic"):
            assert (await ask(bench.gateway, active, role, name)).status_code == 200
    said = [line for line in caplog.messages if "is trained on these calls" in line]
    assert len(said) == 2
    assert f"answers for the model {asked!r}" in said[0]
    assert f"[upstreams.{json.dumps(asked)}]" in said[0]
    assert "[roles]" in said[0]
    assert "answers for the model 'other'" in said[1]


async def test_the_model_that_is_trained_is_asked_for_by_its_name(bench: Any) -> None:
    """An agent that was written for a model asks for it also while it is trained."""
    routes = Router(bench.store, "test", models=["Qwen/Qwen2.5-0.5B-Instruct"])
    assert routes.is_chosen("Qwen/Qwen2.5-0.5B-Instruct", "agent", {})
    assert not routes.is_chosen("gpt-4o-mini", "agent", {})


async def test_a_role_with_a_seat_or_a_place_may_ask_for_any_model(
    bench: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    active = gateway.register(await bench.attempt(seats={"pilot": "policy"}))
    for role in ("pilot", "critic", "me"):
        assert (await ask(gateway, active, role, "gpt-4o")).status_code == 200
    assert "is trained on these calls" not in caplog.text
