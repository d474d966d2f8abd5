"""An image of a call is kept once, named by its digest, and sent on as the agent sent it."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from typing import Any

import httpx
import openai
import pytest

from agentrl.core import images
from agentrl.core.config import RunConfig, UpstreamConfig
from agentrl.core.config.learning import MemberConfig
from agentrl.core.errors import NotFound, Unavailable
from agentrl.core.types import Branch, PolicyVersion, RolloutState, Transition
from agentrl.runners.gateway import images as eyes
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.recorded import question
from agentrl.store.sql.traces import IN_FLIGHT
from tests.runners.conftest import Bench
from tests.runners.gateway.images.calls import (
    BLUE,
    DIGESTS,
    RED,
    TEXT,
    ask,
    named,
    shown,
    stored,
    user,
)
from tests.runners.gateway.images.conftest import Opened
from tests.runners.gateway.images.pictures import claiming, exif, picture, url


async def test_a_call_names_its_images_and_the_server_gets_them(bench: Bench) -> None:
    messages = [
        {"role": "system", "content": [TEXT, shown(RED)]},
        user(shown(BLUE, detail="low"), TEXT, shown(RED)),
    ]
    answer, (call,), _ = await ask(bench, {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert call.messages == [
        {"role": "system", "content": [TEXT, named(RED)]},
        user(named(BLUE, detail="low"), TEXT, named(RED)),
    ]
    assert call.images == (DIGESTS[RED], DIGESTS[BLUE], DIGESTS[RED])
    assert call.exact
    (asked,) = bench.model.requests
    assert asked["messages"] == messages
    images = await bench.store.images("test", call.images)
    assert {(i.media_type, i.width, i.height, i.body) for i in images.values()} == {
        ("image/png", 8, 6, RED),
        ("image/jpeg", 12, 4, BLUE),
    }
    assert await stored(bench) == 2


async def test_the_embedded_server_gets_digests_and_the_store_has_them_before(
    opened: Opened,
) -> None:
    async with opened(embedded=True) as bench:
        found = []

        async def look(request: Any, body: Any) -> None:
            digest = body["messages"][0]["content"][0]["image_url"]["url"].removeprefix("image:")
            found.append((await bench.store.images("test", [digest]))[digest].body)

        bench.model.then(look)
        await ask(bench, {"messages": [user(shown(RED))]})
        assert found == [RED]
        assert bench.model.requests[0]["messages"] == [user(named(RED))]


async def test_a_tools_image_and_what_a_part_without_type_shows(bench: Bench) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"image_url": {"url": url(RED)}}]},
    ]
    answer, (row,), _ = await ask(bench, {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert row.messages[2] == {"role": "tool", "tool_call_id": "c", "content": [named(RED)]}
    assert bench.model.requests[0]["messages"] == messages


async def test_a_conversation_keeps_each_image_once(bench: Bench) -> None:
    first = [user(TEXT, shown(RED))]
    later = [*first, {"role": "assistant", "content": "x"}, user(shown(RED), shown(BLUE))]
    *_, calls, _ = await ask(bench, {"messages": first}, {"messages": later}, {"messages": later})
    assert [len(call.images) for call in calls] == [1, 3, 3]
    assert await stored(bench) == 2


async def test_other_images_make_another_question(bench: Bench) -> None:
    """Seeds, replays and prefixes compare messages, which have the digests."""
    bodies = [{"messages": [user(TEXT, shown(body))]} for body in (RED, BLUE, RED)]
    *_, calls, _ = await ask(bench, *bodies)
    red, blue, again = (question("agent", call.messages, [], None) for call in calls)
    assert red == again != blue


def looking(*bodies: bytes, heard: list[str]) -> Any:
    """An agent that shows one image after the other."""

    async def agent(task: Any) -> None:
        messages: list[Any] = []
        async with openai.AsyncOpenAI() as client:
            for body in bodies:
                messages.append(user(TEXT, shown(body)))
                answer = await client.chat.completions.create(model="m", messages=messages)
                said = answer.choices[0].message.content
                heard.append(str(said))
                messages.append({"role": "assistant", "content": said})

    return agent


def counted(bench: Bench) -> None:
    numbers = iter(range(100))
    bench.model.answer = lambda body: {"role": "assistant", "content": f"no {next(numbers)}"}


async def calls_of(bench: Bench, rollout: str) -> list[Transition]:
    trace = await bench.store.trace(rollout)
    assert trace is not None
    return trace.transitions


async def test_a_branch_replays_with_its_images(bench: Bench) -> None:
    counted(bench)
    heard: list[str] = []
    (source,) = await bench.run(looking(RED, BLUE, RED, heard=heard), {"input": "x"})
    assert source.state is RolloutState.SUCCEEDED, source.failure
    again: list[str] = []
    branch = Branch(rollout=source.id, calls=2)
    (rollout,) = await bench.run(
        looking(RED, BLUE, RED, heard=again), {"input": "x"}, branch=branch
    )
    assert again[:2] == heard[:2]
    assert again[2] != heard[2]
    calls = await calls_of(bench, rollout.id)
    assert [call.repeats is not None for call in calls] == [True, True, False]
    assert [call.images for call in calls] == [
        call.images for call in await calls_of(bench, source.id)
    ]


async def test_a_branch_whose_images_differ_is_not_replayed(bench: Bench) -> None:
    counted(bench)
    heard: list[str] = []
    (source,) = await bench.run(looking(RED, BLUE, heard=heard), {"input": "x"})
    branch = Branch(rollout=source.id, calls=2)
    (rollout,) = await bench.run(looking(BLUE, BLUE, heard=heard), {"input": "x"}, branch=branch)
    assert [call.repeats for call in await calls_of(bench, rollout.id)] == [None, None]


REFUSED = {
    "url": ({"url": "https://x.org/cat.png"}, "send the file itself"),
    "file": ({"url": "file:///etc/passwd"}, "send the file itself"),
    "digest": ({"url": f"image:{'0' * 64}"}, "send the file itself"),
    "none": ({}, "send the file itself"),
    "null": (None, "send the file itself"),
    "list": ({"url": ["x"]}, "send the file itself"),
    "plain": ({"url": "data:image/png,AAAA"}, "send the file itself"),
    "base64": ({"url": "data:image/png;base64,%%%"}, "not base64"),
    "half": ({"url": "data:image/png;base64,AAA"}, "not base64"),
    "spaces": ({"url": "data:image/png;base64,AA AA"}, "not base64"),
    "letters": ({"url": "data:image/png;base64,AA\xe9A"}, "not base64"),
    "empty": ({"url": "data:image/png;base64,"}, "not a PNG"),
    "cut": ({"url": url(RED[:-20])}, "cut off"),
    "large": ({"url": url(claiming(20_000, 20_000))}, "more than 33554432"),
    "bomb": ({"url": url(claiming(2**31 - 1, 2**31 - 1))}, "more than 33554432"),
    "nothing": ({"url": url(claiming(0, 9))}, "0 x 9"),
    "cmyk": ({"url": url(picture("JPEG", mode="CMYK"))}, "CMYK"),
    "rotated": ({"url": url(picture("JPEG", exif=exif(6)))}, "upright"),
    "svg": ({"url": url(b"<svg/>", "image/svg+xml")}, "SVG"),
    "pdf": ({"url": url(b"%PDF-1.7", "application/pdf")}, "not a PNG"),
}


@pytest.mark.parametrize(
    ("name", "embedded"), [*((name, False) for name in REFUSED), ("cut", True), ("url", True)]
)
async def test_what_a_policy_cannot_see_is_refused(
    opened: Opened, name: str, embedded: bool
) -> None:
    given, why = REFUSED[name]
    part = {"type": "image_url", "image_url": given}
    async with opened(embedded=embedded) as bench:
        answer, calls, active = await ask(bench, {"messages": [user(TEXT, shown(RED), part)]})
        assert answer.status_code == 400
        said = answer.json()["error"]["message"]
        assert "messages[0].content[2]" in said
        assert why in said
        assert [*active.failures.values()] == [said]
        assert bench.model.requests == []
        assert calls == []
        assert await stored(bench) == 0


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "video_url", "video_url": {"url": url(RED)}}, "video_url"),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, "input_audio"),
        ({"type": "file", "file": {"file_data": url(RED)}}, "file"),
        (shown(RED) | {"uuid": "cat"}, "uuid"),
    ],
)
async def test_other_media_are_refused(bench: Bench, part: Any, why: str) -> None:
    answer, calls, _ = await ask(bench, {"messages": [user(shown(RED), part)]})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert calls == []
    assert await stored(bench) == 0


@pytest.mark.parametrize("name", eyes.PIXELS)
async def test_the_pixels_are_those_of_the_models_own_processor(bench: Bench, name: str) -> None:
    body = {"messages": [user(shown(RED))], name: {"max_pixels": 5}}
    answer, _, _ = await ask(bench, body)
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]
    text, empty, *_ = await ask(
        bench, {"messages": [user(TEXT)], name: {"x": 1}}, body | {name: {}}
    )
    assert (text.status_code, empty.status_code) == (200, 200)


@pytest.mark.parametrize(
    ("module", "limit", "value", "why"),
    [
        (eyes, "MAX_IMAGES", 1, "2 images, more than 1"),
        (images, "MAX_BYTES", len(BLUE) - 1, f"{len(BLUE)} bytes, more than"),
        (images, "MAX_PIXELS", 47, "8 x 6 pixels, more than 47"),
    ],
)
async def test_limits(
    opened: Opened, module: Any, limit: str, value: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, limit, value)
    small, large = sorted((RED, BLUE), key=len)
    async with opened() as bench:
        answer, calls, _ = await ask(bench, {"messages": [user(shown(small), shown(large))]})
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
        assert calls == []
        assert await stored(bench) == 0


async def test_two_hundred_images_are_not_even_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eyes, "read_image", None)
    answer, _, _ = await ask(bench, {"messages": [user(*[shown(RED)] * 200)]})
    assert "200 images" in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
async def test_every_kind_of_file_is_kept_as_it_came(bench: Bench, form: str) -> None:
    body = picture(form, (1, 1))
    given = {"type": "image_url", "image_url": {"url": url(body, "image/png")}}  # says the agent
    _, (call,), _ = await ask(bench, {"messages": [user(given)]})
    (image,) = (await bench.store.images("test", call.images)).values()
    assert (image.media_type, image.body) == (f"image/{form.lower()}", body)


async def test_a_frozen_endpoint_gets_whatever_the_agent_sends(opened: Opened, model: Any) -> None:
    upstreams = {"frozen": UpstreamConfig(base_url=model.base_url, model="m")}
    strange = {"type": "image_url", "image_url": {"url": "https://x.org/cat.png"}}
    async with opened(upstreams=upstreams, embedded=True) as bench:
        messages = [user(shown(RED), strange)]
        answer, (call,), _ = await ask(bench, {"model": "frozen", "messages": messages})
        assert answer.status_code == 200, answer.text
        assert bench.model.requests[0]["messages"] == messages
        assert call.messages == [user(named(RED), strange)]
        assert call.images == (DIGESTS[RED],)


async def test_of_endpoints_too_images_are_stored_once(opened: Opened, model: Any) -> None:
    """In a run whose policy sees none, or that has no policy."""
    upstreams = {"frozen": UpstreamConfig(base_url=model.base_url, model="m")}
    async with opened(RunConfig(upstreams=upstreams), upstreams=upstreams) as bench:
        messages = [user(TEXT, shown(RED))]
        _, (call,), _ = await ask(bench, {"model": "frozen", "messages": messages})
        assert bench.model.requests[0]["messages"] == messages
        assert call.messages == [user(TEXT, named(RED))]
        answer, calls, _ = await ask(bench, {"messages": messages})
        assert "'policy' is trained on text" in answer.json()["error"]["message"]
        assert calls == []


@pytest.mark.parametrize("embedded", [False, True])
async def test_adapted_messages_have_their_images(opened: Opened, embedded: bool) -> None:
    """What is changed for the policy's chat template has data URLs again for a server of URLs."""

    class Brief(Feature):
        def add_to(self, app: Any, upstream: Any) -> None:
            async def adapt(route: Any, messages: Any) -> Any:
                return [{"role": "system", "content": "be brief"}, *messages]

            upstream.adapters.append(adapt)

    async with opened(embedded=embedded, more=[Brief()]) as bench:
        told = {"role": "system", "content": "be kind"}  # which not every template renders
        _, (call,), _ = await ask(bench, {"messages": [told, user(TEXT, shown(RED))]})
        asked = bench.model.requests[0]["messages"]
        assert [message["role"] for message in asked] == ["system", "system", "user"]
        assert asked[2] == user(TEXT, (named if embedded else shown)(RED))
        assert call.messages == [told, user(TEXT, named(RED))]


async def test_an_image_that_was_pruned_is_put_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, added = bench.store.put_images, bench.store.add_transitions
    puts, lost = [], [True]

    async def count(run: str, images: Any) -> None:
        puts.append([image.digest for image in images])
        await put(run, images)

    async def lose(rows: Any) -> Any:
        if lost:
            raise NotFound(f"Image {DIGESTS[RED]} is not stored {lost.pop()}")
        return await added(rows)

    monkeypatch.setattr(bench.store, "put_images", count)
    monkeypatch.setattr(bench.store, "add_transitions", lose)
    body = {"messages": [user(shown(RED))]}
    answer, again, calls, _ = await ask(bench, body, body)
    assert (answer.status_code, again.status_code) == (200, 200)
    assert puts == [[DIGESTS[RED]]] * 2
    assert len(calls) == 2
    assert eyes.PUT_AGAIN < IN_FLIGHT


@pytest.mark.parametrize("embedded", [False, True])
async def test_no_call_is_stored_if_its_image_is_not(
    opened: Opened, embedded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(run: str, images: Any) -> None:
        raise Unavailable("the disk is full")

    async with opened(embedded=embedded) as bench:
        monkeypatch.setattr(bench.store, "put_images", fail)
        answer, calls, active = await ask(bench, {"messages": [user(shown(RED))]})
        assert answer.status_code >= 500
        assert "the disk is full" in answer.text
        assert "the disk is full" in str(active.failures)
        assert calls == []


async def test_concurrent_calls_with_the_same_images(bench: Bench) -> None:
    active = bench.gateway.register(await bench.attempt())
    headers = {"authorization": f"Bearer {active.key}"}
    async with httpx.AsyncClient(base_url=bench.gateway.base_url, headers=headers) as http:
        body = {"model": "m", "messages": [user(shown(RED), shown(BLUE))]}
        answers = await asyncio.gather(
            *(http.post("/chat/completions", json=body) for _ in range(16))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert await stored(bench) == 2


async def test_large_images_are_put_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyes, "MAX_PUT_BYTES", len(RED) + len(BLUE) - 1)
    put, puts = bench.store.put_images, []

    async def count(run: str, images: Any) -> None:
        puts.append(len(images))
        await put(run, images)

    monkeypatch.setattr(bench.store, "put_images", count)
    await ask(bench, {"messages": [user(shown(RED), shown(BLUE), shown(RED))]})
    assert puts == [1, 1]


async def test_what_is_stored_of_a_call_has_no_pixels(bench: Bench) -> None:
    noise = b64encode(RED).decode()
    _, calls, _ = await ask(bench, {"messages": [user(shown(RED))]})
    assert noise not in json.dumps([call.messages for call in calls])


async def test_each_of_several_policies_sees_or_does_not(opened: Opened) -> None:
    members = {
        "eyes": MemberConfig(roles=["look"], vision="frozen"),
        "mouth": MemberConfig(roles=["talk"]),
    }
    roles = {"look": "eyes", "talk": "mouth"}
    async with opened(RunConfig(policies=members), roles=roles, policies=[*members]) as bench:
        for name in (*members, "eyes@000003"):
            await bench.store.publish(
                PolicyVersion(
                    run="test", policy=name, version=1, base_url=bench.model.base_url, model="m"
                )
            )
        body = {"messages": [user(shown(RED))]}

        async def play(role: str, **seats: str) -> tuple[Any, list[Transition]]:
            active = bench.gateway.register(await bench.attempt(seats=seats))
            url = f"{bench.gateway.base_url.removesuffix('/v1')}/a/{active.id}/{role}/v1"
            async with httpx.AsyncClient() as http:
                answer = await http.post(f"{url}/chat/completions", json={"model": "m"} | body)
            return answer, await calls_of(bench, active.attempt.rollout.id)

        answer, (call,) = await play("look")
        assert answer.status_code == 200, answer.text
        assert (call.role, call.policy, call.images) == ("look", "eyes", (DIGESTS[RED],))
        answer, calls = await play("talk")
        assert "'mouth' is trained on text" in answer.json()["error"]["message"]
        assert calls == []
        answer, (call,) = await play("talk", talk="eyes@000003")  # a snapshot
        assert (call.policy, call.images) == ("eyes@000003", (DIGESTS[RED],))
