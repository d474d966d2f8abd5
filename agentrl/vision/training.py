"""How image-text policies join a training run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.objective.prepare import KEEPS_PROMPTS
from agentrl.algorithms.train.features import Feature, LoadedRun
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.errors import ConfigError
from agentrl.types import Group
from agentrl.vision.calls import Finder
from agentrl.vision.eyes import ImageInputs, files_of
from agentrl.vision.images import Catalogue


class Looking(Feature):
    """Brings the images of a step's calls from the store to the models that read them."""

    def __init__(self) -> None:
        self._eyes: dict[str, ImageInputs] = {}  # by policy
        self._run: LoadedRun | None = None

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        """The updater of one policy, which finds the images of its calls."""
        eyes = inputs_of(model.model)
        eyes = eyes if isinstance(eyes, ImageInputs) else None
        if eyes is not None:
            self._eyes[updater.policy] = eyes
            if eyes.sees:
                check(updater)
        finder, before = Finder(eyes, updater.policy), updater.preprocessor
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
                if name in updaters:  # which a frozen policy is not
                    updaters[name] = self.updater(updaters[name], model)
        loop = asyncio.get_running_loop()

        async def source(digests: Sequence[str]) -> Mapping[str, bytes]:
            """Called on a policy server's loop; the store belongs to this one."""
            found = files_of(run.store, run.config.name, digests)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(found, loop))

        for model in run.models:
            if isinstance(eyes := inputs_of(model.model), ImageInputs):
                eyes.source = source

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        if not self._eyes or self._run is None:
            return groups, {}
        wanted: dict[Catalogue, list[str]] = {}
        for policy, eyes in self._eyes.items():
            digests = (digest for digest in _digests(groups, policy) if not eyes.keeps(digest))
            wanted.setdefault(eyes.catalogue, []).extend(digests)
        store, run = self._run.store, self._run.config.name
        for catalogue, names in wanted.items():
            catalogue.need(await files_of(store, run, list(dict.fromkeys(names))))
        return groups, {}


def check(updater: Updater) -> None:
    """Raise ConfigError for an algorithm with which images cannot be trained."""
    algo = updater.algo
    if not KEEPS_PROMPTS.issuperset(algo.prepare):
        raise ConfigError(
            f"algorithm.preset = {algo.name!r}: it writes prompts anew, without the images that "
            f"policy {updater.policy!r} reads; choose another"
        )


def _digests(groups: Sequence[Group], policy: str) -> list[str]:
    calls = (call for group in groups for rollout in group.rollouts for call in rollout.transitions)
    return list(dict.fromkeys(d for call in calls if call.policy == policy for d in call.images))
