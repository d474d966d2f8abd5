"""Settings of images: which policies see them, and their limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import RunConfig, load
from agentrl.config.learning import MemberConfig, PolicyConfig
from agentrl.config.policies import seeing_policies
from agentrl.errors import ConfigError


def test_which_policies_see() -> None:
    frozen = PolicyConfig(vision="frozen")
    assert seeing_policies(RunConfig()) == set()
    assert seeing_policies(RunConfig(policy=frozen)) == {"policy"}
    members = {"a": MemberConfig(vision="trained"), "b": MemberConfig()}
    assert seeing_policies(RunConfig(policies=members)) == {"a"}
    assert seeing_policies(RunConfig(policies=members, policy=frozen)) == {"a", "b"}


@pytest.mark.parametrize("setting", ["frozen", "trained"])
def test_a_policy_that_sees_has_limits(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[policy]\nmodel = "x"\nvision = "{setting}"\n[images]\nmax_per_call = 3\n')
    config = load(file)
    assert config.policy.vision == setting
    assert config.images.max_per_call == 3


def test_limits_without_eyes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[policy]\nmodel = "x"\n[images]\nmax_per_call = 3\n')
    with pytest.raises(ConfigError, match=r"\[images\] has no effect.*policy.vision"):
        load(file)
