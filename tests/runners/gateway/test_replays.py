"""Branches: the unmodified agent meets the recorded answers, then the policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import openai
import pytest

import agentrl
from agentrl.algorithms.data.merge import counterfactual
from agentrl.core.types import Branch, PolicyVersion, Rollout, RolloutState, Transition
from agentrl.runners.gateway.features import recording
from tests import factories

Agent = Callable[[Any], Any]


def numbered(bench: Any) -> None:
    """Every sampled answer is one of its own."""
    numbers = count()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("tools") and body["messages"][-1]["role"] == "user":
            arguments = f'{{"n":  {next(numbers)}}}'  # two spaces: bytes that no encoder makes
            function = {"name": "look", "arguments": arguments}
            call = {"id": f"call-{next(numbers)}", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"role": "assistant", "content": f"answer {next(numbers)}"}

    bench.model.answer = answer


async def calls_of(bench: Any, rollout: Rollout) -> list[Transition]:
    return list((await bench.store.trace(rollout.id)).transitions)


async def branched(bench: Any, agent: Agent, calls: int) -> tuple[Rollout, Rollout]:
    """A rollout, and one that repeats its first calls."""
    (source,) = await bench.run(agent, {"input": "x"})
    assert source.state is RolloutState.SUCCEEDED, source.failure
    bench.model.requests.clear()
    branch = Branch(rollout=source.id, calls=calls)
    (rollout,) = await bench.run(agent, {"input": "x"}, branch=branch)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    return source, rollout


def talk(turns: int, **extra: Any) -> Agent:
    """A conversation of so many calls; its result is what it was told."""

    async def agent(task: Any) -> list[str]:
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        heard = []
        async with openai.AsyncOpenAI() as client:
            for turn in range(turns):
                answer = await client.chat.completions.create(model="m", messages=messages, **extra)
                heard.append(answer.choices[0].message.content or "")
                messages += [{"role": "assistant", "content": heard[-1]}]
                messages += [{"role": "user", "content": f"turn {turn}"}]
        return heard

    return agent


@pytest.mark.parametrize("calls", [1, 2, 3])
async def test_a_branch_repeats_the_first_calls_and_samples_the_rest(
    bench: Any, calls: int
) -> None:
    numbered(bench)
    source, branch = await branched(bench, talk(3), calls)
    assert source.result == ["answer 0", "answer 1", "answer 2"]
    assert branch.result == [*source.result[:calls], *(f"answer {n}" for n in range(3, 6 - calls))]
    assert len(bench.model.requests) == 3 - calls
    old, new = await calls_of(bench, source), await calls_of(bench, branch)
    assert [row.repeats for row in new] == [*(row.id for row in old[:calls])] + [None] * (3 - calls)
    for then, now in zip(old[:calls], new, strict=False):
        assert (now.prompt, now.completion, now.logprobs) == (
            then.prompt, then.completion, then.logprobs
        )  # fmt: skip
        assert (now.answer, now.finish, now.messages) == (then.answer, then.finish, then.messages)
        assert (now.version, now.sampling, now.exact) == (then.version, then.sampling, True)
        assert now.attempt == branch.attempt
    assert [row.index for row in new] == [0, 1, 2]
    assert branch.branch == Branch(rollout=source.id, calls=calls)


async def test_a_branch_of_a_branch_repeats_the_original(bench: Any) -> None:
    numbered(bench)
    source, first = await branched(bench, talk(3), 1)
    branch = Branch(rollout=first.id, calls=2)
    (second,) = await bench.run(talk(3), {"input": "x"}, branch=branch)
    old, middle = await calls_of(bench, source), await calls_of(bench, first)
    new = await calls_of(bench, second)
    assert [row.repeats for row in new] == [old[0].id, middle[1].id, None]


def tool_user(stream: bool) -> Agent:
    async def agent(task: Any) -> list[Any]:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        messages: list[Any] = [{"role": "user", "content": "look"}]
        async with openai.AsyncOpenAI() as client:
            said: Any = {"role": "assistant", "content": "", "tool_calls": []}
            if stream:
                async with client.chat.completions.stream(
                    model="m", messages=messages, tools=tools
                ) as chunks:
                    whole = await chunks.get_final_completion()
            else:
                whole = await client.chat.completions.create(
                    model="m", messages=messages, tools=tools
                )
            message = whole.choices[0].message
            (call,) = message.tool_calls or ()
            said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
            said["tool_calls"][0].pop("parsed", None)
            messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "seen"}]
            last = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        return [call.function.arguments, whole.choices[0].finish_reason,
                last.choices[0].message.content]  # fmt: skip

    return agent


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_repeated_byte_for_byte(bench: Any, stream: bool) -> None:
    numbered(bench)
    source, branch = await branched(bench, tool_user(stream), 1)
    assert branch.result[:2] == source.result[:2] == ['{"n":  0}', "tool_calls"]
    assert branch.result[2] != source.result[2]
    assert [row.repeats is None for row in await calls_of(bench, branch)] == [False, True]


async def streamed(task: Any) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    heard, usages = [], 0
    async with openai.AsyncOpenAI() as client:
        for _ in range(2):
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            usages += chunks[-1].usage is not None
            said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            heard.append(said)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go"}]
    return [*heard, str(usages)]


async def responses(task: Any) -> list[str]:
    async with openai.AsyncOpenAI() as client:
        first = await client.responses.create(model="m", input="begin")
        second = await client.responses.create(model="m", input="go", previous_response_id=first.id)
    return [first.output_text, second.output_text]


async def messages(task: Any) -> list[str]:
    import anthropic  # takes seconds

    asked: list[Any] = [{"role": "user", "content": "begin"}]
    heard = []
    async with anthropic.AsyncAnthropic() as client:
        for _ in range(2):
            async with client.messages.stream(model="m", messages=asked, max_tokens=50) as stream:
                heard.append(await stream.get_final_text())
            asked += [{"role": "assistant", "content": heard[-1]}]
            asked += [{"role": "user", "content": "go"}]
    return heard


async def completions(task: Any) -> list[str]:
    async with openai.AsyncOpenAI() as client:
        first = await client.completions.create(model="m", prompt="begin", stream=False)
        second = await client.completions.create(model="m", prompt=first.choices[0].text + "!")
    return [first.choices[0].text, second.choices[0].text]


@pytest.mark.parametrize("agent", [streamed, responses, messages, completions])
async def test_every_api_is_repeated(bench: Any, agent: Agent) -> None:
    numbered(bench)
    source, branch = await branched(bench, agent, 1)
    assert source.result[:2] == ["answer 0", "answer 1"]
    assert branch.result == ["answer 0", "answer 2", *source.result[2:]]
    first, second = await calls_of(bench, branch)
    assert first.repeats == (await calls_of(bench, source))[0].id
    assert second.repeats is None
    assert second.exact


async def test_an_agent_that_asks_something_else_is_sampled_from_there(bench: Any) -> None:
    numbered(bench)
    words = iter("aab")

    async def moody(task: Any) -> list[str]:
        said = []
        async with openai.AsyncOpenAI() as client:
            for content in ("begin", next(words), "end"):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": content}]
                )
                said.append(answer.choices[0].message.content)
        return said

    source, branch = await branched(bench, moody, 3)
    assert branch.result == source.result
    diverged = Branch(rollout=source.id, calls=3)
    (other,) = await bench.run(moody, {"input": "x"}, branch=diverged)
    assert other.result == ["answer 0", "answer 3", "answer 4"]  # "end" is not repeated either
    assert [row.repeats is None for row in await calls_of(bench, other)] == [False, True, True]


async def test_calls_made_at_once_are_repeated_in_any_order(bench: Any) -> None:
    numbered(bench)
    orders = iter(["ab", "ba", "ba"])

    async def parallel(task: Any) -> list[str]:
        async def ask(word: str) -> str:
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": word}], n=2
            )
            return "/".join(str(choice.message.content) for choice in answer.choices)

        async with openai.AsyncOpenAI() as client:
            order = next(orders)
            heard = {word: await ask(word) for word in order}
            return [heard["a"], heard["b"], await ask("c")]

    source, branch = await branched(bench, parallel, 4)
    assert branch.result[:2] == source.result[:2]
    assert branch.result[2] != source.result[2]
    # Where only "a" is repeated, "b" is asked anew, although it comes first.
    (early,) = await bench.run(parallel, {"input": "x"}, branch=Branch(rollout=source.id, calls=2))
    assert early.result[0] == source.result[0]
    assert early.result[1] != source.result[1]


async def test_a_record_that_is_gone_repeats_nothing(bench: Any) -> None:
    numbered(bench)
    branch = Branch(rollout="nobody", calls=2)
    (rollout,) = await bench.run(talk(1), {"input": "x"}, branch=branch)
    assert rollout.state is RolloutState.SUCCEEDED
    assert [row.repeats for row in await calls_of(bench, rollout)] == [None]


async def test_what_the_agent_did_not_wait_for_is_not_repeated(bench: Any) -> None:
    attempt = await bench.attempt()
    rows = [
        factories.call(f"c{i}", attempt=attempt.id, index=i, logprob=-0.5, finish=finish)
        for i, finish in enumerate(["stop", "cut", "stop"])
    ]
    await bench.store.add_transitions(rows)
    found = await recording(bench.store, Branch(rollout=attempt.rollout.id, calls=3))
    assert [row.id for row in found.left] == ["c0"]
    assert [row.id for row in found.later] == ["c1", "c2"]


async def test_repeating_needs_no_policy(bench: Any) -> None:
    numbered(bench)
    (source,) = await bench.run(talk(2), {"input": "x"})
    await bench.model.stop()
    branch = Branch(rollout=source.id, calls=2)
    (rollout,) = await bench.run(talk(2), {"input": "x"}, branch=branch)
    assert rollout.result == source.result


async def test_log_probs_that_the_agent_asks_for_are_repeated(bench: Any) -> None:
    numbered(bench)
    found: list[Any] = []

    async def curious(task: Any) -> None:
        async with openai.AsyncOpenAI() as client:
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], logprobs=True
            )
            found.append([token.logprob for token in answer.choices[0].logprobs.content])

    await branched(bench, curious, 1)
    assert found[0] == found[1] == [-0.5] * len("answer 0")


async def test_ids_that_the_agent_gives_to_tool_calls_do_not_matter(bench: Any) -> None:
    numbered(bench)
    ids = count()

    async def renumbering(task: Any) -> str:
        function = {"name": "look", "arguments": "{}"}
        call = {"id": f"mine-{next(ids)}", "type": "function", "function": function}
        said: list[Any] = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "seen"},
        ]
        async with openai.AsyncOpenAI() as client:
            answer = await client.chat.completions.create(model="m", messages=said)
        return str(answer.choices[0].message.content)

    source, branch = await branched(bench, renumbering, 1)
    assert branch.result == source.result


def debate(*rounds: str) -> Agent:
    """Roles are asked in turns what was said last; who speaks is a letter of a round, and those of
    one round hear the same."""

    async def agent(task: Any) -> list[str]:
        heard, said = "begin", []
        async with openai.AsyncOpenAI() as client:
            for speakers in rounds:
                answers = []
                for name in speakers:
                    with agentrl.role(name):
                        answer = await client.chat.completions.create(
                            model="m", messages=[{"role": "user", "content": f"{name}: {heard}"}]
                        )
                    answers.append(str(answer.choices[0].message.content))
                said += answers
                heard = ", ".join(answers)
        return said

    return agent


async def without(bench: Any, agent: Agent, *roles: str) -> tuple[Rollout, Rollout]:
    """A rollout, and what it would have come to with `judge` in these roles."""
    judge = PolicyVersion(
        run="test", policy="judge", version=0, base_url=bench.model.base_url, model="other"
    )
    await bench.store.publish(judge)
    (source,) = await bench.run(agent, {"input": "x"})
    bench.model.requests.clear()
    branch = Branch(rollout=source.id, calls=9, without=list(roles))
    (rollout,) = await bench.run(
        agent, {"input": "x"}, branch=branch, seats=dict.fromkeys(roles, "judge")
    )
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    return source, rollout


async def test_a_role_that_others_play_is_asked_and_what_follows_from_it(bench: Any) -> None:
    numbered(bench)
    source, other = await without(bench, debate("abc", "abc"), "b")
    assert source.result == [f"answer {n}" for n in range(6)]
    # Of the first round the others are repeated, also after the role that is not; the second hears
    # something else.
    assert other.result == ["answer 0", "answer 6", "answer 2", *(f"answer {n}" for n in (7, 8, 9))]
    old, new = await calls_of(bench, source), await calls_of(bench, other)
    assert [row.repeats for row in new] == [old[0].id, None, old[2].id, None, None, None]
    assert [row.policy for row in new] == ["policy", "judge", "policy", "policy", "judge", "policy"]
    assert counterfactual(other)
    assert not counterfactual(source)


async def test_other_questions_end_nothing_where_others_play(bench: Any) -> None:
    """After a question that is new because of them, what is asked as before is repeated again."""
    numbered(bench)

    async def agent(task: Any) -> list[str]:
        async def ask(name: str, content: str) -> str:
            with agentrl.role(name):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": content}]
                )
            return str(answer.choices[0].message.content)

        async with openai.AsyncOpenAI() as client:
            plan = await ask("planner", "plan")
            return [plan, await ask("critic", plan), await ask("solver", "solve")]

    source, other = await without(bench, agent, "planner")
    assert source.result == ["answer 0", "answer 1", "answer 2"]
    assert other.result == ["answer 3", "answer 4", "answer 2"]


async def test_nothing_that_a_role_answered_is_repeated_without_it(bench: Any) -> None:
    """Not even where somebody else asks the same."""
    numbered(bench)

    async def agent(task: Any) -> list[str]:
        said = []
        async with openai.AsyncOpenAI() as client:
            for name in ("a", "b", "a"):
                with agentrl.role(name):
                    answer = await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "same"}]
                    )
                said.append(str(answer.choices[0].message.content))
        return said

    _, other = await without(bench, agent, "a")
    assert other.result == ["answer 3", "answer 1", "answer 4"]
