from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai import OpenAI
from play import SYSTEM, add, play


async def talk(questions, streamed):
    model = OpenAI(model="gpt-4o-mini")  # a name with known features
    agent = FunctionAgent(tools=[add], llm=model, system_prompt=SYSTEM, streaming=streamed)
    context = Context(agent)
    for question in questions:
        await agent.run(question, ctx=context)


play(talk)
