"""The example's parts agree with each other and with what the run needs of them."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.core.config import load
from agentrl.core.loading import load_attribute, load_tasks
from agentrl.tiny.models import TEMPLATE, make_tokenizer

STAFF = Path(__file__).parents[2] / "examples" / "staff"
MODULES = ("agent", "database", "policy", "tasks", "verifier")


@pytest.fixture(scope="module")
def staff() -> Iterator[dict[str, ModuleType]]:
    pytest.importorskip("langchain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "unused")
        for name in MODULES:
            load_attribute(f"{name}.py:__name__", STAFF, key="test")
        yield {name: sys.modules[name] for name in MODULES}
    for name in MODULES:
        del sys.modules[name]
    sys.path.remove(str(STAFF))


def test_the_run_file_is_valid_and_names_what_exists(staff: dict[str, ModuleType]) -> None:
    config = load(STAFF / "run.toml")
    for key, path in [
        ("agent", config.agent.path),
        ("verifier", config.verifier.path),
        ("policy", config.policy.build),
    ]:
        assert load_attribute(path, STAFF, key=key)
    assert len(load_tasks(config.tasks.train, STAFF, key="tasks.train")) > 1000


def test_the_agent_file_does_not_know_agentrl(staff: dict[str, ModuleType]) -> None:
    assert "agentrl" not in (STAFF / "agent.py").read_text()


def test_heldout_people_are_not_asked_about_in_training(staff: dict[str, ModuleType]) -> None:
    tasks = staff["tasks"]
    assert len(tasks.heldout) >= 200
    assert not {t["person"] for t in tasks.heldout} & {t["person"] for t in tasks.train}
    everything = tasks.train + tasks.heldout
    assert len({t["id"] for t in everything}) == len({t["input"] for t in everything})


def test_answers_are_what_the_queries_find(staff: dict[str, ModuleType]) -> None:
    query, verify = staff["agent"].query, staff["verifier"].verify
    for task in staff["tasks"].heldout[:40]:
        found = task["person"]
        for column in task["path"]:
            found = query.invoke({"sql": f"SELECT {column} FROM staff WHERE name = '{found}'"})
        assert verify(task, f" {found}\n") == 1.0
        assert verify(task, f"{found}.") == 0.0


def test_the_tool_reports_mistakes_and_cannot_write(staff: dict[str, ModuleType]) -> None:
    query = staff["agent"].query
    assert query.invoke({"sql": "SELECT name FROM staff WHERE name = 'x'"}) == "no rows"
    assert query.invoke({"sql": "SELECT"}).startswith("error: ")
    assert query.invoke({"sql": "DELETE FROM staff"}).startswith("error: ")


def test_the_database_is_made_again_from_nothing(
    staff: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = staff["database"]
    monkeypatch.setattr(database, "FILE", tmp_path / "staff.db")
    with database.connect() as connection:
        assert connection.execute("SELECT count(*) FROM staff").fetchone() == (256,)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM staff")
    connection.close()
    assert [file.name for file in tmp_path.iterdir()] == ["staff.db"]


def test_each_prompt_extends_what_the_model_has_read_and_written(
    staff: dict[str, ModuleType],
) -> None:
    policy, tasks = staff["policy"], staff["tasks"]
    dice = random.Random(0)
    conversations = [policy.demonstrate(task, dice) for task in tasks.train[:64]]
    texts, _ = render_jinja_template(conversations, tools=policy.TOOLS, chat_template=TEMPLATE)
    tokenizer = make_tokenizer(texts)

    def tokens(messages: list[dict[str, object]], prompt: bool) -> list[int]:
        encoded: list[int] = tokenizer.apply_chat_template(
            messages, tools=policy.TOOLS, add_generation_prompt=prompt
        )["input_ids"]
        return encoded

    for conversation in conversations:
        turns = [i for i, m in enumerate(conversation) if m["role"] == "assistant"]
        prompts = [tokens(conversation[:i], True) for i in turns]
        written = [tokens(conversation[: i + 1], False)[:-1] for i in turns]  # but the newline
        for prompt, whole in zip(prompts, written, strict=True):
            assert whole[: len(prompt)] == prompt
            assert whole[-1] == tokenizer.eos_token_id
        for whole, (_, following) in zip(written, pairwise(prompts), strict=False):
            assert following[: len(whole)] == whole
    assert len(tokenizer.tokenize("Ada Berg")) == 2
