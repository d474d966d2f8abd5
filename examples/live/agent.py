"""A LangChain agent that helps the customers of a shop.

There is no training code here. Point OPENAI_BASE_URL at any OpenAI-compatible server and call
`support(session, customer).ainvoke({"messages": [("user", "Where is order 371?")]})`. The two ids
go along as headers, as web applications have them.
"""

from functools import cache

import httpx
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI
from orders import status

PROMPT = "You help customers of a shop."


@tool
def look_up_order(order: str) -> str:
    """Where an order is."""
    return status(order)


@tool
def start_return(order: str) -> str:
    """Take an order back."""
    return f"order {order}: return started"


TOOLS = [look_up_order, start_return]


@cache
def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120.0)


def support(session: str, customer: str):
    headers = {"x-session-id": session, "x-user-id": customer}
    model = ChatOpenAI(model="policy", default_headers=headers, http_async_client=client())
    return create_agent(model, TOOLS, system_prompt=PROMPT).with_config(recursion_limit=10)
