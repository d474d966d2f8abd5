"""Two players share books, hats and basketballs that each of them values differently.

OpenSpiel's `bargaining` (Lewis et al. 2017): what a player's values are only it knows; in turns
they offer what to keep for themselves, until one agrees. Without an agreement nobody has anything.
The agent runs by itself, too, against any OpenAI-compatible server:
`await agent(tasks.heldout[0]["input"])`.
"""

from agentrl.runners.games import GameAgent, View

KNOWN = ("Agreement", "Number")  # lines that say what every player knows


def describe(view: View) -> list[dict[str, str]]:
    """The pool, the player's values and the offers so far, in OpenSpiel's own words."""
    lines = [line for line in view.seen.splitlines() if not line.startswith(KNOWN)]
    return [{"role": "user", "content": "\n".join([f"You are P{view.player}", *lines])}]


agent = GameAgent(describe)
