"""Each player has its own utility: self-play pays every seat for itself.

The outcome is the mean of both, half of what the players made together.
"""

from agentrl import Reward, Task, Trace
from agentrl.runners.games import Result
from agentrl.runners.games import verify as returns


def verify(task: Task, result: Result, trace: Trace) -> list[Reward]:
    agreed = result["moves"][-1][1] == "Agree"
    return [*returns(task, result, trace), Reward(value=float(agreed), name="agreed")]
