"""The example that learns inside a coding harness: what its model reads, what its test passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.core.config import RunConfig, load
from agentrl.core.config.agents import WorkspaceConfig
from agentrl.core.loading import load_attribute
from agentrl.runners.harness import load_preset
from agentrl.runners.workspace.folders import Workspaces
from tests.examples.parts import EXAMPLES, modules
from tests.runners.harnesses.stored import stored


@pytest.fixture
def parts() -> Any:
    with modules("harness", "tasks", "verifier") as found:
        yield found


def test_its_run_file_is_right_for_both_harnesses() -> None:
    for name in ("codex", "pi"):
        changes = [f"name={name}", f"agent.harness={name}", f"policy.build=policy.py:{name}"]
        config = load(EXAMPLES / "harness" / "run.toml", changes)
        assert load_preset(config.agent.harness, Path()).program == name
        assert callable(load_attribute(config.policy.build, Path(config.root), key="policy.build"))


def test_held_out_names_are_in_no_training_task(parts: Any) -> None:
    tasks = parts["tasks"]
    names = {task["name"] for task in tasks.train}
    assert names.isdisjoint(task["name"] for task in tasks.heldout)
    assert {task["word"] for task in tasks.heldout} == set(tasks.OPERATIONS)


def test_the_model_reads_what_follows_the_last_user_message(parts: Any) -> None:
    """Of 6,000 characters of Pi's request, without its text, fewer than 200 are left."""
    request = stored("pi")[1].body
    template = (EXAMPLES / "harness" / "template.jinja").read_text()
    messages, tools = request["messages"], request["tools"]
    asked = messages[1]["content"][-1]["text"]
    texts, _ = render_jinja_template([messages], tools=tools, chat_template=template)
    assert texts[0].startswith(f"<|im_start|>user bash\n{asked}<|im_end|>\n<|im_start|>assistant\n")
    assert texts[0].endswith("<|im_end|>\n<|im_start|>tool\nran<|im_end|>\n")
    assert messages[0]["content"] not in texts[0]


@pytest.mark.parametrize(
    ("edit", "reward"),
    [
        ("def add(a, b): return a + b\n", 1.0),
        ("def add(a, b): return a - b\n", 0.0),
        ("raise SystemExit(0)\n", 0.0),  # a test that ends early has not passed
        ("def add(a, b: return a + b\n", 0.0),
    ],
)
async def test_the_hidden_test_decides(
    parts: Any, tmp_path: Path, edit: str, reward: float
) -> None:
    task = next(task for task in parts["tasks"].train if task["id"] == "sum-add")
    settings = WorkspaceConfig(source="task.files")
    spaces = Workspaces(RunConfig(workspace=settings), root=tmp_path, gateway="http://127.0.0.1:9")
    await spaces.start()
    try:
        workspace = await spaces.prepare(task)
        (workspace.path / "calc.py").write_text(edit)
        assert await parts["verifier"].verify(task, workspace) == reward
        assert not (workspace.path / "hidden_test.py").exists()
        await spaces.remove(workspace)
    finally:
        await spaces.close()
