"""Who gets the executors of containers, and what does not fit them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.config import resolve
from agentrl.errors import ConfigError
from tests.runners.executors.test_factory import COMMAND, PATH, chosen

IMAGES = {
    "container": {"container": {"image": "an-image"}},
    "kubernetes": {"kubernetes": {"image": "an-image"}},
}


@pytest.mark.parametrize("executor", IMAGES)
@pytest.mark.parametrize(("agent", "given"), [({}, len), (PATH, None), ({}, PATH["path"])])
def test_an_agent_of_python_does_not_fit(
    executor: str, agent: dict[str, str], given: object
) -> None:
    with pytest.raises(ConfigError, match=r"give it in the run file as agent\.command"):
        chosen(agent, given, executor=executor, **IMAGES[executor])


def test_errors_name_the_kinds_and_what_they_need() -> None:
    with pytest.raises(ConfigError, match=r"'vlm'; valid: async, auto, command, container,"):
        resolve({"runner": {"executor": "vlm"}}, source="test")
    with pytest.raises(ConfigError, match=r"test: runner\.container\.image is missing"):
        resolve({"runner": {"executor": "container"}}, source="test")


def test_an_agent_is_a_path_or_a_command() -> None:
    with pytest.raises(ConfigError, match="are both set: leave one out"):
        chosen(PATH | COMMAND, executor="container", **IMAGES["container"])


def test_an_executor_of_its_own_module_is_imported_by_its_users_only() -> None:
    """Without the modules, every other executor is made; theirs is named by the error."""
    hide = """
import sys
from tests.runners.executors.test_factory import COMMAND, PATH, chosen
for kind in ("container", "kubernetes"):
    assert f"agentrl.runners.containers.{kind}" not in sys.modules
    sys.modules[f"agentrl.runners.containers.{kind}"] = None
for agent in (PATH, COMMAND):
    chosen(agent)
chosen(PATH, executor="pool")
try:
    chosen(COMMAND, executor="container", container={"image": "an-image"})
except ImportError as error:
    print(error)
"""
    asked = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=True)
    assert "agentrl.runners.containers.container" in asked.stdout
