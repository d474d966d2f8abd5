"""Seconds of one update of TRL's GRPOTrainer on a given batch; run by `tests.benchmarks.learner`
with a Python that has TRL, so it imports nothing of this package.

python tests/benchmarks/trl_update.py BATCH MODEL REPEATS THREADS"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


class Given(trl.GRPOTrainer):
    """Trains on the batch it is handed instead of sampling one."""

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return generation_batch


def trainer(model: str, tokenizer: PreTrainedTokenizerFast, group: int, size: int) -> Given:
    """One optimizer step on `size` rows in float32, with nothing on that is not needed."""
    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=size, num_generations=group,
        loss_type="grpo", beta=0.0, bf16=False, gradient_checkpointing=False, report_to=[],
        optim="adamw_torch_fused", learning_rate=1e-5, use_cpu=True, save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = Given(
        model=network, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * size),
    )  # fmt: skip
    made.create_optimizer_and_scheduler(num_training_steps=100)
    made.current_gradient_accumulation_steps = 1
    return made


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """TRL's own layout: prompts padded on the left, completions on the right."""

    def pad(name: str, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(row[name]) for row in rows)
        values = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            size = len(row[name])
            place = slice(longest - size, longest) if left else slice(0, size)
            values[index, place] = torch.tensor(row[name])
            mask[index, place] = 1
        return values, mask

    prompt, prompt_mask = pad("prompt", left=True)
    completion, completion_mask = pad("completion", left=False)
    sampled, _ = pad("sampled", left=False)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt_mask,
        "completion_ids": completion, "completion_mask": completion_mask,
        "tool_mask": sampled, "num_items_in_batch": sampled.sum(),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
    }  # fmt: skip


def main() -> None:
    batch, model, repeats, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    given = json.loads(Path(batch).read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=given["tokenizer"], pad_token="<pad>", eos_token="<eos>"
    )
    made = trainer(model, tokenizer, given["group"], len(given["rows"]))
    times = []
    for _ in range(int(repeats)):
        inputs = padded(given["rows"])
        started = time.perf_counter()
        made.training_step(made.model, inputs, inputs["num_items_in_batch"])
        made.accelerator.clip_grad_norm_(made.model.parameters(), made.args.max_grad_norm)
        made.optimizer.step()
        made.model.zero_grad()
        times.append(time.perf_counter() - started)
    print(json.dumps({"seconds": min(times), "trl": trl.__version__}))


if __name__ == "__main__":
    main()
