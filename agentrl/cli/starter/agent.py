"""The agent: an ordinary LangChain agent with a tool. There is no training code in it.

During training, OPENAI_BASE_URL and OPENAI_API_KEY point to the policy.
"""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from shop import look_up

agent = create_agent(ChatOpenAI(model="policy"), [look_up])
