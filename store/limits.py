"""Validates values before every write: whether they can be stored, read back and trained on. Each
function raises Invalid with a message that says what to send instead."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise

from agentrl.errors import Invalid
from agentrl.store.rows import CREDIT, to_blob
from agentrl.types import (
    Image,
    NewRollout,
    Outcome,
    Reward,
    Sampling,
    Scope,
    StepCommit,
    Transition,
)

LATEST_TIME = 2**33  # seconds: in nanoseconds it fits into OpenTelemetry's 64 bits
LONGEST_LEASE = 3600.0  # seconds for which a dead runner may keep a rollout
LONGEST_ID = 512  # bytes: several ids fit into an index row, which has 2704 bytes in PostgreSQL
LARGEST_SIDE = 2**31  # pixels of an image's width or height
DIGEST = re.compile("[0-9a-f]{64}")  # of an image
LARGEST_REWARD = 1e15  # sums of many squares still fit into a float32
LARGEST_LOGPROB = 0.01  # tolerance of a sampler's log-prob above 0
# Sign bytes of float32 numbers that are negative and finite, or positive and less than 0.0079.
USUAL_SIGNS = bytes(range(0x80, 0xFF)) + bytes(range(0x3C))


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise Invalid(f"{name} must be positive and finite, not {value}.")


def check_lease(lease: float) -> None:
    check_positive("lease", lease)
    if lease > LONGEST_LEASE:
        raise Invalid(
            f"lease is {lease:g} seconds, the maximum is {LONGEST_LEASE:g}: keep an attempt longer "
            "by heartbeats."
        )


def check_id(what: str, id: str) -> None:
    """Check the length of an id; `what`: start of the error message."""
    if len(id) * 4 > LONGEST_ID and len(id.encode("utf-8", "surrogatepass")) > LONGEST_ID:
        raise Invalid(
            f"{what} is longer than {LONGEST_ID} bytes ({id[:40]}...): choose a shorter one."
        )


def check_ids(what: str, names: Iterable[str]) -> None:
    for name in names:
        check_id(what, name)


def check_rollout(rollout: NewRollout) -> None:
    for what, id in (("id", rollout.id), ("run", rollout.run), ("group", rollout.group)):
        check_id(f"The {what} of a rollout", id)
    where, branch = f"Rollout {rollout.id}", rollout.branch
    if rollout.max_attempts < 1 or not 0 < rollout.timeout < math.inf:
        raise Invalid(
            f"{where}: max_attempts must be at least 1 and timeout a positive number of seconds."
        )
    if branch is not None and branch.calls < 1:
        raise Invalid(
            f"{where}: a branch repeats at least one call; omit `branch` for a rollout that starts "
            "from scratch."
        )
    if branch is not None and not rollout.seats.keys() >= set(branch.without):
        raise Invalid(
            f"{where}: not all roles of branch.without ({', '.join(branch.without)}) have a seat; "
            "name the policies that play them in `seats`."
        )
    if not all(role and policy for role, policy in rollout.seats.items()):
        raise Invalid(f"{where}: a seat maps a role to a policy, and both names must not be empty.")
    _check_sampling(where, rollout.sampling)


def _check_sampling(where: str, sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and math.isfinite(sampling.top_p)):
        raise Invalid(f"{where}: temperature and top_p must be finite numbers.")


def check_transition(t: Transition) -> None:
    where = f"Call {t.id}"
    check_id("The id of a call", t.id)
    for name, values, code in (
        ("prompt", t.prompt, "i"),
        ("completion", t.completion, "i"),
        ("logprobs", t.logprobs, "f"),
    ):
        if not isinstance(values, array) or values.typecode != code:
            raise Invalid(
                f"{where}: {name} must be an array made by agentrl.types."
                f"{'int32' if code == 'i' else 'float32'}, not {type(values).__name__}."
            )
    if t.exact and len(t.logprobs) != len(t.completion):
        raise Invalid(
            f"{where}: {len(t.logprobs)} log-probs for {len(t.completion)} completion tokens; "
            "send one for each, or mark the call as not exact."
        )
    for name, values in (("prompt", t.prompt), ("completion", t.completion)):
        if not to_blob(values)[3::4].isascii():  # the byte with the sign
            raise Invalid(f"{where}: its {name} has a negative number, not a token id.")
    if to_blob(t.logprobs)[3::4].translate(None, USUAL_SIGNS):
        if not math.isfinite(sum(t.logprobs)):
            raise Invalid(f"{where}: a log-prob is not finite.")
        if (most := max(t.logprobs)) > LARGEST_LOGPROB:
            raise Invalid(f"{where}: a log-prob is {most:g}; it must not be above 0.")
    if t.spans and not (_rises(t) and t.spans[0] == (0, t.version)):
        raise Invalid(
            f"{where}: spans {t.spans} must begin with [0, {t.version}], with increasing first "
            f"tokens and versions, within its {len(t.completion)} tokens."
        )
    if not (0 <= t.started < LATEST_TIME and abs(t.seconds) < LATEST_TIME):  # clocks can go back
        raise Invalid(
            f"{where}: started and seconds must be finite, from 0 to below {LATEST_TIME}."
        )
    check_digests(f"{where}: an image", t.images)
    _check_sampling(where, t.sampling)


def check_digests(what: str, digests: Iterable[str]) -> None:
    for digest in digests:
        if not DIGEST.fullmatch(digest):
            raise Invalid(
                f"{what} is named {digest!r:.80}: name it by the sha256 of its file, in 64 "
                "hexadecimal digits."
            )


def check_image(image: Image) -> None:
    check_digests("An image", [image.digest])
    if sha256(image.body).hexdigest() != image.digest:
        raise Invalid(f"Image {image.digest}: this is not the sha256 of its body.")
    check_id(f"The media type of image {image.digest}", image.media_type)
    if not (0 < image.width < LARGEST_SIDE and 0 < image.height < LARGEST_SIDE):
        raise Invalid(f"Image {image.digest}: {image.width} x {image.height} pixels are no size.")


def _rises(t: Transition) -> bool:
    starts, versions = [start for start, _ in t.spans], [version for _, version in t.spans]
    return all(a < b for row in ([*starts, len(t.completion)], versions) for a, b in pairwise(row))


def check_outcome(outcome: Outcome) -> None:
    if outcome.retry and outcome.failure is None:
        raise Invalid(f"Attempt {outcome.attempt} succeeded: only a failure can be retried.")
    for reward in outcome.rewards:
        check_reward(reward, f"attempt {outcome.attempt}")
    check_ids("The id of a span", (span.id for span in outcome.spans))
    for span in outcome.spans:
        if span.attempt != outcome.attempt:
            raise Invalid(
                f"Span {span.id} of attempt {span.attempt} came with attempt {outcome.attempt}."
            )


def check_reward(reward: Reward, owner: str) -> None:
    """Check a reward's name, value and target; `owner`: what it is of, for the error message."""
    where = f"Reward {reward.name!r} of {owner}"
    if not math.isfinite(reward.value):
        raise Invalid(f"{where} is {reward.value}: a reward must be finite; omit a missing one.")
    if abs(reward.value) > LARGEST_REWARD:
        raise Invalid(
            f"{where} is {reward.value:g}: it must be between -{LARGEST_REWARD:g} and "
            f"{LARGEST_REWARD:g}; scale it."
        )
    if (reward.target is None) is not (reward.scope is Scope.ROLLOUT):
        raise Invalid(f"{where}: name a target for scope transition or role, none for rollout.")


def check_commit(commit: StepCommit) -> None:
    check_ids("A metric's name", commit.metrics)
    for given in commit.rewards:
        check_reward(given.reward, f"rollout {given.rollout}")
    for credit in commit.credits:
        for name in CREDIT:
            values = getattr(credit, name)
            if not isinstance(values, array) or values.typecode != "f":
                raise Invalid(
                    f"Credit of call {credit.transition}: {name} must be an array made by "
                    f"agentrl.types.float32, not {type(values).__name__}."
                )
