"""Calls with equal tokens and other images are different wherever calls are compared."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from agentrl.algorithms.data.merge import new_messages
from agentrl.core.types import NewRollout, Outcome, Reward, RolloutState, Transition
from agentrl.runners.gateway.recorded import question
from agentrl.store.records import digest_of
from tests import factories
from tests.runners.gateway.images.calls import BLUE, DIGESTS, RED, named, user


def call(image: bytes, **more: Any) -> Transition:
    base: dict[str, Any] = {
        "messages": [user(named(image))],
        "answer": {"role": "assistant", "content": "x"},
        "images": (DIGESTS[image],),
    }
    return factories.call("c", [1, 5, 5, 2], [3], **{**base, **more})


def test_sides_of_data_sets() -> None:
    for exact in (True, False):
        red, blue, again = (digest_of([call(body, exact=exact)]) for body in (RED, BLUE, RED))
        assert red == again != blue


def test_questions_of_replays_and_seeds() -> None:
    red, blue = (question("agent", call(body).messages, [], None) for body in (RED, BLUE))
    assert red != blue


def test_observations() -> None:
    assert new_messages(call(RED)) != new_messages(call(BLUE))


def test_prompts_of_pairs() -> None:
    from agentrl.algorithms.preferences.mining import _prompt

    for exact in (True, False):
        red, blue, again = (_prompt(call(body, exact=exact)) for body in (RED, BLUE, RED))
        assert red == again != blue


def test_a_digest_is_no_text_toredact() -> None:
    from agentrl.runners.sessions import redact

    messages = [{"role": "user", "content": [named(RED), {"type": "text", "text": "a 7"}]}]
    told = redact(messages, [re.compile("[0-9]+")])
    assert told[0]["content"][0] == named(RED)
    assert "7" not in told[0]["content"][1]["text"]


async def test_rewards_that_differ_for_equal_calls(store: Any) -> None:
    """Only calls that saw the same can show that a verifier is not sure of itself."""
    from agentrl.algorithms.run_record import _alike
    from tests.store.test_images import image

    images = {body: image(body) for body in (RED, BLUE)}
    await store.put_images("test", [*images.values()])

    async def play(name: str, body: bytes, value: float) -> Any:
        new = NewRollout(id=name, run="test", group=name, index=0, task={"input": "x"})
        await store.enqueue([new])
        (attempt,) = await store.claim(1, runner="r", lease=60.0)
        await store.add_transitions([replace(call(body), id=name, attempt=attempt.id)])
        outcome = Outcome(
            attempt=attempt.id, fence=attempt.fence, result="x", rewards=[Reward(value=value)]
        )
        await store.finish([outcome])
        (row,) = [row for row in await store.rollouts("test") if row.id == name]
        assert row.state is RolloutState.SUCCEEDED
        return row

    first, other = await play("a", RED, 1.0), await play("b", BLUE, 0.0)
    assert await _alike(store, [first, other]) is None
    again = await play("c", RED, 0.0)
    found = await _alike(store, [first, other, again])
    assert found is not None
    assert set(found.rollouts) == {"a", "c"}
