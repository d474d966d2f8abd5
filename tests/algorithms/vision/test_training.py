"""How image-text policies join a run: images come from the store; what cannot look is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.stages import make_updater
from agentrl.algorithms.vision.training import ImageTextPolicies
from agentrl.core.errors import ConfigError
from agentrl.core.types import POLICY, Reward, Transition, float32, int32
from agentrl.tiny import vision
from tests import factories
from tests.algorithms.vision.looks import WORDS, digest, eyes_of, rollouts


class Shelf:
    """The images of a store."""

    def __init__(self, *bodies: bytes) -> None:
        self.kept = {digest(body): SimpleNamespace(body=body) for body in bodies}
        self.asked: list[list[str]] = []

    async def images(self, run: str, digests: list[str]) -> dict[str, Any]:
        self.asked.append(list(digests))
        return {name: self.kept[name] for name in digests if name in self.kept}


def loaded(folder: Path) -> LoadedModel:
    vision.save(*vision.make("llava", WORDS), folder)
    model, tokenizer = load_model(folder, device="cpu")
    return LoadedModel(str(folder), model, tokenizer, policies=[POLICY])


def updater(model: LoadedModel, **tables: Any) -> Any:
    config = factories.config(policy={"model": model.source}, **tables)
    return make_updater(config, POLICY, registry.make("grpo", {}), model)


async def test_a_step_trains_on_images_of_the_store(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    looking, eyes = ImageTextPolicies(), eyes_of(model.model)
    updaters = {POLICY: updater(model, algorithm={"preset": "grpo"})}
    group = rollouts(model.model)
    names = [d for rollout in group.rollouts for call in rollout.transitions for d in call.images]
    shelf = Shelf(*(eyes.catalogue.file(name) or b"" for name in set(names)))
    run: Any = SimpleNamespace(
        store=shelf,
        config=SimpleNamespace(name="r"),
        models=[model],
        policies=SimpleNamespace(updaters=updaters),
    )
    await looking.prepare(run)
    own = updaters[POLICY]
    groups, _ = await looking.complete([group])
    assert set(shelf.asked[0]) == set(names)
    metrics = own.update(0, groups)
    assert metrics["images/distinct"] == len(set(names))
    assert metrics["calls/images_unread"] == 0
    assert metrics["images/encoded"] == len(set(names))
    assert metrics["grad_norm"] > 0
    # A frozen tower has seen them all: nothing is fetched again.
    await looking.complete([group])
    assert len(shelf.asked) == 1
    assert eyes.source is not None


async def test_a_policy_of_text_trains_on_no_call_with_images(tiny_model_dir: Path) -> None:
    """Of a data set, or of a run that was begun with another model."""
    model = LoadedModel("m", *load_model(tiny_model_dir, device="cpu"), policies=[POLICY])
    looking = ImageTextPolicies()
    own = looking.updater(updater(model), model)
    blind = Transition(
        id="b", attempt="a", index=0, prompt=int32([4, 5]), completion=int32([6]),
        logprobs=float32([-1.0]), images=("0" * 64,),
    )  # fmt: skip
    calls = [factories.call("t", [4, 5], [6]), blind]
    rows = [
        factories.rollout(str(n), [call], [Reward(value=float(n))]) for n, call in enumerate(calls)
    ]
    groups, _ = await looking.complete([factories.group(*rows)])
    found, _ = own.preprocessor.process(groups)
    exact = [call.exact for rollout in found[0].rollouts for call in rollout.transitions]
    assert exact == [True, False]
    assert own.preprocessor.learn(found)["calls/images_unread"] == 1


def test_a_preset_that_writes_prompts_is_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    own = updater(model)
    with pytest.raises(ConfigError, match="rewrites prompts"):
        ImageTextPolicies().updater(
            replace(own, algo=replace(own.algo, prepare=(lambda g, t: g,))), model
        )
