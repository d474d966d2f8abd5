"""The CPU benchmark measures what it says, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch

from agentrl.algorithms.model.load import load_model
from tests.benchmarks.cpu_speed import ANSWER, PROMPTS, ROWS, measure, prompts, rollouts


def test_all_figures_of_a_tiny_model(tiny_model_dir: Path) -> None:
    found = measure(str(tiny_model_dir), dtype="float32", tries=1)
    speeds = {f"{name}_{rows}" for name in ("decode", "cached_decode") for rows in ROWS}
    updates = {
        f"update_{kind}_{part}_cpu_s" for kind in ("full", "lora") for part in ("pass", "step")
    }
    assert set(found) == speeds | {f"{name}_lora" for name in speeds} | updates | {"update_tokens"}
    assert min(found.values()) > 0


def test_the_trie_has_each_prompt_once(tiny_model_dir: Path) -> None:
    _, tokenizer = load_model(tiny_model_dir, device="cpu")
    asked = prompts(tokenizer)
    batch = rollouts(asked, 512)
    assert (len(asked), len(batch.rows), batch.n_tokens) == (PROMPTS, 64, 64 * ANSWER)
    first = batch.rows[0].tokens
    assert torch.equal(first[:-ANSWER], torch.tensor(asked[0]))
