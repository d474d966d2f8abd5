"""What a search over the store asks a reflector, and what becomes of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.algorithms import prompts
from agentrl.algorithms.prompt_search import MAX_INVALID, Search, reflections_of
from agentrl.algorithms.prompts import StoredBackend
from agentrl.core.config import resolve
from agentrl.core.errors import AgentRLError
from agentrl.core.types import (
    ErrorKind,
    Failure,
    PromptText,
    Reward,
    Trace,
    Transition,
    float32,
    int32,
)
from agentrl.store import open_store
from tests import factories

TEXT = PromptText(component="solver", role="solver", seed="Be brief.", text="Be brief.")


@pytest.fixture
async def reflector() -> AsyncIterator[tuple[str, list[web.Response]]]:
    """A server's address, and what it answers, in turn."""
    answers: list[web.Response] = []

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", answers
    await runner.cleanup()


def said(text: str | None) -> web.Response:
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    return web.json_response({"choices": [{"message": {"content": text}}], "usage": usage})


async def search(store: Any, config: Any) -> Search:
    state = await store.open_run("run", {})
    backend = StoredBackend(store, config, state, [], None)
    await backend.load()
    return Search(config.prompts, [TEXT], backend, 28)


@pytest.mark.parametrize(("failed", "start"), [(0, 0), (1, 1), (2, 2)])
async def test_seed_texts_that_failed_everywhere_are_played_again(
    tmp_path: Path, failed: int, start: int
) -> None:
    """By the next start, to which the agent may be mended; what it finds then stays."""
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        state = await store.open_run("run", {})
        for number in range(failed + 1):
            group = f"run/prompts/000000/{number:05d}.seed"
            why = Failure(kind=ErrorKind.AGENT, message="no") if number < failed else None
            end = {"failure": why} if why else {"rewards": [Reward(value=0.0)]}
            rows = factories.queue(group, run="run")
            await factories.play(store, rows, lambda _, end=end: ([], end))
        config = resolve({"name": "run", "output": str(tmp_path)}, source="test")
        backend = StoredBackend(store, config, state, [], None)
        await backend.load()
    assert next(backend._evaluations) == start


async def test_a_useless_reflector_is_asked_once_each(tmp_path: Path, reflector: Any) -> None:
    url, answers = reflector
    (tmp_path / "solver.txt").write_text(TEXT.text)
    settings: dict[str, Any] = {
        "name": "run", "root": str(tmp_path), "upstreams": {"teacher": {"base_url": url}},
        "prompts": {"reflector": "teacher", "components": {"solver": "solver.txt"}},
    }  # fmt: skip
    config = resolve(settings, source="test")
    busy = web.json_response({}, status=429, headers={"retry-after": "0"})
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        answers += [busy, said(None), said("Sure!"), said("```\nBe kind.\n```")]
        first = await search(store, config)
        texts = {"solver": TEXT.text}
        for shown in "ab":
            assert await asyncio.to_thread(first.propose, texts, "solver", shown) == texts
        new = await asyncio.to_thread(first.propose, texts, "solver", "c")
        assert (new, first.tokens) == ({"solver": "Be kind."}, 33)

        again = await search(store, config)  # as after a kill: nobody is asked
        assert not answers
        for shown in "ab":
            await asyncio.to_thread(again.propose, texts, "solver", shown)
        assert await asyncio.to_thread(again.propose, texts, "solver", "c") == new
        assert (again.tokens, again.candidates) == (33, first.candidates)

        answers += [said("?") for _ in range(MAX_INVALID)]
        for shown in "de":
            await asyncio.to_thread(again.propose, texts, "solver", shown)
        with pytest.raises(AgentRLError, match="3 consecutive answers were invalid"):
            await asyncio.to_thread(again.propose, texts, "solver", "f")
        assert len(await reflections_of(store, "run")) == 6
        other = await search(store, config)
        with pytest.raises(AgentRLError, match="was asked something else before"):
            await asyncio.to_thread(other.propose, texts, "solver", "x")


def test_a_reflector_reads_messages_as_they_were_written() -> None:
    """A call of token ids alone has no messages, and was not made with the texts."""
    call = {"id": "1", "function": {"name": "find", "arguments": '{"city": "Zürich"}'}}
    base: Any = {"attempt": "a", "role": "solver", "prompt": int32([1]), "completion": int32([2])}
    base["logprobs"] = float32([-1.0])
    spoken = Transition(
        id="t0", index=0, messages=[{"role": "user", "content": "Où?"}],
        answer={"role": "assistant", "content": None, "tool_calls": [call]}, **base,
    )  # fmt: skip
    bare = Transition(id="t1", index=1, **base)
    shown = prompts.example_of(
        Trace(factories.rollout(calls=[spoken, bare]), "a", [spoken, bare], []), TEXT
    )
    assert "Où?" in shown["Read"]
    assert "Zürich" in shown["Said"]
    assert prompts.example_of(Trace(factories.rollout(calls=[bare]), "a", [bare], []), TEXT) == {}
