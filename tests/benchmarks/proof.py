"""What the proof at load costs: seconds of this CPU, and its share of the start of a larger model.

The proof (`forward.prove`, `engines.embedded.proof`) computes small copies on the CPU, so its cost
depends on the layers that a model has and not on their size. It is measured for the shapes of
models whose weights are not needed: FLOPs and seconds of the proof, beside what any start has to do
with the whole model, read its weights and compute one prompt. `share_of_load` is of reading the
weights in bfloat16 at `DISK`, the least that a start takes on a GPU; imports, kernels and an
engine's warm-up come on top. `disk_at_5_percent`: the proof is 5 % of it on a faster disk, in GB/s.

    nice -n 5 python -m tests.benchmarks.proof --json
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from agentrl.algorithms.engines.embedded import proof
from agentrl.algorithms.model import forward
from agentrl.algorithms.model.scaled import scaled_config

DISK = 1.0  # GB/s
PROMPT = 1024  # tokens
HEADS: dict[str, Any] = {"num_attention_heads": 28, "num_key_value_heads": 4}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": ("llama", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }),
    "Qwen2.5-7B": ("qwen2", {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, **HEADS, "tie_word_embeddings": False,
    }),
    "phimoe, whose rows are not packed": ("phimoe", {"sliding_window": 2048}),
}  # fmt: skip


def parameters(shape: PretrainedConfig) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    return sum(weight.numel() for weight in model.parameters())


def proved(shape: PretrainedConfig) -> tuple[float, float, int]:
    """Seconds, seconds of the CPU, and FLOPs of both proofs. A model whose numbers are those of a
    copy has the same copy as the whole model."""
    model = AutoModelForCausalLM.from_config(scaled_config(shape), dtype=torch.float32).eval()
    forward._proofs.clear()
    proof._ways.clear()
    vars(model).pop(forward.ATTRIBUTE, None)
    before = time.monotonic(), time.process_time()
    forward.prove(model)
    proof.prove_engine(model)
    spent = time.monotonic() - before[0], time.process_time() - before[1]
    forward._proofs.clear()
    proof._ways.clear()
    vars(model).pop(forward.ATTRIBUTE, None)
    with FlopCounterMode(display=False) as counter:
        forward.prove(model)
        proof.prove_engine(model)
    return *spent, int(counter.get_total_flops())


def measure(kind: str, numbers: dict[str, Any]) -> dict[str, Any]:
    shape = AutoConfig.for_model(kind, **numbers)
    seconds, cpu, flops = min(proved(shape) for _ in range(3))
    size = parameters(shape)
    load = 2 * size / 1e9 / DISK
    return {
        "parameters": size, "gigabytes_loaded": round(2 * size / 1e9, 2),
        "proof_seconds": round(seconds, 3), "proof_cpu_seconds": round(cpu, 3),
        "proof_flops": flops, "prompt_flops": 2 * size * PROMPT,
        "share_of_load": round(cpu / load, 4),
        "disk_at_5_percent": round(0.05 * 2 * size / 1e9 / cpu, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {name: measure(*shape) for name, shape in SHAPES.items()}
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
