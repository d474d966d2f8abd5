"""Losses, gradients, seconds and memory of TRL's preference trainers on given rows; run by
`tests.benchmarks.preferences` with a Python that has TRL, so it imports nothing of this package.

python tests/benchmarks/trl_preferences.py FOLDER parity|speed|memory"""

from __future__ import annotations

import copy
import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

BASE: dict[str, Any] = {
    "output_dir": tempfile.mkdtemp(), "report_to": [], "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "disable_tqdm": True, "save_strategy": "no",
    "logging_strategy": "no", "remove_unused_columns": False, "max_length": None,
}  # fmt: skip
DPO = {  # ours: TRL's loss types and options
    "dpo": (["sigmoid"], {}), "dpo+nll": (["sigmoid", "sft"], {"loss_weights": [1.0, 1.0]}),
    "robust": (["robust"], {"label_smoothing": 0.1}), "hinge": (["hinge"], {}),
    "ipo": (["ipo"], {}), "exo": (["exo_pair"], {"label_smoothing": 1e-3}),
    "nca": (["nca_pair"], {}), "bco": (["bco_pair"], {}), "sppo": (["sppo_hard"], {}),
    "aot": (["aot"], {"label_smoothing": 0.0}), "apo-zero": (["apo_zero"], {}),
    "apo-down": (["apo_down"], {}),
}  # fmt: skip
PAIR = [{"prompt": "t3 t4", "chosen": " t5 t6", "rejected": " t7"}] * 4


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", eos_token="t1", bos_token="t2"
    )


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """All better sides, then all worse ones. Rows come in pairs, the better one first."""
    order = [*rows[0::2], *rows[1::2]]
    tokens = [torch.tensor(row["tokens"]) for row in order]
    masks = [
        torch.zeros_like(t).index_fill(0, torch.tensor(row["actions"]), 1)
        for t, row in zip(tokens, order, strict=True)
    ]
    every = [torch.ones_like(t) for t in tokens]
    return {"input_ids": pad(tokens), "completion_mask": pad(masks), "attention_mask": pad(every)}


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.given = json.loads((folder / "rows.json").read_text())
        self.policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(
            folder / "reference", dtype=torch.float32
        )
        self.tokenizer = word_tokenizer(self.policy.config.vocab_size)

    def dpo(self, kinds: list[str], **more: Any) -> Any:
        args = trl.DPOConfig(loss_type=kinds, **{**BASE, **more})
        made = trl.DPOTrainer(
            model=copy.deepcopy(self.policy), ref_model=copy.deepcopy(self.reference), args=args,
            train_dataset=Dataset.from_list(PAIR), processing_class=self.tokenizer,
        )  # fmt: skip
        made.model.eval()
        return made

    def older(self, trainer: Any, config: Any, rows: list[Any], **more: Any) -> torch.Tensor:
        made = trainer(
            model=copy.deepcopy(self.policy), args=config(**BASE, **more),
            train_dataset=Dataset.from_list(PAIR), processing_class=self.tokenizer,
        )  # fmt: skip
        made.model.eval()
        full, given = padded(rows), {}
        half = len(rows) // 2
        for name, part in (("chosen", slice(0, half)), ("rejected", slice(half, None))):
            tokens = full["input_ids"][part]
            given[f"{name}_input_ids"] = tokens
            given[f"{name}_attention_mask"] = full["attention_mask"][part]
            given[f"{name}_labels"] = tokens.masked_fill(full["completion_mask"][part] == 0, -100)
        return made.model, made.get_batch_loss_metrics(made.model, given, "train")[0]

    def kto(self) -> Any:
        args = trl.KTOConfig(**BASE, undesirable_weight=1.5, per_device_train_batch_size=4)
        rows = [{"prompt": "t3 t4", "completion": " t5", "label": bool(i % 2)} for i in range(8)]
        made = trl.KTOTrainer(
            model=copy.deepcopy(self.policy), ref_model=copy.deepcopy(self.reference), args=args,
            train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer,
        )  # fmt: skip
        made.model.eval()
        given = self.given["kto"]
        data = padded(given["rows"])
        count = len(given["rows"]) // 2
        data["label"] = torch.tensor([True] * count + [False] * count)
        data |= {f"KL_{name}": x for name, x in padded(given["moved"]).items()}
        return made.model, made._compute_loss(made.model, data, False)

    def sft(self) -> Any:
        """On the actions of rows, which are given as labels; everything else is -100."""
        rows = self.given["tools"]
        data = [
            {
                "input_ids": row["tokens"],
                "labels": [t if i in row["actions"] else -100 for i, t in enumerate(row["tokens"])],
            }
            for row in rows
        ]
        args = trl.SFTConfig(**BASE, per_device_train_batch_size=len(rows))
        made = trl.SFTTrainer(
            model=copy.deepcopy(self.policy), args=args, train_dataset=Dataset.from_list(data),
            processing_class=self.tokenizer,
        )  # fmt: skip
        made.model.eval()
        (batch,) = made.get_train_dataloader()
        return made.model, made.compute_loss(made.model, batch)


def parity(bench: Bench) -> dict[str, float]:
    losses = {}

    def keep(name: str, model: Any, loss: torch.Tensor) -> None:
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        save_file(found, bench.folder / f"{name}.safetensors")
        losses[name] = float(loss.detach())

    rows = bench.given["tools"]
    for name, (kinds, more) in DPO.items():
        made = bench.dpo(kinds, **more)
        keep(name, made.model, made._compute_loss(made.model, padded(rows), False))
    simpo = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}
    keep("simpo", *bench.older(CPOTrainer, CPOConfig, rows, **simpo))
    keep("cpo", *bench.older(CPOTrainer, CPOConfig, rows))
    # TRL's ORPO imitates the prompt too, so prompts are one token here.
    keep("orpo", *bench.older(ORPOTrainer, ORPOConfig, bench.given["short"]))
    keep("kto", *bench.kto())
    keep("sft", *bench.sft())
    return losses


def updates(bench: Bench, name: str, rounds: int) -> dict[str, float]:
    """The least CPU seconds of an update, and the megabytes that the first one adds."""
    made = bench.dpo(
        ["sigmoid"], optim="adamw_torch_fused", learning_rate=1e-5,
        per_device_train_batch_size=2, precompute_ref_log_probs=True,
    )  # fmt: skip
    made.create_optimizer_and_scheduler(num_training_steps=1000)
    made.current_gradient_accumulation_steps = 1
    given = padded(bench.given[name])
    sums = torch.tensor(bench.given[f"{name} reference"], dtype=torch.float32)
    given |= {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2]}
    seconds, before = float("inf"), resident()
    for _ in range(rounds):
        started = time.process_time()
        made.training_step(made.model, dict(given))
        torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
        made.optimizer.step()
        made.model.zero_grad()
        seconds = min(seconds, time.process_time() - started)
    return {"seconds": seconds, "added_mb": peak() - before}


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    folder, part, *name = sys.argv[1:]
    torch.set_num_threads(1)
    bench = Bench(Path(folder))
    result = parity(bench) if part == "parity" else updates(bench, name[0], int(name[1]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
