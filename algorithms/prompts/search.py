"""One prompt search: its candidates, its budget, and the proposal of new texts.

Always true: no batch and no question exceeds the budget; the search is a function of scores and
answers, so a restart repeats it from the store.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.prompts.records import Candidate, Reflection
from agentrl.config.learning import PromptsConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.types import Json, PromptText, Task

log = logging.getLogger("agentrl.algorithm")
Texts = dict[str, str]
"""Component -> prompt text."""
Batch = tuple[Texts, Sequence[int]]
"""Prompt texts, and the indices of the tasks to evaluate them on."""
FENCED = re.compile(r"```[^\n]*\n(.*)\n```", re.DOTALL)
MOST_REFUSED = 3  # invalid answers of the reflector in a row that end the search
KNOWN = ("id", "input")  # fields of a task that hold no answer
TEMPLATE_TOKENS = 64  # tokens that a chat template may add to a question
SHORTEST_LEAK = 4  # least characters of a held-out answer that counts as leaked
QUESTION = """An assistant was given these instructions:
```
{text}
```
Here is what it read and said with them in some tasks, and what was wrong with that:

{examples}

{ask} The new instructions have at most {length} characters. Keep what works, add what the assistant
must know about such tasks, and give no answers of single tasks. Write the whole new instructions
between lines of ```."""


def candidate_id(texts: Sequence[PromptText]) -> str:
    """A digest of the texts: equal for equal texts."""
    return blake2b(msgspec.json.encode(texts), digest_size=8).hexdigest()


class SearchEnd(Exception):
    """The budget is spent, or the score is perfect."""


class TaskResult(NamedTuple):
    """The result of one rollout."""

    score: float  # NaN: missing
    examples: Mapping[str, Mapping[str, str]] = {}  # by component, for the reflector
    failure: str = ""


class Backend(Protocol):
    """Runs rollouts, asks the reflector and stores candidates."""

    def play(
        self, batches: Sequence[tuple[Candidate, Sequence[int]]], *, traces: bool
    ) -> list[list[TaskResult]]:
        """Run all batches at once and wait for their end. traces: whether results have examples."""

    def ask(self, number: int, question: str, max_tokens: int | None) -> Reflection: ...

    def put(self, candidates: Sequence[Candidate]) -> None: ...

    def end_iteration(self, metrics: dict[str, float]) -> None: ...


@dataclass
class Search:
    """The state of a search. Tasks below `train` are for proposals, the others for validation."""

    config: PromptsConfig
    seed: list[PromptText]
    backend: Backend
    tasks: int
    run: str = "run"
    step: int = 0
    random_seed: int = 0
    answers: Collection[str] = ()  # of held-out tasks
    candidates: dict[str, Candidate] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)  # on all validation tasks, by candidate
    rollouts: int = 0
    tokens: int = 0
    _values: dict[tuple[str, int], float] = field(default_factory=dict)
    _missing: set[tuple[str, int]] = field(default_factory=set)
    _asked: int = 0
    _refused: int = 0
    _iteration: dict[str, float] = field(default_factory=dict)

    @property
    def train(self) -> int:
        """The number of tasks for proposals."""
        return self.tasks - self.config.validation

    @property
    def validation(self) -> range:
        return range(self.train, self.tasks)

    @property
    def seed_texts(self) -> Texts:
        return {text.component: text.text for text in self.seed}

    @property
    def best(self) -> Candidate:
        """The candidate with the highest score, the first of equal ones."""
        top = max(self.scores, key=lambda id: self.scores[id], default=None)
        return self.candidate(self.seed_texts) if top is None else self.candidates[top]

    def candidate(self, texts: Texts, parent: str = "", reflection: str | None = None) -> Candidate:
        """The candidate with these texts, added as proposed if it is new. reflection: the id of the
        reflection on `parent` that proposed it."""
        own = [replace(text, text=texts[text.component]) for text in self.seed]
        if (id := candidate_id(own)) not in self.candidates:
            fields: Any = {"state": "proposed", "texts": own, "reflection": reflection}
            parents = [parent] if parent else []
            self._put(Candidate(id=id, run=self.run, step=self.step, parents=parents, **fields))
        return self.candidates[id]

    def evaluate(self, batches: Sequence[Batch], *, traces: bool = False) -> list[list[TaskResult]]:
        """Evaluate batches; returns the result of each rollout. The parent's score replaces a
        missing one, so a failed rollout has no effect. Raises SearchEnd if the budget is too small,
        and if a candidate has a perfect score."""
        wanted = sum(len(tasks) for _, tasks in batches)
        if self.rollouts + wanted > self.config.budget:
            raise SearchEnd(f"the budget of {self.config.budget} rollouts is spent")
        first = not self.rollouts
        self.rollouts += wanted
        chosen = [(self.candidate(texts), tasks) for texts, tasks in batches]
        played = self.backend.play(chosen, traces=traces or first)
        if first:
            self._check_first(played[0])
        results = []
        for (candidate, tasks), given in zip(chosen, played, strict=True):
            pairs = zip(tasks, given, strict=True)
            rows = [one._replace(score=self._known(candidate, t, one.score)) for t, one in pairs]
            results.append(rows)
            if list(tasks) == list(self.validation):
                self.scores[candidate.id] = fmean(row.score for row in rows)
                self._put(replace(candidate, state="accepted"))
        if max(self.scores.values(), default=-math.inf) >= self.config.perfect_score:
            raise SearchEnd("a candidate has a perfect score")
        return results

    def _known(self, candidate: Candidate, task: int, score: float) -> float:
        me, parent = (candidate.id, task), (next(iter(candidate.parents), ""), task)
        if math.isnan(score) or (me not in self._values and parent in self._missing):
            self._missing.add(me)
            score = self._values.get(parent, 0.0)
        else:
            self._missing.discard(me)
        self._values[me] = score
        return score

    def _check_first(self, rows: Sequence[TaskResult]) -> None:
        if all(math.isnan(row.score) for row in rows):
            why = next((row.failure for row in rows if row.failure), "the verifier returned none")
            raise AgentRLError(
                f"no rollout with the seed texts has an outcome: {why}; correct that, and repeat "
                "the command"
            )
        for text in self.seed:
            if not any(text.component in row.examples for row in rows):
                raise ConfigError(
                    f"prompts.components.{text.component}: no call of the agent has the role "
                    f"{text.role!r}{f' and the tool {text.tool!r}' if text.tool else ''}; "
                    "`agentrl prompts find RUN` lists those of a run"
                )

    def propose(
        self, texts: Texts, component: str, shown: str, ask: str = "Write better instructions."
    ) -> Texts:
        """Let the reflector write a new text for a component; returns the texts, unchanged if its
        answer is invalid. shown: the examples. Raises AgentRLError for REFUSED invalid answers in a
        row."""
        length = self.config.max_length
        question = QUESTION.format(text=texts[component], examples=shown, ask=ask, length=length)
        reflection = self.ask(question)
        fenced = FENCED.search(reflection.answer)
        text = fenced[1].strip() if fenced else ""
        if problem := self._problem(text):
            self._refused += 1
            log.warning("a proposal for %s is refused: %s", component, problem)
            if self._refused >= MOST_REFUSED:
                raise AgentRLError(
                    f"prompts.reflector = {self.config.reflector!r}: {MOST_REFUSED} answers in a "
                    f"row were of no use, the last: {problem}; choose a larger model"
                )
            return texts
        self._refused = 0
        new = texts | {component: text}
        self.candidate(new, self.candidate(texts).id, reflection.id)
        return new

    def ask(self, question: str) -> Reflection:
        """Ask the reflector. Raises SearchEnd if the answer might exceed the token budget."""
        limit, left = self.config.max_reflection_tokens, None
        if limit:
            # A token has at least one byte.
            left = limit - self.tokens - len(question.encode()) - TEMPLATE_TOKENS
            if left < self.config.max_length // 4:
                raise SearchEnd(f"the budget of {limit} tokens for reflections is spent")
        self._asked += 1
        reflection = self.backend.ask(self._asked, question, left)
        self.tokens += reflection.prompt_tokens + reflection.completion_tokens
        return reflection

    def _problem(self, text: str) -> str:
        if not text:
            return "there is no text between lines of ```"
        if len(text) > self.config.max_length:
            return f"{len(text)} characters, and prompts.max_length = {self.config.max_length}"
        known = " ".join(text.text for text in self.seed)
        leaks = (
            x for x in self.answers if len(x) >= SHORTEST_LEAK and x in text and x not in known
        )
        leak = next(leaks, None)
        return "" if leak is None else f"it has the answer of a held-out task, {leak[:40]!r}"

    def note(self, **metrics: float) -> None:
        """Add metrics of the current iteration."""
        self._iteration |= {f"prompts/{name}": value for name, value in metrics.items()}

    def end_iteration(self) -> None:
        rejected = [c for c in self.candidates.values() if c.state == "proposed"]
        self._put(*(replace(c, state="rejected") for c in rejected))
        metrics = {"val": self.scores.get(self.best.id, math.nan), "rollouts": self.rollouts}
        metrics |= {"reflections": self._asked, "reflection_tokens": self.tokens}
        metrics |= {f"length/{text.component}": len(text.text) for text in self.best.texts}
        self.note(**{name: float(value) for name, value in metrics.items()})
        self.backend.end_iteration(self._iteration)
        self._iteration = {}

    def _put(self, *candidates: Candidate) -> None:
        self.candidates |= {candidate.id: candidate for candidate in candidates}
        if candidates:
            self.backend.put(candidates)


def as_text(rows: Sequence[TaskResult], component: str) -> str:
    """The examples of a component as text for the reflector."""
    examples = (row.examples[component] for row in rows if component in row.examples)
    return "\n\n".join("\n".join(f"{k}: {v}" for k, v in one.items()) for one in examples)


def leaves(value: Json) -> set[str]:
    """The texts and numbers of a payload."""
    if isinstance(value, Mapping):
        return set().union(*map(leaves, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(leaves, value))
    return set() if value is None or isinstance(value, bool) else {str(value)}


def answers(tasks: Sequence[Task], heldout: Sequence[Task]) -> set[str]:
    """The texts and numbers that only held-out tasks have, in fields for the verifier."""
    own, shared = (
        leaves([value for task in each for key, value in task.items() if key not in KNOWN])
        for each in (heldout, tasks)
    )
    return own - shared
