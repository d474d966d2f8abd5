"""The live example's parts agree with each other, and its customers with the agent that serves
them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.core.config import load
from agentrl.core.loading import load_attribute

LIVE = Path(__file__).parents[2] / "examples" / "live"
MODULES = ("agent", "orders", "policy", "signals", "users", "wording")


@pytest.fixture(scope="module")
def live() -> Iterator[dict[str, ModuleType]]:
    pytest.importorskip("langchain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "unused")
        for name in MODULES:
            load_attribute(f"{name}.py:__name__", LIVE, key="test")
        yield {name: sys.modules[name] for name in MODULES}
    for name in MODULES:
        del sys.modules[name]
    sys.path.remove(str(LIVE))


def test_the_run_file_is_valid_and_names_what_exists(live: dict[str, ModuleType]) -> None:
    config = load(LIVE / "run.toml", ["live.running=true"])
    assert load_attribute(config.policy.build, LIVE, key="policy.build")
    assert load_attribute(config.live.signals.next_message, LIVE, key="next_message")


def test_the_agent_file_does_not_know_agentrl(live: dict[str, ModuleType]) -> None:
    assert "agentrl" not in (LIVE / "agent.py").read_text()


def test_the_judge_knows_what_customers_say(live: dict[str, ModuleType]) -> None:
    wording, content, rng = live["wording"], live["signals"].content, random.Random(0)

    def judged(text: str, role: str = "user") -> float | None:
        found: float | None = content([{"role": role, "content": text}])
        return found

    for kind in wording.REQUESTS:
        assert judged(wording.request_again(kind, "371", rng)) == 0.0
        assert judged(wording.request(kind, "371", rng)) is None
    assert {judged(text) for text in wording.COMPLAINTS} == {0.0}
    assert {judged(text) for text in wording.THANKS} == {1.0}
    assert judged(wording.THANKS[0], "tool") is None


def test_demonstrations_read_rightly_and_act_at_random(live: dict[str, ModuleType]) -> None:
    policy, wording, rng = live["policy"], live["wording"], random.Random(0)
    right = 0
    for _ in range(600):
        _, asked, answered, *_ = policy.demonstrate(rng)
        (kind,) = (
            kind
            for kind, texts in wording.REQUESTS.items()
            if any(text.partition("{}")[0] in asked["content"] for text in texts)
        )
        assert answered["content"].startswith(policy.READ[kind])
        called = [call["function"]["name"] for call in answered.get("tool_calls", ())]
        right += called == [live["users"].TOOL.get(kind)] or (
            not called and answered["content"].endswith(live["orders"].answer(kind, "1"))
        )
    assert 0.2 < right / 600 < 0.3


def test_customers_come_again_as_the_seed_says(live: dict[str, ModuleType]) -> None:
    users = live["users"]
    first, other = (users.options([f"--seed={seed}"]) for seed in (0, 1))
    sessions = [users.Session(number, first) for number in range(1000)]
    assert [s.customer for s in sessions] == [users.Session(n, first).customer for n in range(1000)]
    assert [s.kind for s in sessions] != [users.Session(n, other).kind for n in range(1000)]
    attackers = [s for s in sessions if s.nature == "attacker"]
    assert 30 < len(attackers) < 70
    assert {s.customer for s in attackers} == {"attacker"}
    assert all(s.seems(right) is not right for s in attackers for right in (True, False))


async def test_a_customer_without_an_answer_goes_on(
    live: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Votes and ends the session if asked to."""
    users, posted = live["users"], list[str]()

    class Looping:
        async def ainvoke(self, said: object) -> None:
            raise users.GraphRecursionError("it calls tools")

    async def post(path: str, body: object) -> None:
        posted.append(path)

    monkeypatch.setattr(users, "support", lambda session, customer: Looping())
    monkeypatch.setattr(users, "post", post)
    quiet, usual = ["--votes=0", "--leave-open"], ["--votes=1"]
    for given, paths in ((quiet, set[str]()), (usual, {"/feedback", "/sessions/end"})):
        posted.clear()
        played = await users.Session(3, users.options(given)).play()
        assert played["right"] is False
        assert set(posted) == paths
