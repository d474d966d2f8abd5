"""Learners as packages made them for an earlier version."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.algorithms.learners import factory
from agentrl.algorithms.learners.base import Learner, LearnerDefaults
from agentrl.algorithms.learners.older.forms import current_form
from agentrl.algorithms.presets import catalogue
from agentrl.config import RunConfig
from agentrl.plugins import check_protocol

MODEL: Any = None
TOKENIZER: Any = None


def test_a_learner_of_an_earlier_version_gets_what_it_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Earlier:
        """The members that a learner had to have."""

        supplies = frozenset({"old", "sampler"})
        closed = False

        def close(self) -> None:
            self.closed = True

        logprobs = values = top = symbol_logprobs = step = save = load = lambda *given: None

    learner = current_form(Earlier(), by=Earlier)
    check_protocol(learner, Learner, by=Earlier, key="learner.kind")
    learner.rest()
    learner.close()
    assert learner.closed
    assert (learner.undoable, dict(learner.frozen)) == (False, {})
    (said,) = caplog.messages
    assert "has no undoable, frozen, mark, shrink, rest, which learners have now" in said
    assert current_form(LearnerDefaults(), by=Earlier) is not None
    assert len(caplog.messages) == 1


def test_letters_of_an_earlier_version_still_name_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[Any] = []

    class Lettered(LearnerDefaults):
        supplies = frozenset({"o", "b", "q", "k"})

        def logprobs(self, batch: Any, of: str = "o") -> None:
            asked.append(of)

        def top(self, batch: Any, k: int, of: str = "o") -> None:
            asked.append((k, of))

    learner = current_form(Lettered(), by=Lettered)
    assert learner.supplies == {"old", "sampler", "reference", "top_tokens"}
    assert "'k' is 'top_tokens', 'o' is 'old', 'q' is 'reference'" in caplog.messages[0]
    learner.logprobs(None)
    learner.logprobs(None, "reference")
    learner.top(None, 3, of="teacher")
    assert asked == ["o", "q", (3, "t")]


def test_entropy_weights_have_the_name_of_an_earlier_version(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Earlier(LearnerDefaults):
        supplies = frozenset({"old", "sampler"})

        def step(
            self, batch: Any, psi: Any, *, lr: float, critic: Any = None, eta: Any = None
        ) -> Any:
            return lr, eta

    learner = current_form(Earlier(), by=Earlier)
    assert learner.step(None, None, lr=0.5, critic=None, entropy_weights="weights") == (
        0.5,
        "weights",
    )
    (said,) = caplog.messages
    assert "calls `entropy_weights` eta; rename it" in said


def test_a_run_gets_its_learner_in_todays_form(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lettered(LearnerDefaults):
        supplies = frozenset({"o", "b"})
        logprobs = values = top = symbol_logprobs = step = save = load = lambda *given: None

    monkeypatch.setattr(factory, "learner_factory", lambda config: lambda *given: Lettered())
    made = factory.make_learner(RunConfig(), catalogue.make("grpo", {}), MODEL, TOKENIZER)
    assert made.supplies == {"old", "sampler"}
