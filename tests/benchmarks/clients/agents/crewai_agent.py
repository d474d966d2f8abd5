import os

os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")

from crewai import LLM, Agent
from crewai.tools import tool
from play import SYSTEM, add, play


def talk(questions, streamed):
    model = LLM(model="openai/gpt-4o-mini", stream=streamed)  # a name with known features
    solver = Agent(role="solver", goal=SYSTEM, backstory="b", llm=model, tools=[tool("add")(add)])
    messages = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        said = solver.kickoff(messages)
        messages.append({"role": "assistant", "content": said.raw})


play(talk)
