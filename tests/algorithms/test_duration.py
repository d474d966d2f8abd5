"""What a run says it will need before it begins."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.algorithms import estimate
from agentrl.algorithms.engines.embedded import engine
from agentrl.algorithms.proof import announce, announce_tried
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.train.stages import check_context, check_vocabulary
from agentrl.cli.main import cli
from agentrl.core.config import RunConfig, load, resolve
from agentrl.core.errors import PolicyError
from agentrl.core.processes import PHASE
from tests.factories import call, group, rollout


def run_config(model: Path, **tables: Any) -> RunConfig:
    algorithm = {"groups": 1, "group_size": 4} | tables.pop("algorithm", {})
    settings: dict[str, Any] = {"policy": {"model": str(model)}, "sampling": {"max_tokens": 10}}
    return resolve(settings | {"steps": 6, "algorithm": algorithm} | tables, source="test")


def seconds(found: str) -> float:
    return float(found.removeprefix("time: about ").partition(" s a step")[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of 10 ms and 5 ms for each further call; 1 ms a token read."""

    def seconds_of(network: Any, rows: int, tokens: int) -> float:
        return tokens / 1000 if tokens > 1 else 0.01 + 0.005 * (rows - 1)

    monkeypatch.setattr(estimate, "seconds_of", seconds_of)


def test_time_is_that_of_sampling_and_of_the_update(clock: None, tiny_model_dir: Path) -> None:
    # 10 tokens of 4 calls at once, 0.01 + 4 * 0.005 s each; 6 ms a call; 40 tokens, 3 ms each.
    (found,) = estimate.duration(run_config(tiny_model_dir), None)
    assert seconds(found) == pytest.approx(10 * 0.03 + 0.024 + 40 * 0.003, abs=0.01)
    assert "2.7 s for 6 steps, if a rollout is one call of 10 tokens;" in found
    (twice,) = estimate.duration(run_config(tiny_model_dir, algorithm={"epochs": 2}), None)
    assert seconds(twice) == pytest.approx(10 * 0.03 + 0.024 + 80 * 0.003, abs=0.01)
    (other,) = estimate.duration(run_config(tiny_model_dir, engine={"kind": "vllm"}), None)
    assert other.startswith("time: not estimated for engine.kind = 'vllm'")


def test_finished_steps_are_not_in_the_time_that_is_left(clock: None, tiny_model_dir: Path) -> None:
    (found,) = estimate.duration(run_config(tiny_model_dir), None, done=4)
    assert "0.89 s for the 2 steps that are left, if" in found


def test_waiting_for_a_core_is_not_in_the_time(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_policies(run_config(tiny_model_dir))[0].model
    waiting = tmp_path / "schedstat"
    monkeypatch.setattr(estimate, "SCHEDULER", waiting)
    slow, waited = engine.sample, 0.0

    def sample(logits: Any, *given: Any) -> Any:
        nonlocal waited
        time.sleep(0.5)  # as if others had the cores
        waited += 0.5
        waiting.write_text(f"0 {waited * 1e9:.0f} 1")
        return slow(logits, *given)

    monkeypatch.setattr(engine, "sample", sample)
    assert estimate.seconds_of(network, 2, 1) < 0.4


def test_memory_as_tried_is_that_of_the_contexts_of_rollouts(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tiny_model_dir, engine={"max_context": 512, "max_batch": 64})
    models = load_policies(config)
    calls = [call("c", range(40), range(20)), call("d", range(9))]
    caplog.clear()  # of loading, where another test has set the level
    with caplog.at_level(PHASE, "agentrl.algorithm"):
        announce_tried(config, models, [group(rollout("r", calls))])
        announce_tried(config, models, [group(rollout("r"))])
    (said,) = caplog.messages
    full, short = (
        sum(
            estimate.process_bytes(
                run_config(tiny_model_dir, engine=engine), models[0].model
            ).values()
        )
        for engine in ({"max_context": n, "max_batch": 64} for n in (512, 60))
    )
    assert short < full
    assert said == (
        f"memory: about {short / 2**30:.2g} GiB as tried (contexts of 60 tokens), at most "
        f"{full / 2**30:.2g} if every context fills"
    )


def test_memory_that_will_not_do_is_a_warning(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tiny_model_dir)
    models = load_policies(config)
    parameters = AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()
    needed = estimate.process_bytes(config, models[0].model)
    assert needed["weights"] == 4 * parameters
    assert needed["optimizer"] == 3 * 4 * parameters
    for available, level in ((2 * sum(needed.values()), PHASE), (1.0, logging.WARNING)):
        monkeypatch.setattr(estimate, "available", lambda config, all=available: all)
        with caplog.at_level(PHASE, "agentrl.algorithm"):
            announce(config, models)
        memory, time = caplog.records[-2:]
        assert (memory.levelno, time.levelno) == (level, PHASE)
        assert memory.message.startswith("memory: at most ")
        assert ("gradient_checkpointing" in memory.message) == (level == logging.WARNING)
        assert time.message.startswith("time: about ")


def test_a_dry_run_says_it_in_comments_of_its_run_file(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "LIBRARIES", 0.45e9)  # not of the process of all tests
    file, again = tmp_path / "run.toml", tmp_path / "again.toml"
    file.write_text(f'[policy]\nmodel = "{tiny_model_dir}"\n[sampling]\nmax_tokens = 4\n')
    result = CliRunner().invoke(cli, ["train", str(file), "--dry-run"], catch_exceptions=False)
    memory, time, *_ = result.output.splitlines()
    assert memory.startswith("# memory: at most 0.")
    assert time.startswith("# time: about ")
    again.write_text(result.output)
    assert load(again).sampling.max_tokens == 4
    words = ["train", str(file), "policy.model=no/such", "--dry-run"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.output.startswith("# memory and time of no/such are unknown; agentrl doctor")


def test_a_context_longer_than_the_models_is_said(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for asked, said in ((2048, 0), (4000, 1)):  # the default is only a limit
        config = run_config(tiny_model_dir, engine={"max_context": asked})
        models = load_policies(config)
        longest = models[0].model.config.max_position_embeddings
        assert longest < 2048
        caplog.clear()
        check_context(models[0], config)
        lines = [line for line in caplog.messages if f"calls have at most {longest}" in line]
        assert len(lines) == said


def test_another_models_tokenizer_is_refused_before_a_rollout(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    tokenizer.add_tokens([f"<more{n}>" for n in range(600)])
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(PolicyError, match=r"tokenizer has .* tokens, and the model embeddings for"):
        check_vocabulary(load_policies(run_config(tmp_path / "m"))[0])
    grown = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    grown.resize_token_embeddings(4000)
    grown.save_pretrained(tmp_path / "m")
    check_vocabulary(load_policies(run_config(tmp_path / "m"))[0])
    assert "put the tokenizer files of this very model there" in caplog.text


def test_prompts_are_computed_too(clock: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    text = "a list of prices " * 20
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"input": text}) + "\n")
    network = load_policies(run_config(tiny_model_dir))[0].model
    tokens = len(AutoTokenizer.from_pretrained(tiny_model_dir)(text)["input_ids"])
    tasks = {"tasks": {"train": "tasks.jsonl"}, "root": str(tmp_path)}
    (without,) = estimate.duration(run_config(tiny_model_dir), network)
    for packing, prompts in (("trie", 1), ("rows", 4)):
        config = run_config(tiny_model_dir, learner={"packing": packing}, **tasks)
        (found,) = estimate.duration(config, network)
        more = prompts * tokens * 3 * 0.001
        assert seconds(found) == pytest.approx(seconds(without) + more, rel=0.1)


def test_sampling_is_in_the_time_of_a_decoding_step(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_policies(run_config(tiny_model_dir))[0].model
    slow, found = engine.sample, list[int]()

    def sample(logits: Any, *given: Any) -> Any:
        found.append(len(logits))
        time.sleep(0.05)
        return slow(logits, *given)

    monkeypatch.setattr(engine, "sample", sample)
    assert 0.05 < estimate.seconds_of(network, 5, 1) < 5.0
    assert set(found) == {5}


def test_a_model_that_cannot_be_served_is_said(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load_policies(run_config(tiny_model_dir))[0].model

    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(engine, "sample", lambda *_: None)
    monkeypatch.setattr(engine.Engine, "_forward", fail)
    with pytest.raises(PolicyError, match="the model failed: DefaultCPUAllocator"):
        estimate.seconds_of(network, 2, 1)


def test_long_times_are_in_words() -> None:
    assert [estimate._roughly(x) for x in (0.213, 99, 100, 9e4)] == [
        "0.21 s",
        "99 s",
        "100 s",
        "25 h",
    ]


def test_threads_that_wait_for_cores_are_not_in_the_time(tiny_model_dir: Path) -> None:
    network = load_policies(run_config(tiny_model_dir))[0].model
    own = network.forward

    def forward(*given: Any, **named: Any) -> Any:
        time.sleep(0.3)  # as at a barrier
        return own(*given, **named)

    network.forward = forward
    assert estimate.seconds_of(network, 1, 16) < 0.2
