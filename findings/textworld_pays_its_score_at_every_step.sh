#!/usr/bin/env bash
# Natural guess: what a step of TextWorld returns beside the observation is the reward of that command: `Environment.step`
# documents "a reward for performing that command", and textworld.gym registers, makes and steps games as Gym does.
# What is so: it is the score so far, in both (textworld.gym calls it that), and each command that follows returns it again.
# A game of three points, won in four steps, adds up to 7, and with ten more looks to 17.
# Why it matters: the sum of a rollout's rewards, which trainers take for its return, pays a point once for every step that
# comes after it. The best policy takes what is near and then waits; finishing the game ends its income.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check textworld==1.7.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

import textworld
import textworld.gym
from textworld import GameMaker
from textworld.generator.game import Event, Quest

maker = GameMaker()
kitchen = maker.new_room("Kitchen")
maker.set_player(kitchen)
fruits = [maker.new(type="o", name=name) for name in ("apple", "pear", "plum")]
kitchen.add(*fruits)
maker.quests = [
    Quest(win_events=[Event(conditions={maker.new_fact("in", fruit, maker.inventory)})], reward=1) for fruit in fruits
]
maker.build().save("game.json")
name = textworld.gym.register_game("game.json")


def rewards(commands: list[str], gym: bool) -> list[int]:
    game = textworld.gym.make(name) if gym else textworld.start("game.json")
    game.reset()
    return [game.step(command)[1] for command in commands]


print("textworld", version("textworld"))
short = ["take apple", "look", "take pear", "take plum"]
long = ["take apple", *["look"] * 11, "take pear", "take plum"]
seen = {}
for commands in (short, long):
    for gym in (False, True):
        paid = rewards(commands, gym)
        seen[len(commands), gym] = sum(paid)
        print(f"{len(commands)} steps, {'textworld.gym' if gym else 'textworld'}: {paid}, {sum(paid)} in all")
says = "reward for performing" in textworld.core.Environment.step.__doc__
sys.exit(seen != {(4, False): 7, (4, True): 7, (14, False): 17, (14, True): 17} or not says)
PY
