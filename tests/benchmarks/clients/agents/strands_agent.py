from play import ARGUMENT, KEY, ROOT, SYSTEM, add, play
from strands import Agent, tool


def model(streamed):
    if ARGUMENT == "anthropic":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(model_id="policy", max_tokens=2048)
    if ARGUMENT == "gemini":
        from strands.models.gemini import GeminiModel

        options = {"api_key": KEY, "http_options": {"base_url": ROOT}}
        return GeminiModel(client_args=options, model_id="policy")
    from strands.models.openai import OpenAIModel

    return OpenAIModel(model_id="policy", streaming=streamed)


def talk(questions, streamed):
    agent = Agent(
        model=model(streamed), tools=[tool(add)], system_prompt=SYSTEM, callback_handler=None
    )
    for question in questions:
        agent(question)


play(talk)
