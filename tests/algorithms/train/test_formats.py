"""What a run says of its chat templates."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.templates import templates
from agentrl.algorithms.train.formats import Break, check_tools, continued, sentence
from agentrl.algorithms.train.formats import breaks as breaks_of
from agentrl.core.errors import TrainingError
from agentrl.core.types import Json, Transition
from agentrl.store import open_store
from tests import warm
from tests.algorithms.model.roundtrip import TOOLS, family_tokenizer

BLIND = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
BLIND += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
AGENT = """
import openai

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


async def agent(text):
    async with openai.AsyncOpenAI(max_retries=0) as client:
        messages = [{"role": "user", "content": text}]
        try:
            await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        except openai.BadRequestError:
            pass
    return "I do not know."


def verify(task, result):
    return 0.0
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_llama_dir: Path) -> Path:
    """A run whose agent sends tools, and hides errors; the model's template drops tools."""
    shutil.copytree(tiny_llama_dir, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(BLIND)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"input": "Oslo"}\n{"input": "Lima"}\n')
    (tmp_path / "run.toml").write_text(
        'name = "tools"\noutput = "out"\nsteps = 2\n'
        'agent.path = "agent.py:agent"\nverifier.path = "agent.py:verify"\n'
        'tasks.train = "tasks.jsonl"\ntasks.heldout = "tasks.jsonl"\n'
        'policy.model = "model"\npolicy.device = "cpu"\nsampling.max_tokens = 8\n'
        "algorithm.groups = 1\nalgorithm.group_size = 2\n"
        "runner.processes = 1\nlearner.threads = 1\naudit.before = false\n"
    )
    return tmp_path


def train(folder: Path, *settings: str) -> Any:
    return warm.run("-m", "agentrl", "train", "run.toml", *settings, cwd=folder)


async def stored(folder: Path) -> tuple[int, list[Transition]]:
    """The number of steps, and a trained call."""
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
        steps = [row for row in await store.steps("tools") if row.committed]
        calls = list[Transition]()
        for row in await store.rollouts("tools"):
            trace = await store.trace(row.id)
            calls += trace.transitions if trace else []
        return len(steps), calls


def test_tools_that_the_template_drops_end_the_run_before_a_step(folder: Path) -> None:
    """Also if the agent catches the error, so that no rollout fails."""
    ended = train(folder)
    assert ended.returncode == 2
    assert "does not render tools" in ended.stderr
    assert "set policy.chat_template = 'chatml'" in ended.stderr
    assert "in Python: policy={'model': ..., 'chat_template': 'chatml'}" in ended.stderr
    assert "the same command with --fresh, if it has this option; in Python fit(" in ended.stderr
    assert asyncio.run(stored(folder))[0] == 0

    assert train(folder, "policy.chat_template=chatml", "--fresh").returncode == 0
    steps, calls = asyncio.run(stored(folder))
    assert steps == 2
    (checkpoint,) = (folder / "out" / "checkpoints").glob("000002*")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.chat_template == templates()["chatml"].text
    prompt = Chat(tokenizer, Codec(tokenizer)).encode(list(calls[0].messages), list(calls[0].tools))
    assert prompt == tuple(calls[0].prompt.tolist())


async def test_a_server_ends_at_the_first_tools_in_vain(folder: Path) -> None:
    server = EmbeddedServer(*load_model(folder / "model", device="cpu"))
    failure = asyncio.ensure_future(server.wait_for_failure())
    await asyncio.sleep(0)
    assert not failure.done()
    with pytest.raises(Exception, match="does not render tools"):
        server._chat.encode([{"role": "user", "content": "Hi"}], TOOLS)
    assert "does not render tools" in str(await failure)
    await server.close()


def test_a_template_that_rewords_answers_is_named_once(folder: Path) -> None:
    rewording = BLIND.replace(
        "m.content +", "(m.content + '!' if m.role != 'user' else m.content) +"
    )
    (folder / "model" / "chat_template.jinja").write_text(rewording)
    (folder / "agent.py").write_text(TALKING)
    ended = train(folder)
    assert ended.returncode == 0, ended.stderr
    (line,) = (one for one in ended.stdout.splitlines() if "does not repeat" in one)
    assert "does not repeat its answers as the model wrote them: 2 of 4 calls" in line
    assert "policy.chat_template = 'chatml' repeats all" in line


TALKING = """
import openai


async def agent(text):
    messages = [{"role": "user", "content": text}]
    async with openai.AsyncOpenAI() as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="m", messages=messages)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
    return said


def verify(task, result):
    return float(len(result) % 2)
"""


def call(
    index: int, prompt: Sequence[int], completion: Sequence[int], messages: list[Any], answer: Any
) -> Transition:
    return Transition(
        id=str(index), attempt="a", index=index,
        prompt=np.array(prompt, np.int32), completion=np.array(completion, np.int32),
        logprobs=np.zeros(len(completion), np.float32), messages=messages, answer=answer,
    )  # fmt: skip


def breaks(calls: list[Transition]) -> list[Break]:
    return list(breaks_of(continued(calls)))


USER: dict[str, Json] = {"role": "user", "content": "Hi"}
SAID: dict[str, Json] = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
CALLING: dict[str, Json] = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
]}  # fmt: skip


def test_a_retokenized_history_is_a_break_with_its_cost() -> None:
    first = call(0, [1, 2, 3], [4, 5, 6], [USER], SAID)
    goes_on = call(1, [1, 2, 3, 4, 5, 6, 7], [8], [USER, SAID, USER], SAID)
    assert breaks([first, goes_on]) == []
    drops = call(1, [1, 2, 3, 5, 6, 7], [8], [USER, SAID, USER], SAID)
    (found,) = breaks([drops, first])
    assert (found.earlier, found.call, found.tokens) == (first, drops, 3)
    assert found.reason == "the thinking of earlier turns"
    short = call(1, [1, 2], [8], [USER, SAID, USER], SAID)
    assert [one.tokens for one in breaks([first, short])] == [4]
    calling = call(0, [1], [2, 3], [USER], CALLING)
    respelt = call(1, [1, 2, 4], [5], [USER, {**CALLING, "content": ""}, USER], SAID)
    assert [one.reason for one in breaks([calling, respelt])] == ["its tool calls"]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": "Yes."}, USER],  # the agent dropped the thinking
        [{"role": "user", "content": "Else"}, SAID, USER],
        [USER],
    ],
)
def test_what_the_agent_itself_changed_is_no_break(messages: list[Any]) -> None:
    first = call(0, [1, 2, 3], [4, 5, 6], [USER], SAID)
    assert breaks([first, call(1, [1, 9], [8], messages, SAID)]) == []


def test_the_sentence_has_numbers_and_a_better_template() -> None:
    tokenizer = family_tokenizer("qwen")
    first = call(0, [1, 2, 3], [4, 5, 6], [USER], SAID)
    found = breaks([first, call(1, [1, 2, 3, 5], [8], [USER, SAID, USER], SAID)])
    said = sentence(found, 2, tokenizer)
    assert "does not repeat the thinking of earlier turns" in said
    assert "1 of 2 calls begin a branch of their own, and 3 tokens" in said
    dropping = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    dropping.chat_template = BLIND
    assert "policy.chat_template = 'chatml' repeats" in sentence(found, 2, dropping)


def test_every_engine_refuses_calls_whose_tools_were_dropped() -> None:
    with_tools = msgspec.structs.replace(call(0, [1], [2], [USER], SAID), tools=TOOLS)
    check_tools(family_tokenizer("chatml"), with_tools)
    blind = type(family_tokenizer("chatml"))(
        tokenizer_object=family_tokenizer("chatml").backend_tokenizer
    )
    blind.chat_template = BLIND
    with pytest.raises(TrainingError, match=r"policy.chat_template = 'chatml'.*--fresh"):
        check_tools(blind, with_tools)
