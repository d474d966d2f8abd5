"""Prompt search: GEPA and APO over the agent's texts, their candidates, budget and results.

Invariant: no batch exceeds the budget; the search is a function of scores and answers, so a
restart repeats it from the store, which keeps candidates and calls to the reflector as documents.
Texts come from their files or from the result of a search; possible components are texts that the
calls of a role share. A search writes the best texts and their lineage to files, and a summary to
the console.

ProTeGi (arXiv 2305.03495): automatic prompt optimisation with textual gradients and beam search,
with the budget of Agent Lightning's APO: two parents, two children each, a few tasks a round.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from hashlib import blake2b
from itertools import cycle, islice
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from agentrl.core.config import RunConfig
from agentrl.core.config.learning import MINIBATCH, PromptComponent, PromptsConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.types import (
    INSTRUCTION_ROLES,
    Json,
    PromptText,
    Record,
    Task,
    Transition,
    are_shares,
    score_text,
)
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.rows import storable_text

log = logging.getLogger("agentrl.algorithm")


Texts = dict[str, str]
"""Component -> prompt text."""

Batch = tuple[Texts, Sequence[int]]
"""Prompt texts, and the indices of the tasks to evaluate them on."""

FENCED = re.compile(r"```[^\n]*\n(.*)\n```", re.DOTALL)
MAX_INVALID = 3  # consecutive invalid answers of the reflector that end the search
QUESTION_FIELDS = ("id", "input")  # fields of a task that hold no answer
# Characters of a text: longer texts tend to be repetitive and make every call more expensive.
MAX_LENGTH = 4000
MIN_LEAK = 4  # characters of a held-out answer, from which it counts as leaked


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
    examples: Mapping[str, Mapping[str, str]] = {}  # component -> example for the reflector
    failure: str = ""


class Backend(Protocol):
    """Runs rollouts, asks the reflector and stores candidates."""

    def play(
        self, batches: Sequence[tuple[Candidate, Sequence[int]]], *, traces: bool
    ) -> list[list[TaskResult]]:
        """Run all batches concurrently and wait for their end. traces: whether results have
        examples."""

    def ask(self, number: int, question: str) -> Reflection: ...

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
    answers: Collection[str] = ()  # right answers of held-out tasks
    candidates: dict[str, Candidate] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)  # on all validation tasks, by candidate
    rollouts: int = 0
    tokens: int = 0  # prompt and completion tokens of the reflector
    _values: dict[tuple[str, int], float] = field(default_factory=dict)
    _missing: set[tuple[str, int]] = field(default_factory=set)
    _asked: int = 0
    _invalid: int = 0  # consecutive invalid answers
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
        """The candidate with these texts; a new one is added in the state "proposed". reflection:
        the id of the reflection on `parent` that proposed it."""
        new_texts = [replace(text, text=texts[text.component]) for text in self.seed]
        if (id := candidate_id(new_texts)) not in self.candidates:
            fields: Any = {"state": "proposed", "texts": new_texts, "reflection": reflection}
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
        for (candidate, tasks), scored in zip(chosen, played, strict=True):
            pairs = zip(tasks, scored, strict=True)
            rows = [
                result._replace(score=self._score_of(candidate, t, result.score))
                for t, result in pairs
            ]
            results.append(rows)
            if list(tasks) == list(self.validation):
                self.scores[candidate.id] = fmean(row.score for row in rows)
                self._put(replace(candidate, state="accepted"))
        if max(self.scores.values(), default=-math.inf) >= self.config.perfect_score:
            raise SearchEnd("a candidate has a perfect score")
        return results

    def _score_of(self, candidate: Candidate, task: int, score: float) -> float:
        key, parent = (candidate.id, task), (next(iter(candidate.parents), ""), task)
        if math.isnan(score) or (key not in self._values and parent in self._missing):
            self._missing.add(key)
            score = self._values.get(parent, 0.0)
        else:
            self._missing.discard(key)
        self._values[key] = score
        return score

    def _check_first(self, rows: Sequence[TaskResult]) -> None:
        if all(math.isnan(row.score) for row in rows):
            why = next((row.failure for row in rows if row.failure), "the verifier returned none")
            raise AgentRLError(
                f"no rollout with the seed texts has an outcome: {why}; fix the cause and rerun"
            )
        for text in self.seed:
            if not any(text.component in row.examples for row in rows):
                raise ConfigError(
                    f"prompts.components.{text.component}: no call of the agent has the role "
                    f"{text.role!r}{f' and the tool {text.tool!r}' if text.tool else ''}; "
                    "`agentrl prompts RUN_FILE --find` lists those of its run"
                )

    def propose(
        self, texts: Texts, component: str, shown: str, ask: str = "Write better instructions."
    ) -> Texts:
        """Let the reflector write a new text for a component; returns the texts, unchanged if its
        answer is invalid. shown: the examples. Raises AgentRLError for MAX_INVALID consecutive
        invalid answers."""
        question = QUESTION.format(
            text=texts[component], examples=shown, ask=ask, length=MAX_LENGTH
        )
        reflection = self.ask(question)
        fenced = FENCED.search(reflection.answer)
        text = fenced[1].strip() if fenced else ""
        if problem := self._problem(text):
            self._invalid += 1
            log.warning("a proposal for %s is rejected: %s", component, problem)
            if self._invalid >= MAX_INVALID:
                raise AgentRLError(
                    f"prompts.reflector = {self.config.reflector!r}: {MAX_INVALID} consecutive "
                    f"answers were invalid, the last: {problem}; choose a larger model"
                )
            return texts
        self._invalid = 0
        new = texts | {component: text}
        self.candidate(new, self.candidate(texts).id, reflection.id)
        return new

    def ask(self, question: str) -> Reflection:
        """Send a request to the reflector."""
        self._asked += 1
        reflection = self.backend.ask(self._asked, question)
        self.tokens += reflection.prompt_tokens + reflection.completion_tokens
        return reflection

    def _problem(self, text: str) -> str:
        if not text:
            return "there is no text between lines of ```"
        if len(text) > MAX_LENGTH:
            return f"it has {len(text)} characters, and {MAX_LENGTH} are allowed"
        original = " ".join(text.text for text in self.seed)
        leaks = (x for x in self.answers if len(x) >= MIN_LEAK and x in text and x not in original)
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
    return "\n\n".join("\n".join(f"{k}: {v}" for k, v in example.items()) for example in examples)


def leaves(value: Json) -> set[str]:
    """The texts and numbers of a payload."""
    if isinstance(value, Mapping):
        return set().union(*map(leaves, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(leaves, value))
    return set() if value is None or isinstance(value, bool) else {str(value)}


def answers(tasks: Sequence[Task], heldout: Sequence[Task]) -> set[str]:
    """The texts and numbers that only held-out tasks have, in fields for the verifier."""
    heldout_only, shared = (
        leaves(
            [value for task in group for key, value in task.items() if key not in QUESTION_FIELDS]
        )
        for group in (heldout, tasks)
    )
    return heldout_only - shared


BEAM_WIDTH = 2  # candidates that survive a round
CHILDREN = 2  # children of each surviving candidate
ROUND_SHARE = 2 / 3  # fraction of the validation tasks on which a round compares candidates


CRITIQUE = """An assistant was given these instructions:

{text}

With them it read and said this in some tasks, with these faults:

{examples}

Say in a few sentences what the instructions lack or have wrong, so that these faults arose."""


def apo_search(search: Search) -> None:
    """Search until SearchEnd is raised."""
    rng = random.Random(search.random_seed)
    beam = [search.seed_texts]
    search.evaluate([(beam[0], search.validation)])
    components = cycle(search.seed_texts)
    while True:
        parents = [beam[i % len(beam)] for i in range(BEAM_WIDTH) for _ in range(CHILDREN)]
        children = [_child(search, texts, next(components), rng) for texts in parents]
        beam = _best(search, [*beam, *children], rng)
        if search.candidate(beam[0]).id not in search.scores:
            search.evaluate([(beam[0], search.validation)])
        search.end_iteration()


def _child(search: Search, texts: Texts, component: str, rng: random.Random) -> Texts:
    """Edit one component by a critique of some rollouts: the critique is the "gradient", the edit
    the "step"."""
    tasks = rng.sample(range(search.train), min(MINIBATCH, search.train))
    (rows,) = search.evaluate([(texts, tasks)], traces=True)
    shown = as_text(rows, component)
    gradient = search.ask(CRITIQUE.format(text=texts[component], examples=shown)).answer
    return search.propose(texts, component, gradient, "Correct that.")


def _best(search: Search, pool: list[Texts], rng: random.Random) -> list[Texts]:
    """The best BEAM_WIDTH of a pool on a sample of the validation tasks, evaluated together."""
    unique = list({search.candidate(texts).id: texts for texts in pool}.values())
    tasks = rng.sample(search.validation, max(1, int(ROUND_SHARE * len(search.validation))))
    played = search.evaluate([(texts, tasks) for texts in unique])
    means = [fmean(row.score for row in rows) for rows in played]
    ranked = sorted(range(len(unique)), key=lambda i: -means[i])
    return [unique[i] for i in islice(ranked, BEAM_WIDTH)]


def prompt_texts(config: RunConfig, directory: Path | None = None) -> list[PromptText]:
    """The components of a run with the texts of their files, or of the files in `directory`. Raises
    ConfigError for missing or empty files, and if a text contains another one."""
    components: list[PromptText] = []
    for name, setting in config.prompts.components.items():
        component = PromptComponent(file=setting) if isinstance(setting, str) else setting
        seed = _text(name, config.path(component.file))
        text = _text(name, directory / f"{name}.txt") if directory else seed
        role, seed_text = component.role or name, "" if component.insert else seed
        for other in (
            listed for listed in components if (listed.role, listed.tool) == (role, component.tool)
        ):
            if seed_text in other.seed or other.seed in seed_text:
                raise ConfigError(
                    f"prompts.components.{name}: {other.component} has the same role {role!r}, and "
                    "one text contains the other; make them one component"
                )
        components.append(
            PromptText(component=name, role=role, seed=seed_text, text=text, tool=component.tool)
        )
    return components


def found_texts(config: RunConfig) -> Path | None:
    """The folder of texts from the settings or from a search; None if it does not exist."""
    folder = Path(config.prompts.directory or Path(config.output, "prompts"))
    return folder if folder.is_dir() else None


def _text(name: str, file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"prompts.components.{name}: there is no file {file}")
    if not (text := file.read_text(encoding="utf-8").strip()):
        raise ConfigError(f"prompts.components.{name}: {file} is empty")
    return text


CANDIDATE, REFLECTION = "candidate", "reflection"  # kinds of documents


class Candidate(Record, frozen=True):
    """Texts in place of the agent's own. Rollouts with its `id` give its score."""

    id: str  # a digest of the texts
    run: str
    step: int  # step of the search or training run that created it
    parents: list[str]
    state: Literal["proposed", "rejected", "accepted", "chosen"]
    texts: list[PromptText]
    reflection: str | None = None  # id of the reflection that wrote its newest text


class Reflection(Record, frozen=True):
    """A question to a model that proposes texts, and its answer."""

    id: str
    run: str
    step: int
    question: str
    answer: str
    prompt_tokens: int = 0  # counted by the reflector's server
    completion_tokens: int = 0
    seconds: float = 0.0


async def put_candidates(store: Store, run: str, candidates: Sequence[Candidate]) -> None:
    """Add candidates of a run; for existing ones only the state is updated."""
    stored = {candidate.id: candidate for candidate in await candidates_of(store, run)}
    new = [
        replace(stored.get(candidate.id, candidate), state=candidate.state)
        for candidate in candidates
    ]
    documents = {candidate.id: msgspec.to_builtins(candidate) for candidate in new}
    await store.put_documents(run, CANDIDATE, documents, replace=True)


async def candidates_of(store: Store, run: str) -> list[Candidate]:
    """The candidates of a run in the order of their creation."""
    documents = await store.documents(run, CANDIDATE)
    return msgspec.convert([*documents.values()], list[Candidate])


async def add_reflection(store: Store, reflection: Reflection) -> None:
    """Add a call to the reflector; if the id exists, the first call is kept."""
    texts = {name: storable_text(getattr(reflection, name)) for name in ("question", "answer")}
    document = msgspec.to_builtins(replace(reflection, **texts))
    await store.put_documents(reflection.run, REFLECTION, {reflection.id: document})


async def reflections_of(store: Store, run: str) -> list[Reflection]:
    """The calls of a run to the reflector, in order."""
    documents = await store.documents(run, REFLECTION)
    return msgspec.convert([*documents.values()], list[Reflection])


async def write_texts(store: Store, config: RunConfig, folder: Path) -> Candidate:
    """Write the chosen candidate's texts and lineage.json to a folder; returns the candidate."""
    candidates = await candidates_of(store, config.name)
    best = next((c for c in reversed(candidates) if c.state == "chosen"), None)
    if best is None:
        raise AgentRLError(f"{config.name}: the search has not ended; rerun the command")
    for text in best.texts:
        (folder / f"{text.component}.txt").write_text(f"{text.text}\n", encoding="utf-8")
    scores: dict[str | None, list[float]] = {}
    for rollout in await store.rollouts(config.name):
        if not math.isnan(rollout.reward()):
            scores.setdefault(rollout.candidate, []).append(rollout.reward())
    lineage = [
        {
            "id": candidate.id,
            "parents": candidate.parents,
            "state": candidate.state,
            "rollouts": len(scores.get(candidate.id, [])),
            "mean": fmean(scores[candidate.id]) if scores.get(candidate.id) else None,
            "texts": {text.component: text.text for text in candidate.texts},
        }
        for candidate in candidates
    ]
    file = folder / "lineage.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(lineage)))
    return best


async def report(store: Store, config: RunConfig, best: Candidate) -> list[str]:
    """Lines with the diff of the texts, the held-out scores and the cost."""
    lines: list[str] = []
    for text in best.texts:
        old, new = prompt_lines(text.seed), prompt_lines(text.text)
        lines += unified_diff(old, new, text.component, f"{text.component} (best)", lineterm="")
    metrics: dict[str, float] = {}
    for row in await store.steps(config.name):
        metrics |= row.metrics
    before, after = (metrics.get(f"prompts/heldout{x}", float("nan")) for x in ("_before", ""))
    share = are_shares({"eval/score": score} for score in (before, after))
    reflections = await reflections_of(store, config.name)
    tokens = sum(
        reflection.prompt_tokens + reflection.completion_tokens for reflection in reflections
    )
    played = metrics.get("prompts/rollouts", 0.0)
    lines += [
        f"held-out score {score_text(before, share)} -> {score_text(after, share)}",
        f"{played:.0f} rollouts of at most {config.prompts.budget}, {len(reflections)} reflections "
        f"with {tokens} tokens",
    ]
    return lines


def prompt_lines(text: str) -> list[str]:
    """The sentences of a text as lines, for a diff by sentence."""
    return [line for part in text.splitlines() for line in part.replace(". ", ".\n").split("\n")]


async def find(store_url: str, run: str, rollouts: int = 20) -> str:
    """Possible components as a table of a run file: for each role, the longest common prefix of its
    system messages, and its tools."""
    async with open_store(store_url, readonly=True) as store:
        calls: list[Transition] = []
        for rollout in await store.rollouts(run, limit=rollouts):
            trace = await store.trace(rollout.id)
            calls += trace.transitions if trace else []
    if not calls:
        raise ConfigError(f"run {run!r} has no calls in {store_url}: run it first")
    return "\n\n".join(_component(role, calls) for role in sorted({call.role for call in calls}))


def _component(role: str, calls: list[Transition]) -> str:
    calls_of_role = [call for call in calls if call.role == role]
    texts = [text for call in calls_of_role if (text := _system(call.messages))]
    shared = commonprefix(texts)  # noqa: RUF071 - of characters
    tools = Counter(name for call in calls_of_role for name in _tools(call.tools))
    lines = [f"# {role}: {len(calls_of_role)} calls, tools: {', '.join(tools) or 'none'}"]
    if shared.strip():
        text = shared.strip().replace("\n", "\n# ")
        lines += [f"# write to prompts/{role}.txt:", f"# {text}", f'{role} = "prompts/{role}.txt"']
    else:
        lines.append(f'{role} = {{ file = "prompts/{role}.txt", insert = true }}  # has no text')
    return "\n".join(lines)


def _system(messages: list[dict[str, Json]]) -> str:
    content = next((m.get("content") for m in messages if m.get("role") in INSTRUCTION_ROLES), "")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return str(next(filter(None, texts), ""))


def _tools(tools: list[dict[str, Any]]) -> Iterator[str]:
    for tool in tools:
        yield str((tool.get("function") or {}).get("name"))
