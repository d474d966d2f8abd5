"""Every form of agent behind one protocol."""

from __future__ import annotations

import asyncio
import contextvars
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.errors import AgentError, ConfigError
from agentrl.core.processes import DaemonThreads, call
from agentrl.runners.executors.inprocess import as_agent, load


class Runnable:
    """Has what matters of a LangChain runnable."""

    def __init__(self, output: Any, checkpointer: object = None) -> None:
        self.output, self.checkpointer, self.seen = output, checkpointer, []

    async def ainvoke(self, value: Any, config: Any = None) -> Any:
        self.seen.append((value, config))
        return self.output

    def __call__(self) -> None:
        raise AssertionError("a runnable is invoked, not called")


async def shout(text: str) -> str:
    return text.upper()


class Shouter:
    async def __call__(self, text: str) -> str:
        return text.upper()


@pytest.mark.parametrize(
    "agent",
    [
        shout,
        Shouter(),
        Shouter,  # a class is a factory
        lambda: shout,
        lambda text: text.upper(),
        lambda text: shout(text),
        str.upper,
        lambda text, times=1: text.upper() * times,
    ],
)
async def test_callables_and_factories(agent: object) -> None:
    assert await as_agent(agent)("hello") == "HELLO"


async def test_factory_is_called_once() -> None:
    built = []

    def factory() -> Any:
        built.append(1)
        return shout

    agent = as_agent(factory)
    await agent("a")
    await agent("b")
    assert built == [1]


async def test_sync_agents_run_beside_the_loop_with_the_context_of_the_attempt() -> None:
    variable = contextvars.ContextVar("variable", default="none")
    together = threading.Barrier(3, timeout=10)

    def agent(text: str) -> str:
        together.wait()  # passes only if three run at the same time
        return f"{variable.get()} {text}"

    async def run(name: str) -> str:
        variable.set(name)
        return str(await as_agent(agent)("x"))

    assert await asyncio.gather(run("a"), run("b"), run("c")) == ["a x", "b x", "c x"]


async def test_what_a_runnable_is_given() -> None:
    runnable = Runnable({"messages": [SimpleNamespace(content="hi", text="hi")]})
    agent = as_agent(runnable)
    assert await agent("question") == "hi"
    await agent({"city": "Paris"})
    messages = {"messages": [{"role": "user", "content": "question"}]}
    assert runnable.seen == [(messages, None), ({"city": "Paris"}, None)]


async def test_graph_with_a_checkpointer_gets_a_thread_of_its_own() -> None:
    runnable = Runnable("done", checkpointer=object())
    agent = as_agent(runnable)
    await agent("a")
    await agent("b")
    threads = {config["configurable"]["thread_id"] for _, config in runnable.seen}
    assert len(threads) == 2


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ({"messages": [SimpleNamespace(content=[{"type": "text"}], text="joined")]}, "joined"),
        ({"messages": [{"role": "assistant", "content": "plain"}]}, "plain"),
        ({"structured_response": {"a": 1}, "messages": []}, {"a": 1}),
        ({"answer": 3}, {"answer": 3}),
        (SimpleNamespace(content="c", text="text"), "text"),
        (17, 17),
    ],
)
async def test_what_a_runnable_answers(output: Any, result: Any) -> None:
    assert await as_agent(Runnable(output))("x") == result


async def build_async() -> Any:
    return shout


def broken() -> Any:
    raise OSError("no key")


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (17, "of type 'int'"),
        (lambda: 17, "of type 'int'"),
        (lambda a, b: None, "one argument"),
        (build_async, "is async"),
        (broken, "'broken' raised OSError: no key"),
    ],
)
def test_what_is_not_an_agent(agent: object, says: str) -> None:
    with pytest.raises(AgentError, match=says):
        as_agent(agent)


def test_load_names_the_setting_and_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "my_agent_file.py").write_text("solver = 1\n")
    assert load("my_agent_file.py:solver", tmp_path) == 1
    with pytest.raises(ConfigError, match=r"agent\.path.*did you mean 'solver'"):
        load("my_agent_file.py:solvr", tmp_path)


async def test_threads_that_hang_hold_nobody_up() -> None:
    release = threading.Event()
    executor, loop = DaemonThreads(), asyncio.get_running_loop()
    hung = [loop.run_in_executor(executor, release.wait) for _ in range(100)]
    assert await loop.run_in_executor(executor, len, "abc") == 3
    executor.shutdown()
    assert not any(future.done() for future in hung)
    release.set()
    await asyncio.gather(*hung)


async def test_an_error_of_a_thread_reaches_the_caller() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call(next, iter(()))
    with pytest.raises(SystemExit):
        await call(sys.exit, 3)


CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


async def test_chat_messages_as_input_of_a_graph_and_of_a_function() -> None:
    graph = Runnable("done")
    for given in ("q", CHAT, [1], {"messages": CHAT}):
        await as_agent(graph)(given)
    one = {"messages": [{"role": "user", "content": "q"}]}
    many = {"messages": CHAT}
    assert [state for state, _ in graph.seen] == [one, many, [1], many]
    assert await as_agent(lambda value: value)(CHAT) == CHAT


async def test_chat_messages_as_input_of_langchain() -> None:
    """A chain that begins with a model takes messages, one that begins with a prompt a state."""
    pytest.importorskip("langchain")
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import FakeListChatModel
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    def model() -> Any:
        return FakeListChatModel(responses=["yes"])

    prompt = ChatPromptTemplate.from_messages([("placeholder", "{messages}")])
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    used = {"role": "assistant", "content": None, "tool_calls": [called]}
    talk = [*CHAT, used, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    chains = [model(), model() | StrOutputParser(), model().bind(stop=["x"]), prompt | model()]
    for agent in (*chains, create_agent(model(), tools=[])):
        for given in ("q", talk):
            assert await as_agent(agent)(given) == "yes"


def test_chat_messages_as_input_of_a_harness() -> None:
    from agentrl.runners.harness import prompt_of

    assert prompt_of(CHAT) == "s\n\nq"
    told = [*CHAT, {"role": "assistant", "content": "a"}]
    assert json.loads(prompt_of(told)) == told
    assert prompt_of([]) == "[]"
