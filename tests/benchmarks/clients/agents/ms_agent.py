from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from play import ARGUMENT, SYSTEM, add, play


async def talk(questions, streamed):
    kind = OpenAIChatClient if ARGUMENT == "responses" else OpenAIChatCompletionClient
    agent = Agent(kind(model="policy"), SYSTEM, name="solver", tools=[add])
    session = agent.create_session()
    for question in questions:
        if streamed:
            await agent.run(question, session=session, stream=True).get_final_response()
        else:
            await agent.run(question, session=session)


play(talk)
