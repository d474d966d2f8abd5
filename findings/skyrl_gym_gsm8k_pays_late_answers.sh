#!/usr/bin/env bash
# Natural guess: in SkyRL's environment gsm8k_multi_turn a rollout that is right at once is worth the most.
# What is so: a wrong number in the right format is paid at each of up to five turns, and the game goes on until the
# number is right. A rollout's rewards are .04 for each wrong turn and 1.0 for the right one: right at once 1.0, wrong four
# times and then right 1.16.
# Why it matters: with the sum of rewards as the outcome a policy that knows the answer is paid for holding it back, and
# GRPO ranks the rollout that guessed four times above the one that did not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check skyrl-gym==0.4.0 func_timeout==4.3.5 omegaconf==2.3.0 \
    pandas==2.3.3 requests==2.32.5
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

import skyrl_gym


def total(*answers: str) -> float:
    task = {"reward_spec": {"ground_truth": "16"}, "max_turns": 5}
    game = skyrl_gym.make("gsm8k_multi_turn", extras=task)
    game.init([])
    steps = [game.step(f"#### {answer}") for answer in answers]
    assert steps[-1]["done"]
    return round(sum(step["reward"] for step in steps), 6)


print("skyrl-gym", version("skyrl-gym"))
seen = total("16"), total("7", "16"), total("1", "2", "3", "4", "16"), total("1", "2", "3", "4", "5")
for name, reward in zip(("at once", "at the second turn", "at the fifth turn", "never"), seen, strict=True):
    print(f"right {name}: {reward}")
sys.exit(seen != (1.0, 1.04, 1.16, 0.2))
PY
