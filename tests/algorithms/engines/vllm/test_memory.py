"""What of one GPU vLLM may take beside the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.engines.vllm import process
from agentrl.algorithms.engines.vllm.server import vllm_server, vllm_share
from agentrl.algorithms.estimate import USABLE_MEMORY, bytes_needed
from agentrl.algorithms.model.load import load_model
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError, PolicyError


def config_of(vllm: dict[str, Any], **tables: Any) -> RunConfig:
    engine = {"kind": "vllm", "max_context": 256, "vllm": vllm}
    return resolve({"policy": {"model": "m"}, "engine": engine, **tables}, source="run.toml")


def test_vllm_gets_what_the_learner_leaves(tiny_model_dir: Path) -> None:
    network, _ = load_model(tiny_model_dir, device="cpu")
    budget = {"token_budget": 256}
    awake, asleep = config_of({}, learner=budget), config_of({"sleep": 1}, learner=budget)
    moved = config_of({"sleep": 1}, learner=budget | {"offload": True})
    parts = bytes_needed(awake, network)
    assert parts["KV cache"] == 0  # which is vLLM's own
    total = 10 * int(sum(parts.values()))
    shares = [vllm_share(config, network, total) for config in (awake, asleep, moved)]
    assert shares[0] == pytest.approx(USABLE_MEMORY - sum(parts.values()) / total)
    assert shares[1] == pytest.approx(shares[0] + (parts["activations"] + parts["logits"]) / total)
    assert shares[2] == pytest.approx(USABLE_MEMORY - parts["weights"] / total)


def test_too_little_is_a_sentence_with_the_numbers(tiny_model_dir: Path) -> None:
    network, _ = load_model(tiny_model_dir, device="cpu")
    config = config_of({})
    total = int(sum(bytes_needed(config, network).values()) / USABLE_MEMORY)
    with pytest.raises(PolicyError, match=r"GiB of the learner's GPU.*set engine\.vllm\.sleep=1"):
        vllm_share(config, network, total)


@pytest.mark.parametrize("vllm", [{"sleep": 1}, {"gpu_memory": 0.4}])
def test_a_cpu_has_no_gpu_memory_to_share(
    vllm: dict[str, Any], tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "check_installed", lambda: None)
    config = config_of(vllm, output=str(tmp_path))
    with pytest.raises(PolicyError, match="need a GPU, and the policy is on cpu; remove them"):
        vllm_server(config, *load_model(tiny_model_dir, device="cpu"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"vllm": {"sleep": 2}, "policy": {"model": "m", "lora": {"rank": 4}}}, "set it to 1"),
        (
            {
                "vllm": {"sleep": 1},
                "algorithm": {"async_sampling": "in_flight", "max_staleness": 1},
            },
            "a sleeping vLLM answers no calls",
        ),
        (
            {"vllm": {"sleep": 1, "urls": ["http://a:1"]}},
            r"engine\.vllm\.sleep is for a vLLM child",
        ),
        (
            {"vllm": {}, "learner": {"offload": True, "optimizer": "paged_adamw8bit"}},
            "remove learner.offload",
        ),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tables.pop("vllm"), **tables)
