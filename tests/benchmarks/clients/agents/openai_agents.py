from agents import (
    Agent,
    OpenAIConversationsSession,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
)
from play import ARGUMENT, SYSTEM, add, play

if ARGUMENT == "chat":
    set_default_openai_api("chat_completions")


async def talk(questions, streamed):
    agent = Agent(name="solver", instructions=SYSTEM, tools=[function_tool(add)], model="policy")
    kept = ARGUMENT == "conversations"  # by the server
    session = OpenAIConversationsSession() if kept else SQLiteSession("one")  # in memory
    for question in questions:
        if streamed:
            run = Runner.run_streamed(agent, question, session=session)
            async for _ in run.stream_events():
                pass
        else:
            await Runner.run(agent, question, session=session)
    await session.clear_session()


play(talk)
