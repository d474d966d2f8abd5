"""Reward models: loss, training from a data set, held-out measures, best of n."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec import json
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.reward_models import ScalarScorer, load_scalar
from agentrl.algorithms.reward_training import (
    Example,
    RewardTrainer,
    best_of_n,
    make_scorer,
    preference_metrics,
)
from agentrl.cli.main import cli
from agentrl.core.types import Attempt, Reward, Transition
from agentrl.store import open_store
from agentrl.store.records import Item, Side, digest_of
from tests import factories


def call(id: str, tokens: list[int], **fields: object) -> Transition:
    return factories.call(id, tokens[:1], tokens[1:], **fields)


def pair(number: int, better: list[int], worse: list[int], **more: float) -> Example:
    return Example(str(number), (tuple(better), tuple(worse)), **more)


def trainer_of(directory: Path, budget: int = 10_000, **more: float):
    model, tokenizer = load_model(directory)
    return RewardTrainer(make_scorer(model, tokenizer, budget), tokenizer, **more)


EXAMPLES = [
    pair(0, [1, 2, 3], [1, 2, 4], margin=0.5),
    pair(1, [1, 5], [1, 6, 7], weight=2.0),
    Example("2", ((8, 9),), label=0.25),
]


def test_the_first_loss_margin_and_centre_are_the_published(tiny_model_dir: Path) -> None:
    trainer = trainer_of(tiny_model_dir, margin=2.0)
    assert trainer.step(EXAMPLES[1:], lr=0.0) == pytest.approx(math.log(2))
    r = torch.tensor([0.3, -0.2, 1.0, 0.5, 0.4], dtype=torch.float64)

    def log_sigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    first = -log_sigmoid(0.5 - 2.0 * 0.5) + 0.01 * 0.1**2
    second = -log_sigmoid(0.5) + 0.01 * 1.5**2
    third = -0.25 * log_sigmoid(0.4) - 0.75 * log_sigmoid(-0.4)
    loss = trainer.loss(EXAMPLES, r)
    assert float(loss) == pytest.approx((first + 2 * second + third) / 4)


def test_the_gradient_does_not_depend_on_the_token_budget(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for budget, packs in ((10_000, 1), (4, 3)):
        trainer = trainer_of(tiny_model_dir, budget=budget)
        torch.manual_seed(0)
        torch.nn.init.normal_(trainer.scorer.model.score.weight)
        named = dict(trainer.scorer.model.named_parameters())
        assert len(trainer.scorer.packs([t for e in EXAMPLES for t in e.texts])) == packs
        monkeypatch.setattr(
            trainer.optimizer,
            "step",
            lambda lr, named=named: found.append({n: p.grad.clone() for n, p in named.items()}),
        )
        trainer.step(EXAMPLES, lr=1.0)
    for name, whole in found[0].items():
        assert torch.allclose(whole, found[1][name], atol=1e-6), name


@pytest.mark.parametrize("padding", ["end of a turn", "none", "its own"])
def test_transformers_computes_the_same_scores_in_padded_batches(
    padding: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Also of texts that end with the token that the policy's tokenizer pads with."""
    model, tokenizer = load_model(tiny_model_dir)
    end = tokenizer.eos_token_id
    if padding != "its own":
        tokenizer.pad_token = tokenizer.eos_token if padding == "end of a turn" else None
    trainer = RewardTrainer(make_scorer(model, tokenizer, 10_000), tokenizer)
    torch.manual_seed(0)
    torch.nn.init.normal_(trainer.scorer.model.score.weight)
    texts = [[5, 6, 7, 8, end], [9, end], [5, 6, 7, 11]]
    ours = trainer.scorer.scores(texts)
    trainer.save(tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for side in ("left", "right"):
        own = AutoTokenizer.from_pretrained(tmp_path, padding_side=side)
        batch = own.pad({"input_ids": texts}, return_tensors="pt")
        with torch.no_grad():
            scores = theirs(**batch).logits[:, 0].double()
        torch.testing.assert_close(scores, ours, rtol=0, atol=1e-5)
    policy, tokenizer = load_model(tiny_model_dir)
    scorer = ScalarScorer(load_scalar("m", str(tmp_path), policy, tokenizer))
    torch.testing.assert_close(scorer.scores(texts), ours, rtol=0, atol=1e-6)


class Fixed:
    """A model with these scores."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.known = scores.double()

    def scores(self, texts: object) -> torch.Tensor:
        return self.known


def test_metrics_say_what_length_has_to_do_with_it() -> None:
    examples = [pair(i, [1] * (i + 2), [1] * 2, length=i) for i in (-1, 1, 2, 3)]
    longer = torch.tensor([-1.0, 0, 1, 0, 2, 0, 3, 0])
    found = preference_metrics(Fixed(longer), examples)
    assert found["accuracy"] == 0.75
    assert found["accuracy_shorter"] == 0.0
    assert found["length"] == pytest.approx(1.0)
    sure = torch.tensor([1e3, 0] * 4).double()
    assert preference_metrics(Fixed(sure), examples)["ece"] == 0.0
    assert preference_metrics(Fixed(-sure), examples)["ece"] == 1.0


def test_best_of_n_is_the_mean_over_all_subsets() -> None:
    dice = random.Random(3)
    scores = [dice.choice([0.1, 0.2, 0.7, 0.9]) for _ in range(6)]
    truth = [dice.random() for _ in range(6)]
    for n in (1, 2, 4, 6):
        slow = []
        for chosen in itertools.combinations(range(6), n):
            top = max(scores[i] for i in chosen)
            slow.append(fmean(truth[i] for i in chosen if scores[i] == top))
        assert best_of_n(scores, truth, n) == pytest.approx(fmean(slow))


async def fill(url: str) -> None:
    """48 pairs in which an answer of token 7 is better than one of token 8, eight of them held out,
    and labels of steps; one group of rollouts with outcomes."""
    async with open_store(url) as store:
        sides, items = {}, []
        for i in range(48):
            made = [call(f"{i}{k}", [10 + i, 60, k]) for k in (7, 8)]
            w, worse = (Side(digest=digest_of([one]), own=[one]) for one in made)
            sides |= {w.digest: w, worse.digest: worse}
            split = "test" if i < 8 else "train"
            items.append(
                Item(position=i, kind="pair", chosen=w.digest, rejected=worse.digest, split=split)
            )
        version = await store.draft_dataset("pairs", {})
        await store.add_items("pairs", version, items, list(sides.values()))
        await store.commit_dataset("pairs", version)
        await store.open_run("played", {})

        def played(attempt: Attempt) -> Any:
            good = attempt.rollout.index == 2
            made = call(f"c{attempt.id}", [99, 60, 7 if good else 8], attempt=attempt.id)
            return [made], {"rewards": [Reward(value=float(good))]}

        rows = factories.queue("g", 4, run="played", task={"input": ""})
        await factories.play(store, rows, played)


async def test_a_data_set_becomes_a_reward_model(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path / 'store.db'}"
    await fill(url)
    (tmp_path / "rm.toml").write_text(
        f'name = "rm"\nstore = "{url}"\npolicy.model = "{tiny_model_dir}"\ndata.name = "pairs"\n'
        "reward_model = { epochs = 8, batch = 8, lr = 3e-3 }\n"
    )
    weights = []
    for _ in range(2):  # the same model again
        trained = ["reward-model", "rm.toml", "--json"]
        done = CliRunner().invoke(cli, trained, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        made = tmp_path / "runs/rm/reward_model"
        weights.append((made / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert AutoModelForSequenceClassification.from_pretrained(made).config.num_labels == 1
    measured = ["--eval", "--best-of", "1,2,4", "--run", "played", "--json"]
    arguments = ["reward-model", "rm.toml", *measured]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    found = json.decode(done.output)
    assert found["accuracy"] == 1.0
    assert [found[f"best of {n}"] for n in (1, 2, 4)] == [0.25, 0.5, 1.0]
    done = CliRunner().invoke(cli, ["reward-model", "rm.toml", "data.name=other"])
    assert "has no such version" in str(done.exception)


def test_numbers_are_written_with_commas(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    best = ["reward-model", str(tmp_path / "run.toml"), "--eval", "--best-of", "4,x"]
    assert "'4,x': write comma-separated numbers" in CliRunner().invoke(cli, best).output
