"""Tic-tac-toe as a short prompt: the marks on the board, the player to move and the legal moves.

The rules, the moves and the perfect player are OpenSpiel's. The agent also runs by itself with any
OpenAI-compatible server: `await agent(tasks.heldout[0]["input"])`.
"""

from agentrl.runners.games import GameAgent, View

MARKS = "xo"


def describe(view: View) -> list[dict[str, str]]:
    """The prompt "o to move: x(0,0) o(1,1) legal: o(0,1) ...". A move is written like its mark on
    the board."""
    cells = [
        f"{mark}({row},{column})"
        for row, line in enumerate(view.seen.splitlines())
        for column, mark in enumerate(line)
        if mark in MARKS
    ]
    said = " ".join([f"{MARKS[view.player]} to move:", *cells, "legal:", *view.legal])
    return [{"role": "user", "content": said}]


agent = GameAgent(describe)
