"""Finds the images of calls in their prompts, and puts the ids of images in place of placeholders.

The images of a prompt are its runs of placeholders, in order, but for those that the policy has
sampled itself, which are text. A call whose images cannot be found for certain is not trained.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from agentrl.algorithms.data.merge import trainable
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.base.images import url_of
from agentrl.types import Group, Json, Rollout, Transition, int32
from agentrl.vision.eyes import ImageInputs
from agentrl.vision.images import ImageError, Seen, Tokens, placed

log = logging.getLogger("agentrl.algorithm")


class Finder:
    """A `Completer` of one policy's calls, which also reports what it could not find. eyes: None:
    of a policy that reads text alone, whose calls with images are not trained."""

    def __init__(self, eyes: ImageInputs | None, policy: str) -> None:
        self._eyes, self._policy = eyes, policy
        self._lost: Counter[str] = Counter()  # calls by the reason why they are not trained
        self._images: set[str] = set()

    def complete(self, groups: list[Group]) -> list[Group]:
        self._lost.clear()
        self._images.clear()
        found = [
            structs.replace(group, rollouts=[self._rollout(each) for each in group.rollouts])
            for group in groups
        ]
        for reason, calls in self._lost.items():
            log.warning("%d calls with images are not trained: %s", calls, reason)
        return found

    def learn(self, groups: Sequence[Group]) -> Metrics:
        """images/distinct: of the calls that are trained; calls/images_unread: left out."""
        lost = self._lost.total()
        if self._eyes is None and not lost:
            return {}
        return {"images/distinct": float(len(self._images)), "calls/images_unread": float(lost)}

    def _rollout(self, rollout: Rollout) -> Rollout:
        calls = rollout.transitions
        return structs.replace(
            rollout, transitions=[self._call(call, calls[:at]) for at, call in enumerate(calls)]
        )

    def _call(self, call: Transition, earlier: Sequence[Transition]) -> Transition:
        digests = call.images
        shown = digests or any(map(_has_image, call.messages))
        if not shown or not trainable(call, self._policy):
            return call
        try:
            if self._eyes is None:
                raise ImageError("the policy reads text alone; choose a model that reads images")
            if not digests:
                raise ImageError("its images were not kept; record it with policy.vision set")
            images = [_seen(self._eyes, digest) for digest in digests]
            prompt = np.frombuffer(call.prompt, np.int32)
            own = np.flatnonzero(prompt == int(self._eyes.model.config.image_token_id))
            own = own[~_sampled(prompt, earlier)[own]]
            ids = placed(prompt, own, images)
        except ImageError as error:
            self._lost[str(error)] += 1
            return structs.replace(call, exact=False)
        self._images.update(digests)
        return structs.replace(call, prompt=int32(ids.tobytes()))


def _seen(eyes: ImageInputs, digest: str) -> Seen:
    catalogue = eyes.catalogue
    seen = catalogue.find(digest)
    if seen and (catalogue.readable(digest) or eyes.keeps(digest)):
        return seen
    if (body := catalogue.file(digest)) is None:
        raise ImageError("an image is not in the store; it may have been pruned")
    return catalogue.add(body, digest)


def _has_image(message: dict[str, Json]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(url_of(part) is not None for part in parts)


def _sampled(prompt: Tokens, earlier: Sequence[Transition]) -> NDArray[np.bool_]:
    """Which tokens of a prompt earlier calls have sampled."""
    found = np.zeros(len(prompt), np.bool_)
    whole = prompt.tobytes()
    for call in earlier:
        if whole.startswith(before := bytes(call.prompt)) and call.exact:
            completion = bytes(call.completion)
            if whole.startswith(completion, len(before)):
                start = len(call.prompt)
                found[start : start + len(call.completion)] = True
    return found
