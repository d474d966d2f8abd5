"""Learning from privileged text: the policy's calls are scored again with a text z in their prompts
that only training knows (a solution, a sibling's success, an error, what came next, what a user
said). The difference is a divergence to descend, or a weight of the host's advantage.

z stands before the first message after the system prompt, rendered by the model's chat template; a
user's reaction stands after the question that it is about. Only the difference is stored. SRPO's
weights by entropy (arXiv 2604.02288), SDPG's schedule (2606.04036) and HERO's reflection on what
came next (2606.11559) are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from statistics import fmean
from typing import Any, Literal

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from agentrl.algorithms.credit.core import weighted_sum
from agentrl.algorithms.credit.told import (
    EVIDENCE,
    STYLE,
    TOLD,
    GapState,
    ToldBelief,
    ToldCredit,
    ToldGap,
    ToldScale,
    ToldShare,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.data.merge import (
    build_batch,
    counterfactual,
    map_calls,
    new_messages,
    trainable,
)
from agentrl.algorithms.model.chat import RequestError, text_content
from agentrl.algorithms.objective.core import Algo, TopKDistillation
from agentrl.algorithms.objective.prepare import TrainedPolicy, with_call_rewards
from agentrl.algorithms.preferences.turns import corrections, last_user_text, reasked, turns
from agentrl.algorithms.presets.declare import Cap, Discount, Num, Share, modifier, outcome_of
from agentrl.algorithms.presets.imitation import Whose
from agentrl.core.config import Natural
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.processes import log_phase
from agentrl.core.types import Group, Json, Rollout, Transition, int32

log = logging.getLogger("agentrl.algorithm")
STYLE_CALLS = 16  # calls of a step whose style is measured
EVIDENCE_CALLS = 16  # calls of successes that show in a step whether the policy follows
TOP = 20  # tokens over which the divergence is computed by default
WORD = re.compile(r"\w+")
CORRECTED = "\n\n(The answer should have been: {text})"
ASKED_AGAIN = "\n\n(The user then said: {text})"
TEMPLATES = {
    "task": "A correct solution of the task below, which only you see:\n{text}\n\n",
    "sibling": "An earlier attempt at the task below, which succeeded:\n{text}\n\n",
    "error": "An earlier attempt at the task below ended with this:\n{text}\n\n",
    "next": "What follows your next step in the task below:\n{text}\n\n",
}
Control = Literal["none", "unrelated", "wrong", "empty"]
Against = Literal["untold", "unrelated", "wrong", "empty"]
Use = Literal["kl", "scale", "belief"]
Texts = dict[str, str]  # z by the id of a call


# -- what is told ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Telling:
    """Scores the policy's calls again with a text z of a source in their prompts, and adds to each
    a reward `told`: the log-prob of its tokens with z minus that without, both before the update.

    source: "task:FIELD", "sibling", "error", "next" or "user". control: in place of z that of
    another task, a wrong one of the same task, or nothing (arXiv 2608.09228). against: a control
    in place of the untold prompt in the difference, so that the effect of any text of this kind
    cancels out (RLCSD, arXiv 2606.11709, here with one wrong text). least: the reward from
    which a rollout succeeded. failures_only: rollouts that succeeded, or whose reward is unknown,
    are told nothing. Calls that then exceed the context are left out, with a warning."""

    source: str = "sibling"
    control: Control = "none"
    against: Against = "untold"
    template: str = ""
    outcome: str = "outcome"
    least: float = 1.0
    failures_only: bool = False
    teacher: Literal["current", "reference"] = "current"
    temperature: float = 1.0
    by_token: bool = False  # whether credit reads `Batch.told`
    gap: ToldGap | None = None  # tells when to retire

    def __call__(self, groups: list[Group], policy: TrainedPolicy) -> list[Group]:
        if self.retired(policy):
            return groups
        groups = with_call_rewards(groups, EVIDENCE, self._evidence(groups, policy))
        if not self.follows(groups, policy):
            return groups
        texts = self.texts(groups, policy.name, self.control)
        told = self._with_texts(groups, texts, policy)
        self._log_start(texts, told)
        if not told:
            return groups
        before = self._before(groups, told, policy)
        gap = _differences(self.scored(groups, told, policy), before)
        style = _differences(self._style(groups, told, policy), before)
        return with_call_rewards(with_call_rewards(groups, TOLD, gap), STYLE, style)

    def calls(
        self, groups: Sequence[Group], policy: TrainedPolicy, control: Control | None = None
    ) -> dict[str, Transition]:
        """The calls that are told something, with those prompts. Raises TrainingError for a field
        that no task has."""
        if self.retired(policy) or not self.follows(groups, policy):
            return {}
        texts = self.texts(groups, policy.name, self.control if control is None else control)
        return self._with_texts(groups, texts, policy)

    def retired(self, policy: TrainedPolicy) -> bool:
        part = policy.state.get(self.gap.name) if self.gap is not None else None
        return isinstance(part, GapState) and part.retired

    def follows(self, groups: Sequence[Group], policy: TrainedPolicy) -> bool:
        """Whether the policy does what it is told, as far as earlier steps and this one show it."""
        part = policy.state.get(self.gap.name) if self.gap is not None else None
        if not isinstance(part, GapState):
            return True
        return not part.evidence.after(torch.tensor(_measured(groups))).is_missing

    def scored(
        self, groups: list[Group], told: Mapping[str, Transition], policy: TrainedPolicy
    ) -> dict[str, float]:
        """The log-prob of each told call's completion, by its id."""
        new = map_calls(groups, lambda call: told.get(call.id))
        return _totals(new, policy, self.outcome, self.teacher, self.temperature)

    def _before(
        self, groups: list[Group], told: Mapping[str, Transition], policy: TrainedPolicy
    ) -> dict[str, float]:
        if self.against != "untold":
            return self.scored(groups, self.calls(groups, policy, self.against), policy)
        untold = map_calls(groups, lambda call: call if call.id in told else None)
        return _totals(untold, policy, self.outcome, "current", 1.0)

    def _style(
        self, groups: list[Group], told: Mapping[str, Transition], policy: TrainedPolicy
    ) -> dict[str, float]:
        """The log-probs of `STYLE_CALLS` of the told calls with the text of another task: the
        effect of any text of this kind."""
        if self.control != "none" or self.against != "untold" or self.source == "user":
            return {}
        texts = self.texts(groups, policy.name, "unrelated")
        sample = {id: texts[id] for id in islice(told, STYLE_CALLS) if id in texts}
        unrelated = self._with_texts(groups, sample, policy)
        return self.scored(groups, unrelated, policy) if unrelated else {}

    def _evidence(self, groups: list[Group], policy: TrainedPolicy) -> dict[str, float]:
        """See `told.Evidence`. Empty for the sources "next" and "user", whose texts are of one call
        and not of a success, and for controls, which are there to show their effect."""
        if self.control != "none" or self.against != "untold" or self.source in ("next", "user"):
            return {}
        texts_of_groups = [self._of_group(group, policy.name) for group in groups]
        right, wrong = Texts(), Texts()
        measured = list[list[str]]()  # ids of calls
        for number, (group, texts) in enumerate(zip(groups, texts_of_groups, strict=True)):
            success = next(filter(self.succeeded, _played(group)), None)
            failures = [row for row in _played(group) if self.failed(row)]
            told = [c.id for row in failures for c in row.transitions if c.id in texts]
            if success is None or not told:
                continue
            if self.source == "error":
                wrong_text = _unrelated_texts(number, groups, texts_of_groups).get(told[0])
            else:
                wrong_text = transcript(failures[0], policy.name)
            if wrong_text:
                ids = [c.id for c in success.transitions if trainable(c, policy.name)]
                measured.append(ids)
                right.update(dict.fromkeys(ids, texts[told[0]]))
                wrong.update(dict.fromkeys(ids, wrong_text))
        in_turn = filter(None, chain.from_iterable(zip_longest(*measured)))
        chosen = [*islice(in_turn, EVIDENCE_CALLS)]

        def scored(texts: Texts) -> dict[str, float]:
            calls = self._with_texts(groups, {id: texts[id] for id in chosen}, policy)
            return self.scored(groups, calls, policy)

        helped, misled = scored(right), scored(wrong)
        calls = {call.id: call for call in _calls(groups) if call.id in helped}
        untold = self._before(groups, calls, policy)
        return {
            id: (helped[id] - max(misled[id], untold[id])) / len(call.completion)
            for id, call in calls.items()
            if id in misled
        }

    def token_gap(self, batch: Batch, groups: list[Group], policy: TrainedPolicy) -> Tensor:
        """As the reward `told`, but of each token of the batch, in nats, float64 [N]; NaN where
        nothing is told."""
        after = self._tokens(batch, groups, self.calls(groups, policy), policy)
        if self.against == "untold":
            return after - policy.logprobs(batch).cpu().double()
        return after - self._tokens(batch, groups, self.calls(groups, policy, self.against), policy)

    def _tokens(
        self,
        batch: Batch,
        groups: list[Group],
        told: Mapping[str, Transition],
        policy: TrainedPolicy,
    ) -> Tensor:
        """The log-probs of the tokens of told calls, float64 [N]; NaN for others."""
        new, batch_at, new_at = self._matched(batch, groups, told, policy.name)
        logprobs = torch.full((batch.n_tokens,), torch.nan, dtype=torch.float64)
        if new.n_tokens:
            logprobs[batch_at] = _logprobs(new, policy, self.teacher).double()[new_at]
        return logprobs

    def told(
        self, batch: Batch, groups: list[Group], policy: TrainedPolicy
    ) -> tuple[Batch, Tensor, Tensor]:
        """See `PrivilegedPrompts`."""
        return self._matched(batch, groups, self.calls(groups, policy), policy.name)

    def _matched(
        self, batch: Batch, groups: list[Group], told: Mapping[str, Transition], policy: str
    ) -> tuple[Batch, Tensor, Tensor]:
        """The batch of the told calls; and of the tokens that it has in common with `batch`, the
        indices in `batch` and in it, int64 [n] each."""
        told_groups = map_calls(groups, lambda call: told.get(call.id))
        new = build_batch(told_groups, reward_names=(self.outcome,), policy=policy)
        index = {id: number for number, id in enumerate(batch.transitions)}
        old_call = torch.tensor([index.get(id, -1) for id in new.transitions], dtype=torch.int64)
        calls = old_call[new.token_transition]  # of each new token, -1: not in `batch`
        # Tokens of a call keep their order, so sorting both by call pairs them.
        new_at = calls.argsort(stable=True)
        batch_at = batch.token_transition.argsort(stable=True)
        batch_at = batch_at[torch.isin(batch.token_transition[batch_at], calls)]
        return at_temperature(new, self.temperature), batch_at, new_at[calls[new_at] >= 0]

    # -- texts

    def texts(self, groups: Sequence[Group], policy: str, control: Control = "none") -> Texts:
        """z of each call that has one."""
        by_group = [self._of_group(group, policy) for group in groups]
        rows = [row for group in groups for row in group.rollouts]
        lacks = self.source.startswith("task:") and all(
            _field(row, self.source) is None for row in rows
        )
        if rows and lacks:
            raise TrainingError(
                f"algorithm.options.told_source = {self.source!r}: no task of the step has this "
                "field; name one that the tasks have"
            )
        if control == "wrong":
            return self._wrong(groups, by_group, policy)
        if control == "empty":
            return {id: "" for texts in by_group for id in texts}
        if control == "unrelated":
            by_group = [
                _unrelated_texts(number, groups, by_group) for number in range(len(by_group))
            ]
        return {id: text for texts in by_group for id, text in texts.items()}

    def _of_group(self, group: Group, policy: str) -> Texts:
        return {
            id: text
            for rollout in group.rollouts
            if not (self.failures_only and not self.failed(rollout))
            for id, text in self._of_rollout(group, rollout, policy)
        }

    def _of_rollout(self, group: Group, rollout: Rollout, policy: str) -> Iterator[tuple[str, str]]:
        calls = rollout.transitions
        if self.source == "user":
            text_by_call = _reactions(rollout)
        elif self.source == "next":
            text_by_call = {n: _observed_after(call, calls) for n, call in enumerate(calls)}
        else:
            text = self._of_whole(group, rollout, policy)
            text_by_call = dict.fromkeys(range(len(calls)), text)
        for number, text in text_by_call.items():
            call = calls[number]
            if text and trainable(call, policy) and call.repeats is None and len(call.completion):
                yield call.id, text

    def _of_whole(self, group: Group, rollout: Rollout, policy: str) -> str:
        """z of a rollout whose calls are all told the same."""
        if self.source == "sibling":
            others = [row for row in _played(group) if row.id != rollout.id]
            best = max(filter(self.succeeded, others), key=self._reward, default=None)
            return "" if best is None else transcript(best, policy)
        if self.source == "error":
            return error_of(rollout, self.outcome) if not self.succeeded(rollout) else ""
        value = _field(rollout, self.source)
        if value is None or isinstance(value, str):
            return value or ""
        return msgspec.json.encode(value).decode()

    def _wrong(self, groups: Sequence[Group], texts: Sequence[Texts], policy: str) -> Texts:
        """A failed sibling's calls; where z is of one call, that of another call of the group."""
        wrong_texts: Texts = {}
        for group, by_call in zip(groups, texts, strict=True):
            for rollout in group.rollouts:
                failed = [
                    row for row in _played(group) if row.id != rollout.id and self.failed(row)
                ]
                wrong = transcript(failed[0], policy) if failed else ""
                for id in (call.id for call in rollout.transitions if call.id in by_call):
                    if self.source in ("next", "error", "user"):
                        wrong = next((text for text in by_call.values() if text != by_call[id]), "")
                    if wrong:
                        wrong_texts[id] = wrong
        return wrong_texts

    def succeeded(self, rollout: Rollout) -> bool:
        return self._reward(rollout) >= self.least

    def failed(self, rollout: Rollout) -> bool:
        """False if the reward is unknown."""
        return self._reward(rollout) < self.least

    def _reward(self, rollout: Rollout) -> float:
        return rollout.reward(self.outcome)

    # -- prompts

    def _with_texts(
        self, groups: Sequence[Group], texts: Texts, policy: TrainedPolicy
    ) -> dict[str, Transition]:
        """The calls with their texts; without those that then cannot be scored."""
        told_calls = (
            self._with_text(call, texts[call.id], policy)
            for call in _calls(groups)
            if call.id in texts
        )
        return {call.id: call for call in told_calls if call is not None}

    def _with_text(self, call: Transition, text: str, policy: TrainedPolicy) -> Transition | None:
        place = _after_the_question if self.source == "user" else self._before_task
        messages = place(call, text)
        if messages is None:
            return None
        try:
            prompt = policy.chat.encode(messages, call.tools)
        except RequestError:
            return None
        fits = policy.fits(len(prompt) + len(call.completion))
        return structs.replace(call, prompt=int32(prompt)) if fits else None

    def _before_task(self, call: Transition, text: str) -> list[dict[str, Json]] | None:
        kind = self.source.partition(":")[0]
        z = (self.template or TEMPLATES[kind]).replace("{text}", text)
        numbered = enumerate(call.messages)
        at = next((n for n, m in numbered if m.get("role") not in ("system", "developer")), None)
        if at is None:
            return None
        content: Any = call.messages[at].get("content")
        if isinstance(content, list):
            content = [{"type": "text", "text": z}, *content]
        else:
            content = z + (content or "")
        changed = {**call.messages[at], "content": content}
        return [*call.messages[:at], changed, *call.messages[at + 1 :]]

    def _log_start(self, texts: Texts, told: Mapping[str, Transition]) -> None:
        """Log, each once per process: that nothing is told, that calls with a text are left out,
        and how much of z appears in the answers."""
        left_out = len(texts) - len(told)
        if left_out and self._first_time("left out"):
            log.warning(
                "+told: %d of %d calls are told nothing: with the text their prompt exceeds the "
                "context or cannot be rendered", left_out, len(texts),
            )  # fmt: skip
        if not texts and self._first_time("nothing"):
            log_phase(log, f"+told: nothing is told in this step: {self._why_untold()}")
        shares = [leakage(texts[id], call) for id, call in told.items() if texts[id]]
        if shares and self._first_time("leakage"):
            words = sum(len(texts[id].split()) for id in told) / len(told)
            share = sum(shares) / len(shares)
            log_phase(
                log,
                f"+told: {len(told)} calls are told {self.source} (control {self.control}), "
                f"{words:.0f} words each; {share:.0%} of these stand in their answers",
            )

    def _why_untold(self) -> str:
        """Why no call has a z."""
        row, reward = "failure" if self.failures_only else "rollout", f"a reward >= {self.least:g}"
        return {
            "task": f"no {row} has a task with this field",
            "sibling": f"no {row} has a sibling with {reward}",
            "error": "no failure has an error or a note of the verifier",
            "next": f"no call of a {row} is followed by an observation",
            "user": "no user corrected an answer or asked again",
        }[self.source.partition(":")[0]] + (
            f", or what control {self.control!r} tells instead" if self.control != "none" else ""
        )

    def _first_time(self, line: str) -> bool:
        new = (self, line) not in _logged
        _logged.add((self, line))
        return new


_logged: set[tuple[Telling, str]] = set()


def leakage(text: str, call: Transition) -> float:
    """The share of the words of z that appear in the answer of a call."""
    words, answer = WORD.findall(text), set(WORD.findall(answer_text(call)))
    return sum(word in answer for word in words) / len(words) if words else 0.0


def transcript(rollout: Rollout, policy: str) -> str:
    """What a rollout's own calls answered, a line or more each; of a team, with their roles."""
    calls = [call for call in rollout.transitions if call.policy == policy]
    team = len({call.role for call in calls}) > 1
    return "\n".join(
        f"{call.role}: {answer_text(call)}" if team else answer_text(call) for call in calls
    )


def answer_text(call: Transition) -> str:
    """A call's answer, with the JSON of its tool calls."""
    answer = call.answer or {}
    tools: Any = answer.get("tool_calls") or []
    named = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    called = [msgspec.json.encode(function).decode() for function in named]
    return "\n".join(filter(None, [_content(answer), *called]))


def error_of(rollout: Rollout, outcome: str) -> str:
    """What the environment said about a failure, and the verifier about the outcome."""
    notes = [row.note for row in rollout.rewards if row.name == outcome]
    failure = [rollout.failure.message] if rollout.failure else []
    return "\n".join(filter(None, [*failure, *notes]))


def _observed_after(call: Transition, calls: Sequence[Transition]) -> str:
    """What the next call of the same conversation observed after this one."""
    size = len(call.messages) + 1
    for later in calls:
        grown = later.role == call.role and len(later.messages) > size
        if grown and later.messages[: size - 1] == call.messages and len(new_messages(later)):
            first = [m for m in later.messages[size:] if m.get("role") != "assistant"]
            return "\n".join(filter(None, map(_content, first)))
    return ""


def _reactions(rollout: Rollout) -> dict[int, str]:
    """What the user said about the turns that were corrected, or whose question was asked again, by
    the number of the call."""
    calls, after = rollout.transitions, dict[int, str]()
    for first, second in reasked(calls, rollout.rewards):
        after[first] = ASKED_AGAIN.format(text=last_user_text(calls[second]))
    for index, better in corrections(calls, rollout.rewards):
        tools = better.get("tool_calls")
        text = msgspec.json.encode(better).decode() if tools else better.get("content") or ""
        after[index] = CORRECTED.format(text=text)
    return {
        index: next(after[other] for other in turn if other in after)
        for turn in turns(calls)
        if any(other in after for other in turn)
        for index in turn
    }


def _after_the_question(call: Transition, text: str) -> list[dict[str, Json]] | None:
    at = max((n for n, m in enumerate(call.messages) if m.get("role") == "user"), default=-1)
    content: Json = call.messages[at].get("content") if at >= 0 else None
    if not isinstance(content, str):
        return None
    messages = [*call.messages]
    messages[at] = {**messages[at], "content": content + text}
    return messages


def _unrelated_texts(number: int, groups: Sequence[Group], by_group: Sequence[Texts]) -> Texts:
    """For each call of a group, a different text from the next groups with another task."""
    tasks = [next((row.task for row in group.rollouts), None) for group in groups]
    order = [*range(number + 1, len(by_group)), *range(number)]
    others = [by_group[n] for n in order if tasks[n] != tasks[number]]
    candidates = list(dict.fromkeys(text for texts in others for text in texts.values()))
    return {
        id: other
        for id, text in by_group[number].items()
        if (other := next((candidate for candidate in candidates if candidate != text), ""))
    }


def _measured(groups: Sequence[Group]) -> list[float]:
    """The evidence of each group that has any."""
    name = EVIDENCE.partition(":")[2]
    rewards = (
        [r.value for row in g.rollouts for r in row.rewards if r.name == name] for g in groups
    )
    return [fmean(values) for values in rewards if values]


def _calls(groups: Sequence[Group]) -> Iterator[Transition]:
    return (call for group in groups for row in group.rollouts for call in row.transitions)


def _played(group: Group) -> list[Rollout]:
    """Its rollouts, without counterfactual replays."""
    return [row for row in group.rollouts if not counterfactual(row)]


def _field(rollout: Rollout, source: str) -> Json:
    """The field of a task that "task:FIELD" names; dots separate levels."""
    value: Json = rollout.task
    for name in source.removeprefix("task:").split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _content(message: Mapping[str, Json]) -> str:
    try:
        return str(text_content(message.get("content"), "message") or "")
    except RequestError:
        return ""


def _differences(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The differences of the calls that both have."""
    return {id: after[id] - before[id] for id in after if id in before}


def _totals(
    groups: list[Group], policy: TrainedPolicy, outcome: str, of: str, temperature: float
) -> dict[str, float]:
    """The log-prob of each call's completion, by the id of the call."""
    batch = build_batch(groups, reward_names=(outcome,), policy=policy.name)
    if not batch.n_tokens:
        return {}
    logprobs = _logprobs(at_temperature(batch, temperature), policy, of)
    total = reduce_by(logprobs, batch.token_transition, len(batch.transitions))
    return dict(zip(batch.transitions, total.tolist(), strict=True))


def _logprobs(batch: Batch, policy: TrainedPolicy, of: str) -> Tensor:
    return (policy.logprobs(batch) if of == "current" else policy.logprobs(batch, of)).cpu()


def at_temperature(batch: Batch, factor: float) -> Batch:
    """The batch with the temperatures of its tokens multiplied."""
    if factor == 1:
        return batch
    rows = [replace(row, temperature=row.temperature * factor) for row in batch.rows]
    return replace(batch, rows=rows)


@modifier("told", prefix="told_")
def with_told(
    algo: Algo,
    *,
    source: str = "sibling",
    use: Use = "kl",
    control: Control = "none",
    against: Against = "untold",
    template: str = "",
    failures_only: bool | None = None,
    least: Share = 1.0,
    teacher: Literal["current", "reference"] = "current",
    temperature: Cap = 1.0,
    top: Natural | None = None,
    of: Whose = "teacher",
    beta: Num = 0.1,
    limit: Cap = 5.0,
    blend: Discount | None = None,
    by: Literal["transition", "token"] = "transition",
    band: Discount = 0.2,
    retire: Natural = 0,
) -> Algo:
    """Scores the policy's calls again with a text z in their prompts: a field of the task
    ("task:solution"), the best "sibling" with a reward of at least `least`, the "error", what came
    "next" or what the "user" said. A call that is told nothing has the host's advantage alone. use:
    "kl" adds `beta` times distillation towards the policy (or `reference`) that is told, over the
    `top` tokens of one of them (default 20, with `against` 0), or with 0 estimated from the sampled
    calls, whose log-ratio is within +- `limit`; `beta` is small so that the host decides where
    rewards differ. "scale" and "belief" weigh the host's advantage within 1 +- `band`.
    failures_only: successes are told nothing, as in SRPO; the default for kl, except with "user".
    blend: of the host's advantage where something is told, default 1 for kl, else .5. control:
    something else is told; against: in place of the untold prompt. retire: steps without a lower
    divergence after which nothing is told. Where a group has a success, its calls are scored with
    what a failure is told, with a wrong text and with none; until the first is shown to make
    them most probable (`told/evidence`, a z-score, of 2 over three groups), nothing is told. arXiv
    2601.20802, 2602.04942, 2601.19897, 2604.02288, 2606.11709, 2608.05987, 2608.04007,
    2609.20784."""
    if top is None:
        top = TOP if use == "kl" and against == "untold" else 0
    if failures_only is None:
        failures_only = use == "kl" and source != "user"
    _check(algo, source, use, template, top, by, against)
    outcome, by_token = outcome_of(algo), use == "scale" and by == "token"
    telling = Telling(
        source, control, against, template, outcome, least, failures_only, teacher, temperature,
        by_token, ToldGap(retire),
    )  # fmt: skip
    share = (1.0 if use == "kl" else 0.5) if blend is None else blend
    told = replace(
        algo,
        telling=telling,
        optional=(*algo.optional, TOLD, STYLE, EVIDENCE),
        prepare=(*algo.prepare, telling),
    )
    if use == "scale":
        return replace(told, credit=ToldScale(algo.credit, share, band, by_token))
    if use == "belief":
        return replace(told, credit=ToldBelief(algo.credit, share, band, least, outcome))
    host = (algo.credit, ToldShare(share) if share != 1 else 1.0)
    if top:
        return replace(
            told,
            credit=weighted_sum(host),
            distill=TopKDistillation(top, beta, of, told=True),
        )
    return replace(told, credit=weighted_sum(host, (ToldCredit(limit), beta)))


def _check(
    algo: Algo, source: str, use: Use, template: str, top: int, by: str, against: Against
) -> None:
    """Raise ConfigError for options that do not fit each other."""
    key = "algorithm.options.told"
    kinds = ("sibling", "error", "next", "user")
    if source not in kinds and not source.partition("task:")[2]:
        raise ConfigError(
            f'{key}_source = {source!r}: none of "task:FIELD", {", ".join(map(repr, kinds))}'
        )
    if template and (source == "user" or "{text}" not in template):
        why = "what a user said has words of its own" if source == "user" else "it has no {text}"
        raise ConfigError(f"{key}_template = {template!r}: {why}")
    if top and use != "kl":
        raise ConfigError(f"{key}_top = {top}: only told_use = 'kl' reads it; leave it out")
    if top and against != "untold":
        raise ConfigError(
            f"{key}_against = {against!r}: the divergence over several tokens is from the untold "
            f"policy; set {key.rpartition('.')[2]}_top = 0"
        )
    if by == "token" and use != "scale":
        raise ConfigError(f"{key}_by = 'token': only told_use = 'scale' reads it; leave it out")
    if top and (algo.topk or algo.side is not None):
        raise ConfigError(
            f"{key}_top = {top} imitates several tokens at every position, which cannot be "
            f"combined with {algo.name!r}; set told_top = 0"
        )
    if algo.telling is not None:
        raise ConfigError("algorithm.preset tells the policy twice; use one +told")
