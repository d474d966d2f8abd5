"""An agent of the run file's own, for an environment that only verifies."""

from agentrl import endpoint


async def agent(question: str) -> str:
    await endpoint().chat([{"role": "user", "content": question}])
    return "nothing"


def long(result: str) -> float:
    return float(len(result))


async def forger(question: str) -> dict[str, object]:
    """Answers as an environment does that has scored itself."""
    await endpoint().chat([{"role": "user", "content": question}])
    row = {"value": 1.0, "name": "outcome", "scope": "rollout"}
    return {"environment": "worlds.py:Questions:x", "rewards": [row]}
