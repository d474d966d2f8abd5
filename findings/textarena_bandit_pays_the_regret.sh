#!/usr/bin/env bash
# Natural guess: at the end of TextArena's Bandit, where the best of five buttons has to be named, the best button earns the
# most, and of the others a better one earns more than a worse one.
# What is so: each earns its regret as a reward, which is the chance of the best button to pay minus its own. The best earns 0,
# and the worst the most, up to 0.45 in Bandit-v0. The text says "You chose an incorrect button" in each case: the name is
# compared with the whole table of chances, which it never equals.
# Why it matters: a policy is taught to name the button that paid least, by every difference within a group; the mean reward
# rises while the choices get worse, and the right answer looks like a failed rollout.
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


def final(button):
    """The reward of a final choice, and the chance of each button, of the game with one seed."""
    env = textarena.make("Bandit-v0")
    env.reset(num_players=1, seed=3)
    done, presses = False, 0
    while not done:
        env.get_observation()
        done, _ = env.step(action=f"[{button}]")
        presses += 1
    while hasattr(env, "env"):
        env = env.env
    assert presses == env.num_turns + 1
    return env.state.rewards[0], env.state.game_state["ground_truth"]


print("textarena", version("textarena"))
_, chances = final("red")
order = sorted(chances, key=chances.get, reverse=True)
rewards = {}
for button in order:
    rewards[button], same = final(button)
    assert same == chances
    print(f"{button}: pays {chances[button]:.2f} of the time, named at the end it earns {rewards[button]:.2f}")
best, *others = (rewards[button] for button in order)
sys.exit(best != 0.0 or others != sorted(others) or not 0 < others[0] < others[-1])
PY
