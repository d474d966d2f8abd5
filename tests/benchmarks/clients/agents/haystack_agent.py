from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from play import ARGUMENT, SYSTEM, add, play


def talk(questions, streamed):
    kind = OpenAIResponsesChatGenerator if ARGUMENT == "responses" else OpenAIChatGenerator
    callback = (lambda chunk: None) if streamed else None
    agent = Agent(
        chat_generator=kind(model="policy"),
        tools=[create_tool_from_function(add)],
        streaming_callback=callback,
    )
    messages = [ChatMessage.from_system(SYSTEM)]
    for question in questions:
        messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"]


play(talk)
