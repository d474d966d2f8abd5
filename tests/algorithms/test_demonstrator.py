"""`agentrl demonstrate`: another model plays the tasks, through the real runner and gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.algorithms.conversations import UNFINISHED, conversations_of, is_unfinished
from agentrl.algorithms.demonstrations import ConversationReader
from agentrl.algorithms.demonstrator import message_of, served
from agentrl.algorithms.model.load import load_model
from agentrl.cli.main import cli
from agentrl.core.types import Transition
from tests import warm
from tests.factories import call

TEACHER = '''
import re
from pathlib import Path

ASKED = Path(__file__).with_name("asked")


def answer(messages, tools):
    """Adds two numbers with the tool, but wrongly if the first is 3."""
    with ASKED.open("a") as file:
        file.write(".")
    assert [tool["function"]["name"] for tool in tools] == ["add"]
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    a, b = map(int, re.findall(r"\\d+", messages[-1]["content"]))
    return {"tool_calls": [{"name": "add", "arguments": {"a": a, "b": b + (a == 3)}}]}


def broken(messages, tools):
    return {}["nothing"]
'''
VERIFIER = """
def verify(task, result):
    return float(result == str(task["answer"]))
"""
COMMAND = ("demonstrate", "run.toml", "--out", "demos.jsonl")
SCRIPT = ("--script", "teacher.py:answer")


@pytest.fixture
def folder(run_folder: Path) -> Path:
    (run_folder / "teacher.py").write_text(TEACHER)
    (run_folder / "verifier.py").write_text(VERIFIER)
    return run_folder


def demonstrate(folder: Path, *arguments: str) -> Any:
    return warm.run("-m", "agentrl", *COMMAND, *arguments, cwd=folder)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "demos.jsonl").read_text().splitlines()]


def questions(rows: list[dict[str, Any]]) -> set[str]:
    return {row["messages"][0]["content"] for row in rows}


def test_a_script_demonstrates_a_tool_and_the_policy_imitates_it(
    folder: Path, tiny_model_dir: Path
) -> None:
    """Of six tasks all but the wrong one; the same command plays nothing again."""
    done = demonstrate(folder, *SCRIPT, "--count", "6")
    assert done.returncode == 0, done.stderr
    assert "5 of 6 rollouts have a reward of at least 1: 5 different conversations" in done.stderr
    rows = written(folder)
    assert questions(rows) == {f"What is {i} plus {i + 1}?" for i in (0, 1, 2, 4, 5)}
    assert {row["reward"] for row in rows} == {1.0}
    row = next(row for row in rows if "What is 5" in row["messages"][0]["content"])
    asked, called, result, said = row["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 5, "b": 6}'}
    assert (asked["role"], result["role"], said["content"]) == ("user", "tool", "11")
    assert row["imitate"] == [1, 3]
    assert row["tools"][0]["function"]["name"] == "add"
    calls = (folder / "asked").stat().st_size
    assert calls == 12
    again = demonstrate(folder, *SCRIPT, "--count", "6", "--least", "0")
    assert again.returncode == 0, again.stderr
    assert (folder / "asked").stat().st_size == calls
    assert len(written(folder)) == 6
    more = demonstrate(folder, *SCRIPT, "--count", "2", "--samples", "2")
    assert "4 of 4 rollouts have a reward of at least 1: 2 different" in more.stderr
    assert questions(written(folder)) == {"What is 0 plus 1?", "What is 1 plus 2?"}
    calls = (folder / "asked").stat().st_size
    (folder / "verifier.py").write_text(f"{VERIFIER}# changed\n")
    assert demonstrate(folder, *SCRIPT, "--count", "2").returncode == 0
    assert (folder / "asked").stat().st_size == calls + 4

    tokenizer = load_model(tiny_model_dir)[1]
    reader = ConversationReader(tokenizer, [tokenizer.eos_token_id])
    ((prompt, first), (_, second)) = reader.answers(row)
    assert tokenizer.decode(first) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 6}}\n</tool_call><|im_end|>'
    )
    assert tokenizer.decode(second) == "11<|im_end|>"
    assert "Add two numbers." in tokenizer.decode(prompt)

    settings = ["warmup.data=demos.jsonl", "warmup.steps=3", "warmup.lr=1e-3", "steps=1"]
    small = ["algorithm.groups=1", "algorithm.group_size=2", "eval.tasks=1", "policy.lora.rank=2"]
    trained = warm.run("-m", "agentrl", "train", "run.toml", *settings, *small, cwd=folder)
    assert trained.returncode == 0, trained.stderr
    assert "imitation step 1/3  loss " in trained.stdout
    assert (folder / "out/warmup/adapter_config.json").is_file()


async def test_a_server_demonstrates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its URL, also where the agent names roles; a changed model plays again."""
    agent = (folder / "agent.py").read_text().replace("agent = ", "inner = ")
    agent += """
import agentrl

def agent(text):
    with agentrl.role("planner"):
        return inner.invoke({"messages": [("user", text)]})["messages"][-1].content
"""
    (folder / "agent.py").write_text(agent)
    seen: list[list[dict[str, Any]]] = []

    def answer(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        seen.append(messages)
        return "1" if "What is 0 plus 1?" in messages[0]["content"] else "never"

    monkeypatch.setenv("MY_KEY", "secret")
    command = ["--model", "big", "--key-env", "MY_KEY", "--tasks", "heldout", "--count", "2"]
    async with served(answer, "big") as url:
        command += ["--url", url, "--samples", "2"]
        done = await asyncio.to_thread(demonstrate, folder, *command)
        assert done.returncode == 0, done.stderr
        assert "2 of 4 rollouts" in done.stderr
        assert "1 different conversations" in done.stderr
        (row,) = written(folder)
        assert [message["content"] for message in row["messages"]] == ["What is 0 plus 1?", "1"]
        assert len(seen) == 4
        (folder / "demos.jsonl").unlink()
        command[1] = "bigger"
        none = await asyncio.to_thread(demonstrate, folder, *command, "--least", "1.5")
    assert len(seen) == 8
    assert none.returncode == 2
    assert "0 of 4 rollouts have a reward of at least 1.5, at most 1: 0 diff" in none.stderr
    assert "lower --least, or take a stronger model" in none.stderr
    assert not (folder / "demos.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --url and --model of a server, or --script of a function"),
        (["--url", "http://127.0.0.1:1/v1"], "give --url and --model of a server"),
        (["--url", "http://127.0.0.1:1/v1", "--model", "m"], "no server answers"),
        (["--url", "no url", "--model", "m"], "--url no url: no server answers"),
        (["--url", "http://x/v1", "--model", "m", "--key-env", "UNSET"], "--key-env"),
        (["--script", "teacher.py:nobody"], "it has no 'nobody'"),
        (["--script", "teacher.py:ASKED"], "it is not a function"),
        ([*SCRIPT, "--out", "demos.parquet"], "[warmup] reads .jsonl"),
        ([*SCRIPT, "--tasks", "more.jsonl"], "cannot read the task file"),
        ([*SCRIPT, "tasks.heldout=", "--tasks", "heldout"], "tasks.heldout is missing"),
        ([*SCRIPT, "upstreams.demonstrator.text=x"], "has the name of the demonstrator"),
    ],
)
def test_what_cannot_demonstrate_says_why(
    folder: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    failed = CliRunner().invoke(cli, [*COMMAND, *arguments])
    assert failed.exit_code != 0
    assert sentence in f"{failed.exception} {failed.output}"
    assert not (folder / "demos.jsonl").exists()


def test_a_script_that_raises_ends_the_command(folder: Path) -> None:
    failed = demonstrate(folder, "--script", "teacher.py:broken", "--count", "2")
    assert failed.returncode == 2
    assert "raised KeyError: 'nothing' (" in failed.stderr
    assert not (folder / "demos.jsonl").exists()


def step(messages: list[dict[str, Any]], answer: dict[str, Any], **more: Any) -> Transition:
    return call(messages=messages, answer=answer, exact=False, **more)


USER, LATER = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
EXAMPLE = {"role": "assistant", "content": "an example"}


def test_calls_that_continue_a_conversation_are_one() -> None:
    """As the model answered, however the agent sends it again; another tool list or another
    beginning is another conversation."""
    arguments = ['{"x":  1}', '{"x": 1}']
    written, resent = (
        [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}]
        for text in arguments
    )
    answer = {"role": "assistant", "content": None, "tool_calls": written, "refusal": None}
    again = {"role": "assistant", "content": "", "tool_calls": resent}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    parts = [{"type": "text", "text": "a"}]
    said = {"role": "assistant", "content": "two"}
    found = conversations_of(
        [
            step([EXAMPLE, USER], answer),
            step([LATER], said),  # of a sub-agent
            step([EXAMPLE, {"role": "user", "content": parts}, again, result], said),
            step([EXAMPLE, USER, again, result, said, LATER], said, tools=[{"type": "function"}]),
        ]
    )
    first, other, more = found
    assert first["messages"][2]["tool_calls"] == written
    assert first["messages"][3:] == [result, said]
    assert "refusal" not in first["messages"][2]
    assert first["imitate"] == [2, 4]  # not the example
    assert (other["messages"], other["imitate"]) == ([LATER, said], [1])
    assert (len(more["messages"]), more["imitate"]) == (7, [6])


def test_what_a_script_may_return() -> None:
    assert message_of("a") == {"role": "assistant", "content": "a"}
    (one,) = message_of({"tool_calls": [{"name": "f", "arguments": {"é": 1}}]})["tool_calls"]
    assert one["function"] == {"name": "f", "arguments": '{"é": 1}'}
    whole = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message_of({"content": "b", "tool_calls": [whole]})["tool_calls"] == [whole]
    with pytest.raises(TypeError, match="neither text nor a message"):
        message_of(None)


async def test_a_scripted_server_streams() -> None:
    """As agents with streaming ask it to."""
    from openai import AsyncOpenAI

    def answer(messages: Any, tools: Any) -> dict[str, Any]:
        calls = [{"name": "f", "arguments": {"n": n}} for n in range(2)]
        return {"content": "wait", "tool_calls": calls}

    async with served(answer, "m") as url, AsyncOpenAI(base_url=url, api_key="x") as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], stream=True
        )
        ((choice,),) = [part.choices async for part in stream]
    assert choice.delta.content == "wait"
    assert [c.function.arguments for c in choice.delta.tool_calls or () if c.function] == [
        '{"n": 0}', '{"n": 1}',
    ]  # fmt: skip
    assert choice.finish_reason == "tool_calls"


def test_only_chosen_messages_are_imitated(tiny_model_dir: Path) -> None:
    tokenizer = load_model(tiny_model_dir)[1]
    reader = ConversationReader(tokenizer, [tokenizer.eos_token_id])
    said = {"role": "assistant", "content": "two"}
    messages = [USER, EXAMPLE, LATER, said]
    (row,) = reader.rows({"messages": messages, "imitate": [3]})
    assert tokenizer.decode(row.tokens[row.actions]) == "two<|im_end|>"
    (row,) = reader.rows({"messages": messages})
    assert tokenizer.decode(row.tokens[row.actions]) == "an example<|im_end|>two<|im_end|>"


@pytest.mark.parametrize("finish", [*UNFINISHED, "MAX_TOKENS"])
def test_an_unfinished_answer_is_known_by_any_apis_word(finish: str) -> None:
    assert is_unfinished(call(finish=finish))
    assert not is_unfinished(call(finish="tool_calls"))
