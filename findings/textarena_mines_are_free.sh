#!/usr/bin/env bash
# Natural guess: whoever steps on a mine in TextArena's Minesweeper has lost.
# What is so: a mine is an illegal move, of which the first in a row is forgiven: the game names the mine, asks for another
# move, and forgets the mistake with the next safe cell. A player that steps on all ten mines, with a safe cell after each, and
# then on all other cells, ends with the full reward. Two mines in a row end the game, with the share that was uncovered.
# Why it matters: the best policy does not reason about mines. It tries a cell, and if that was a mine, takes a safe one before
# the next try; curves of rewards rise as in a game that is being learned, and the skill is worth nothing elsewhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check textarena==0.7.4 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

import textarena

print("textarena", version("textarena"))


def play(in_a_row):
    """The reward, and the mines and safe cells that were stepped on, with so many mines before each safe cell."""
    env = textarena.make("Minesweeper-v0")
    env.reset(num_players=1, seed=0)
    game = env
    while hasattr(game, "env"):
        game = game.env

    def step(cell):
        env.get_observation()
        return env.step(action=f"[{cell[0]} {cell[1]}]")[0]

    done = step((0, 0))
    cells = [(row, column) for row in range(game.rows) for column in range(game.cols)]
    mines = [(row, column) for row, column in cells if game.grid[row][column] == -1]
    hit, safe = 0, 0
    while not done:
        for _ in range(min(in_a_row, len(mines))):
            done, hit = step(mines.pop()), hit + 1
            if done:
                break
        else:
            left = [(r, c) for r, c in cells if game.grid[r][c] > 0 and not game.revealed[r][c]]
            left = left or [(r, c) for r, c in cells if game.grid[r][c] >= 0 and not game.revealed[r][c]]
            done, safe = step(left[0]), safe + 1
    return game.state.rewards[0], hit, safe


seen = {}
for in_a_row in (1, 2):
    reward, mines, safe = play(in_a_row)
    seen[in_a_row] = (reward == 1, mines)
    print(f"mines before each safe cell: {in_a_row}; stepped on {mines} mines and {safe} safe cells, reward {reward:.2f}")
sys.exit(seen != {1: (True, 10), 2: (False, 2)})
PY
