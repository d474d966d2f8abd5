"""Tic-tac-toe in few words: what is on the board, and who is to move.

The rules, the moves and the perfect player are OpenSpiel's. The agent runs by itself, too, against
any OpenAI-compatible server: `await agent(tasks.heldout[0]["input"])`.
"""

from agentrl.runners.games import GameAgent, View

MARKS = "xo"


def describe(view: View) -> list[dict[str, str]]:
    """ "o to move: x(0,0) o(1,1) legal: o(0,1) ...": a move is worded as the mark that it leaves on
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
