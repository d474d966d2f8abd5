"""TRL's SFTTrainer on calls of recorded traces; run by `tests.benchmarks.traces` with a Python that
has TRL, so it imports nothing of this package.

python tests/benchmarks/trl_traces.py SETTINGS.json"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    if given["threads"]:
        torch.set_num_threads(given["threads"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    settings = trl.SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=given["steps"], seed=given["seed"],
        per_device_train_batch_size=given["batch"], learning_rate=given["lr"],
        lr_scheduler_type="linear", warmup_steps=given["steps"] // 10, weight_decay=0.0,
        save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, logging_steps=10,
    )  # fmt: skip
    adapter = LoraConfig(
        r=given["rank"], lora_alpha=given["alpha"], target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    made = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, given["dtype"])),
        args=settings, train_dataset=Dataset.from_list(given["rows"]), peft_config=adapter,
        processing_class=tokenizer,
    )  # fmt: skip
    started = time.process_time()
    made.train()
    used = time.process_time() - started
    made.model.merge_and_unload().save_pretrained(given["out"])
    tokenizer.save_pretrained(given["out"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu_seconds": used, "peak_mb": peak, "version": trl.__version__}))


if __name__ == "__main__":
    main()
