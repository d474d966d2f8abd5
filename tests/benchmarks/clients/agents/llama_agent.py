from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai import OpenAI
from play import SYSTEM, add, play


async def talk(questions, streamed):
    model = OpenAI(model="gpt-4o-mini")  # a name with known features
    agent = FunctionAgent(tools=[add], llm=model, system_prompt=SYSTEM, streaming=streamed)
    memory = ChatMemoryBuffer.from_defaults(token_limit=100_000)
    for question in questions:
        await agent.run(question, memory=memory)


play(talk)
