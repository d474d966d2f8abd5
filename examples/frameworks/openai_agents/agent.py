"""Two agents of the OpenAI Agents SDK: a solver with a tool hands over to a critic. It streams."""

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)

set_default_openai_api("chat_completions")
set_tracing_disabled(True)  # the SDK sends its own traces to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


critic = Agent(name="critic", instructions="Check the answer: right or wrong?", model="policy")
solver = Agent(
    name="solver",
    instructions="Solve it with the tool, then hand over.",
    tools=[add],
    handoffs=[critic],
    model="policy",
)


async def agent(question: str) -> str:
    run = Runner.run_streamed(solver, question, max_turns=6)
    async for _ in run.stream_events():
        pass
    return str(run.final_output)
