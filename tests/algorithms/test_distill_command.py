"""On-policy distillation from the command line, by a teacher behind a server."""

from __future__ import annotations

from pathlib import Path

from agentrl.algorithms.model.load import load_model
from tests.algorithms.test_teachers import FakeVllm
from tests.system.test_run import agentrl, measured

RUN = """
[teacher]
model = "big"
[upstreams.big]
base_url = "{url}"
"""


def test_a_policy_learns_from_a_teacher_that_a_server_has(
    run_folder: Path, tiny_llama_dir: Path
) -> None:
    """It is asked at the start and about every row; one that fails ends the run in a sentence."""
    model, tokenizer = load_model(tiny_llama_dir, device="cpu")
    with FakeVllm(model, tokenizer).serving() as fake:
        run = run_folder / "run.toml"
        run.write_text(run.read_text() + RUN.format(url=fake.url))
        preset = ["algorithm.preset=grpo+distill", "algorithm.options.distill_top=5"]
        small = ["steps=1", "algorithm.groups=1", "algorithm.group_size=4", "eval.tasks=1"]
        trained = agentrl(run_folder, "train", "run.toml", *preset, *small)
        assert trained.returncode == 0, trained.stderr
        (step,) = measured(run_folder)
        assert step["update/skipped"] == 0
        assert step["grad_norm"] > 0
        assert len(fake.asked) == 1 + step["rows"]
        fake.answer = {"choices": []}
        again = agentrl(run_folder, "train", "run.toml", *preset, *small, "output=again")
        assert again.returncode != 0
        assert "/completions answers without the prompt_logprobs" in again.stderr
