"""Text worlds in which success is rare, and a tabular language model that can follow a hint.

The model has two tables of logits over the vocabulary: by the last state word (a clue, a room, a
bug) and by the previous token. Both are learned. What is not learned is that it reads: where its
prompt has a text between <z> and </z>, the word that stands there for the present step is `READS`
nats likelier. So a policy that is told a solution acts better than one that is not, as an
instruction model does, and a fact that a tool states ("red opens east") is learned by the same
table that acts on it. Untrained, it writes one of the action words at random.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agentrl.algorithms.data.batch import Batch, TokenRow
from agentrl.algorithms.learners.base import LearnerDefaults, LossCoefficients, StepReport
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.core.types import (
    Group,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    float32,
    int32,
)

ACTIONS = ("north", "east", "south", "west", "up", "down")
STATES = tuple(f"{c}{n}" for c in ("red", "blue", "green") for n in range(4))
WORDS = ("is", "opens", "the", "way", "was", "you", "see", "and", "step", "planner", "worker",
         "done", "task", "log", "note", "0", "1", "2", "3", ":")  # fmt: skip
MARKS = ("<system>", "<user>", "<assistant>", "<tool>", "<end>", "<z>", "</z>")
TEMPLATE = """\
{%- for message in messages -%}
{{ '<' + message.role + '>' + message.content + '<end>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}
"""
TOLD = "<z>{text}</z>"
READS = 4.0  # nats
FLUENT = 6.0  # nats by which an action word is likelier than others where it answers
Message = dict[str, Any]


def make_tokenizer() -> PreTrainedTokenizerFast:
    every = ["<unk>", " ", "\n", *MARKS, *WORDS, *ACTIONS, *STATES]
    vocabulary = {word: number for number, word in enumerate(every)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = Regex(r"\s|" + "|".join(MARKS) + "|:")
    made.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    return fast


# -- the model -------------------------------------------------------------------------------------


class TabularModel(LearnerDefaults):
    """A learner, and a sampler. rare: action words with a lower logit at first."""

    supplies = frozenset({"old", "sampler", "top_tokens", "observations"})

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rare: dict[str, float]) -> None:
        self.tokenizer = tokenizer
        self.words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.id = {word: number for number, word in enumerate(self.words)}
        size = len(self.words)
        by_state = torch.zeros(size, size, dtype=torch.float64)
        by_token = torch.zeros(size, size, dtype=torch.float64)
        by_token[self.id["<assistant>"], [self.id[word] for word in ACTIONS]] = FLUENT
        for word, less in rare.items():
            by_token[self.id["<assistant>"], self.id[word]] -= less
        self.tables = [by_state.requires_grad_(), by_token.requires_grad_()]
        self.optimizer = torch.optim.Adam(self.tables, lr=1.0)

    def read(self, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """At each position but the first: the last state word, the token before, and the word that
        is read for the step (-1: none)."""
        return _read(tuple(tokens), tuple(self.words))

    def logits(self, features: Sequence[tuple[int, int, int]]) -> Tensor:
        state, before, hint = torch.tensor(features).T
        found = self.tables[0][state] + self.tables[1][before]
        read = torch.zeros_like(found)
        at = (hint >= 0).nonzero().flatten()
        read[at, hint[at]] = READS
        return found + read

    @torch.no_grad()
    def next_logprobs(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Log-probs of the token after each prompt, [n, V]."""
        return self.logits([self.read([*prompt, 0])[-1] for prompt in prompts]).log_softmax(-1)

    def sample(
        self, prompts: Sequence[Sequence[int]], draw: torch.Generator
    ) -> list[tuple[int, float]]:
        """One token for each prompt, with its log-prob."""
        every = self.next_logprobs(prompts)
        tokens = torch.multinomial(every.exp(), 1, generator=draw)
        logprobs = every.gather(1, tokens)
        return list(zip(tokens[:, 0].tolist(), logprobs[:, 0].tolist(), strict=True))

    def _every(self, batch: Batch, places: Callable[[TokenRow], Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probs [n, V] and tokens [n] of some positions of all rows."""
        features: list[tuple[int, int, int]] = []
        tokens, heat = [], []
        for row in batch.rows:
            read, at = self.read(row.tokens.tolist()), places(row)
            features += [read[place - 1] for place in at.tolist()]
            tokens.append(row.tokens[at])
            own = row.temperature if places is _actions else torch.ones(len(at))
            heat.append(own.double())
        logits = self.logits(features) / torch.cat(heat)[:, None]
        return logits.log_softmax(-1), torch.cat(tokens)

    def logprobs(self, batch: Batch, of: str = "current") -> Tensor:
        with torch.no_grad():
            every, tokens = self._every(batch, _actions)
        return every.gather(1, tokens[:, None])[:, 0]

    def top(self, batch: Batch, k: int, of: str = "current") -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            every, tokens = self._every(batch, _actions)
        ids = every.scatter(1, tokens[:, None], torch.inf).topk(min(k, every.shape[1])).indices
        return ids, every.gather(1, ids)

    def topk_logprobs(self, batch: Batch, of: str = "current") -> Tensor:
        with torch.no_grad():
            return self._every(batch, _actions)[0].gather(1, batch.topk_tokens)

    def step(
        self,
        batch: Batch,
        coefficients: LossCoefficients,
        *,
        lr: float,
        critic: object = None,
        entropy_weights: Tensor | None = None,
        observation_weights: Tensor | None = None,
    ) -> StepReport:
        every, tokens = self._every(batch, _actions)
        ids = batch.topk_tokens if batch.topk_tokens.numel() else tokens[:, None]
        p = every.gather(1, ids)
        read = p.detach() if batch.topk_tokens.numel() else p.detach()[:, 0]
        psi = coefficients(read, torch.arange(batch.n_tokens))
        loss = -(
            (psi if psi.dim() == 2 else psi[:, None]) * p[:, : 1 if psi.dim() == 1 else None]
        ).sum()
        report = StepReport(logprobs=p.detach()[:, 0].float(), applied=True)
        report.topk_logprobs = p.detach().float() if batch.topk_tokens.numel() else None
        if observation_weights is not None:
            seen, answered = self._every(batch, lambda row: row.observed)
            said = seen.gather(1, answered[:, None])[:, 0]
            loss = loss - observation_weights @ said
            report.observations = said.detach().float()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([table.grad.norm() for table in self.tables if table.grad is not None])
        report.loss, report.grad_norm = float(loss.detach()), float(norm.norm())
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if report.grad_norm:
            self.optimizer.step()
        return report

    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


def _actions(row: TokenRow) -> Tensor:
    return row.actions


@lru_cache(2**16)
def _read(tokens: tuple[int, ...], words: tuple[str, ...]) -> list[tuple[int, int, int]]:
    found, state, step, role = [], 0, -1, ""
    z: list[str] | None = None
    lines: list[str] = []
    for token in tokens[:-1]:
        word = words[token]
        if word == "<z>":
            z = []
        elif word == "</z>":
            lines, z = "".join(z or []).split("\n"), None
        elif z is not None:
            z.append(word)
        elif word in STATES:
            state = token
        elif word in ("planner", "worker") and not role:
            role = word
        elif word == "<assistant>":
            step += 1
        hint = _hinted(lines, step, role) if word == "<assistant>" else ""
        found.append((state, token, words.index(hint) if hint else -1))
    return found


def _hinted(lines: Sequence[str], step: int, role: str) -> str:
    """The action word that the lines of z have for a step: "step 1: east", "the way was east", or
    the line of that number; of a team, among the lines of the role."""
    for line in lines:
        if match := re.match(r"step (\d): (\w+)", line):
            if int(match[1]) == step:
                return match[2]
            continue
        if match := re.match(r"the way was (\w+)", line):
            return match[1]
    own = [
        line.removeprefix(f"{role}: ") for line in lines if line.startswith(f"{role}: ")
    ] or lines
    word = own[step] if 0 <= step < len(own) else ""
    return word if word in ACTIONS else ""


# -- worlds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A task is a path of states; in each the policy writes a word, which is right or not. All must
    be right. answers: what the tool says after a word: nothing, "way" (the right word) or "fact"
    (the right word of some state of the path). broken: the share of tasks without any success.
    team: the last step is another role's, in a conversation of its own."""

    name: str
    source: str
    steps: int
    states: int
    answers: str = ""
    note: bool = False
    team: bool = False
    broken: float = 0.0
    rare: dict[str, float] = field(default_factory=dict)

    def rule(self, seed: int) -> dict[str, str]:
        """The right word of each state, which only the world knows."""
        draw = random.Random(f"{self.name} {seed}")
        usual = [word for word in ACTIONS if word not in self.rare]
        words = [usual[n % len(usual)] for n in range(self.states)]
        for n in range(0, self.states if self.rare else 0, 2):  # every other state needs a rare one
            words[n] = list(self.rare)[n // 2 % len(self.rare)]
        draw.shuffle(words)
        states = draw.sample(STATES, self.states)
        return dict(zip(states, words, strict=True))

    def task(self, rule: dict[str, str], draw: random.Random) -> dict[str, Any]:
        path = draw.sample(list(rule), self.steps)
        solution = [rule[state] for state in path]
        if self.team:
            roles = ["planner"] * (self.steps - 1) + ["worker"]
            solution = [f"{role}: {word}" for role, word in zip(roles, solution, strict=True)]
        broken = draw.random() < self.broken
        return {"path": path, "solution": "\n".join(solution), "broken": broken}


TOLD_WORLDS = (
    World("password in steps", "task:solution", 3, 12),
    World("rare join", "sibling", 2, 10, rare={"down": 2.0, "up": 2.0}),
    World("maze with answers", "next", 3, 12, answers="way"),
    World("repair", "error", 3, 12, note=True),
    World("two roles", "task:solution", 3, 12, team=True),
)
ECHO_WORLDS = (
    World("answers tell the way", "", 3, 12, answers="way", broken=0.5),
    World("answers tell facts", "", 3, 12, answers="fact", broken=0.5),
    World("a team with answers", "", 3, 12, answers="way", team=True, broken=0.5),
)


@dataclass
class Player:
    """Plays a world with the model as it is; calls have what a gateway would record."""

    world: World
    model: TabularModel
    rule: dict[str, str]
    draw: torch.Generator

    def __post_init__(self) -> None:
        self.chat = Chat(self.model.tokenizer, Codec(self.model.tokenizer))
        self.prompts: dict[tuple[str, ...], list[int]] = {}  # by the contents of the messages

    def groups(self, tasks: Sequence[dict[str, Any]], size: int, step: int) -> list[Group]:
        """A group of `size` rollouts for each task."""
        names = [f"{step}/{number}" for number in range(len(tasks))]
        games = [
            Game(self.world, self.rule, task, f"{name}/{index}", name, index)
            for name, task in zip(names, tasks, strict=True)
            for index in range(size)
        ]
        for number in range(self.world.steps):
            prompts = [self.encode(game.messages(number)) for game in games]
            sampled = self.model.sample(prompts, self.draw)
            for game, prompt, (token, logprob) in zip(games, prompts, sampled, strict=True):
                game.play(number, prompt, token, logprob, self.model.words[token], step)
        rows = [game.rollout(step) for game in games]
        return [
            Group(id=name, run="bench", step=step, rollouts=rows[at * size : (at + 1) * size])
            for at, name in enumerate(names)
        ]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        contents = tuple(message["content"] for message in messages)
        if contents not in self.prompts:
            self.prompts[contents] = list(self.chat.encode(messages))
        return self.prompts[contents]

    def score(self, tasks: Sequence[dict[str, Any]]) -> float:
        """The expected share of successes if all tasks can be solved, without sampling: what the
        model writes depends on the last state that it was shown, and on nothing before."""
        seen = [self.encode(opening("planner", state)) for state in self.rule]
        logprobs = self.model.next_logprobs(seen)
        right = [self.model.id[word] for word in self.rule.values()]
        chance = logprobs[range(len(right)), right].exp().tolist()
        by_state = dict(zip(self.rule, chance, strict=True))
        return fmean(prod(by_state[state] for state in task["path"]) for task in tasks)


@dataclass
class Game:
    """One rollout while it is played."""

    world: World
    rule: dict[str, str]
    task: dict[str, Any]
    id: str
    group: str
    index: int
    calls: list[Transition] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def role(self, number: int) -> str:
        return "worker" if self.world.team and number == self.world.steps - 1 else "planner"

    def messages(self, number: int) -> list[Message]:
        """Of call `number`: the conversation of its role so far."""
        path, role = self.task["path"], self.role(number)
        if number == 0 or role == "worker":
            return opening(role, path[number])
        before = self.calls[-1]
        tool = {"role": "tool", "content": self.answer(number - 1)}
        return [*before.messages, dict(before.answer or {}), tool]

    def play(
        self, number: int, prompt: list[int], token: int, logprob: float, word: str, step: int
    ) -> None:
        right = self.rule[self.task["path"][number]]
        if word != right:
            self.wrong.append(f"step {number}: {right}")
        self.calls.append(
            Transition(
                id=f"{self.id}/{number}", attempt=self.id, index=number, prompt=int32(prompt),
                completion=int32([token]), logprobs=float32([logprob]), role=self.role(number),
                version=step, messages=self.messages(number),
                answer={"role": "assistant", "content": word},
            )
        )  # fmt: skip

    def answer(self, number: int) -> str:
        """The tool's words after call `number`, which is not the last of its conversation; those
        of "way" name the right word, after which the next state."""
        path: list[str] = self.task["path"]
        state, then = path[number], f"you see {path[number + 1]}"
        if self.world.source == "next" and self.world.answers == "way":
            return f"the way was {self.rule[state]}\n{then}"
        about = {"way": state, "fact": path[(number * 2) % len(path)]}.get(self.world.answers)
        return f"{about} opens {self.rule[about]}\n{then}" if about else then

    def rollout(self, step: int) -> Rollout:
        good = not self.wrong and not self.task["broken"]
        note = self.wrong[0] if self.wrong and self.world.note else ""
        return Rollout(
            id=self.id, run="bench", group=self.group, index=self.index, task=self.task,
            purpose=Purpose.TRAIN, state=RolloutState.SUCCEEDED, step=step, attempts=1,
            attempt=self.id, result=None, failure=None,
            rewards=[Reward(value=float(good), note=note)], transitions=self.calls,
        )  # fmt: skip


def opening(role: str, state: str) -> list[Message]:
    return [{"role": "system", "content": role}, {"role": "user", "content": f"you see {state}"}]
