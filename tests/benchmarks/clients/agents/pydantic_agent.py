from play import ARGUMENT, ROOT, SYSTEM, add, play
from pydantic_ai import Agent


def model():
    if ARGUMENT == "google":
        from pydantic_ai.models.google import GoogleModel
        from pydantic_ai.providers.google import GoogleProvider

        return GoogleModel("policy", provider=GoogleProvider(base_url=ROOT))
    if ARGUMENT == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel

        return AnthropicModel("policy")
    if ARGUMENT == "openai-chat":
        from pydantic_ai.models.openai import OpenAIChatModel

        return OpenAIChatModel("policy")
    return "openai:policy"


async def talk(questions, streamed):
    agent = Agent(model(), instructions=SYSTEM, tools=[add])
    history = []
    for question in questions:
        if streamed:
            async with agent.iter(question, message_history=history) as run:
                async for node in run:
                    if Agent.is_model_request_node(node):
                        async with node.stream(run.ctx) as stream:
                            async for _ in stream:
                                pass
            history = run.result.all_messages()
        else:
            history = (await agent.run(question, message_history=history)).all_messages()


play(talk)
