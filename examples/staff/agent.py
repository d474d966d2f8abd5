"""A LangChain agent that answers questions about a company's staff by querying its database.

There is no training code here. Point OPENAI_BASE_URL at any OpenAI-compatible server and call
`agent.invoke({"messages": [("user", "What is the city of Ada Berg?")]})`.
"""

import sqlite3
from contextlib import closing

from database import connect
from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI

PROMPT = "Answer from the table staff(name, team, city, title, manager)."


@tool
def query(sql: str) -> str:
    """Run one SQL query."""
    with closing(connect()) as staff:  # LangChain runs tools in threads
        try:
            rows = staff.execute(sql).fetchall()
        except sqlite3.Error as error:
            return f"error: {error}"
    return "\n".join(", ".join(map(str, row)) for row in rows) or "no rows"


agent = create_agent(ChatOpenAI(model="policy"), [query], system_prompt=PROMPT)
agent = agent.with_config(recursion_limit=10)  # five model calls; three are enough
