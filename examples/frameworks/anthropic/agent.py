"""The Anthropic SDK: messages with a tool, then a streamed verdict. The names of the models are the
roles."""

from typing import Any

from anthropic import AsyncAnthropic

client = AsyncAnthropic()
INTEGER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
TOOL: Any = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}


async def agent(question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    system, answer = "Solve it with the tool. Reply with the number.", ""
    for _ in range(3):
        reply = await client.messages.create(
            model="solver", max_tokens=64, system=system, messages=messages, tools=[TOOL]
        )
        answer = "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": str(sum(use.input.values()))}
            for use in reply.content
            if use.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": results})
    asked: Any = [{"role": "user", "content": f"{question} {answer}"}]
    verdict = "Check the answer: right or wrong?"
    async with client.messages.stream(
        model="critic", max_tokens=16, system=verdict, messages=asked
    ) as stream:
        await stream.get_final_message()
    return answer
