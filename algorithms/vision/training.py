"""Image-text policies in a training run: the images of calls are found in their prompts, and the
ids of images take the place of placeholders.

The images of a prompt are its runs of placeholders, in order, except placeholders that the policy
has sampled, which are text. A call whose images cannot be found for certain is not trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from agentrl.algorithms.data.merge import trainable
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.objective.prepare import KEEPS_PROMPTS
from agentrl.algorithms.train.features import Feature, LoadedRun
from agentrl.algorithms.train.metrics import Metrics
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.algorithms.vision.images import Catalogue, CatalogueImage, ImageError, Tokens, placed
from agentrl.algorithms.vision.inputs import ImageInputs, files_of
from agentrl.core.errors import ConfigError
from agentrl.core.images import url_of
from agentrl.core.types import Group, Json, Rollout, Transition, int32

log = logging.getLogger("agentrl.algorithm")


class Finder:
    """A `Completer` of one policy's calls, which also counts images that it could not find.
    encoder: None for a text policy, so calls with images are not trained."""

    def __init__(self, encoder: ImageInputs | None, policy: str) -> None:
        self._encoder, self._policy = encoder, policy
        self._lost: Counter[str] = Counter()  # calls by the reason why they are not trained
        self._images: set[str] = set()

    def complete(self, groups: list[Group]) -> list[Group]:
        self._lost.clear()
        self._images.clear()
        completed = [
            structs.replace(group, rollouts=[self._rollout(rollout) for rollout in group.rollouts])
            for group in groups
        ]
        for reason, calls in self._lost.items():
            log.warning("%d calls with images are not trained: %s", calls, reason)
        return completed

    def learn(self, groups: Sequence[Group]) -> Metrics:
        """Metrics: images/distinct of trained calls; calls/images_unread: calls that are left
        out."""
        lost = self._lost.total()
        if self._encoder is None and not lost:
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
            if self._encoder is None:
                raise ImageError("the policy reads text alone; choose a model that reads images")
            if not digests:
                raise ImageError("its images were not kept; record it with policy.vision set")
            images = [_seen(self._encoder, digest) for digest in digests]
            prompt = np.frombuffer(call.prompt, np.int32)
            placeholders = np.flatnonzero(prompt == int(self._encoder.model.config.image_token_id))
            placeholders = placeholders[~_sampled(prompt, earlier)[placeholders]]
            ids = placed(prompt, placeholders, images)
        except ImageError as error:
            self._lost[str(error)] += 1
            return structs.replace(call, exact=False)
        self._images.update(digests)
        return structs.replace(call, prompt=int32(ids.tobytes()))


def _seen(encoder: ImageInputs, digest: str) -> CatalogueImage:
    catalogue = encoder.catalogue
    image = catalogue.find(digest)
    if image and (catalogue.readable(digest) or encoder.keeps(digest)):
        return image
    if (body := catalogue.file(digest)) is None:
        raise ImageError("an image is not in the store; it may have been pruned")
    return catalogue.add(body, digest)


def _has_image(message: dict[str, Json]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(url_of(part) is not None for part in parts)


def _sampled(prompt: Tokens, earlier: Sequence[Transition]) -> NDArray[np.bool_]:
    """Which tokens of a prompt earlier calls have sampled."""
    sampled = np.zeros(len(prompt), np.bool_)
    prompt_bytes = prompt.tobytes()
    for call in earlier:
        if prompt_bytes.startswith(before := bytes(call.prompt)) and call.exact:
            completion = bytes(call.completion)
            if prompt_bytes.startswith(completion, len(before)):
                start = len(call.prompt)
                sampled[start : start + len(call.completion)] = True
    return sampled


class ImageTextPolicies(Feature):
    """Brings the images of a step's calls from the store to the models that read them."""

    def __init__(self) -> None:
        self._encoders: dict[str, ImageInputs] = {}  # policy -> encoder
        self._run: LoadedRun | None = None

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        """The updater of one policy, which finds the images of its calls."""
        encoder = inputs_of(model.model)
        encoder = encoder if isinstance(encoder, ImageInputs) else None
        if encoder is not None:
            self._encoders[updater.policy] = encoder
            if encoder.sees:
                check(updater)
        finder, before = Finder(encoder, updater.policy), updater.preprocessor
        return replace(
            updater,
            preprocessor=replace(
                before,
                completers=(finder, *before.completers),
                trainers=(*before.trainers, finder),
            ),
        )

    async def prepare(self, run: LoadedRun) -> None:
        self._run, updaters = run, run.policies.updaters
        for model in run.models:
            for name in model.policies:
                if name in updaters:  # frozen policies have no updater
                    updaters[name] = self.updater(updaters[name], model)
        loop = asyncio.get_running_loop()

        async def source(digests: Sequence[str]) -> Mapping[str, bytes]:
            """Called on a policy server's event loop, but the store belongs to this one."""
            reading = files_of(run.store, run.config.name, digests)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(reading, loop))

        for model in run.models:
            if isinstance(encoder := inputs_of(model.model), ImageInputs):
                encoder.source = source

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        if not self._encoders or self._run is None:
            return groups, {}
        wanted: dict[Catalogue, list[str]] = {}
        for policy, encoder in self._encoders.items():
            digests = (digest for digest in _digests(groups, policy) if not encoder.keeps(digest))
            wanted.setdefault(encoder.catalogue, []).extend(digests)
        store, run = self._run.store, self._run.config.name
        for catalogue, names in wanted.items():
            catalogue.need(await files_of(store, run, list(dict.fromkeys(names))))
        return groups, {}


def check(updater: Updater) -> None:
    """Raise ConfigError for an algorithm with which images cannot be trained."""
    algo = updater.algo
    if not KEEPS_PROMPTS.issuperset(algo.prepare):
        raise ConfigError(
            f"algorithm.preset = {algo.name!r}: it rewrites prompts, without the images that "
            f"policy {updater.policy!r} reads; choose another"
        )


def _digests(groups: Sequence[Group], policy: str) -> list[str]:
    calls = (call for group in groups for rollout in group.rollouts for call in rollout.transitions)
    return list(dict.fromkeys(d for call in calls if call.policy == policy for d in call.images))
