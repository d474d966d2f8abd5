"""Remote teachers, where `teacher.model` names one of [upstreams]: servers whose `prompt_logprobs`,
of vLLM, are the log-probs of the policy's sampled tokens and of the most probable alternatives.

Invariant: a row is one request, so the common prefix of a conversation's calls is sent once;
log-probs are at temperature 1; both sides have the same vocabulary. Responses are not cached,
because no row occurs twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import aiohttp
import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algorithms.chat_completions import ModelServer, post, upstream_endpoint
from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.learners.base import Teacher
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.load import vocabulary_size
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import RunConfig
from agentrl.core.errors import AgentRLError, PolicyError, TrainingError

CONCURRENCY = 8  # requests at a time: the log-probs of each take memory of the server
CHECKED_TOKENS = 64  # token ids to compare, spread over all and again of the last, the added tokens


class _Token(msgspec.Struct):
    logprob: float
    decoded_token: str | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Token] | None] | None = None


class _Reply(msgspec.Struct):
    """The fields of a response that are used."""

    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class RemoteTeacher:
    """A teacher at an endpoint."""

    name: str
    endpoint: ModelServer
    k: int  # tokens at each position, including the sampled one
    tokenizer: Tokenizer  # the policy's tokenizer
    vocabulary: int  # number of the policy's token ids

    async def check(self) -> None:
        """Raise PolicyError unless the server answers, and has the policy's vocabulary."""
        vocab = sorted(self.tokenizer.get_vocab().values())
        ids = vocab[:: len(vocab) // CHECKED_TOKENS + 1] + vocab[-CHECKED_TOKENS:]
        try:
            async with aiohttp.ClientSession() as session:
                answers = await self._ask(session, [ids[0], *ids])
        except AgentRLError as error:
            raise PolicyError(
                f"{error}. It must be vLLM with the policy's vocabulary ({len(vocab)} tokens) and "
                f"--max-logprobs {self.k} or more"
            ) from None
        for id, tokens in zip(ids, answers, strict=True):
            theirs, ours = tokens[id].decoded_token or "", self.tokenizer.decode([id])
            # The text of a partial character depends on the tokens before it.
            if theirs.strip() != ours.strip() and "\ufffd" not in theirs + ours:
                raise PolicyError(
                    f"{self.name}: token {id} is {theirs!r} there and {ours!r} here, so it cannot "
                    "read the policy's tokens; choose a teacher with the policy's vocabulary"
                )
            if any(token.logprob > 0.01 for token in tokens.values()):
                raise PolicyError(
                    f"{self.name} returns logits; start it with --logprobs-mode raw_logprobs"
                )

    def top(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Learner.top`, for k tokens. Raises TrainingError for tokens sampled at a temperature
        other than 1, PolicyError for a token outside the policy's vocabulary."""
        for row in batch.rows:
            if len(others := row.temperature[row.temperature != 1]):
                raise TrainingError(
                    f"{self.name} returns log-probs at temperature 1, and tokens were sampled at "
                    f"{float(others[0]):g}; set sampling.override_agent = true, or load a "
                    "teacher.model"
                )
        pairs = asyncio.run(self._pairs(batch.rows))
        ids = pairs[..., 0].long()
        if (ids >= self.vocabulary).any():
            raise PolicyError(
                f"{self.name} names token {int(ids.max())}, and the policy has {self.vocabulary}; "
                "choose a teacher with the policy's vocabulary"
            )
        return ids, pairs[..., 1].float()

    async def _pairs(self, rows: Sequence[TokenRow]) -> Tensor:
        """Token ids and their log-probs, float64 [N, K, 2]."""
        slots = asyncio.Semaphore(CONCURRENCY)
        async with aiohttp.ClientSession() as session:

            async def ask(row: TokenRow) -> Tensor:
                tokens = row.tokens[: int(row.actions[-1]) + 1].tolist()
                async with slots:
                    answer = await self._ask(session, tokens)
                pairs = [self._best(answer[at - 1], tokens[at]) for at in row.actions.tolist()]
                return torch.tensor(pairs, dtype=torch.float64)

            empty = torch.empty(0, self.k, 2, dtype=torch.float64)
            return torch.cat([empty, *await asyncio.gather(*map(ask, rows))])

    def _best(self, named: dict[int, _Token], sampled: int) -> list[tuple[int, float]]:
        """The sampled token and the k - 1 most probable others, with their log-probs."""
        others = sorted(named.keys() - {sampled}, key=lambda id: -named[id].logprob)
        return [(id, named[id].logprob) for id in (sampled, *others[: self.k - 1])]

    async def _ask(
        self, session: aiohttp.ClientSession, tokens: list[int]
    ) -> list[dict[int, _Token]]:
        """For each position except the first: the log-probs of its token and of the most probable
        tokens."""
        fields = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": self.k if self.k > 1 else 0}
        content = await post(session, self.endpoint, "completions", self.name, **fields)
        try:
            rows = msgspec.json.decode(content, type=_Reply).choices[0].prompt_logprobs or []
        except (msgspec.DecodeError, IndexError):
            rows = []
        pairs = zip(rows[1:], tokens[1:], strict=False)
        complete = [row for row, id in pairs if row and id in row and len(row) >= self.k]
        if len(complete) != len(tokens) - 1:
            raise PolicyError(
                f"{self.name}: {self.endpoint.url}/completions answers without the prompt_logprobs "
                "that the request asks for"
            )
        return complete


def make_teacher(
    config: RunConfig, algo: Algo, policy: PreTrainedModel, tokenizer: Tokenizer
) -> RemoteTeacher | None:
    """The remote teacher of a policy, if it has one. config: the policy's view of the run."""
    name, size = config.teacher_server, vocabulary_size(policy)
    if not name:
        return None
    k = min(algo.distill.k, size) if algo.distill else 1
    title, endpoint = f"teacher.model = {name!r}", upstream_endpoint(config, name)
    return RemoteTeacher(title, endpoint, k, tokenizer, size)


def with_teacher_server(updater: Updater, model: LoadedModel) -> Updater:
    """The updater of a policy with its teacher, if that is behind a server."""
    if not updater.config.teacher_server:
        return updater
    teacher = make_teacher(updater.config, updater.algo, model.model, model.tokenizer)
    return replace(updater, teacher=teacher)


async def check_teachers(teachers: Iterable[Teacher | None]) -> None:
    """Raise PolicyError for a server that does not answer, or has another vocabulary."""
    for teacher in teachers:
        if isinstance(teacher, RemoteTeacher):
            await teacher.check()
