"""What tools answered: which tokens are observations, and that they alone have a gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.credit.dump import load_dump, save_dump
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.data.observations import AnswerTexts
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.model.packing import Packing
from agentrl.algorithms.objective.core import (
    Algo,
    Echo,
    compute_advantages,
    loss_coefficients,
    loss_terms,
    observation_weights,
)
from agentrl.algorithms.objective.ratios import ALL_OUTPUTS, GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.metrics import Dump
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import Reward, Rollout, Transition
from agentrl.tiny.models import word_tokenizer
from tests import factories

PRESETS = ("grpo+echo",)
Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}
ASKED: Message = {"role": "user", "content": "What is the team of Ada?"}
AGAIN: Message = {"role": "user", "content": "And of Berg?"}


def echoed(**options: Any) -> Algo:
    return make("grpo+echo", options, supplies=ALL_OUTPUTS)


def tool(content: str, name: str = "query") -> Message:
    return {"role": "tool", "content": content, "name": name}


def said(content: str) -> Message:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama_dir)


@pytest.fixture
def model(tiny_llama_dir: Path) -> PreTrainedModel:
    """In float64 throughout: transformers computes norms in float32 whatever the model's is."""
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    for norm in (part for part in made.modules() if type(part).__name__ == "LlamaRMSNorm"):
        norm.forward = partial(exact_norm, norm)  # type: ignore[method-assign]
    return made.double()


def exact_norm(norm: Any, x: Tensor) -> Tensor:
    scaled: Tensor = norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return scaled


class Scribe:
    """Writes calls of a conversation as a policy server would."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat = tokenizer, Chat(tokenizer, Codec(tokenizer))
        self.number = 0

    def call(self, messages: Sequence[Message], answer: str, **fields: Any) -> Transition:
        """The next call; the answer ends as if it were sampled."""
        self.number += 1
        ended = f"{answer}{self.tokenizer.eos_token}"
        completion = self.tokenizer.encode(ended, add_special_tokens=False)
        return factories.call(
            str(self.number), self.chat.encode([*messages]), completion,
            index=self.number, messages=[*messages], answer=said(answer), **fields,
        )  # fmt: skip


def conversation(tokenizer: Any) -> list[Transition]:
    """A call of a tool, its result, an answer; the user asks again; two results at once."""
    scribe = Scribe(tokenizer)
    first = [SYSTEM, ASKED]
    second = [*first, said("query"), tool("sales Oslo")]
    third = [*second, said("sales"), AGAIN]
    fourth = [*third, said("look"), tool("legal Lima", "query"), tool("user", "list")]
    texts = ["query", "sales", "look", "legal"]
    return [scribe.call(m, t) for m, t in zip((first, second, third, fourth), texts, strict=True)]


def batch_of(tokenizer: Any, calls: Sequence[Transition], echo: Echo | None = None) -> Batch:
    made = factories.rollout("r", calls, [Reward(value=1.0)])
    return build_batch([factories.group(made)], observations=AnswerTexts(echo or Echo(), tokenizer))


def texts(tokenizer: Any, batch: Batch) -> list[str]:
    return [tokenizer.decode(row.tokens[row.observed]) for row in batch.rows]


def test_observations_are_the_tokens_of_results_alone(tokenizer: Any) -> None:
    batch = batch_of(tokenizer, conversation(tokenizer))
    assert texts(tokenizer, batch) == ["sales Oslolegal Limauser"]
    assert batch.sources == ["list", "query"]
    by: dict[str, list[int]] = {name: [] for name in batch.sources}
    for token, source in zip(batch.rows[0].observed, batch.observation_source, strict=True):
        by[batch.sources[int(source)]].append(int(batch.rows[0].tokens[token]))
    assert {name: tokenizer.decode(ids) for name, ids in by.items()} == {
        "query": "sales Oslolegal Lima", "list": "user",
    }  # fmt: skip
    assert not set(batch.rows[0].observed.tolist()) & set(batch.rows[0].actions.tolist())


@pytest.mark.parametrize(
    ("echo", "text"),
    [(Echo(tools=("list",)), "user"), (Echo(roles=("user",)), "And of Berg?"),
     (Echo(roles=("tool", "user"), tools=("user", "query")), "sales OsloAnd of Berg?legal Lima")],
)  # fmt: skip
def test_roles_and_tools_are_chosen(tokenizer: Any, echo: Echo, text: str) -> None:
    assert texts(tokenizer, batch_of(tokenizer, conversation(tokenizer), echo)) == [text]


def test_tokenizers_of_whole_words_have_observations() -> None:
    """Their tokens have no spaces, so the text of a result is nowhere in the prompt as it is."""
    messages = [SYSTEM, ASKED, said("query"), tool("sales\n Oslo"), said("sales"), AGAIN]
    words = dict.fromkeys(" ".join(str(message["content"]) for message in messages).split())
    tokenizer = word_tokenizer([*words], ("system", "user", "assistant", "tool"))
    scribe = Scribe(tokenizer)
    sampled = ((messages[:2], "query"), (messages[:4], "sales"), (messages, "Ada?"))
    calls = [scribe.call(before, text) for before, text in sampled]
    batch = batch_of(tokenizer, calls)
    assert [tokenizer.convert_ids_to_tokens(row.tokens[row.observed]) for row in batch.rows] == [
        ["sales", "Oslo"]
    ]


def branches(tokenizer: Any) -> list[Transition]:
    """After one action: two samples of the same next call, one after another result, and a
    sub-agent whose prompt has results that follow none of its own actions."""
    scribe = Scribe(tokenizer)
    start, result = [SYSTEM, ASKED], [SYSTEM, ASKED, said("query"), tool("sales Oslo")]
    other = [SYSTEM, ASKED, said("query"), tool("sales Lima")]
    foreign = [AGAIN, said("elsewhere"), tool("Cairo")]
    return [
        scribe.call(start, "query"), scribe.call(result, "sales"), scribe.call(result, "legal"),
        scribe.call(other, "sales"), scribe.call(foreign, "support"),
    ]  # fmt: skip


def test_branches_count_what_they_share_once(tokenizer: Any) -> None:
    found = texts(tokenizer, batch_of(tokenizer, branches(tokenizer)))
    whole = tokenizer.encode("sales Oslo", add_special_tokens=False)
    other = tokenizer.encode("sales Lima", add_special_tokens=False)
    shared = next(n for n, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    assert found == ["sales Oslo", "", tokenizer.decode(other[shared:]), ""]


def test_what_follows_a_replayed_call_counts_where_sampled(tokenizer: Any) -> None:
    scribe = Scribe(tokenizer)
    first = scribe.call([SYSTEM, ASKED], "query", repeats="elsewhere")
    second = scribe.call([SYSTEM, ASKED, said("query"), tool("sales Oslo")], "sales")
    assert texts(tokenizer, batch_of(tokenizer, [first, second])) == [""]


def test_a_result_that_the_template_renders_otherwise_is_told(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = conversation(tokenizer)
    unlike = factories.call(
        "x", second.prompt, second.completion, messages=[*first.messages, said("query"), tool("?")]
    )
    assert texts(tokenizer, batch_of(tokenizer, [first, unlike])) == [""]
    assert "is not in the prompt of call x" in caplog.text


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def written_apart(model: PreTrainedModel, tokenizer: Any, batch: Batch, texts: set[str]) -> Tensor:
    """The mean cross-entropy of the tokens of some texts, found in the decoded rows, each distinct
    prefix once; 0 of those that are less than half as probable as chance."""
    losses, seen = [], set()
    for row in batch.rows:
        logits = model(row.tokens[None]).logits[0].log_softmax(-1)
        pieces = [tokenizer.decode([t]) for t in row.tokens.tolist()]
        whole = "".join(pieces)
        for text in texts:
            mark = f"<tool_response>\n{text}\n</tool_response>"
            start = whole.find(mark) + len("<tool_response>\n")
            at = 0
            for n, piece in enumerate(pieces):
                inside = mark in whole and start <= at and at + len(piece) <= start + len(text)
                at += len(piece)
                key = tuple(row.tokens[: n + 1].tolist())
                if inside and key not in seen:
                    seen.add(key)
                    loss = -logits[n - 1, row.tokens[n]]
                    losses.append(loss * (loss < math.log(2 * logits.shape[-1])))
    return torch.stack(losses).mean()


CASES = {
    "one row": (conversation, {"sales Oslo", "legal Lima", "user"}),
    "branches": (branches, {"sales Oslo", "sales Lima"}),
}


@pytest.mark.parametrize(
    ("case", "packing", "budget"),  # each two of them together
    [("one row", "rows", 8), ("one row", "trie", 4096), ("branches", "rows", 4096),
     ("branches", "trie", 8)],
)  # fmt: skip
def test_only_observations_have_a_gradient(
    case: str, packing: Packing, budget: int, model: PreTrainedModel, tokenizer: Any
) -> None:
    """That of prompts, system, users, marks and actions is 0: all of it is that of the loss which
    is written apart."""
    make_calls, results = CASES[case]
    batch = batch_of(tokenizer, make_calls(tokenizer))
    expected = gradients(model, 0.1 * written_apart(model, tokenizer, batch, results))
    learner = TorchLearner(model, tokenizer, packing=packing, token_budget=budget)
    weights = observation_weights(echoed(), batch)
    learner._backward(batch, lambda p, index: torch.zeros_like(p), None, None, weights)
    for mine, own in zip((p.grad for p in model.parameters()), expected, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, own, rtol=1e-8, atol=1e-10)
    assert max(float(g.abs().max()) for g in expected) > 1e-4


def test_with_actions_the_gradient_is_the_sum(model: PreTrainedModel, tokenizer: Any) -> None:
    batch = batch_of(tokenizer, conversation(tokenizer))
    learner = TorchLearner(model, tokenizer)
    psi = torch.linspace(-1, 1, batch.n_tokens).double()

    def found(weights: Tensor | None) -> list[Tensor]:
        learner._zero_grad()
        learner._backward(batch, lambda p, index: psi[index], None, None, weights)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    weights = observation_weights(echoed(), batch)
    both, actions = found(weights), found(None)
    psi = torch.zeros_like(psi)
    for one, a, o in zip(both, actions, found(weights), strict=True):
        torch.testing.assert_close(one, a + o, rtol=1e-9, atol=1e-12)


def test_ratios_credit_and_averages_do_not_see_observations(tokenizer: Any) -> None:
    calls = conversation(tokenizer)
    with_them = batch_of(tokenizer, calls)
    made = factories.rollout("r", calls, [Reward(value=1.0)])
    without = build_batch([factories.group(made)])
    assert len(with_them.observation_row)
    for name in ("grpo", "gspo+tis", "reinforce++", "grpo+echo"):
        algo = echoed() if "echo" in name else make(name, {})
        pair = []
        for batch in (with_them, without):
            terms = loss_terms(algo, batch, GivenLogProbs(old=batch.sampler_logprobs.double()))
            p, index = batch.sampler_logprobs.double() + 0.1, torch.arange(batch.n_tokens)
            pair.append((compute_advantages(algo, batch), loss_coefficients(algo, terms, p, index)))
        for one, other in zip(*pair, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


def flat_group(tokenizer: Any, outcomes: Sequence[float]) -> Any:
    rows: list[Rollout] = []
    for number, value in enumerate(outcomes):
        calls = [
            factories.call(f"{number}/{c.id}", c.prompt, c.completion, messages=c.messages,
                           answer=c.answer)
            for c in conversation(tokenizer)
        ]  # fmt: skip
        rows.append(factories.rollout(str(number), calls, [Reward(value=value)], index=number))
    return factories.group(*rows)


def test_a_group_without_a_difference_teaches_what_tools_answer(
    tokenizer: Any, model: PreTrainedModel
) -> None:
    settings = AlgorithmConfig(preset="grpo+echo", lr=1e-2)
    learner = TorchLearner(model.float(), tokenizer)
    updater = Updater(
        RunConfig(algorithm=settings), echoed(echo_weight=1.0), learner,
        preprocessor=Preprocessor(tokenizer=tokenizer),
    )  # fmt: skip
    first = updater.update(0, [flat_group(tokenizer, [0.0, 0.0])])
    second = updater.update(1, [flat_group(tokenizer, [0.0, 0.0])])
    assert first["update/skipped"] == 0
    assert first["echo/tokens"] > 8
    assert second["echo/loss"] < first["echo/loss"] - 0.1
    assert {"echo/query/loss", "echo/list/loss"} < set(first)
    plain = Updater(RunConfig(), make("grpo", {}), learner)
    assert plain.update(0, [flat_group(tokenizer, [0.0, 0.0])])["update/skipped"] == 1


def test_a_step_without_an_answer_is_reported_once(
    tokenizer: Any, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    updater = Updater(
        RunConfig(), echoed(echo_tools=["search"]), TorchLearner(model, tokenizer),
        preprocessor=Preprocessor(tokenizer=tokenizer),
    )  # fmt: skip
    for step in range(2):
        updater.update(step, [flat_group(tokenizer, [0.0, 0.0])])
    lines = [r.getMessage() for r in caplog.records if "+echo" in r.getMessage()]
    assert lines == [
        "+echo: step 1 has no observation to learn from: no message of role tool and tool search "
        "follows an action in a prompt that continues its tokens"
    ]


def test_answers_less_probable_than_chance_are_not_learned(
    tokenizer: Any, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy that was never trained on such text would learn it before it learns the task."""
    with torch.no_grad():  # so that one token is as good as certain
        model.get_output_embeddings().weight *= 40
    updater = Updater(
        RunConfig(), echoed(), TorchLearner(model, tokenizer),
        preprocessor=Preprocessor(tokenizer=tokenizer),
    )  # fmt: skip
    metrics = [updater.update(step, [flat_group(tokenizer, [0.0, 0.0])]) for step in range(2)]
    assert metrics[0]["echo/loss"] > math.log(len(tokenizer))
    assert metrics[0]["echo/below_chance"] == 1
    assert metrics[0]["grad_norm"] == 0
    lines = [r.getMessage() for r in caplog.records if "+echo" in r.getMessage()]
    assert lines == [
        "+echo: step 1 learns nothing from 100% of what tools answered, which the policy finds "
        "far less probable than any token by chance: it was not trained on such text"
    ]


def test_a_part_and_a_dump_of_a_batch_keep_observations(tokenizer: Any, tmp_path: Path) -> None:
    batch = batch_of(tokenizer, branches(tokenizer))
    part, _ = batch.cut(torch.tensor([0, 2]))
    assert part.observation_row.tolist() == [
        {0: 0, 2: 1}[row] for row in batch.observation_row.tolist() if row in (0, 2)
    ]
    assert part.observation_source.numel() == part.observation_row.numel()
    batch = replace(batch, rewards={"outcome": torch.ones(1).double()})
    terms = loss_terms(make("reinforce", {}), batch, GivenLogProbs(), fresh=True)
    path = tmp_path / "d.safetensors"
    save_dump(path, Dump(batch, terms, batch.sampler_logprobs, 0.0, 0.0))
    read = load_dump(path).batch
    for one, other in zip(read.rows, batch.rows, strict=True):
        assert torch.equal(one.observed, other.observed)
    assert read.sources == batch.sources


def test_a_learner_that_computes_no_observations_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns from what tools answered"):
        make("grpo+echo", {}, supplies=("old", "sampler"))
