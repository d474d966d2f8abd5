"""The learner of an image-text policy against the class's own forward pass with pixel values."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.auxiliary import Reference, load_auxiliary
from agentrl.algorithms.learners.base import LossCoefficients
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.proof import trie_gap
from agentrl.algorithms.vision import inputs
from agentrl.algorithms.vision.images import positions
from agentrl.algorithms.vision.learner import ImageTextLearner
from agentrl.algorithms.vision.training import Finder
from agentrl.core.config import PolicyConfig
from agentrl.core.errors import PolicyError
from agentrl.core.types import Group, Transition, int32
from agentrl.models.export import export_merged
from agentrl.tiny import vision
from tests import factories
from tests.algorithms.vision.looks import (
    KINDS,
    WORDS,
    digest,
    eyes_of,
    looked,
    own_logprobs,
    png,
    rollouts,
)

CLOSE = 2e-6  # nats


def make(kind: str, **options: Any) -> tuple[Any, Any]:
    return vision.make(kind, WORDS, most=28 * 56, **options)  # type: ignore[arg-type]


def batch_of(model: Any, group: Group) -> Batch:
    return build_batch(Finder(eyes_of(model), "policy").complete([group]))


def calls_of(group: Group) -> list[Transition]:
    return [call for rollout in group.rollouts for call in rollout.transitions]


def uniform(batch: Batch) -> LossCoefficients:
    return lambda logprobs, tokens: torch.full((len(tokens),), 1 / batch.n_tokens)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", ["trie", "rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_the_class_with_pixel_values(kind: str, packing: Any) -> None:
    model, tokenizer = make(kind)
    group = rollouts(model)
    batch = batch_of(model, group)
    learner = ImageTextLearner(model, tokenizer, packing=packing)
    found = learner.logprobs(batch)
    with torch.no_grad():
        own = torch.cat([own_logprobs(model, call) for call in calls_of(group)])
    assert len(batch.rows) == 4  # each second call goes on from the first
    assert (found - own).abs().max() <= CLOSE


@pytest.mark.parametrize(
    ("budget", "recompute"),
    [(10**6, False), (20, False), (10**6, True)],
    ids=["one graph", "parts", "recomputed"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_on_into_a_trained_tower(
    kind: str, budget: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = make(kind, trained=True)
    group = rollouts(model)
    batch = batch_of(model, group)
    own = torch.cat([own_logprobs(model, call) for call in calls_of(group)])
    (-own.mean()).backward()
    wanted = gradients(model)
    model.zero_grad()
    learner = ImageTextLearner(
        model, tokenizer, token_budget=budget, gradient_checkpointing=recompute
    )
    kept: dict[str, Tensor] = {}
    monkeypatch.setattr(
        learner.optimizer, "clip", lambda most: kept.update(gradients(model)) or 1.0
    )
    report = learner.step(batch, uniform(batch), lr=1e-3)
    assert report.applied
    assert (report.logprobs - own.detach()).abs().max() <= CLOSE
    assert {name for name, g in wanted.items() if g.norm() > 0} <= kept.keys()
    towers = [name for name in wanted if not name.startswith("model.language_model")]
    assert sum(float(wanted[name].norm()) for name in towers) > 0
    for name, gradient in wanted.items():
        if name in kept:
            assert (kept[name] - gradient).norm() <= 2e-6 * max(1, gradient.norm()), name
    assert report.metrics["images/encoded"] == 6  # of eight in the prompts of four rollouts


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tower_encodes_each_image_once_per_run(kind: str) -> None:
    model, tokenizer = make(kind)
    learner, eyes = ImageTextLearner(model, tokenizer), eyes_of(model)
    tower = [p.clone() for part in eyes.kind.towers for p in part.parameters()]
    batch = batch_of(model, rollouts(model))
    decoded = eyes.catalogue.decoded
    for step in range(3):
        report = learner.step(batch, uniform(batch), lr=1e-2)
        assert report.applied
        assert report.metrics["images/encoded"] == (0 if step else 6)
    assert eyes.catalogue.decoded == decoded
    after = [p for part in eyes.kind.towers for p in part.parameters()]
    assert all(map(torch.equal, tower, after))
    names = learner.optimizer.masters
    assert not any("vis" in name or "projector" in name for name in names)


def test_a_trained_tower_is_read_anew_after_each_update() -> None:
    model, tokenizer = make("llava", trained=True)
    learner, group = ImageTextLearner(model, tokenizer), rollouts(model)
    batch = batch_of(model, group)
    for _ in range(2):
        learner.step(batch, uniform(batch), lr=1e-2)
        with torch.no_grad():
            own = torch.cat([own_logprobs(model, call) for call in calls_of(group)])
        assert (learner.logprobs(batch) - own).abs().max() <= CLOSE


@pytest.mark.parametrize("kind", KINDS)
def test_other_images_are_other_rows(kind: str) -> None:
    """Equal placeholders with another image continue nothing, and share no node."""
    model, _ = make(kind)
    a, b = png(1), png(2)
    first = looked("1", [4, a, 1], [7, 2], model)
    same = looked("2", [4, a, 1, 7, 2, 5, 1], [8, 2], model)
    other = looked("3", [4, b, 1, 7, 2, 5, 1], [8, 2], model)
    assert bytes(same.prompt) == bytes(other.prompt)
    rows = batch_of(model, factories.group(factories.rollout("r", [first, same, other])))
    assert [len(row.actions) for row in rows.rows] == [4, 2]
    assert rows.transition_prompt.unique().numel() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_is_shown_twice_is_encoded_once(kind: str) -> None:
    model, tokenizer = make(kind, trained=True)
    a, b = png(21), png(22, 30, 30)
    group = factories.group(
        factories.rollout("1", [looked("1", [4, a, 5, b, 6, a, 1], [7, 8, 2], model)]),
        factories.rollout("2", [looked("2", [4, a, 5, a, 1], [9, 2], model)]),
    )
    learner, batch = ImageTextLearner(model, tokenizer), batch_of(model, group)
    report = learner.step(batch, uniform(batch), lr=0.0)
    assert report.metrics["images/encoded"] == 2
    with torch.no_grad():
        own = torch.cat([own_logprobs(model, call) for call in calls_of(group)])
    assert (report.logprobs - own).abs().max() <= CLOSE


def test_a_sampled_placeholder_is_text() -> None:
    model, tokenizer = make("qwen2_5_vl")
    image = model.config.image_token_id
    first = looked("1", [4, png(1), 1], [7, image, 2], model)
    plain = looked("2", [4, png(1), 1, 7, image, 2, 5, png(2, 30, 30), 1], [8, 2], model)
    group = factories.group(factories.rollout("r", [first, plain]))
    batch = batch_of(model, group)
    assert len(batch.rows) == 1
    assert int((batch.rows[0].tokens == image).sum()) == 1
    assert ImageTextLearner(model, tokenizer).logprobs(batch).isfinite().all()


def test_the_proof_of_packing_shows_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = make("qwen2_5_vl")
    sound = trie_gap(model, tokenizer)
    assert sound is not None
    assert sound.within(PolicyConfig())

    def moved(ids: Any, images: Any, end: Any = None) -> Any:
        """What follows a picture that a pack has only once, as tries do."""
        found = positions(ids, images, end)
        if images and (ids < 0).sum() == images[0].size:
            found[:, np.flatnonzero(ids < 0)[-1] + 1 :] += 5
        return found

    monkeypatch.setattr(inputs, "positions", moved)
    broken = trie_gap(model, tokenizer)
    assert broken is not None
    assert not broken.within(PolicyConfig())


def test_a_call_whose_images_are_not_found_is_not_trained(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = make("qwen2_5_vl")
    good = looked("1", [4, png(1), 1], [7, 2], model)
    short = structs.replace(good, id="2", prompt=int32([*good.prompt[:3], *good.prompt[4:]]))
    gone = structs.replace(good, id="3", images=(digest(b"gone"),))
    broken = structs.replace(good, id="4", images=(digest(png(9)[:99]),))
    eyes_of(model).catalogue.need({digest(png(9)[:99]): png(9)[:99]})
    finder = Finder(eyes_of(model), "policy")
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    shown = [{"role": "user", "content": [part]}]
    lost = structs.replace(good, id="5", images=(), messages=shown)
    size = len(good.prompt) - 2
    dropped = structs.replace(good, id="6", prompt=int32([4, 1]))
    taken = structs.replace(good, id="7", prompt=int32([*good.prompt, 5, good.prompt[1], 1]))
    calls = (good, short, gone, broken, lost, dropped, taken)
    rows = [factories.rollout(str(n), [call]) for n, call in enumerate(calls)]
    with caplog.at_level(logging.WARNING):
        found = finder.complete([factories.group(*rows)])
    assert [call.exact for call in calls_of(found[0])] == [True, *[False] * 6]
    assert finder.learn(found) == {"images/distinct": 1, "calls/images_unread": 6}
    for words in (
        f"has {size - 1} placeholders for 1 images, for which the model's image processor gives"
        f" {size}; serve it with the policy's own preprocessor_config.json, and leave min_pixels",
        "not in the store", "be read", "not kept", "no placeholders for 1 images: the server's",
        f"has {size}, 1 placeholders for 1 images, so the text of a placeholder",
    ):  # fmt: skip
        assert any(words in message for message in caplog.messages), words


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_of_text_alone(kind: str, tmp_path: Path) -> None:
    model, tokenizer = make(kind)
    adapters = LoraAdapters(model)
    adapters.add("policy", rank=2, alpha=4, seed=1)
    assert adapters.parameters("policy")
    assert all(name.startswith("model.language_model") for name in adapters.parameters("policy"))
    learner = ImageTextLearner(model, tokenizer, adapters=adapters)
    group = rollouts(model)
    batch = batch_of(model, group)
    before = learner.logprobs(batch)
    assert learner.step(batch, uniform(batch), lr=1e-1).applied
    assert (learner.logprobs(batch) - before).abs().max() > 1e-3
    assert (learner.logprobs(batch, "reference") - before).abs().max() <= CLOSE
    learner.save(tmp_path)
    adapters.add("second", rank=2, alpha=4, seed=2)
    assert adapters.parameters("second").keys() == adapters.parameters("policy").keys()
    with pytest.raises(PolicyError, match="no linear layers 'fc1'"):
        adapters.add("other", rank=2, alpha=4, targets=["fc1"])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_keep_the_tower_and_what_it_takes_to_look(kind: str, tmp_path: Path) -> None:
    model, tokenizer = make(kind, trained=True)
    learner, group = ImageTextLearner(model, tokenizer), rollouts(model)
    batch = batch_of(model, group)
    learner.step(batch, uniform(batch), lr=1e-2)
    learner.save(tmp_path)
    loaded, _ = load_model(tmp_path, device="cpu")
    assert type(loaded) is type(model)
    again = ImageTextLearner(loaded, tokenizer)
    wanted = learner.logprobs(batch)
    assert (again.logprobs(batch) - wanted).abs().max() <= CLOSE
    learner.step(batch, uniform(batch), lr=1e-2)
    learner.load(tmp_path)
    assert torch.equal(learner.logprobs(batch), wanted)


def test_a_merged_adapter_can_look(tmp_path: Path) -> None:
    vision.save(*make("qwen3_vl"), tmp_path / "base")
    model, tokenizer = load_model(tmp_path / "base", device="cpu")
    adapters = LoraAdapters(model)
    adapters.add("policy", rank=2, alpha=4, seed=1)
    learner = ImageTextLearner(model, tokenizer, adapters=adapters)
    batch = batch_of(model, rollouts(model))
    assert learner.step(batch, uniform(batch), lr=1e-1).applied
    learner.save(tmp_path / "adapter")
    export_merged(tmp_path / "adapter", tmp_path / "merged")
    merged, _ = load_model(tmp_path / "merged", device="cpu")
    found = ImageTextLearner(merged, tokenizer).logprobs(batch)
    assert (found - learner.logprobs(batch)).abs().max() <= 1e-5


def test_a_reference_looks_with_its_own_tower(tmp_path: Path) -> None:
    model, tokenizer = make("llava", trained=True)
    group = rollouts(model)
    batch = batch_of(model, group)
    other, _ = make("llava", seed=0)
    learner = ImageTextLearner(model, tokenizer, frozen={"reference": Reference(other, model)})
    before = learner.logprobs(batch)
    learner.step(batch, uniform(batch), lr=1e-2)
    assert torch.equal(learner.logprobs(batch, "reference"), before)
    same, different = tmp_path / "same", tmp_path / "different"
    vision.save(other, tokenizer, same)
    vision.save(make("qwen2_5_vl")[0], tokenizer, different)
    assert load_auxiliary("reference.model", str(same), model, tokenizer)
    with pytest.raises(PolicyError, match=r"reference.model = .*: it does not read images as"):
        load_auxiliary("reference.model", str(different), model, tokenizer)
