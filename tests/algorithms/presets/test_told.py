"""What the policy is told, where, and what it then learns: against prompts and losses written out
by hand, on a small model in float64."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.credit.told import EVIDENCE, STYLE, TOLD, Evidence, GapState
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.learners.auxiliary import Reference
from agentrl.algorithms.learners.factory import caches_reference
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.objective.core import loss_coefficients, loss_terms
from agentrl.algorithms.objective.prepare import TrainedPolicy
from agentrl.algorithms.objective.ratios import ALL_OUTPUTS
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.presets.told import TEMPLATES, Telling, leakage
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.config.learning import DataConfig
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import Branch, ErrorKind, Failure, Group, Reward, Rollout, Transition, int32
from tests import factories
from tests.algorithms.data.test_observations import exact_norm

PRESETS = ("grpo+told",)
Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}
QUESTIONS = ["What is the team of Ada?", "What is the team of Berg?"]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama_dir)


def exact_model(folder: Path) -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    for norm in (part for part in made.modules() if type(part).__name__ == "LlamaRMSNorm"):
        norm.forward = partial(exact_norm, norm)  # type: ignore[method-assign]
    return made.double()


@pytest.fixture
def model(tiny_llama_dir: Path) -> PreTrainedModel:
    return exact_model(tiny_llama_dir)


@pytest.fixture
def policy(model: PreTrainedModel, tokenizer: Any) -> TrainedPolicy:
    return TrainedPolicy(TorchLearner(model, tokenizer).logprobs, tokenizer)


def conversation(question: str, answers: Sequence[str]) -> list[list[Message]]:
    """The messages before each answer; a tool returns between two."""
    messages: list[Message] = [SYSTEM, {"role": "user", "content": question}]
    before = []
    for number, text in enumerate(answers):
        before.append([*messages])
        messages += [{"role": "assistant", "content": text},
                     {"role": "tool", "content": f"result {number} of {text}"}]  # fmt: skip
    return before


def played(
    tokenizer: Any, id: str, question: str, answers: Sequence[str], value: float, **fields: Any
) -> Rollout:
    chat = Chat(tokenizer, Codec(tokenizer))
    note = fields.pop("note", "")
    calls = [
        factories.call(
            f"{id}/{n}", chat.encode(messages),
            tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False), index=n,
            messages=messages, answer={"role": "assistant", "content": text}, attempt=id,
        )
        for n, (messages, text) in enumerate(zip(conversation(question, answers), answers,
                                                  strict=True))
    ]  # fmt: skip
    return factories.rollout(id, calls, [Reward(value=value, note=note)], **fields)


def groups(tokenizer: Any) -> list[Group]:
    """Two tasks; of the first a failure with a note, a success, and another failure."""
    task = {"solution": "look up Ada", "meta": {"hint": 3}}
    first = [
        played(tokenizer, "a0", QUESTIONS[0], ["query", "sales"], 0.0, task=task,
               note="Oslo is no team"),
        played(tokenizer, "a1", QUESTIONS[0], ["look", "legal"], 1.0, task=task),
        played(tokenizer, "a2", QUESTIONS[0], ["finance"], 0.0, task=task),
    ]  # fmt: skip
    other = {"solution": "look up Berg"}
    second = [played(tokenizer, f"b{n}", QUESTIONS[1], ["support"], 0.0, task=other)
              for n in range(2)]  # fmt: skip
    return [factories.group(*first, id="a"), factories.group(*second, id="b")]


SIBLING = "look\nlegal"
CASES: dict[str, tuple[Telling, dict[str, str]]] = {
    "task": (
        Telling("task:solution", failures_only=True),
        dict.fromkeys(["a0/0", "a0/1", "a2/0"], "look up Ada")
        | dict.fromkeys(["b0/0", "b1/0"], "look up Berg"),
    ),
    "part of a task": (
        Telling("task:meta.hint"), dict.fromkeys(["a0/0", "a0/1", "a1/0", "a1/1", "a2/0"], "3")
    ),
    "sibling": (Telling(), dict.fromkeys(["a0/0", "a0/1", "a2/0"], SIBLING)),
    "error": (Telling("error"), dict.fromkeys(["a0/0", "a0/1"], "Oslo is no team")),
    "next": (
        Telling("next"), {"a0/0": "result 0 of query", "a1/0": "result 0 of look"}
    ),
    "unrelated": (
        Telling("task:solution", "unrelated", failures_only=True),
        dict.fromkeys(["a0/0", "a0/1", "a2/0"], "look up Berg")
        | dict.fromkeys(["b0/0", "b1/0"], "look up Ada"),
    ),
    "wrong": (
        Telling("sibling", "wrong"), {"a0/0": "finance", "a0/1": "finance", "a2/0": "query\nsales"}
    ),
    "wrong next": (
        Telling("next", "wrong"), {"a0/0": "result 0 of look", "a1/0": "result 0 of query"}
    ),
    "empty": (Telling("sibling", "empty"), dict.fromkeys(["a0/0", "a0/1", "a2/0"], "")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_source_and_control_tells_its_text(name: str, tokenizer: Any) -> None:
    telling, expected = CASES[name]
    assert telling.texts(groups(tokenizer), "policy", telling.control) == expected


def test_an_unrelated_text_is_of_another_task(tokenizer: Any) -> None:
    """A task may have several groups in a step."""
    first, second = groups(tokenizer)
    again = replace(first, id="c", rollouts=[
        played(tokenizer, "c0", QUESTIONS[0], ["hr"], 1.0, task=first.rollouts[0].task),
        played(tokenizer, "c1", QUESTIONS[0], ["it"], 0.0, task=first.rollouts[0].task),
    ])  # fmt: skip
    assert (
        Telling("sibling", "unrelated").texts([first, again, second], "policy", "unrelated") == {}
    )
    found = Telling("task:solution", "unrelated").texts(
        [first, again, second], "policy", "unrelated"
    )
    assert {found[id] for id in ("a0/0", "a1/0", "c0/0", "c1/0")} == {"look up Berg"}
    assert found["b0/0"] == "look up Ada"


def test_a_replay_without_a_role_is_no_sibling(tokenizer: Any) -> None:
    first, _ = groups(tokenizer)
    replay = replace(first.rollouts[1], branch=Branch(rollout="a1", calls=0, without=["x"]))
    rows = [first.rollouts[0], replay, first.rollouts[2]]
    assert Telling().texts([replace(first, rollouts=rows)], "policy") == {}


def test_an_error_is_what_the_environment_said_too(tokenizer: Any) -> None:
    failure = Failure(kind=ErrorKind.TIMEOUT, message="no answer in 60 s")
    made = played(tokenizer, "a0", QUESTIONS[0], ["query"], 0.0, failure=failure, note="Lima")
    found = Telling("error").texts([factories.group(made)], "policy")
    assert found == {"a0/0": "no answer in 60 s\nLima"}


def test_the_text_stands_after_the_system_prompt(policy: TrainedPolicy, tokenizer: Any) -> None:
    telling = Telling("task:solution", template="Told {text}. ")
    told = telling.calls(groups(tokenizer), policy)
    text = tokenizer.decode(told["a0/1"].prompt)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nTold look up Ada. What is the team of Ada?<|im_end|>\n"
        "<|im_start|>assistant\nquery<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nresult 0 of query\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = groups(tokenizer)[0].rollouts[0].transitions[1]
    assert told["a0/1"].completion == own.completion
    assert "Told" not in tokenizer.decode(own.prompt)


def test_what_the_policy_may_not_train_or_read_is_not_told(
    policy: TrainedPolicy, tokenizer: Any
) -> None:
    made = groups(tokenizer)
    for changed in ({"exact": False}, {"policy": "judge"}, {"repeats": "x"}):
        calls = [replace(c, **changed) for c in made[0].rollouts[0].transitions]
        row = replace(made[0].rollouts[0], transitions=calls)
        assert Telling("error").calls([factories.group(row)], policy) == {}
    from dataclasses import replace as altered

    assert Telling("error").calls(made, altered(policy, context=8)) == {}


def test_a_field_that_no_task_has_is_an_error(policy: TrainedPolicy, tokenizer: Any) -> None:
    for control in ("none", "wrong", "empty"):
        with pytest.raises(TrainingError, match="no task of the step has this field"):
            Telling("task:solutoin", control).calls(groups(tokenizer), policy)


def logprobs_after(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]
) -> Tensor:
    """[C, V] by the model itself."""
    ids = torch.tensor([*prompt, *completion])
    return model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def total(model: PreTrainedModel, call: Transition) -> float:
    found = logprobs_after(model, call.prompt, call.completion)
    with torch.no_grad():
        return float(found.gather(1, torch.tensor(call.completion)[:, None]).sum())


def rewards_of(made: Sequence[Group], name: str) -> dict[str | None, float]:
    rows = (row for group in made for rollout in group.rollouts for row in rollout.rewards)
    return {row.target: row.value for row in rows if row.name == name.partition(":")[2]}


def test_a_call_is_worth_the_difference_of_its_log_probs(
    model: PreTrainedModel, policy: TrainedPolicy, tokenizer: Any
) -> None:
    made, telling = groups(tokenizer), Telling("task:solution")
    own = {c.id: c for g in made for r in g.rollouts for c in r.transitions}
    told, other = telling.calls(made, policy), telling.calls(made, policy, "unrelated")
    found = telling(made, policy)
    for name, after in ((TOLD, told), (STYLE, other)):
        expected = {id: total(model, after[id]) - total(model, own[id]) for id in after}
        assert rewards_of(found, name) == pytest.approx(expected, abs=1e-5)
    against = Telling("task:solution", against="unrelated")(made, policy)
    expected = {id: total(model, told[id]) - total(model, other[id]) for id in told}
    assert rewards_of(against, TOLD) == pytest.approx(expected, abs=1e-5)


def updater(
    model: PreTrainedModel, tokenizer: Any, host: str, follows: bool = True, **options: Any
) -> Updater:
    """follows: earlier steps have shown that the policy does what it is told."""
    algo = make(f"{host}+told", {f"told_{k}": v for k, v in options.items()}, supplies=ALL_OUTPUTS)
    settings = AlgorithmConfig(preset=algo.name, group_size=1, lr=1e-2)
    reference = {}
    if options.get("teacher") == "reference":
        reference = {"reference": Reference(options_reference(model), model)}
    state = AlgorithmState(algo.remembered)
    for part in state.parts.values() if follows else ():
        if isinstance(part, GapState):
            part.evidence = Evidence(100, 100, 100.1)
    return Updater(
        RunConfig(algorithm=settings), algo, TorchLearner(model, tokenizer, frozen=reference),
        state=state, preprocessor=Preprocessor(tokenizer=tokenizer),
    )  # fmt: skip


def options_reference(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with other weights."""
    made = exact_model(Path(model.name_or_path))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).double())
    return made


@pytest.mark.parametrize("source", ["task:solution", "sibling", "error"])
def test_the_evidence_is_what_a_text_adds_to_a_success(
    source: str, model: PreTrainedModel, policy: TrainedPolicy, tokenizer: Any
) -> None:
    """Told what its failed sibling is told, in place of a failed sibling's calls; of an error, in
    place of another task's."""
    made = groups(tokenizer)
    rows = made[1].rollouts
    rows[0] = played(tokenizer, "b0", QUESTIONS[1], ["support"], 0.0, note="Rome is no team")
    given = {"task:solution": "look up Ada", "sibling": SIBLING, "error": "Oslo is no team"}
    wrong = "Rome is no team" if source == "error" else "query\nsales"
    kind = source.partition(":")[0]

    def after(call: Transition, text: str) -> float:
        question = {"role": "user", "content": TEMPLATES[kind].format(text=text) + QUESTIONS[0]}
        prompt = policy.chat.encode([SYSTEM, question, *call.messages[2:]])
        return total(model, replace(call, prompt=int32(prompt)))

    calls = made[0].rollouts[1].transitions
    expected = {
        call.id: (after(call, given[source]) - max(after(call, wrong), total(model, call)))
        / len(call.completion)
        for call in calls
    }
    found = rewards_of(Telling(source, failures_only=True)(made, policy), EVIDENCE)
    assert found == pytest.approx(expected, abs=1e-5)
    assert rewards_of(Telling(source, "wrong")(made, policy), EVIDENCE) == {}


@pytest.mark.parametrize("options", [{"top": 4}, {"top": 0}, {"use": "scale"}, {"use": "belief"}])
def test_a_policy_that_does_not_follow_is_told_nothing(
    options: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This model has never seen such a text, so each step is the host's."""
    host = exact_model(Path(model.name_or_path))
    plain = AlgorithmConfig(preset="grpo", group_size=1, lr=1e-2)
    algo = make("grpo", {}, supplies=ALL_OUTPUTS)
    alone = Updater(RunConfig(algorithm=plain), algo, TorchLearner(host, tokenizer))
    run = updater(model, tokenizer, "grpo", follows=False, source="sibling", **options)
    for part in run.state.parts.values():
        if isinstance(part, GapState):
            part.evidence = Evidence(100, 0.0, 100.0)
    for step in range(2):
        metrics = run.update(step, groups(tokenizer))
        alone.update(step, groups(tokenizer))
        assert metrics["told/calls"] == 0
        assert metrics["told/evidence"] < 2
    for own, other in zip(model.parameters(), host.parameters(), strict=True):
        assert torch.equal(own, other)
    assert not [r for r in caplog.records if "is not used" in r.getMessage()]  # it was known


@pytest.mark.parametrize(
    ("of", "teacher", "temperature"),  # each two of them together
    [("policy", "current", 1.0), ("policy", "reference", 0.5), ("teacher", "current", 0.5),
     ("teacher", "reference", 1.0)],
)  # fmt: skip
def test_over_all_tokens_its_gradient_is_that_of_the_divergence(
    of: Literal["policy", "teacher"],
    teacher: Literal["current", "reference"],
    temperature: float,
    model: PreTrainedModel,
    tokenizer: Any,
) -> None:
    made = groups(tokenizer)
    made = [replace(g, rollouts=[replace(r, rewards=[Reward(value=0.0)]) for r in g.rollouts])
            for g in made]  # fmt: skip
    size = model.config.vocab_size
    run = updater(model, tokenizer, "reinforce", source="task:solution", top=size, of=of, beta=0.7,
                  teacher=teacher, temperature=temperature, failures_only=False)  # fmt: skip
    learner = run.learner
    assert isinstance(learner, TorchLearner)
    frozen = learner.frozen["reference"].model if teacher == "reference" else model
    told = Telling("task:solution").calls(made, run.trained)
    loss, rows = torch.zeros((), dtype=torch.float64), 0
    for rollout in (row for group in made for row in group.rollouts):
        rows += 1
        for call in rollout.transitions:
            p = logprobs_after(model, call.prompt, call.completion)
            ids = torch.tensor([*told[call.id].prompt, *call.completion])
            logits = frozen(ids[None]).logits[0, len(told[call.id].prompt) - 1 : -1]
            q = (logits / temperature).log_softmax(-1).detach()
            first, second = (p, q) if of == "policy" else (q, p)
            loss = loss + 0.7 * (first.exp() * (first - second)).sum()
    expected = torch.autograd.grad(loss / rows, list(model.parameters()))
    prepared = run.preprocessor.prepare(made, run.algo, run.trained, 1)
    built = run.build(run.algo, prepared.groups, 0, 0)
    scored = run.score(built.algo, built.batch, 0, prepared.groups)
    terms = loss_terms(built.algo, scored.batch, scored.given, fresh=True)
    assert terms.skip is None
    learner._backward(scored.batch, partial(loss_coefficients, built.algo, terms), None, None, None)
    largest = max(float(g.abs().max()) for g in expected)
    for parameter, own in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        # log-probs of symbols are stored in float32
        torch.testing.assert_close(parameter.grad, own, rtol=1e-5, atol=1e-6 * largest)
    assert largest > 1e-3


def test_weights_of_tokens_are_of_their_own_gaps(model: PreTrainedModel, tokenizer: Any) -> None:
    made = groups(tokenizer)
    run = updater(model, tokenizer, "grpo", source="task:solution", use="scale", by="token")
    prepared = run.preprocessor.prepare(made, run.algo, run.trained, 1)
    batch = run.build(run.algo, prepared.groups, 0, 0).batch
    found = run.score(run.algo, batch, 0, prepared.groups).batch.told
    told = Telling("task:solution").calls(made, run.trained)
    own = {c.id: c for g in made for r in g.rollouts for c in r.transitions}
    for number, id in enumerate(batch.transitions):
        ids = torch.tensor(own[id].completion)[:, None]
        after, before = (logprobs_after(model, c.prompt, c.completion).gather(1, ids)[:, 0].detach()
                         for c in (told[id], own[id]))  # fmt: skip
        mine = found[batch.token_transition == number]
        torch.testing.assert_close(mine, after - before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"use": "scale"}, {"use": "scale", "by": "token"}, {"use": "belief"}, {"blend": 0.5},
     {"top": 4}, {"top": 4, "of": "teacher", "failures_only": True}, {"control": "unrelated"},
     {"against": "wrong"}, {"control": "empty"}],
)  # fmt: skip
def test_a_step_learns_from_each_use(
    options: dict[str, Any], model: PreTrainedModel, tokenizer: Any
) -> None:
    source = {} if options.get("against") == "wrong" else {"source": "task:solution"}
    run = updater(model, tokenizer, "grpo", **source, **options)
    before = [p.detach().clone() for p in model.parameters()]
    metrics = run.update(0, groups(tokenizer))
    assert metrics["update/steps"] == 1
    assert metrics["update/skipped"] == 0
    assert metrics["told/calls"] > 0
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert any(moved)


def test_without_a_success_or_a_text_the_host_is_unchanged(
    model: PreTrainedModel, tokenizer: Any
) -> None:
    run = updater(model, tokenizer, "grpo", source="sibling", top=4)
    failed = [g for g in groups(tokenizer) if g.id == "b"]
    metrics = run.update(0, failed)
    assert metrics["update/skipped"] == 1
    assert metrics["told/calls"] == 0


@pytest.mark.parametrize(
    "options", [{}, {"blend": 0.3}, {"blend": 0.3, "top": 0}, {"use": "scale"}, {"use": "belief"}]
)
def test_a_step_that_tells_nothing_is_that_of_the_host(
    options: dict[str, Any], model: PreTrainedModel, tokenizer: Any
) -> None:
    """Also where the optimizer has moments of an earlier step, and the groups are flat."""
    made = groups(tokenizer)
    host = exact_model(Path(model.name_or_path))
    plain = AlgorithmConfig(preset="grpo", group_size=1, lr=1e-2)
    algo = make("grpo", {}, supplies=ALL_OUTPUTS)
    runs = [
        Updater(RunConfig(algorithm=plain), algo, TorchLearner(host, tokenizer)),
        updater(model, tokenizer, "grpo", source="user", **options),
    ]
    for step, step_groups in enumerate((made[:1], made[1:], made)):
        metrics = [run.update(step, step_groups) for run in runs]
        assert metrics[0]["update/skipped"] == metrics[1]["update/skipped"] == (step == 1)
    for own, other in zip(model.parameters(), host.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_step_passes_only_what_is_told(model: PreTrainedModel, tokenizer: Any) -> None:
    """Towards the likeliest tokens of the told policy: the told calls alone are forwarded."""
    run, seen = updater(model, tokenizer, "grpo", source="sibling"), list[int]()
    learner: Any = run.learner
    top = learner.top
    learner.top = lambda batch, *given: seen.append(batch.n_tokens) or top(batch, *given)
    made = groups(tokenizer)
    run.update(0, [g for g in made if g.id == "b"])
    assert seen == []
    run.update(1, made)
    told = Telling(failures_only=True).calls(made, run.trained)
    assert seen == [sum(len(call.completion) for call in told.values())]


def test_what_is_retired_costs_no_pass(model: PreTrainedModel, tokenizer: Any) -> None:
    run = updater(model, tokenizer, "grpo", source="task:solution", retire=1, top=4)
    (state,) = (p for p in run.state.parts.values() if isinstance(p, GapState))
    assert not state.retired
    made = groups(tokenizer)
    run.update(0, made)
    for name in [n for n, p in run.state.parts.items() if isinstance(p, GapState)]:
        run.state.parts[name] = GapState(1, retired=True)
    asked = []
    real = run.learner.logprobs
    run.trained.__dict__["logprobs"] = lambda *given: asked.append(given) or real(*given)
    metrics = run.update(1, made)
    assert metrics["told/retired"] == 1
    assert asked == []
    assert "reward/transition:told/mean" not in metrics


def test_the_start_says_how_much_of_the_text_is_in_the_answers(
    model: PreTrainedModel, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = groups(tokenizer)
    assert leakage("look up Ada", made[0].rollouts[1].transitions[0]) == pytest.approx(1 / 3)
    caplog.set_level(logging.INFO)
    run = updater(model, tokenizer, "grpo", source="task:solution", template="Only now: {text} ")
    run.update(0, made)
    run.update(1, made)
    lines = [r.getMessage() for r in caplog.records if "stand in their answers" in r.getMessage()]
    assert len(lines) == 1
    assert "5 calls are told task:solution (control none), 3 words each; 0% of these" in lines[0]


def test_what_is_told_to_nobody_is_said_once(
    policy: TrainedPolicy, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace as altered

    caplog.set_level(logging.INFO)
    made = groups(tokenizer)
    failed = [g for g in made if g.id == "b"]
    for _ in range(2):
        assert Telling(least=0.9)(failed, policy) == failed
        assert Telling("error", least=0.9)(made, altered(policy, context=8)) == made
    lines = [r.getMessage() for r in caplog.records]
    assert lines == [
        "+told: nothing is told in this step: no rollout has a sibling with a reward >= 0.9",
        "+told: 2 of 2 calls are told nothing: with the text their prompt exceeds the context or "
        "cannot be rendered",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"source": "friend"}, "none of"), ({"source": "task:"}, "none of"),
     ({"template": "no text"}, "it has no {text}"),
     ({"source": "user", "template": "{text}"}, "words of its own"),
     ({"use": "scale", "top": 3}, "only told_use = 'kl'"),
     ({"by": "token"}, "only told_use = 'scale'"),
     ({"top": 3, "against": "wrong"}, "is from the untold policy; set told_top = 0")],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("grpo+told", {f"told_{k}": v for k, v in options.items()}, supplies=ALL_OUTPUTS)


def test_what_it_does_by_default() -> None:
    """Over several tokens but against a control, and successes are the host's, as SRPO routes; what
    a user said is about any rollout, and weights keep the sign of its advantage."""

    def made(preset: str = "grpo+told", **options: Any) -> tuple[int, bool]:
        algo = make(preset, {f"told_{k}": v for k, v in options.items()}, supplies=ALL_OUTPUTS)
        assert isinstance(algo.telling, Telling)
        return 0 if algo.distill is None else algo.distill.k, algo.telling.failures_only

    assert made() == (20, True)
    assert made(against="wrong") == (0, True)
    assert made(source="user") == (20, False)
    assert made(use="scale") == made(use="belief") == (0, False)
    assert made("grpo+self-distill") == (0, False)
    assert made(top=0, failures_only=False) == (0, False)
    with pytest.raises(ConfigError, match=r"choose .* top = 0 of distill or told"):
        make("grpo+told", {}, supplies=("old", "sampler"))


def test_a_told_reference_is_in_memory() -> None:
    """The store may have its log-probs, but not where it is told something."""
    config = RunConfig(data=DataConfig(name="items"))
    plain = make("grpo", {"kl": 0.1}, supplies=ALL_OUTPUTS)
    assert caches_reference(config, plain)
    for teacher, cached in (("current", True), ("reference", False)):
        algo = make("grpo+told", {"kl": 0.1, "told_teacher": teacher}, supplies=ALL_OUTPUTS)
        assert caches_reference(config, algo) is cached


def test_it_cannot_be_told_twice_nor_beside_another_distillation() -> None:
    with pytest.raises(ConfigError, match="tells the policy twice"):
        make("grpo+self-distill+told", {}, supplies=ALL_OUTPUTS)
    with pytest.raises(ConfigError, match="cannot be combined"):
        make("dppo-topk+told", {"told_top": 3}, supplies=ALL_OUTPUTS)


def test_a_batch_of_told_calls_has_the_tokens_of_the_batch(
    policy: TrainedPolicy, tokenizer: Any
) -> None:
    made = groups(tokenizer)
    batch = build_batch(made)
    told, at, there = Telling("error").told(batch, made, policy)
    actions = torch.cat([row.tokens[row.actions] for row in batch.rows])
    others = torch.cat([row.tokens[row.actions] for row in told.rows])
    assert torch.equal(actions[at], others[there])
    assert {batch.transitions[n] for n in batch.token_transition[at].tolist()} == {"a0/0", "a0/1"}
