"""How much of a GPU an update of a model of Qwen2.5's shapes uses, and what takes its time.

python -m tests.benchmarks.utilisation --model 1.5B --rank 16 --json

One optimizer step in bfloat16 of a random model on groups of eight rollouts of ten turns. Model
FLOPs are counted on the tokens that are packed: 6 for each trained weight of the layers and token
(forward, gradient of its input, gradient of the weight), 4 for each frozen one, the same for each
weight of the head and action, 12 for each layer, hidden unit and pair of a token and one it sees.
What is computed twice (logits, checkpointed layers) is not counted. Tokens per second are of
distinct tokens, whatever the packing repeats.

One more step, on one of the groups, runs under torch's profiler. `share_...` are parts of the time
of its kernels (on a CPU: of its operations) and sum to 1; `busy` is the time of all kernels over
the seconds of the best such step without the profiler: what is missing to 1 the GPU waited for
Python. `largest_other`: the operations with most of the time of `share_other`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.algorithms.learners.factory import use_liger
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.packing import Packing, pack_rows
from agentrl.core.types import POLICY
from tests.benchmarks.learner import Shape, batch_of, rows, tokenizer, update
from tests.benchmarks.report import arguments, report


@dataclass(frozen=True)
class ModelShape:
    """Of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int = 2
    tied: bool = True
    vocabulary: int = 151_936


MODELS = {
    "0.5B": ModelShape(896, 4864, 24, 14),
    "1.5B": ModelShape(1536, 8960, 28, 12),
    "7B": ModelShape(3584, 18_944, 28, 28, key_heads=4, tied=False, vocabulary=152_064),
    "tiny": ModelShape(64, 128, 2, 4, vocabulary=512),
}
# Tokens of a micro-batch: with an adapter and Liger Kernel a 0.5B token takes 1 MB, a 7B token 4.
BUDGETS = {"0.5B": 16_384, "1.5B": 16_384, "7B": 12_288, "tiny": 512}
TURNS: Shape = (1500, 150, 250, 10)  # tokens of prompt, action and observation, and turns
TFLOPS = 989.0  # of an H100 and an H200 in bfloat16, without sparsity

HEAD, TREE, OPTIMIZER = "_Head", "_TreeAttention", "Optimizer."
ATTENTION = "flex", "triton_tem", "flash", "fmha", "attention"  # in names of kernels
PRODUCTS = "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"
KINDS = "products", "attention", "head", "optimizer", "other"
Figures = dict[str, Any]


def random_model(shape: ModelShape, device: str, layers: int = 0) -> Qwen2ForCausalLM:
    """layers: 0: as many as the shape has."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden,
        intermediate_size=shape.intermediate, num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
        tie_word_embeddings=shape.tied, max_position_embeddings=8192, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device(device):
        return Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


def utilisation(
    name: str, packing: Packing = "trie", *, rank: int = 0, budget: int = 0, groups: int = 4,
    repeats: int = 5, turns: Shape = TURNS, tflops: float = TFLOPS, device: str = "cuda",
    liger: bool = False,
) -> Figures:  # fmt: skip
    """rank: of an adapter on all linear layers; 0: all weights are trained."""
    shape, budget = MODELS[name], budget or BUDGETS[name]
    model = random_model(shape, device)
    weights = sum(p.numel() for p in model.model.layers.parameters())
    adapters, trained = None, weights
    if rank:
        adapters, trained = LoraAdapters(model), 0
        adapters.add(POLICY, rank=rank, alpha=2.0 * rank)
        trained = sum(p.numel() for p in adapters.parameters(POLICY).values())
    if liger:
        use_liger(model)
    learner = TorchLearner(
        model, tokenizer(), packing=packing, token_budget=budget, adapters=adapters
    )
    batch = batch_of(rows(turns, groups, shape.vocabulary))
    times = [update(learner, batch) for _ in range(repeats + 1)]
    best, peak = min(times[1:]), peak_mb()
    one = batch_of(rows(turns, 1, shape.vocabulary))  # a profile of all takes minutes to read
    seconds = min(update(learner, one) for _ in range(2))
    with profile(activities=activities(device)) as profiler:
        update(learner, one)
    distinct = sum(len(pack.positions) for pack in pack_rows(batch.rows, "trie", budget))
    depths = torch.cat([pack.positions for pack in pack_rows(batch.rows, packing, budget)])
    frozen = weights if rank else 0
    flops = (6 * trained + 4 * frozen) * len(depths) + 12 * shape.layers * shape.hidden * int(
        (depths + 1).sum()
    )
    head = shape.hidden * shape.vocabulary
    flops += (4 if rank else 6) * head * batch.n_tokens
    return {
        "first_update_seconds": times[0],
        "update_seconds": best,
        "distinct_tokens": distinct,
        "packed_tokens": len(depths),
        "actions": batch.n_tokens,
        "token_budget": learner.token_budget,  # halved if memory ran out
        "tokens_per_s": distinct / best,
        "model_tflops": flops / best / 1e12,
        "utilisation": flops / best / 1e12 / tflops,
        "peak_mb": peak,
        **spent(profiler.events() or [], seconds, device),
    }


def peak_mb() -> float:
    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0


def activities(device: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]


def spent(events: Iterable[Any], seconds: float, device: str) -> Figures:
    """The shares of kinds of work in a profile, and how busy the device was in `seconds`."""
    found, other = Counter[str](), Counter[str]()

    def count(event: Any, name: str, duration: float) -> None:
        found[belongs := kind(event, name)] += duration
        if belongs == "other":
            other[event.name] += duration

    for event in events:
        if event.device_type != DeviceType.CPU:
            continue  # kernels are counted with the operation that started them
        if device == "cuda":
            for kernel in event.kernels:
                count(event, kernel.name, kernel.duration)
        else:
            count(event, event.name, event.self_cpu_time_total)
    total = sum(found.values()) or 1.0
    largest = {name: duration / total for name, duration in other.most_common(5)}
    shares = {f"share_{name}": found[name] / total for name in KINDS}
    return shares | {"busy": total / 1e6 / seconds, "largest_other": largest}


def kind(event: Any, name: str) -> str:
    """What an operation, or a kernel of this name that it started, belongs to."""
    inside, each = [], event
    while each is not None:
        inside.append(each.name)
        each = each.cpu_parent
    if any(OPTIMIZER in one for one in inside):
        return "optimizer"
    if any(HEAD in one for one in inside):
        return "head"
    if any(TREE in one for one in inside) or any(one in name.lower() for one in ATTENTION):
        return "attention"
    return "products" if any(one in PRODUCTS for one in inside) else "other"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="0.5B")
    parser.add_argument("--packing", choices=["trie", "rows"], default="trie")
    parser.add_argument("--rank", type=int, default=0, help="of an adapter; 0: all weights")
    parser.add_argument("--liger", action="store_true", help="with Liger Kernel")
    parser.add_argument("--budget", type=int, default=0, help="tokens of a micro-batch")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="peak of the GPU in bfloat16")
    own = parser.parse_args()
    found = utilisation(
        own.model, own.packing, rank=own.rank, budget=own.budget, groups=own.groups,
        repeats=own.repeats, tflops=own.tflops, liger=own.liger,
    )  # fmt: skip
    report(found, as_json=own.json)


if __name__ == "__main__":
    main()
