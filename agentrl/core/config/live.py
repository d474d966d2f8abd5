"""The tables [live], [live.promotion], [live.signals] and [live.people]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec.structs import replace

from agentrl.core.config.base import Count, Natural, NonNegative, Seconds, Section
from agentrl.core.errors import nearest
from agentrl.core.types import CORRECTION, FEEDBACK

if TYPE_CHECKING:
    from agentrl.core.config.schema import RunConfig


# Default seconds without a call after which a session ends: short, to learn from it soon.
IDLE = 60.0
# Sessions of a candidate before a decision, so that a few lucky ones cannot decide.
MIN_SESSIONS = 20
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PromotionConfig(Section, frozen=True):
    """When a candidate becomes the serving version."""

    # better: its sessions are shown to be better; not_worse: shown not to be worse by `margin`;
    # always: as soon as it is offered; never: only by `agentrl live promote`.
    rule: Literal["better", "not_worse", "always", "never"] = "better"
    alpha: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.05  # error rate of a decision
    margin: NonNegative = 0.05  # how much lower an outcome may be to count as not worse
    most: Count = 400  # sessions of the candidate after which an undecided one is dropped


class SignalsConfig(Section, frozen=True):
    """How sessions are judged. The verifier of the ended session is the run file's."""

    # Weights of signals in the outcome: 1 for feedback, correction (whose value is 0), verifier and
    # next_message, 0 for other names that the verifier returns or feedback posts, unless named.
    weights: dict[str, NonNegative] = {}
    # Judge of an answer by the message or tool result that follows it: a function, as
    # "file.py:name", or the name of one of [upstreams]. Empty: none.
    next_message: str = ""
    timeout: Seconds = 30.0  # Seconds that a judge or verifier may take for one session.

    @property
    def weight(self) -> dict[str, float]:
        """The weights of all signals that have one."""
        return dict.fromkeys((FEEDBACK, CORRECTION, "verifier", "next_message"), 1.0) | self.weights

    def problems(self, config: RunConfig) -> Iterator[str]:
        name = self.next_message
        if name and ":" not in name and name not in config.upstreams:
            yield f"live.signals.next_message = {name!r}; {nearest(name, config.upstreams)}"


class PeopleConfig(Section, frozen=True):
    """Users' rights, and limits of what one user can do to the policy."""

    user_header: str = "x-user-id"  # request header with the id of the user; stored as a hash
    # Variable with the secret of the run, by which users are hashed and tokens made. Empty: one is
    # made and kept in the store.
    secret_env: str = ""
    token: bool = True  # Whether feedback needs the token that the session's responses carry.
    retention: Seconds | None = None  # Seconds after which sessions are deleted; none: never.
    per_user: Natural = 10  # number of a user's first sessions of a day that count; 0: all


class LiveConfig(Section, frozen=True):
    """How `agentrl live` trains a served policy on its sessions, and promotes new versions."""

    running: bool = False  # Whether this is a live run; set by `agentrl live`.
    sessions: Count = 32  # labelled sessions of a step
    # Seconds after which a step begins with fewer, but at least a quarter of them.
    every: Seconds = 3600.0
    # Seconds after a session's end to wait for explicit feedback. A session without any signal by
    # then is not trained.
    wait: NonNegative = 600.0
    share: Share = 0.1  # fraction of new sessions that a candidate serves
    promotion: PromotionConfig = PromotionConfig()
    # A version is rolled back at once, as a candidate or after its promotion, if its share of
    # failed calls exceeds that of the version that it replaces by more than this, or its mean
    # outcome is lower by more; none: it is not, for these reasons.
    guard: Share | None = 0.1
    signals: SignalsConfig = SignalsConfig()
    people: PeopleConfig = PeopleConfig()

    def problems(self, config: RunConfig) -> Iterator[str]:
        if self.promotion.rule in ("better", "not_worse") and not 0 < self.share < 1:
            yield (
                f"live.promotion.rule = {self.promotion.rule!r} compares two versions that serve "
                f"at the same time: live.share must be between 0 and 1, not {self.share:g}"
            )
        if self.promotion.most < MIN_SESSIONS:
            most = self.promotion.most
            yield f"live.promotion.most = {most}: no decision is made on fewer than {MIN_SESSIONS}"
        if not self.running:
            return
        if config.policies:
            yield "[live] trains one policy, and [policies] has several; remove one of the tables"
        if replace(config.tasks, heldout="", columns={}) != type(config.tasks)():
            yield "tasks: a live run learns from its sessions: keep only heldout and columns"
        if config.tasks.heldout and not config.agent.path:
            yield "tasks.heldout is played by the run file's agent: set agent.path"
        if config.algorithm.joins:
            yield (
                "algorithm.branching, counterfactual: the rest of a live session cannot be "
                "replayed, because its user and agent are elsewhere; remove the table"
            )
