#!/usr/bin/env bash
# Natural guess: the seed of a game's reset fixes the game, as Gymnasium's does, and nothing else.
# What is so: TextArena seeds Python's generator for the whole process, so what is drawn after a reset,
# by whatever code, is the same after each reset with that seed.
# Why it matters: what explores, picks opponents or shuffles with `random` beside the games repeats itself
# in each rollout of a group, which compares rollouts that should differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check textarena==0.7.4 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PY'
import random, sys
from importlib.metadata import version
import textarena
print("textarena", version("textarena"))

def draws():
    env = textarena.make("FrozenLake-v0")
    env.reset(num_players=1, seed=3)
    return [random.randrange(1000) for _ in range(5)]

random.seed()  # from the system's entropy, as a process starts
first = draws()
random.seed()
second = draws()
print("drawn after two resets with one seed:", first, second)
sys.exit(first != second)
PY
