"""A teacher behind a server: the same lessons as from memory, and every way in which it fails."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agentrl.algorithms import chat_completions as chat_completion
from agentrl.algorithms.chat_completions import ModelServer
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.teachers import RemoteTeacher, make_teacher
from agentrl.algorithms.train.stages import load_algorithm
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig, resolve
from agentrl.core.errors import AgentRLError, ConfigError, PolicyError, TrainingError
from tests.algorithms.learners.test_learner import make_batch
from tests.algorithms.objective.test_distill import learners
from tests.algorithms.train.test_update import group

VOCABULARY = 512


class FakeVllm:
    """Answers `prompt_logprobs` from a model, as vLLM does. status: of the first answers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.status: list[int] = []
        self.answer: dict[str, Any] | None = None  # in place of the model's
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.url = ""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, k = body["prompt"], body["prompt_logprobs"]
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows: list[dict[str, Any] | None] = [None]
        for place, id in enumerate(ids[1:]):
            named = [id, *logprobs[place].topk(k).indices.tolist()]
            rows.append(
                {
                    str(n): {
                        "logprob": float(logprobs[place, n]), "rank": 1,
                        "decoded_token": self.tokenizer.decode([n]),
                    }
                    for n in named
                }
            )  # fmt: skip
        return {"choices": [{"index": 0, "text": "!", "prompt_logprobs": rows}]}

    @contextmanager
    def serving(self) -> Iterator[FakeVllm]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/completions"
                body = msgspec.json.decode(self.rfile.read(int(self.headers["content-length"])))
                fake.asked.append(body)
                fake.keys.add(self.headers["authorization"] or "")
                status = fake.status.pop(0) if fake.status else 200
                told = msgspec.json.encode(fake.answer or fake.reply(body))
                self.send_response(status)
                self.send_header("content-length", str(len(told)))
                self.end_headers()
                with suppress(BrokenPipeError):  # of a client that has found another error
                    self.wfile.write(told)

            def log_message(self, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield self
        server.shutdown()
        server.server_close()


@pytest.fixture
def learner(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> TorchLearner:
    """A policy, and in its memory the teacher that is served, too."""
    monkeypatch.setattr(chat_completion, "FIRST_WAIT", 0.0)
    return learners(tiny_model_dir)


@pytest.fixture
def fake(learner: TorchLearner, tiny_model_dir: Path) -> Iterator[FakeVllm]:
    _, tokenizer = load_model(tiny_model_dir, device="cpu")
    with FakeVllm(learner.frozen["teacher"].model, tokenizer).serving() as serving:
        yield serving


def remote(fake: FakeVllm, k: int = 6) -> RemoteTeacher:
    endpoint = ModelServer(fake.url, "big", "big", "secret")
    return RemoteTeacher("teacher.model = 'big'", endpoint, k, fake.tokenizer, VOCABULARY)


@pytest.mark.parametrize("k", [1, 6, VOCABULARY])
def test_it_has_the_log_probs_of_the_teacher_in_memory(
    learner: TorchLearner, fake: FakeVllm, k: int
) -> None:
    batch, teacher = make_batch(), remote(fake, k)
    fake.status = [503, 429]
    asyncio.run(teacher.check())
    ids, logprobs = teacher.top(batch)
    wanted, expected = learner.top(batch, k, "teacher")
    assert torch.equal(ids[:, 0], wanted[:, 0])
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    named = learner.topk_logprobs(replace(batch, topk_tokens=ids), "teacher")
    torch.testing.assert_close(logprobs, named, atol=1e-4, rtol=0)
    assert fake.keys == {"Bearer secret"}
    assert {body["model"] for body in fake.asked} == {"big"}
    assert len(fake.asked) == 3 + len(batch.rows)  # the probe thrice; a row for both of its calls
    nothing = replace(batch, rows=[], token_row=torch.empty(0, dtype=torch.int64))
    assert teacher.top(nothing)[0].shape == (0, k)


def weights(learner: TorchLearner) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in learner.model.parameters()])


@pytest.mark.parametrize("preset", ["distill", "grpo+distill"])
@pytest.mark.parametrize(("top", "epochs"), [(0, 1), (6, 1), (6, 2)])
def test_a_step_is_the_one_that_the_same_teacher_in_memory_gives(
    learner: TorchLearner, fake: FakeVllm, preset: str, top: int, epochs: int
) -> None:
    prefix = "" if preset == "distill" else "distill_"
    algo = make(preset, {f"{prefix}top": top}, supplies=learner.supplies)
    settings = AlgorithmConfig(lr=1e-3, epochs=epochs, minibatches=epochs)
    groups, config = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)], RunConfig(algorithm=settings)
    other = TorchLearner(copy.deepcopy(learner.model), fake.tokenizer, token_budget=40)
    here = Updater(config, algo, learner).update(0, groups)
    there = Updater(config, algo, other, teacher=remote(fake, top or 1)).update(0, groups)
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-4, abs=1e-6)
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-3)
    start = torch.cat([w.detach().flatten() for w in load_start(fake)])
    moved = weights(learner) - start
    assert moved.abs().max() > 1e-4
    # Adam divides by a gradient's size: where that is rounding, so is the weight's change.
    differs = torch.linalg.vector_norm(weights(other) - start - moved)
    assert differs < 1e-3 * torch.linalg.vector_norm(moved)


def load_start(fake: FakeVllm) -> list[Tensor]:
    model, _ = load_model(fake.tokenizer.name_or_path, device="cpu")
    return list(model.parameters())


def refusal(teacher: RemoteTeacher) -> str:
    with pytest.raises(PolicyError) as caught:
        asyncio.run(teacher.check())
    assert str(caught.value).startswith("teacher.model = 'big'")
    return str(caught.value)


def test_what_cannot_teach_is_a_sentence_at_the_start(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = remote(fake)
    fake.status, fake.answer = [404], {"error": {"message": "The model `big` does not exist."}}
    assert "answered 404" in (told := refusal(teacher))
    assert "The model `big` does not exist." in told
    assert "(420 tokens) and --max-logprobs 6 or more" in told
    for answer in ({"choices": []}, {"choices": [{"text": "!"}]}, {"object": "list"}):
        fake.answer = answer
        assert "/completions answers without the prompt_logprobs" in refusal(teacher)
    fake.answer = None
    few = fake.reply({"prompt": fake.asked[0]["prompt"], "prompt_logprobs": 3})
    fake.answer = few
    assert "without the prompt_logprobs" in refusal(teacher)
    fake.answer = None
    decode = fake.tokenizer.decode
    with monkeypatch.context() as patched:
        patched.setattr(
            type(fake.tokenizer), "decode",
            lambda self, ids: "other" if self is fake.tokenizer and ids == [419] else decode(ids),
        )  # fmt: skip
        own = PreTrainedTokenizerFast.from_pretrained(fake.tokenizer.name_or_path)
        told = refusal(replace(teacher, tokenizer=own))
        assert "token 419 is 'other' there and " in told
        assert "choose a teacher with the policy's vocabulary" in told
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda self, dim: self)
    assert "returns logits; start it with --logprobs-mode raw_logprobs" in refusal(teacher)


def test_a_server_that_is_down_is_a_sentence(fake: FakeVllm) -> None:
    teacher, batch = remote(fake), make_batch()
    gone = replace(teacher, endpoint=teacher.endpoint._replace(url="http://127.0.0.1:9/v1"))
    assert "http://127.0.0.1:9/v1/completions is unreachable" in refusal(gone)
    with pytest.raises(AgentRLError, match=r"is unreachable .*the same command resumes from here"):
        gone.top(batch)
    fake.status = [500] * 99
    with pytest.raises(AgentRLError, match="answered 500"):
        teacher.top(batch)


def test_what_it_cannot_answer_while_training_is_a_sentence(fake: FakeVllm) -> None:
    teacher, batch = remote(fake), make_batch()
    warm = replace(batch.rows[1], temperature=torch.full_like(batch.rows[1].temperature, 0.7))
    said = r"sampled at 0\.7; set sampling\.override_agent = true"
    with pytest.raises(TrainingError, match=said):
        teacher.top(replace(batch, rows=[batch.rows[0], warm]))
    assert not fake.asked
    with pytest.raises(PolicyError, match=r"names token 5\d\d, and the policy has 500"):
        replace(teacher, vocabulary=500).top(batch)


def settings(**tables: Any) -> RunConfig:
    given = {
        "upstreams": {
            "big": {"base_url": "http://x/v1", "key_env": "BIG_KEY"}, "said": {"text": ""},
        },
        "teacher": {"model": "big"}, "algorithm": {"preset": "distill"},
    }  # fmt: skip
    return resolve(given | tables, source="run.toml")


def test_the_run_file_names_it(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", "secret")
    model = load_model(tiny_model_dir, device="cpu")
    config = settings(algorithm={"preset": "grpo+distill", "options": {"distill_top": 9}})
    teacher = make_teacher(config, load_algorithm(config), *model)
    assert teacher is not None
    assert (teacher.k, teacher.vocabulary) == (9, VOCABULARY)
    assert teacher.endpoint[:4] == ("http://x/v1", "big", "big", "secret")
    config = settings()
    teacher = make_teacher(config, load_algorithm(config), *model)
    assert teacher is not None
    assert teacher.k == 1
    assert make_teacher(settings(teacher={}), load_algorithm(config), *model) is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"teacher": {"model": "said"}},
            r"teacher\.model = 'said': this upstream answers with a fixed text; name one",
        ),
        ({"sampling": {"temperature": 0.7}}, r"sampling\.temperature: .* set it to 1"),
        ({"algorithm": {"preset": "grpo"}}, r"teacher\.model is set, .* reads no teacher"),
        (
            {"algorithm": {"preset": "distill", "options": {"top": 4, "of": "policy"}}},
            r"teacher\.model is set, and a server has no log-probs of the policy's most probable",
        ),
    ],
)
def test_what_could_not_be_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_algorithm(settings(**tables))
