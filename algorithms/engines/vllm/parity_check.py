"""Whether vLLM serves the learner's weights: log-probs of a few tokens, there and here."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan
from typing import Any

from agentrl.algorithms.engines.vllm.serving import TrainedModel
from agentrl.algorithms.engines.vllm.weight_sync import VllmServers
from agentrl.errors import PolicyError

COMPLETIONS = "/v1/completions"


async def check(
    servers: VllmServers,
    learned: TrainedModel,
    name: str,
    policy: str,
    version: int,
    tolerance: float,
) -> None:
    """Raises PolicyError where log-probs of the probe differ.

    name: of the policy in calls; policy: in the learner."""
    probe = list(learned.probe)
    body = {"model": name, "prompt": probe, "max_tokens": 1, "prompt_logprobs": 0}
    answers = await servers.post(COMPLETIONS, body | {"temperature": 1.0})
    scored = learned.score(policy, probe)
    for answer in answers:
        served = _told(answer["choices"][0]["prompt_logprobs"][1:])
        gaps = [abs(a - b) for a, b in zip(served, scored, strict=True)]
        worst = max(range(len(gaps)), key=lambda i: inf if isnan(gaps[i]) else gaps[i])
        if not gaps[worst] <= tolerance:
            raise PolicyError(
                f"vLLM serves other weights than the learner's after publishing version "
                f"{version}: log-prob {served[worst]:.6f} against {scored[worst]:.6f}, tolerance "
                f"{tolerance:g} (engine.vllm.tolerance)"
            )


async def check_temperature(
    servers: VllmServers, learned: TrainedModel, name: str, policy: str, tolerance: float
) -> None:
    """Raises PolicyError where log-probs are not of what is sampled from."""
    probe = list(learned.probe)
    body = {"model": name, "prompt": probe, "max_tokens": 8, "temperature": 2.0, "seed": 0}
    body |= {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    for answer in await servers.post(COMPLETIONS, body):
        choice = answer["choices"][0]
        tokens, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        colder = learned.score(policy, probe + tokens)[-len(tokens) :]
        if all(abs(a - b) <= tolerance for a, b in zip(served, colder, strict=True)):
            raise PolicyError(
                "vLLM tells log-probs of another distribution than it samples from; start it "
                "with --logprobs-mode processed_logprobs"
            )


def _told(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [next(iter(row.values()))["logprob"] for row in rows]
