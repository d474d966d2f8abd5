"""An agent of the run file's own, for an environment that only verifies."""

from agentrl import endpoint


async def agent(question: str) -> str:
    await endpoint().chat([{"role": "user", "content": question}])
    return "nothing"


def long(result: str) -> float:
    return float(len(result))
