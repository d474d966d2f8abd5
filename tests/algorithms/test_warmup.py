"""Supervised fine-tuning before a run's first step."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from agentrl import trainer
from agentrl.algorithms.credit.core import Imitated
from agentrl.algorithms.demonstrations import ConversationReader
from agentrl.algorithms.learners.factory import torch_learner
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.warmup import Patience, as_batch
from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.derived import initial_version
from agentrl.core.config.learning import WarmupConfig
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import StepRow
from agentrl.evaluation import evaluation_run
from agentrl.telemetry.console import Progress
from agentrl.tiny.models import rows_of

SHOWN: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "Where is Ada?"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "query", "arguments": '{"sql": "SELECT"}'}}],
            },
            {"role": "tool", "content": place},
            {"role": "assistant", "content": place},
        ],
        "tools": [{"type": "function", "function": {"name": "query", "parameters": {}}}],
    }
    for place in ("Oslo", "Lima", "Cairo")
]


def settings(model: Path, tmp_path: Path, **changed: object) -> RunConfig:
    (tmp_path / "shown.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(SHOWN))
    warmup = {"data": "shown.jsonl", "steps": 30, "batch": 2, "lr": 1e-2}
    given = {"root": str(tmp_path), "output": str(tmp_path / "run"), "learner": {"threads": 1}}
    return resolve(
        {**given, "policy": {"model": str(model)}, "warmup": warmup, **changed}, source="test"
    )


def loss_of(directory: str) -> float:
    """Nats per token that the assistant writes in the demonstrations, by transformers alone."""
    model, tokenizer = load_model(directory)
    messages = [[*one["messages"]] for one in SHOWN]
    for one in messages:
        call = {"name": "query", "arguments": {"sql": "SELECT"}}
        one[1] = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    (pack,) = pack_rows(rows_of(tokenizer, messages, SHOWN[0]["tools"]), "rows", 10**5)
    with torch.no_grad():
        return -float(forward_logprobs(model, pack).mean())


def test_a_run_begins_with_a_policy_that_imitates(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    (loaded,) = load_policies(config)
    assert loaded.built
    assert loaded.source == config.model_path() == str(tmp_path / "run/warmup")
    assert loss_of(loaded.source) < 0.3 * loss_of(str(tiny_model_dir))
    (again,) = load_policies(config)  # made once
    assert not again.built
    weights = Path(loaded.source, "model.safetensors").read_bytes()
    shutil.rmtree(loaded.source)  # a start that was killed makes the same
    load_policies(config)
    assert Path(loaded.source, "model.safetensors").read_bytes() == weights


def test_a_checkpoint_is_not_warmed_up_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    own = evaluation_run(config, "eval", tiny_model_dir)
    assert load_policies(own)[0].source == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"warmup": {"steps": 3}}, "no effect without `data`"),
        ({"policies": {"a": {"roles": ["a"], "model": "m"}}}, "several policies trains adapters"),
        (
            {
                "policy": {"model": "m", "lora": {"rank": 4}},
                "learner": {"kind": "external", "factory": "mine.py:make"},
            },
            "trains an adapter only with learner.kind = 'torch'",
        ),
    ],
)
def test_a_warm_up_without_effect_is_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(Path("m"), tmp_path, **changed)


def test_what_cannot_be_imitated_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = settings(tiny_model_dir, tmp_path)
    (tmp_path / "shown.jsonl").write_text('{"input": "no messages"}\n')
    with pytest.raises(ConfigError, match=r"warmup.data: .*shown.jsonl:1 has no 'messages'"):
        load_policies(config)
    (tmp_path / "shown.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(TrainingError, match="no message of the assistant"):
        load_policies(config)
    assert not (tmp_path / "run/warmup").exists()


def shown(number: int) -> list[dict[str, object]]:
    """More conversations than are needed to hold some out."""
    return [SHOWN[index % 3] for index in range(number)]


def write(tmp_path: Path, number: int) -> None:
    (tmp_path / "shown.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(shown(number)))


LORA = {"lora": {"rank": 4}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_warmed_up_and_goes_on(
    tiny_model_dir: Path, tmp_path: Path, dtype: str
) -> None:
    """The same adapter; the policy after the warm-up is its reference, as that of all weights."""
    policy = LORA | {"model": str(tiny_model_dir), "dtype": dtype}
    config = settings(tiny_model_dir, tmp_path, policy=policy)
    (loaded,) = load_policies(config)
    assert loaded.built
    assert loaded.source == config.model_path() == str(tiny_model_dir)
    assert loaded.adapters is not None
    assert loaded.adapters.names == ["policy"]  # the reference is neither trained nor served
    reader = ConversationReader(loaded.tokenizer, [loaded.tokenizer.eos_token_id])
    batch = as_batch([row for one in SHOWN for row in reader.rows(one)])
    learner = torch_learner(
        config, Algo(Imitated(), rewards=()), loaded.model, loaded.tokenizer, loaded.adapters,
        "policy",
    )  # fmt: skip
    before = learner.logprobs(batch)
    with loaded.adapters.using(None):
        (pack,) = pack_rows(batch.rows, "trie", 10**5)
        base = forward_logprobs(loaded.model, pack)
    assert -before.mean() < -0.5 * base.mean()
    assert torch.equal(learner.logprobs(batch, of="reference"), before)
    learner.step(batch, lambda p, index: torch.ones_like(p), lr=1e-4)
    assert learner.logprobs(batch).mean() > before.mean()
    assert torch.equal(learner.logprobs(batch, of="reference"), before)
    learner.save(tmp_path / "saved")
    now = learner.logprobs(batch)
    (again,) = load_policies(config)
    assert not again.built
    resumed = torch_learner(
        config, Algo(Imitated(), rewards=()), again.model, again.tokenizer, again.adapters,
        "policy",
    )  # fmt: skip
    assert torch.equal(resumed.logprobs(batch), before)
    resumed.load(tmp_path / "saved")
    assert torch.equal(resumed.logprobs(batch), now)
    assert torch.equal(resumed.logprobs(batch, of="reference"), before)


def test_the_initial_version_of_an_adapter_is_the_warmed_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = settings(tiny_model_dir, tmp_path, policy=LORA | {"model": str(tiny_model_dir)})
    assert initial_version(config, "policy")[1].directory == ""
    load_policies(config)
    directory = initial_version(config, "policy")[1].directory
    assert directory == str(tmp_path / "run/warmup")
    own = evaluation_run(config, "eval", Path(directory))
    assert own.policy.lora.adapter == directory
    (loaded,) = load_policies(own)
    assert loaded.adapters is not None
    assert loaded.adapters.reference("policy") is None
    assert not Path(own.output, "warmup").exists()


def test_it_ends_once_the_format_is_learned(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal conversations are soon as likely as they get; no step is made after that, but all are
    where none is held out, of a few."""
    lines = {}
    for number in (60, 30):
        caplog.clear()
        warmup = {"data": "shown.jsonl", "steps": 120, "batch": 8, "lr": 1e-2}
        folder = tmp_path / str(number)
        folder.mkdir()
        config = settings(tiny_model_dir, folder, warmup=warmup)
        write(folder, number)
        with caplog.at_level(logging.INFO, "agentrl"):
            load_policies(config)
        lines[number] = "\n".join(record.getMessage() for record in caplog.records)
    first, last = (
        re.search(pattern, lines[60])
        for pattern in (
            r"imitation step 1/120  loss (\d\.\d+)  at most \d+ s left",
            r"imitated for (\d+) steps: (\d\.\d+) to \d\.\d+ nats per token, held out (\d\.\d+),",
        )
    )
    assert first is not None
    assert last is not None
    assert int(last[1]) < 120
    assert float(last[3]) < 0.75  # one of three places, and nothing else, is unknown
    assert "imitating 54 conversations of shown.jsonl, 6 held out" in lines[60]
    assert "imitated for 120 steps" in lines[30]
    assert "held out" not in lines[30]


class Scripted:
    """A learner with these losses on what is held out."""

    undoable = True

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.done = losses, list[object]()

    def logprobs(self, batch: object) -> torch.Tensor:
        return torch.tensor([-self.losses.pop(0)])

    def mark(self) -> None:
        self.done.append("mark")

    def shrink(self, share: float) -> None:
        self.done.append(share)


@pytest.mark.parametrize(
    ("losses", "checks", "marks"),
    [
        ([3, 2, 1, 0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01], 10, 10),  # each is lower
        ([3, 1, 0.995, 1.1, 1.2, *[1] * 10, 0.1], 15, 3),  # a plateau
        ([0.01, 0.005, 0.0045, 0.004, 0.0035, *[0.001] * 5], 8, 6),  # learned
        ([3, 2, 1, 0.1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], 10, 4),  # one low loss is chance
        ([1, 0.994, 0.987, 0.98, 0.974, 0.96, 0.95, 0.94, 0.93, 0.92], 10, 10),  # gains add up
        ([3, 2, 1, 0.5, 0.4, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2], 11, 5),  # it rises
        # As of SmolLM2 on a node of examples/traces: after a plateau it is learned at once.
        ([0.1, 0.12, 0.06, 0.17, 0.04, 0.19, 0.1, 0.18, 0.1, 0.035, 0.02, 0.02], 12, 5),
    ],
)
def test_the_weights_are_those_of_the_best_check(
    losses: list[float], checks: int, marks: int, tiny_model_dir: Path
) -> None:
    tokenizer = load_model(tiny_model_dir)[1]
    rows = ConversationReader(tokenizer, [tokenizer.eos_token_id]).rows(SHOWN[0])
    learner, patience = Scripted([*losses]), Patience(WarmupConfig(data="x", steps=100), [rows])
    steps = 4 * len(losses)
    ended = next((n for n in range(1, steps + 1) if patience.ends(cast(Any, learner), n)), steps)
    patience.restore(cast(Any, learner))
    assert ended == 4 * checks
    assert learner.done == ["mark"] * marks + [0.0]
    assert patience.best == pytest.approx(min(losses[:checks]))


def test_a_short_warm_up_outlasts_a_rise_of_its_loss(tiny_model_dir: Path) -> None:
    """Losses of SmolLM2 on a node of examples/traces, checked every second step."""
    tokenizer = load_model(tiny_model_dir)[1]
    rows = ConversationReader(tokenizer, [tokenizer.eos_token_id]).rows(SHOWN[0])
    rise, fall = [1.478, 1.928, 2.852, 1.834], [0.898, 0.368, 0.250, 0.302, 0.146]
    flat = [0.261, 0.176, 0.142, 0.227, 0.180, 0.148]
    learner = Scripted([*rise, *fall, *flat])
    patience = Patience(WarmupConfig(data="x", steps=30), [rows])
    assert not any(patience.ends(cast(Any, learner), n) for n in range(1, 31))
    assert patience.best == pytest.approx(0.142)


def test_what_does_not_fit_the_context_is_left_out(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tiny_model_dir, tmp_path)
    long = {"messages": [{"role": "user", "content": "Ada " * 600}, SHOWN[0]["messages"][3]]}
    file = tmp_path / "shown.jsonl"
    file.write_bytes(msgspec.json.Encoder().encode_lines([*SHOWN, long]))
    with caplog.at_level(logging.WARNING, "agentrl"):
        load_policies(config)
    assert "1 conversations are longer than 512 tokens: left out" in caplog.text
    shutil.rmtree(tmp_path / "run")
    file.write_bytes(msgspec.json.Encoder().encode_lines([long]))
    with pytest.raises(TrainingError, match="every conversation is longer than 512 tokens"):
        load_policies(config)


def test_fresh_deletes_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Otherwise the run would begin with what other settings made."""
    config = settings(tiny_model_dir, tmp_path)
    Path(config.output, "warmup").mkdir(parents=True)
    trainer.clear(config)
    assert not Path(config.output, "warmup").exists()


@pytest.mark.parametrize(
    ("warmup", "when"), [({}, "untrained"), ({"data": "shown.jsonl"}, "before the first step")]
)
def test_a_score_after_it_is_not_called_untrained(warmup: dict[str, Any], when: str) -> None:
    config = resolve({"steps": 9, "warmup": warmup}, source="test")
    row = StepRow(run="r", step=0, metrics={"eval/score": 0.5}, committed=False, at=0.0)
    assert Progress(config, [row]).scores_line(row) == f"{when}:  held-out 50.0%"
