import os

os.environ["AGNO_TELEMETRY"] = "false"

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat
from play import SYSTEM, add, play


def talk(questions, streamed):
    agent = Agent(
        model=OpenAIChat(id="policy"),
        tools=[add],
        instructions=SYSTEM,
        db=InMemoryDb(),
        add_history_to_context=True,
        telemetry=False,
    )
    for question in questions:
        if streamed:
            for _ in agent.run(question, session_id="one", stream=True):
                pass
        else:
            agent.run(question, session_id="one")


play(talk)
