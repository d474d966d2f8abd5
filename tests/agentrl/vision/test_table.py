"""The settings of the part."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import RunConfig, load
from agentrl.config.schema import MemberConfig, PolicyConfig
from agentrl.errors import ConfigError
from agentrl.vision.table import check, seeing_policies


def test_which_policies_see() -> None:
    frozen = PolicyConfig(vision="frozen")
    assert seeing_policies(RunConfig()) == set()
    assert seeing_policies(RunConfig(policy=frozen)) == {"policy"}
    members = {"a": MemberConfig(vision="trained"), "b": MemberConfig()}
    assert seeing_policies(RunConfig(policies=members)) == {"a"}
    assert seeing_policies(RunConfig(policies=members, policy=frozen)) == {"a", "b"}


def test_until_a_learner_sees_images_the_setting_is_refused() -> None:
    check(RunConfig())
    with pytest.raises(ConfigError, match="no learner sees them yet"):
        check(RunConfig(policy=PolicyConfig(vision="frozen")))


def test_limits_without_eyes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[policy]\nmodel = "x"\n[images]\nmax_per_call = 3\n')
    with pytest.raises(ConfigError, match=r"\[images\] has no effect.*policy.vision"):
        load(file)
