"""A LangChain agent that reads a price list. It has no tools.

There is no training code here. Point OPENAI_BASE_URL at any OpenAI-compatible server and call
`agent.invoke({"messages": [("user", "lamp: 48 dollars\\nWhat does the lamp cost?")]})`.
"""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

PROMPT = "Answer briefly, like this: The sofa costs 77 dollars."

agent = create_agent(ChatOpenAI(model="policy"), tools=[], system_prompt=PROMPT)
