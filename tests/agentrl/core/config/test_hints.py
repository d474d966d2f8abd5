"""What is said of a mistake in a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import RunConfig, derived, load, resolve
from agentrl.core.config.derived import check_presets, preset_names
from agentrl.core.errors import ConfigError


def settings_hint(**settings: Any) -> str:
    """What is said of settings, after the key."""
    with pytest.raises(ConfigError) as refused:
        check_presets(resolve(settings, source="run.toml"))
    return str(refused.value).rpartition("; ")[2]


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"lr": 1e-5}, "'algorithm.lr'?"),
        ({"algorithm": {"learning_rate": 1e-5}}, "'algorithm.lr'?"),
        ({"policy": {"lr": 1e-5}}, "'algorithm.lr'?"),
        ({"batch_size": 8}, "'algorithm.groups' or 'algorithm.group_size'?"),
        ({"algorithm": {"num_generations": 8}}, "'algorithm.group_size'?"),
        ({"max_tokens": 8}, "'sampling.max_tokens'?"),
        ({"algorithm": {"max_tokens": 8}}, "'sampling.max_tokens'?"),
        ({"sampling": {"max-new-tokens": 8}}, "'sampling.max_tokens'?"),
        ({"beta": 0.1}, "'algorithm.options.kl'?"),
        ({"algorithm": {"options": {"beta": 0.1}}}, "'algorithm.options.kl'?"),
        ({"algorithm": {"options": {"learning_rate": 1.0}}}, "'algorithm.lr'?"),
        ({"policies": {"a": {"learning_rate": 1e-5}}}, "'algorithm.lr'?"),  # of a nested table
        ({"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}}}, "'algorithm.lr' for its lr?"),
        ({"data": {"train_batch_size": 8}}, "'algorithm.groups' or 'algorithm.group_size'?"),
        ({"trainer": {"total_epochs": 8}}, "'steps' for its total_epochs?"),
        ({"algorithm": {"gropu_size": 8}}, "'group_size'?"),  # a typo
        ({"runner": {"sampling_temperatur": 8}}, ""),
        ({"policy": {"rank": 8}}, "'policy.lora.rank'?"),  # of another table
        ({"algorithm": {"preset": "GRPO"}}, "'grpo'?"),
        ({"algorithm": {"preset": "reinforce_plus_plus"}}, "'reinforce++'?"),
        ({"algorithm": {"preset": "dr_grpo"}}, "'dr-grpo'?"),
        ({"algorithm": {"preset": "gae"}}, "'ppo'?"),
        ({"algorithm": {"preset": "DAPO+tis"}}, "'dapo'?"),
    ],
)  # fmt: skip
def test_names_of_other_libraries_and_tables_are_known(
    settings: dict[str, Any], meant: str
) -> None:
    said = settings_hint(**settings)
    assert said == f"did you mean {meant}" if meant else said.startswith("valid: ")


def test_what_other_names_mean_exists() -> None:
    names = derived.other_names()
    paths = {*derived._paths(RunConfig)}
    options = {option for own in preset_names().presets.values() for option in own}
    paths |= {f"algorithm.options.{option}" for option in options}
    named = {path for found in names["settings"].values() for path in found}
    assert named <= paths, named - paths
    presets = {name for found in names["presets"].values() for name in found}
    assert presets <= preset_names().hosts
    assert not names["presets"].keys() & preset_names().hosts
    assert all(name == name.lower().replace("-", "_") for table in names.values() for name in table)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[algorithm]\n\tlr = 1e-5x\n", "  2 | \tlr = 1e-5x\n      \t         ^"),
        ('name = "a\n', '  1 | name = "a\n               ^'),
        ("a = [1,\n", ""),  # at the end
    ],
)
def test_a_syntax_error_shows_its_line(tmp_path: Path, text: str, shown: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match="not a readable TOML file") as refused:
        load(tmp_path / "run.toml")
    assert str(refused.value).partition("\n")[2] == shown
