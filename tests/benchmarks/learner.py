"""What an update of the learner takes: memory against all logits at once, seconds against TRL.

python -m tests.benchmarks.learner --json [--trl PYTHON]   the CPU figures; PYTHON: one with TRL
python -m tests.benchmarks.learner --json --device cuda    tokens/s and FLOP utilisation of a GPU

Memory: one update (forward, backward, AdamW) of a float32 Qwen2-configuration model with 150,000
tokens in its vocabulary on a row of 4,096 tokens, of which all but the first are sampled. Peak
resident set of a child process, all of it, imports included; the straightforward one makes
log_softmax of all logits and gathers.

TRL: forward, loss, backward, clipping and optimizer step on the same groups of eight; sampling,
rewards and advantages are outside on both sides. TRL gets float32, one padded batch, fused AdamW,
no reference model, no checkpointing, no logging. Both in child processes, in turns, the best time.

On a GPU: `utilisation` of Qwen2.5 0.5B and 1.5B, each packed as a trie and as rows.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.memory import process_peak
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.objective.core import loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.core.types import (
    Group,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    float32,
    int32,
)
from tests.benchmarks.report import arguments, report

GROUP = 8
TARGETS = {"memory ratio": 0.35, "one turn / TRL": 0.5, "ten turns / TRL": 0.5}
# Tokens of prompt, action and observation, and turns: real sizes divided by 10.
Shape = tuple[int, int, int, int]
SHAPES: dict[str, Shape] = {"one turn": (150, 15, 0, 1), "ten turns": (150, 15, 25, 10)}


def network(vocabulary: int, hidden: int, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 448), tie_word_embeddings=True,
        max_position_embeddings=8192,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """The learner only writes it into checkpoints, and TRL only looks for its padding."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "x": 2}, unk_token="x"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="x"
    )


# -- data ------------------------------------------------------------------------------------------


def rows(shape: Shape, groups: int, vocabulary: int) -> list[dict[str, Any]]:
    """Rollouts as prompt, completion and which of its tokens were sampled; lengths of actions vary
    by half around their mean."""
    dice = random.Random(0)
    prompt_size, action, observation, turns = shape

    def tokens(n: int) -> list[int]:
        return [dice.randrange(vocabulary) for _ in range(n)]

    made = []
    for group in range(groups):
        prompt = tokens(prompt_size)
        for _ in range(GROUP):
            completion: list[int] = []
            sampled: list[int] = []
            for turn in range(turns):
                if turn:
                    completion += tokens(observation)
                    sampled += [0] * observation
                size = dice.randint(action // 2, action + action // 2)
                completion += tokens(size)
                sampled += [1] * size
            row = {"prompt": prompt, "completion": completion, "sampled": sampled}
            made.append({**row, "advantage": dice.uniform(-1, 1), "group": group})
    return made


def batch_of(made: list[dict[str, Any]]) -> Batch:
    return build_batch(groups_of(made))


def groups_of(made: list[dict[str, Any]]) -> list[Group]:
    """The same rollouts with their calls as the store has them."""
    groups: dict[int, list[Rollout]] = {}
    for index, row in enumerate(made):
        rollouts = groups.setdefault(row["group"], [])
        rollouts.append(
            Rollout(
                id=str(index), run="r", group=str(row["group"]), index=len(rollouts), task={},
                purpose=Purpose.TRAIN, state=RolloutState.SUCCEEDED, step=0, attempts=1,
                attempt="a", result=None, failure=None, transitions=calls(row),
                rewards=[Reward(value=row["advantage"])],
            )
        )  # fmt: skip
    return [Group(id=str(name), run="r", step=0, rollouts=found) for name, found in groups.items()]


def calls(row: dict[str, Any]) -> list[Transition]:
    """One for each stretch of sampled tokens."""
    flags = [*row["sampled"], 0]
    edges = [i for i, flag in enumerate(flags) if flag != (flags[i - 1] if i else 0)]
    whole = row["prompt"] + row["completion"]
    made = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        begin, end = first + len(row["prompt"]), last + len(row["prompt"])
        made.append(
            Transition(
                id=str(begin), attempt="a", index=len(made), prompt=int32(whole[:begin]),
                completion=int32(whole[begin:end]), logprobs=float32([-9.0] * (end - begin)),
            )
        )  # fmt: skip
    return made


# -- measurement -----------------------------------------------------------------------------------


def update(learner: TorchLearner, batch: Batch, lr: float = 1e-5) -> float:
    """Seconds of one optimizer step of GRPO."""
    algo = make("grpo", {})
    terms = loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    started = time.perf_counter()
    report = learner.step(batch, lambda p, index: loss_coefficients(algo, terms, p, index), lr=lr)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert report.applied
    return time.perf_counter() - started


def seconds(shape: str, groups: int, repeats: int, threads: int) -> dict[str, float]:
    """Of our update, in this process."""
    learner = TorchLearner(
        network(8192, 512, 6, torch.float32), tokenizer(), threads=threads, token_budget=8192
    )
    batch = batch_of(rows(SHAPES[shape], groups, 8192))
    return {"seconds": min(update(learner, batch) for _ in range(repeats))}


def memory(implementation: str, length: int, hidden: int) -> dict[str, float]:
    """Peak resident set of this process in MB after one update."""
    vocabulary = 150_000
    model = network(vocabulary, hidden, 4, torch.float32)
    dice = random.Random(0)
    tokens = [dice.randrange(vocabulary) for _ in range(length)]
    if implementation == "ours":
        row = {"prompt": tokens[:1], "completion": tokens[1:], "sampled": [1] * (length - 1)}
        batch = batch_of([{**row, "advantage": 1.0, "group": 0}])
        learner = TorchLearner(model, tokenizer(), token_budget=length)
        learner.step(batch, lambda p, index: torch.ones_like(p) / len(p), lr=1e-5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])
        torch.autograd.backward(-logprobs.mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"mb": process_peak() / 1e6}


def on_gpu(tflops: float) -> dict[str, Any]:
    """Each model and packing in a process of its own."""
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.benchmarks.utilisation", "--json"]
    for name in ("0.5B", "1.5B"):
        for packing in ("trie", "rows"):
            found = child(*command, "--model", name, "--packing", packing, "--tflops", str(tflops))
            figures |= {f"{name} {packing} {key}": value for key, value in found.items()}
    return figures


def child(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def ourselves(*arguments: object) -> dict[str, Any]:
    return child(sys.executable, "-m", "tests.benchmarks.learner", *map(str, arguments))


def compare_memory(length: int, hidden: int) -> dict[str, float]:
    peaks = {
        name: ourselves("--child", "memory", name, length, hidden)["mb"]
        for name in ("ours", "full")
    }
    return {
        "memory ours mb": peaks["ours"],
        "memory all logits mb": peaks["full"],
        "memory ratio": peaks["ours"] / peaks["full"],
    }


def compare_trl(python: str, groups: int, rounds: int, threads: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        network(8192, 512, 6, torch.float32).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = str(Path(folder, "tokenizer.json"))
        script = str(Path(__file__).with_name("trl_update.py"))
        for shape in SHAPES:
            file = Path(folder, "batch.json")
            made = rows(SHAPES[shape], groups, 8192)
            file.write_text(json.dumps({"rows": made, "group": GROUP, "tokenizer": words}))
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(ourselves("--child", "seconds", shape, groups, 3, threads)["seconds"])
                found = child(python, script, str(file), folder, "3", str(threads))
                theirs.append(found["seconds"])
                figures["TRL version"] = found["trl"]
            figures[f"{shape} ours seconds"] = min(ours)
            figures[f"{shape} TRL seconds"] = min(theirs)
            figures[f"{shape} / TRL"] = min(ours) / min(theirs)
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trl", help="Python that has TRL; default: this one, if it has")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the GPU in bfloat16")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--length", type=int, default=4096, help="of the row of the memory figures")
    parser.add_argument("--hidden", type=int, default=256, help="likewise: of the model")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, name, *numbers = options.child
        measured = {"memory": memory, "seconds": seconds}[kind]
        print(json.dumps(measured(name, *map(int, numbers))))  # type: ignore[operator]
        return
    figures: dict[str, Any]
    if options.device == "cuda":
        figures = on_gpu(options.tflops)
    else:
        figures = compare_memory(options.length, options.hidden)
        python = options.trl or (sys.executable if find_spec("trl") else None)
        if python:
            figures |= compare_trl(python, options.groups, options.rounds, options.threads)
        else:
            figures["TRL"] = "not measured: give --trl a Python that has it"
        figures |= {f"{name}, at most": limit for name, limit in TARGETS.items() if name in figures}
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
