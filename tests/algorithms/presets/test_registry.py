"""Names and options of presets: what is built, what is read off it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.objective.core import compute_advantages, loss_terms
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.recipes import Recipe, modifier_of, preset_of
from agentrl.algorithms.presets.registry import library_presets, make
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.config.derived import check_presets
from agentrl.core.errors import ConfigError, TrainingError
from tests.algorithms.worlds import EVERY_OUTPUT, Call, Play, world

presets, modifiers = library_presets()
NEEDED: dict[str, dict[str, Any]] = {
    "streams": {"streams": {"outcome": {}}},
    "process": {"process_streams": {"p": {"scope": "transition"}}},
    "only": {"only_roles": ["agent"]},
    "mean-by": {"mean_by_units": ["role"]},
    "credit": {"credit": "agentrl.algorithms.credit.core:response_lengths"},
    "coma": {"roles": ["agent"], "actions": ["yes", "no"]},
}


def test_every_preset_builds_with_its_defaults() -> None:
    for name in [*presets, *(f"{m.host}+{x}" for x, m in modifiers.items())]:
        options = NEEDED.get(name.split("+")[-1], {})
        assert make(name, options, supplies=EVERY_OUTPUT).name == name
    for name, preset in presets.items():
        assert any(source in preset.doc for source in ("arXiv", "OpenReview", "Williams")), name


def test_options_of_presets_and_modifiers_never_share_a_name() -> None:
    of_modifiers = [name for modifier in modifiers.values() for name in modifier.options()]
    assert len(of_modifiers) == len(set(of_modifiers))
    assert not set(of_modifiers).intersection(*(preset.options() for preset in presets.values()))


def test_options_reach_the_preset_and_its_modifiers() -> None:
    algo = make("grpo+tis", {"clip_high": 0.28, "clip_low": 0, "tis_cap": 3})
    assert algo.gates[0].fn == Clip(0.0, 0.28)
    assert "hi=3.0" in repr(algo.gates[1].fn)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, r"algorithm\.preset: no preset 'grop'; did you mean 'grpo'\?"),
        ("", {}, r"algorithm\.preset: no preset ''; valid: agent-r1"),
        ("grpo+tsi", {}, r"no modifier \+tsi for 'grpo'; did you mean 'tis'\?"),
        ("grpo+", {}, r"no modifier \+ for 'grpo'; valid"),
        ("grpo", {"clip_hihg": 0.3}, r"algorithm\.options\.clip_hihg: .* 'clip_high'\?"),
        (
            "rloo",
            {"clip_high": 0.3},
            r"options\.clip_high: no option of 'rloo'; valid: average, baseline, entropy, length",
        ),
        ("grpo", {"tis_cap": 2.0}, r"options\.tis_cap: no option of 'grpo'"),
        ("grpo", {"clip_high": inf}, r"options\.clip_high = inf: .*<= 1000000"),
        ("grpo+tis", {"algo": 1}, r"algorithm\.options\.algo: "),
        ("grpo", {"clip_high": "0.3"}, r"algorithm\.options\.clip_high = '0\.3': Expected `float`"),
        ("grpo", {"std": 1}, r"algorithm\.options\.std = 1: Expected `bool`"),
        ("grpo", {"clip_low": -0.1}, r"algorithm\.options\.clip_low = -0\.1: .*>= 0"),
        ("grpo", {"kl": nan}, r"algorithm\.options\.kl = nan"),
        ("dr-grpo", {"length": -1}, r"algorithm\.options\.length = -1"),
        ("grpo", {"average": "sum", "length": 9}, r"options\.length = 9: .*average = 'sum'"),
        ("rloo", {"average": "sum", "length": 9}, r"options\.length = 9: .*average = 'sum'"),
        ("dr-grpo", {"average": "sum"}, r"options\.length = 1024: .*average = 'sum'"),
        ("dppo-topk+behaviour", {}, "most probable tokens, of which"),
        ("grpo+pairs", {"pairs_loss": "dpo+nll"}, r"set pairs_loss = 'dpo' and add \+nll to"),
        ("grpo+pairs", {"pairs_loss": "ipo+only+nll"}, r"'ipo' and add \+only and \+nll"),
        ("cpo+nll", {}, r"set algorithm\.options\.nll instead"),
        ("orpo+nll", {"nll_share": 0.5}, r"set algorithm\.options\.nll instead"),
        ("dpo+nll", {"nll": 0.5}, r"set algorithm\.options\.nll instead"),
        ("grpo", {"kl": 0.04}, r"'grpo' needs the log-probs of a reference model"),
        ("scalerl+tis", {}, r"correct for the sampler twice, by Truncate\(lo=0\.0, hi=5\.0\) and"),
        ("grpo+decoupled+opsm", {"decoupled": 1}, r"options\.decoupled: no option of"),
        ("gdpo", {"rewards": {}}, r"options\.rewards = {}: .*length >= 1"),
        ("gdpo", {"rewards": {"outcome": nan}}, r"options\.rewards = "),
        ("dppo-topk", {}, r"'dppo-topk' needs the most probable tokens .*choose dppo-tv"),
        ("dppo-topk", {"kind": "js"}, r"options\.kind = 'js': "),
        ("dppo-topk", {"k": -1}, r"options\.k = -1: "),
        ("agent-r1", {"gamma": 1.5}, r"options\.gamma = 1\.5: .*<= 1"),
        ("magrpo", {"reward": "transition:p"}, r"in aligned mode .* is a reward of rollouts"),
        ("magrpo", {"mode": "cross", "reward": "outcome"}, r"in cross mode .* of transitions"),
        ("remax+per-role", {}, r"\+per-role cannot split a baseline or weight of whole rollouts"),
        ("grpo+tis+mis", {}, r"correct for the sampler twice"),
        ("ppo", {}, r"'ppo' needs the values of a critic, which this run does not"),
        ("streams", {}, r"algorithm\.options\.streams: required by 'streams'; set it"),
        ("grpo+only", {}, r"algorithm\.options\.only_roles: required by 'grpo\+only'"),
        ("grpo+only", {"only_roles": []}, r"only_roles = \[\]: .*length >= 1"),
        ("grpo+gigpo", {"weight": 2.0}, r"options\.weight: no option of 'grpo\+gigpo'"),
        (
            "streams",
            {"streams": {"p": {"wieght": 1.0}}},
            r"options\.streams\.p\.wieght: unknown; did you mean 'weight'\?",
        ),
        ("streams", {"streams": {"p": {"scope": "call"}}}, r"Invalid enum value 'call'"),
        (
            "streams",
            {"mix": "rewards", "streams": {"p": {"clip": 1.0}}},
            r"streams\.p\.clip: has no effect on streams mixed as rewards",
        ),
        (
            "streams",
            {"mix": "returns", "streams": {"p": {"gate": "agree"}}},
            r"streams\.p\.gate: has no effect on streams mixed as returns",
        ),
        ("streams", {"streams": {"p": {"potential": True}}}, r"set scope = 'transition'"),
        (
            "streams",
            {"streams": {"p": {"gate": "agree"}}},
            r"streams\.p\.outcome = 'outcome': there is no stream of that name",
        ),
        (
            "streams",
            {"gamma": 0.9, "streams": {"p": {}}},
            r"gamma and norm are those of a sum of returns or rewards",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"std": False, "scale": "batch"}, "scale = 'batch': has no effect with std"),
        ("ipo", {"label_smoothing": 0.1}, "label_smoothing = 0.1: the loss 'ipo' does not read it"),
        ("dpo", {"loss": "exo"}, "label_smoothing = 0.0: the loss 'exo' takes its log"),
        ("robust", {"label_smoothing": 0.5}, "< 0.5"),
        ("dpo", {"gamma": 0.1}, "the loss 'sigmoid' does not read it"),
        ("dpo+pairs", {}, "to a preset without"),
        ("grpo+pairs", {"pairs_loss": "kto"}, "adds one of dpo"),
        ("grpo+nll", {}, "is for losses of pairs"),
        ("kto", {"how": "all"}, "no option of 'kto'"),
    ],
)
def test_an_option_without_effect_is_refused(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options, supplies=EVERY_OUTPUT)


def test_the_rewards_it_reads_are_part_of_an_algorithm() -> None:
    assert make("rloo", {}).rewards == ("outcome",)
    assert make("rloo", {"reward": "style"}).rewards == ("style",)
    assert make("gdpo", {"rewards": {"a": 1, "b": -0.5}}).rewards == ("a", "b")


def test_a_stream_may_be_one_that_a_step_lacks() -> None:
    streams = {"outcome": {}, "p": {"scope": "transition", "required": False}}
    algo = make("streams", {"streams": streams})
    assert (algo.rewards, algo.optional) == (("outcome", "transition:p"), ("transition:p",))
    algo = make("grpo+process", {"process_streams": {"p": streams["p"]}})
    assert (algo.rewards, algo.optional) == (("outcome", "transition:p"), ("transition:p",))


def test_a_credit_function_keeps_its_reward_beside_a_filters(tmp_path: Path) -> None:
    (tmp_path / "mine_credit.py").write_text("def mine(batch): return batch.rewards['style']\n")
    options = {"credit": "mine_credit.py:mine", "credit_reward": "style"}
    assert make("dapo+credit", options, root=tmp_path).rewards == ("style", "outcome")
    assert make("grpo+credit", options, root=tmp_path).rewards == ("style",)


def test_a_reward_that_no_rollout_has_is_refused() -> None:
    batch = world(*(Play([Call()], outcome=x, rewards={"style": x}) for x in (1.0, 0.0)))
    with pytest.raises(TrainingError, match=r"none of 2 rollouts has a reward 'stile'.*'style'"):
        loss_terms(make("grpo", {"reward": "stile"}), batch, GivenLogProbs(), fresh=True)


OF_ROLLOUTS = ("ppo", "reinforce++", "rft", "mt-grpo", "dpo", "remax", "pass-at-k", "best-of")


@pytest.mark.parametrize("name", [*OF_ROLLOUTS, "vineppo"])
@pytest.mark.parametrize("reward", ["role:tact", "transition:score"])
def test_rewards_of_roles_and_calls_are_not_those_of_rollouts(name: str, reward: str) -> None:
    """They were read at the places of rollouts: the number of another role or call."""
    algo = make(name, {"reward": reward}, supplies=("old", "sampler", "reference", "values"))
    calls = [Call(role=role, rewards={"score": 1.0, "turn": 0.0}) for role in ("a", "b")]
    plays = [Play(calls, tact={"a": x, "b": -x}, greedy=x > 0) for x in (1.0, 0.0)]
    batch = world(*plays, values=[0.0] * 4)
    zeros = torch.zeros(4)
    with pytest.raises(TrainingError, match=f"one reward per rollout, and '{reward}' has 4 values"):
        loss_terms(algo, batch, GivenLogProbs(old=zeros, reference=zeros))


def test_a_reward_of_the_only_role_is_one_of_rollouts() -> None:
    batch = world(*(Play([Call(), Call()], outcome=x, tact={"agent": x}) for x in (1.0, 0.0)))
    of_roles, of_rollouts = (
        compute_advantages(make("reinforce++", {"reward": reward}), batch)
        for reward in ("role:tact", "outcome")
    )
    assert of_roles.tolist() == of_rollouts.tolist()


def test_a_mask_may_be_added_to_a_correction() -> None:
    assert len(make("scalerl+opsm", {}).gates) == 2
    assert len(make("grpo+tis+opsm", {}).gates) == 3


def test_what_an_algorithm_needs_of_a_run_is_read_off_its_record() -> None:
    assert [make(name, {}).needs_greedy for name in ("remax", "grpo")] == [True, False]
    assert make("ppo", {}, supplies=("old", "sampler", "values")).reads_critic
    for name in ("agent-r1", "turn-ppo"):
        assert not make(name, {"value": "transition:v"}).reads_critic


# -- recipes ---------------------------------------------------------------------------------------


def run_with(name: str, **options: object) -> RunConfig:
    return RunConfig(steps=1, algorithm=AlgorithmConfig(preset=name, options=options))


def test_presets_and_modifiers_are_few_and_the_others_recipes() -> None:
    here, changes = library_presets()
    every = [*here.values(), *changes.values()]
    assert sum(not made.of for made in every) <= 60
    assert all(made.text for made in every if made.of)
    assert all(issubclass(type(made), declare.AlgoPreset) for made in declare.presets.values())


def test_a_recipe_has_all_options_of_its_preset() -> None:
    here, _ = library_presets()
    options = here["dr-grpo"].options()
    assert options.keys() == here["grpo"].options().keys()
    assert (options["std"].default, options["length"].default) == (False, 1024)
    check_presets(run_with("dr-grpo+mis", length=7, kl=0.1, mis_cap=2.0))
    with pytest.raises(ConfigError, match=r"options\.lenght: no option of 'dr-grpo'; did you mean"):
        check_presets(run_with("dr-grpo", lenght=7))
    streams = EVERY_OUTPUT
    made = make("dr-grpo", {"std": True, "length": 0, "kl": 0.1}, supplies=streams)
    assert replace(made, name="") == replace(make("grpo", {"kl": 0.1}, supplies=streams), name="")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Recipe("x", "grpo", {"stdd": False}, ""), "'x': 'grpo' has no option .'stdd'"),
        (Recipe("x", "grpo+tree", {"clip": 1.0}, ""), "'x': 'grpo.tree' has no option .'clip'"),
        (Recipe("+x", "+tis", {"tis_cap": 1.0}, ""), "'.x': '.tis' has no option .'tis_cap'"),
        (Recipe("+x", "agent-r1", {"vaule": ""}, ""), "'.x': 'agent-r1' has no option .'vaule'"),
    ],
)
def test_a_misspelt_option_of_a_recipe_is_an_error(row: Recipe, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        modifier_of(row) if row.name[0] == "+" else preset_of(row)


def test_no_two_presets_are_the_same() -> None:
    streams = EVERY_OUTPUT
    names = library_presets()[0].keys() - {"streams", "coma", "dppo-tv"}  # the default of dppo
    made = {name: repr(replace(make(name, {}, supplies=streams), name="")) for name in names}
    assert len(set(made.values())) == len(made)
