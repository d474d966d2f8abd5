"""Checks that vLLM computes with the learner's weights, by the log-probs of a text."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan

from agentrl.algorithms.engines.vllm.client import VllmClient
from agentrl.algorithms.engines.vllm.serving import ServedModel, TrainedModel
from agentrl.errors import PolicyError
from agentrl.types import POLICY

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Compares vLLM's log-probs with the learner's, up to a tolerance in nats."""

    learned: TrainedModel
    serving: ServedModel
    tolerance: float

    async def check_logprobs(self, policy: str, servers: VllmClient) -> None:
        """Raise PolicyError if vLLM's log-probs of the probe text differ from the learner's."""
        probe = list(self.learned.probe)
        body = {"model": self.serving.name(policy), "prompt": probe, "max_tokens": 1}
        body |= {"prompt_logprobs": 0, "temperature": 1.0}
        answers = await servers.post(COMPLETIONS, body)
        scored = self._scored(policy, probe)
        for answer in answers:
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            served = [next(iter(row.values()))["logprob"] for row in rows]
            gaps = [abs(a - b) for a, b in zip(served, scored, strict=True)]
            worst = max(range(len(gaps)), key=lambda i: inf if isnan(gaps[i]) else gaps[i])
            if not gaps[worst] <= self.tolerance:
                raise PolicyError(
                    f"vLLM serves other weights than the learner's after publishing version "
                    f"{self.serving.versions[policy]}: log-prob {served[worst]:.6f} against "
                    f"{scored[worst]:.6f}, tolerance {self.tolerance:g} (engine.vllm.tolerance)"
                )

    async def check_temperature(self, policy: str, servers: VllmClient) -> None:
        """Raise PolicyError if vLLM's log-probs ignore the temperature that it samples at."""
        probe = list(self.learned.probe)
        body = {"model": self.serving.name(policy), "prompt": probe, "max_tokens": 8}
        body |= {"seed": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        for answer in await servers.post(COMPLETIONS, body | {"temperature": 2.0}):
            choice = answer["choices"][0]
            tokens, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            pairs = zip(served, self._scored(policy, probe + tokens)[-len(tokens) :], strict=True)
            if all(abs(a - b) <= self.tolerance for a, b in pairs):  # those at temperature 1
                raise PolicyError(
                    "vLLM returns log-probs of another distribution than it samples from; start it "
                    "with --logprobs-mode processed_logprobs"
                )

    def _scored(self, policy: str, tokens: list[int]) -> list[float]:
        """The learner's log-probs. It has its own name for a whole model, unlike a fleet."""
        whole = next(iter(self.learned.adapters), POLICY)
        return self.learned.score(policy if self.serving.adapters else whole, tokens)
