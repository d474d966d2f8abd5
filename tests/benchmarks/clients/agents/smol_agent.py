import os

from play import KEY, add, play
from smolagents import OpenAIModel, ToolCallingAgent, tool


def talk(questions, streamed):
    model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=KEY)
    agent = ToolCallingAgent(
        [tool(add)], model, max_steps=4, verbosity_level=0, stream_outputs=streamed
    )
    for number, question in enumerate(questions):
        agent.run(question, reset=number == 0)


play(talk)
