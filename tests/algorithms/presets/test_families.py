"""All families: each preset has a case, says where it is from, and has options of its own."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from agentrl.algorithms.presets.registry import library_presets, make
from agentrl.errors import ConfigError
from tests.algorithms.feedback.test_credit import CASES as FEEDBACK
from tests.algorithms.multiagent.test_critics import CASES as CRITIC_CASES
from tests.algorithms.preferences.test_completions import PUBLISHED as SIDE_CASES
from tests.algorithms.preferences.test_losses import PUBLISHED as PREFERENCES
from tests.algorithms.presets.test_baselines import CASES as MEMORY_CASES
from tests.algorithms.presets.test_baselines_losses import CASES as BASELINES
from tests.algorithms.presets.test_catalogue import CASES, refuses_rewards_of_more_than_rollouts
from tests.algorithms.presets.test_critics_credit import CASES as CRITICS
from tests.algorithms.presets.test_gates_losses import CASES as GATES
from tests.algorithms.presets.test_gates_symbols import CASES as SYMBOL_CASES
from tests.algorithms.presets.test_hindsight_credit import CASES as HINDSIGHT
from tests.algorithms.presets.test_process_credit import CASES as PROCESS
from tests.algorithms.presets.test_states_credit import CASES as STATES
from tests.algorithms.presets.test_teams_credit import CASES as TEAMS
from tests.algorithms.presets.test_turns import CASES as AGENT_CASES
from tests.algorithms.replays.test_preset_credit import CASES as TREES
from tests.algorithms.worlds import EVERY_OUTPUT

presets, modifiers = library_presets()


def test_every_preset_and_modifier_has_a_case() -> None:
    cases = [*CASES, *SIDE_CASES, *AGENT_CASES, *MEMORY_CASES, *SYMBOL_CASES, *CRITIC_CASES]
    cases += [*BASELINES, *GATES, *CRITICS, *PROCESS, *STATES]
    cases += [*TREES, *HINDSIGHT, *FEEDBACK, *TEAMS, *PREFERENCES]
    names = {case.split()[0] for case in cases}
    assert presets.keys() == {name for name in names if name in presets}
    assert all(any(f"+{modifier}+" in f"{name}+" for name in names) for modifier in modifiers)


def test_every_preset_builds_with_its_defaults_and_says_where_it_is_from() -> None:
    needed = {
        "streams": {"streams": {"outcome": {}}},
        "process": {"process_streams": {"p": {"scope": "transition"}}},
        "only": {"only_roles": ["agent"]},
        "mean-by": {"mean_by_units": ["role"]},
        "credit": {"credit": "agentrl.algorithms.credit.core:response_lengths"},
        "coma": {"roles": ["agent"], "actions": ["yes"]},
    }
    for name, preset in presets.items():
        assert make(name, needed.get(name, {}), streams=EVERY_OUTPUT).name == name
        said = preset.doc
        assert any(source in said for source in ("arXiv", "OpenReview", "Williams"))
    for name in modifiers:
        host = "dpo" if name == "nll" else "grpo"
        options = needed.get(name, {})
        assert make(f"{host}+{name}", options, streams=EVERY_OUTPUT).name == f"{host}+{name}"


def test_options_of_presets_and_modifiers_never_share_a_name() -> None:
    of_modifiers = [name for modifier in modifiers.values() for name in modifier.options()]
    assert len(of_modifiers) == len(set(of_modifiers))
    assert not set(of_modifiers).intersection(*(preset.options() for preset in presets.values()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo+decoupled+opsm", {"decoupled": 1}, r"options\.decoupled: no option of"),
        ("gdpo", {"rewards": {}}, r"options\.rewards = {}: .*length >= 1"),
        ("gdpo", {"rewards": {"outcome": nan}}, r"options\.rewards = "),
        ("dppo-topk", {}, r"'dppo-topk' needs the most probable tokens .*choose dppo-tv"),
        ("dppo-topk", {"kind": "js"}, r"options\.kind = 'js': "),
        ("dppo-topk", {"k": 0}, r"options\.k = 0: "),
        ("agent-r1", {"gamma": 1.5}, r"options\.gamma = 1\.5: .*<= 1"),
        ("magrpo", {"reward": "transition:p"}, r"in aligned mode .* is a reward of rollouts"),
        ("magrpo", {"mode": "cross", "reward": "outcome"}, r"in cross mode .* of transitions"),
        ("remax+per-role", {}, r"\+per-role cannot split a baseline or weight of whole rollouts"),
        ("grpo+tis+mis", {}, r"correct for the sampler twice"),
    ],
)
def test_what_is_not_understood_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, options)


def test_the_rewards_it_reads_are_part_of_an_algorithm() -> None:
    assert make("gdpo", {"rewards": {"a": 1, "b": -0.5}}).rewards == ("a", "b")


def test_a_mask_may_be_added_to_a_correction() -> None:
    assert len(make("scalerl+opsm", {}).gates) == 2
    assert len(make("grpo+tis+opsm", {}).gates) == 3


@pytest.mark.parametrize("name", ["remax", "pass-at-k", "best-of", "vineppo"])
@pytest.mark.parametrize("reward", ["role:tact", "transition:score"])
def test_rewards_of_roles_and_calls_are_not_taken_for_those_of_rollouts(
    name: str, reward: str
) -> None:
    refuses_rewards_of_more_than_rollouts(name, reward)


def test_what_an_algorithm_needs_of_a_run_is_read_off_its_record() -> None:
    assert make("remax", {}).needs_greedy
    assert not make("agent-r1", {"value": "transition:v"}).reads_critic
