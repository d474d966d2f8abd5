"""An environment that verifiers brings: products of reasoning-gym, answered in <answer> tags."""

from __future__ import annotations

from typing import Any

import verifiers as vf


def load_environment() -> Any:
    config = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    gym = [{"name": "products", "weight": 1, "config": config}]
    return vf.ReasoningGymEnv(gym=gym, num_train_examples=200, num_eval_examples=400)
