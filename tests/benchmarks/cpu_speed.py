"""What sampling and updating a real model takes of a CPU.

python -m tests.benchmarks.cpu_speed --model DIR --json [--dtype float32] [--only PART]
    [--vllm PYTHON]

CPU seconds of this process (`time.process_time`), of several tries the fewest: where others use the
caches and memory bandwidth of the machine, it takes up to half more. Sampling: the embedded engine
answers eight short prompts about prices with 16 tokens each: 64 requests (eight of each prompt),
8 (one of each), and 1; once with nothing cached and once with cached prompts. Update: 64 rollouts
with 16 tokens each on the same prompts, packed as a trie: `pass` is forward and backward, `step`
is `Learner.step` with clipping and AdamW. `lora`: with an adapter of rank 16 on all linear layers.
`vllm`: the same requests to the CPU build of vLLM that PYTHON has.
"""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.engines.embedded.attention import GenerationRequest
from agentrl.algorithms.engines.embedded.engine import Engine, TokenUpdates
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.packing import pack_rows
from agentrl.core.types import POLICY, Sampling
from tests.benchmarks.learner import batch_of, update
from tests.benchmarks.report import arguments, report

ROWS = (1, 8, 64)
ANSWER = 16  # tokens
SYSTEM = "Answer briefly, like this: The sofa costs 77 dollars."
NAMES = ("lamp", "chair", "desk", "clock", "mirror", "carpet", "vase", "kettle", "basket", "towel")
PROMPTS = 8
PARTS = ("decode", "full", "lora")
TARGETS = {"decode_64": 350.0, "decode_1": 30.0, "update_full_pass_cpu_s": 7.0}


def prompts(tokenizer: Any) -> list[list[int]]:
    """Eight prompts with the same system message."""
    dice, chat = random.Random(0), Chat(tokenizer, Codec(tokenizer))
    made = []
    for _ in range(PROMPTS):
        names, prices = dice.sample(NAMES, 3), dice.sample(range(10, 100), 3)
        lines = [f"{name}: {price} dollars" for name, price in zip(names, prices, strict=True)]
        question = "\n".join([*lines, f"What does the {names[0]} cost?"])
        talk = [("system", SYSTEM), ("user", question)]
        made.append(list(chat.encode([{"role": role, "content": text} for role, text in talk])))
    return made


def cpu_seconds(work: Callable[[], object], tries: int) -> float:
    """The fewest of some tries."""
    found = []
    for _ in range(tries):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


class Sampler:
    """An engine that answers lists of prompts."""

    def __init__(self, model: Any, threads: int, adapters: LoraAdapters | None = None) -> None:
        self.left, self.done = 0, threading.Event()
        self.engine = Engine(
            model, eos=[], max_batch=max(ROWS), max_context=1024, threads=threads,
            deliver=self._ended, adapters=adapters, policies=[POLICY if adapters else None],
        )  # fmt: skip
        self.engine.start()

    def _ended(self, updates: TokenUpdates) -> None:
        self.left -= len(updates)
        if not self.left:
            self.done.set()

    def answer(self, asked: Sequence[Sequence[int]], *, cached: bool) -> None:
        """Sample 16 tokens for each prompt; cached: with the keys that earlier requests left."""
        if not cached:
            self.engine.swap().result()
        self.left = len(asked)
        self.done.clear()
        sampling = Sampling(max_tokens=ANSWER)
        for seed, prompt in enumerate(asked):
            tokens = np.asarray(prompt, np.int32)
            self.engine.submit(GenerationRequest(tokens, sampling, seed, lambda update: None))
        self.done.wait()


def decode(
    model: Any,
    asked: list[list[int]],
    tries: int,
    threads: int,
    adapters: LoraAdapters | None = None,
) -> dict[str, float]:
    """Sampled tokens per CPU second by number of rows: `decode_N`, and `cached_decode_N`."""
    sampler, figures = Sampler(model, threads, adapters), {}
    suffix = "_lora" if adapters else ""
    for rows in ROWS:
        requests = [asked[i % PROMPTS] for i in range(rows)]
        for name, cached in (("decode", False), ("cached_decode", True)):

            def once(requests: list[list[int]] = requests, cached: bool = cached) -> None:
                sampler.answer(requests, cached=cached)

            once()
            figures[f"{name}_{rows}{suffix}"] = rows * ANSWER / cpu_seconds(once, tries)
    sampler.engine.close()
    return figures


def rollouts(asked: list[list[int]], vocabulary: int) -> Batch:
    """Eight rollouts for each prompt, of random tokens."""
    dice, made = random.Random(0), []
    for group, prompt in enumerate(asked):
        for _ in range(64 // PROMPTS):
            answer = [dice.randrange(vocabulary) for _ in range(ANSWER)]
            row = {"prompt": prompt, "completion": answer, "sampled": [1] * ANSWER}
            made.append({**row, "advantage": dice.uniform(-1, 1), "group": group})
    return batch_of(made)


def train(
    model: Any, tokenizer: Any, batch: Batch, tries: int, threads: int,
    adapters: LoraAdapters | None = None,
) -> dict[str, float]:  # fmt: skip
    """CPU seconds of one pass and of one step, and the tokens of the trie."""
    learner = TorchLearner(model, tokenizer, adapters=adapters, threads=threads)
    packs = pack_rows(batch.rows, "trie", learner.token_budget)

    def once() -> None:
        with learner._adapted():
            for pack in packs:
                forward_logprobs(model, pack).sum().backward()

    name = "update_lora" if adapters else "update_full"
    with learner.threads.working():
        once()
        passed = cpu_seconds(once, tries)
    learner.optimizer.zero_grad()
    update(learner, batch)
    return {
        "update_tokens": float(sum(len(pack.tokens) for pack in packs)),
        f"{name}_pass_cpu_s": passed,
        f"{name}_step_cpu_s": cpu_seconds(lambda: update(learner, batch), tries),
    }


def adapted(model: Any) -> LoraAdapters:
    adapters = LoraAdapters(model)
    adapters.add(POLICY, rank=16, alpha=32.0)
    return adapters


def vllm(
    python: str, directory: str, asked: list[list[int]], *, dtype: str, tries: int, threads: int
) -> dict[str, float]:
    """`decode` by vLLM."""
    given = {
        "model": directory, "prompts": asked, "rows": ROWS, "answer": ANSWER, "dtype": dtype,
        "tries": tries, "threads": threads,
    }  # fmt: skip
    command = [python, str(Path(__file__).with_name("vllm_cpu.py"))]
    done = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(
    directory: str, *, dtype: str = "bfloat16", tries: int = 3, threads: int = 1,
    only: Sequence[str] = PARTS, python: str | None = None,
) -> dict[str, float]:  # fmt: skip
    """All figures of a model. python: one that has vLLM."""
    torch.set_num_threads(threads)
    figures: dict[str, float] = {}
    model, tokenizer = load_model(directory, dtype, "cpu")
    asked, network = prompts(tokenizer), model
    size: int = network.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    batch = rollouts(asked, size)
    if "decode" in only:
        figures |= decode(model, asked, tries, threads)
    if "full" in only:
        figures |= train(model, tokenizer, batch, tries, threads)
    if "lora" in only:
        model, tokenizer = load_model(directory, dtype, "cpu")
        adapters = adapted(model)
        figures |= decode(model, asked, tries, threads, adapters)
        figures |= train(model, tokenizer, batch, tries, threads, adapters)
    if python:
        given = {"dtype": dtype, "tries": tries, "threads": threads}
        figures |= vllm(python, directory, asked, **given)
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="directory of a Hugging Face model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python with vLLM, to compare with")
    own = parser.parse_args()
    parts = own.only or (() if own.vllm else PARTS)
    given = {"dtype": own.dtype, "tries": own.tries, "threads": own.threads, "python": own.vllm}
    found = measure(own.model, only=parts, **given)
    report(found, as_json=own.json, targets=TARGETS)


if __name__ == "__main__":
    main()
