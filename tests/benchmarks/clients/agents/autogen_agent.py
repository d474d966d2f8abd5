from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from play import SYSTEM, add, play


async def talk(questions, streamed):
    model = OpenAIChatCompletionClient(model="gpt-4o-mini")  # a name with known features
    agent = AssistantAgent(
        "solver",
        model,
        tools=[add],
        system_message=SYSTEM,
        model_client_stream=streamed,
        max_tool_iterations=4,
    )
    for question in questions:
        await agent.run(task=question)
    await model.close()


play(talk)
