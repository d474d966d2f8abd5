import datetime
import os
import sys
from pathlib import Path

import pytest

from agentrl.core import loading
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_attribute, load_tasks, model_variables, task_file
from agentrl.runners.executors.command import environment


def test_attribute_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text("value = 41\n")
    assert load_attribute("my_agent.py:value", tmp_path, key="agent.path") == 41


def test_files_of_one_name_in_two_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"value = {name!r}\n")
        assert load_attribute("same_name.py:value", tmp_path / name, key="k") == name


def test_a_file_means_its_own_neighbours(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_neighbour.py").write_text(f"value = {name!r}\n")
        (tmp_path / name / f"asks_{name}.py").write_text("from same_neighbour import value\n")
    for name in ("one", "two", "one"):
        assert load_attribute(f"asks_{name}.py:value", tmp_path / name, key="k") == name
        assert load_attribute("same_neighbour.py:value", tmp_path / name, key="k") == name


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("", "agent.py", "write it as file.py:name"),
        ("", "missing_file.py:agent", "there is no file"),
        ("agnet = 1", "agent_a.py:agent", "it has no 'agent'; did you mean 'agnet'"),
        ("1 / 0", "agent_b.py:agent", r"raised ZeroDivisionError.*agent_b\.py:1"),
        ("exit('no key')", "agent_d.py:agent", r"raised SystemExit: no key \(.*agent_d\.py:1"),
        ("import pytest; pytest.skip('x', allow_module_level=True)", "agent_e.py:a", "Skipped: x"),
        ("import no_such_module_here", "agent_c.py:agent", "No module named"),
    ],
)
def test_mistakes_name_key_and_place(tmp_path: Path, source: str, path: str, message: str) -> None:
    if source:
        (tmp_path / path.split(":")[0]).write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        load_attribute(path, tmp_path, key="agent.path")
    assert str(caught.value).startswith("agent.path = ")


def test_tasks_of_a_jsonl_file(tmp_path: Path) -> None:
    text = '{"input": "a\u2028", "answer": 1}\n\n{"input": "b"}\n'
    (tmp_path / "t.jsonl").write_text(text, encoding="utf-8")
    tasks = load_tasks("t.jsonl", tmp_path, key="tasks.train")
    assert [task["input"] for task in tasks] == ["a\u2028", "b"]


def test_tasks_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "task_source.py").write_text("def train():\n    yield {'input': 'x'}\n")
    assert load_tasks("task_source.py:train", tmp_path, key="k") == [{"input": "x"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": 1}\n{"input": \n', r"t\.jsonl:2 is not a JSON object"),
        ('{"input": 1}\n[1]\n', r"t\.jsonl:2 is not a JSON object"),
        ('{"question": 1}\n', r"t\.jsonl:1 has no 'input'"),
        ("\n", "there are no tasks"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks("t.jsonl", tmp_path, key="tasks.train")


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("{'entry': {'grid': [(1, 2)]}}", r"task['entry']['grid'][0] is of type tuple, and comes"),
        ("{'answer': {1: 2}}", "task['answer'] has the key 1, which is text in JSON"),
        ("{'answer': np.str_('a')}", "task['answer'] is of type numpy.str_, and comes back"),
        ("{'answer': [0, np.float64(1)]}", "task['answer'][1] is of type numpy.float64"),
        ("{'answer': float('nan')}", "task['answer'] is nan, which JSON does not have"),
        ("{'answer': 2**70}", "task['answer'] is an integer of more than 64 bits"),
        ("{'answer': object()}", "task['answer'] is of type 'object', which has no JSON form"),
    ],
)
def test_tasks_that_change_as_json_are_named(tmp_path: Path, task: str, problem: str) -> None:
    """The verifier of a run would see another task than a direct call of it."""
    source = f"import numpy as np\nrows = [{{'input': 1}}, {{'input': 2}} | {task}]\n"
    (tmp_path / "task_change.py").write_text(source)
    sys.modules.pop("task_change", None)
    with pytest.raises(ConfigError) as error:
        load_tasks("task_change.py:rows", tmp_path, key="tasks.train")
    assert str(error.value).startswith(f"tasks.train: task_change.py:rows[1]: {problem}")
    with pytest.raises(ConfigError) as error:
        task_file(load_attribute("task_change.py:rows", tmp_path, key="k"), tmp_path / "heldout.x")
    assert str(error.value).startswith(f"heldout: task 1: {problem}")


def test_a_number_of_a_task_file_that_no_store_keeps(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(f'{{"input": 1}}\n{{"input": 2, "answer": [{2**70}]}}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: task\['answer'\]\[0\] is an integer of"):
        load_tasks("t.jsonl", tmp_path, key="tasks.train")


def test_tasks_beside_an_agent_whose_client_needs_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are imported by processes that have no gateway."""
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    source = "from openai import AsyncOpenAI\nclient = AsyncOpenAI()\nrows = [{'input': 'x'}]\n"
    (tmp_path / "task_and_agent.py").write_text(source)
    assert load_tasks("task_and_agent.py:rows", tmp_path, key="tasks.train") == [{"input": "x"}]
    assert "OPENAI_API_KEY" not in os.environ


CLIENT = "import os\nurl = os.environ['OPENAI_BASE_URL']\n"


def test_what_was_imported_without_a_gateway_is_imported_again_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent, tasks and verifier are in one file, and the agent runs in this process."""
    for name in model_variables("", ""):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "one_file_client.py").write_text(CLIENT)
    (tmp_path / "one_file.py").write_text("from one_file_client import url\nrows = [{'input': 1}]")
    assert load_tasks("one_file.py:rows", tmp_path, key="tasks.train") == [{"input": 1}]
    assert "OPENAI_BASE_URL" not in os.environ
    for url in ("http://one/v1", "http://one/v1"):
        with environment(url):
            assert load_attribute("one_file.py:url", tmp_path, key="agent.path") == url
    first = sys.modules["one_file"]
    with environment("http://one/v1"):
        load_attribute("one_file.py:rows", tmp_path, key="verifier.path")
    assert sys.modules["one_file"] is first


def test_a_key_of_the_user_is_what_tasks_are_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "own")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    source = (
        "import os\nrows = [{'input': os.environ.get('OPENAI_BASE_URL'), 'k': os.environ['%s']}]"
    )
    (tmp_path / "own_key.py").write_text(source % "OPENAI_API_KEY")
    wanted = [{"input": None, "k": "own"}]
    assert load_tasks("own_key.py:rows", tmp_path, key="tasks.train") == wanted


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("import json\n\nrows = json.loads('{')", "whose_line.py:3"),  # the library's is last
        ("from neighbour_of_line import x", "neighbour_of_line.py:2"),
        ("import nothing_at_all.of_this", "whose_line.py:1"),
        ("from json import nothing_of_this", "whose_line.py:1"),
        ("rows = [\n1 +* 2]", "whose_line.py:2"),
        ("import json\ndef rows():\n    yield json.loads('{')", "whose_line.py:3"),
        ("import msgspec\nrows = msgspec.convert(1, type=str)", "whose_line.py:2"),
    ],
)
def test_errors_name_the_user_s_own_line(tmp_path: Path, source: str, place: str) -> None:
    for name in ("whose_line", "neighbour_of_line"):
        sys.modules.pop(name, None)
    (tmp_path / "whose_line.py").write_text(source)
    (tmp_path / "neighbour_of_line.py").write_text("import json\nx = json.loads('{')\n")
    with pytest.raises(ConfigError) as caught:
        load_tasks("whose_line.py:rows", tmp_path, key="tasks.train")
    assert str(caught.value).endswith(f"({tmp_path / place})")


def test_task_function_that_raises(tmp_path: Path) -> None:
    (tmp_path / "task_fault.py").write_text("def train():\n    yield {'input': 1 / 0}\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError: division by zero"):
        load_tasks("task_fault.py:train", tmp_path, key="tasks.train")


def test_missing_task_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the task file"):
        load_tasks("none.jsonl", tmp_path, key="tasks.train")


def test_tasks_of_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    rows = [{"question": "1+1", "answer": "2"}, {"input": "2+2", "question": "no", "answer": "4"}]

    def read(source: str, root: Path) -> list[tuple[str, dict[str, str]]]:
        asked.append(source)
        return [(f"{source}[{index}]", row) for index, row in enumerate(rows)]

    monkeypatch.setattr(loading, "read_rows", read)
    tasks = load_tasks("hf:openai/gsm8k/main:test", Path(), key="tasks.train")
    assert [task["input"] for task in tasks] == ["1+1", "2+2"]
    assert asked == ["hf:openai/gsm8k/main:test"]
    rows[:] = [{"input": "x", "on": datetime.date(2026, 1, 2)}]  # type: ignore[dict-item]
    assert load_tasks("hf:a/b", Path(), key="tasks.train") == [{"input": "x", "on": "2026-01-02"}]
    rows[:] = [{"text": "1+1"}]
    with pytest.raises(ConfigError, match=r"hf:a/b\[0\] has no 'input'"):
        load_tasks("hf:a/b", Path(), key="tasks.train")
