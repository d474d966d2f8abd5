"""TRL's GRPOTrainer on an agent's prompts, tasks and verifier; run by `tests.benchmarks.real_model`
and `tests.benchmarks.public` with a Python that has TRL, so it imports nothing of this package.

python tests/benchmarks/trl_real_model.py SETTINGS.json"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

Given = dict[str, Any]


class Watch(TrainerCallback):
    """The seconds of each step: of its rollouts, its rewards and its update."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall.append(time.perf_counter() - self.started[0])
        self.cpu.append(time.process_time() - self.started[1])
        print(f"step {len(self.cpu)}: {self.cpu[-1]:.1f} CPU seconds", file=sys.stderr, flush=True)


def verifier(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("verifier", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.verify


def rows(given: Given, tasks: list[Given]) -> Dataset:
    system = [{"role": "system", "content": given["prompt"]}] if given["prompt"] else []
    return Dataset.from_list(
        [
            {"prompt": [*system, {"role": "user", "content": task["input"]}], "task": task}
            for task in tasks
        ]
    )


def trainer(given: Given, verify: Any, watch: Watch) -> trl.GRPOTrainer:
    """The run file's settings, with nothing on that is not needed."""
    size = given["groups"] * given["group_size"]
    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=given["steps"], seed=given["seed"],
        per_device_train_batch_size=size, gradient_accumulation_steps=1,
        num_generations=given["group_size"], max_completion_length=given["max_tokens"],
        learning_rate=given["lr"], lr_scheduler_type="constant", warmup_steps=0,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, loss_type="grpo",
        save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    adapter = LoraConfig(
        r=given["rank"], lora_alpha=given["alpha"], target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    dtype = getattr(torch, given["dtype"])
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype)
    if given.get("adapter"):  # which a warm-up has made
        model, adapter = PeftModel.from_pretrained(model, given["adapter"], is_trainable=True), None
    return trl.GRPOTrainer(
        model,
        lambda completions, task, **_: [
            verify(one, answer[0]["content"])
            for one, answer in zip(task, completions, strict=True)
        ],
        args=settings, train_dataset=rows(given, given["train"]), peft_config=adapter,
        processing_class=AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
        callbacks=[watch],
    )  # fmt: skip


def answers(made: trl.GRPOTrainer, given: Given, *, sample: bool) -> list[str]:
    """A reply to each held-out task."""
    model, tokenizer = made.model.eval(), made.processing_class
    texts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in rows(given, given["heldout"])
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    how = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if sample else {}
    with torch.inference_mode():
        tokens = model.generate(
            **encoded, max_new_tokens=given["max_tokens"], do_sample=sample,
            pad_token_id=tokenizer.pad_token_id, **how,
        )  # fmt: skip
    new = tokens[:, encoded["input_ids"].shape[1] :]
    found: list[str] = tokenizer.batch_decode(new, skip_special_tokens=True)
    return found


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(given["threads"])
    torch.manual_seed(given["seed"])
    verify, watch = verifier(given["verifier"]), Watch()
    made = trainer(given, verify, watch)
    started = time.perf_counter()
    found = {} if not given["heldout"] else scores(made, given, verify, "before")
    made.train()
    found |= {} if not given["heldout"] else scores(made, given, verify, "after")
    found |= {
        "cpu_per_step": median(watch.cpu),
        "wall_per_step": median(watch.wall),
        "seconds": time.perf_counter() - started,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "trl": trl.__version__,
    }
    print(json.dumps(found))


def scores(made: trl.GRPOTrainer, given: Given, verify: Any, when: str) -> Given:
    """Held-out scores, greedy and sampled; with `answers` the greedy replies and their rewards."""
    found: Given = {}
    for way, sample in {"greedy": False, "sampled": True}.items():
        if sample and given.get("answers"):
            break
        said = answers(made, given, sample=sample)
        rewards = [verify(task, one) for task, one in zip(given["heldout"], said, strict=True)]
        found[f"{way}_{when}"] = sum(rewards) / len(rewards)
        if given.get("answers"):
            found |= {f"answers_{when}": said, f"rewards_{when}": rewards}
    return found


if __name__ == "__main__":
    main()
