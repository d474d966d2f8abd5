"""The reward of each seat is its own utility, and the outcome is the mean of both."""

from agentrl import Reward, Task, Trace
from agentrl.runners.games import GameResult
from agentrl.runners.games import verify as returns


def verify(task: Task, result: GameResult, trace: Trace) -> list[Reward]:
    agreed = result["moves"][-1][1] == "Agree"
    return [*returns(task, result, trace), Reward(value=float(agreed), name="agreed")]
