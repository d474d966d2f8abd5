#!/usr/bin/env bash
# Natural guess: a game of TextArena that ends by illegal moves pays -1, the default of set_invalid_move.
# What is so: FrozenLake pays the share that was completed, and Slitherlink pays a text, because its
# arguments are swapped there: the number is the reason, and the reason the reward.
# Why it matters: a policy is paid for giving up by an illegal move, or every rollout of a game fails in
# float().
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
found = {}
for name in ("FrozenLake-v0", "Slitherlink-v0"):
    env = textarena.make(name)
    env.reset(num_players=1, seed=0)
    done = False
    while not done:
        env.get_observation()
        done, _ = env.step(action="nothing")
    while hasattr(env, "env"):
        env = env.env
    found[name] = env.state.rewards[0]
print(found)
sys.exit(not (found["FrozenLake-v0"] == 0.0 and isinstance(found["Slitherlink-v0"], str)))
PY
