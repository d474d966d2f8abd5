"""What `tests.benchmarks.gpu` measures, each case in a process of its own.

A case says its figures as they come, one JSON object per line, so that they are kept when its time
is over. What the machine lacks for it is said under `absent`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import torch
from msgspec import Struct, convert
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.lm_head import action_logprobs
from agentrl.algorithms.model.load import load_model, no_progress_bars
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.lora_targets import load_quantized
from agentrl.algorithms.model.packing import Packing, pack_rows
from agentrl.algorithms.proof import trie_gap
from agentrl.algorithms.train.serving import policy_server
from agentrl.core.config import resolve
from agentrl.core.types import POLICY, StepRow
from tests.benchmarks import real_model
from tests.benchmarks.cpu_speed import prompts, rollouts
from tests.benchmarks.demo import read_steps
from tests.benchmarks.learner import Shape, batch_of, rows, update
from tests.benchmarks.utilisation import MODELS, TURNS, peak_mb, random_model, utilisation

Figures = dict[str, Any]
Say = Callable[[Figures], None]

RANK = 16
LR = 1e-4  # of a variant's two steps: large enough that the policy moves by more than rounding
GPU = "cuda"
TINY_RUN = (
    "steps=2", "algorithm.groups=2", "algorithm.group_size=2", "sampling.max_tokens=4",
    "eval.tasks=1", "eval.every=0", "policy.lora.rank=2",
)  # fmt: skip


class Case(Struct, frozen=True):
    """One measurement."""

    section: str
    name: str
    device: str
    model: str = ""  # directory of a Hugging Face model
    why: str = ""  # there is none
    folder: str = ""  # for what it writes
    tflops: float = 989.0  # peak of the GPU in bfloat16

    @property
    def tiny(self) -> bool:
        return self.device != GPU


class AbsentError(Exception):
    """The machine lacks what a case needs; the message says what."""


class LateError(Exception):
    """The time of the case is over."""


# -- agents ----------------------------------------------------------------------------------------


def agents(case: Case, say: Say) -> None:
    """An agent of examples/smollm: its scores before and after, and what its steps report."""
    output = Path(case.folder, case.name)
    shutil.rmtree(output, ignore_errors=True)  # a run that is there would go on, or have ended
    own = [f"policy.model={needed(case)}", f"policy.device={case.device}"]
    try:
        found = real_model.train(
            real_model.AGENTS[case.name], output, [*own, *(TINY_RUN if case.tiny else ())]
        )
        say(found)
    except LateError:
        say({"late": "the run did not end in the time of this case"})
    if (output / "store.db").is_file():
        with suppress(ValueError):  # it has no run yet
            say(speeds(asyncio.run(read_steps(output))))


def speeds(steps: list[StepRow]) -> Figures:
    """Of the steps that trained."""
    trained = [row.metrics for row in steps if "time/update" in row.metrics]

    def total(key: str) -> float:
        return sum(row.get(key, 0.0) for row in trained)

    differences = [row.get("logprob_difference/mean", 0.0) for row in trained]
    scores = {row.step: row.metrics["eval/score"] for row in steps if "eval/score" in row.metrics}
    return {
        "steps": len(trained),
        "curve": scores,
        "rollout_seconds": total("time/rollouts"),
        "update_seconds": total("time/update"),
        "sampled_tokens_per_s": total("tokens/completion") / max(total("time/rollouts"), 1e-9),
        "updated_tokens_per_s": total("tokens/forwarded") / max(total("time/update"), 1e-9),
        "logprob_difference_mean": max(differences, default=0.0),
        "peak_mb": max((row.get("memory/peak_mb", 0.0) for row in trained), default=0.0),
    }


# -- update ----------------------------------------------------------------------------------------


def updates(case: Case, say: Say) -> None:
    """An update of a model of Qwen2.5's shapes: "1.5B lora" trains an adapter, "1.5B" all."""
    name, *kinds = case.name.split()
    if "liger" in kinds and find_spec("liger_kernel") is None:
        raise AbsentError("liger-kernel is not installed")
    rank = RANK if "lora" in kinds else 0
    if case.tiny:
        given: Figures = {"groups": 1, "repeats": 1, "turns": (24, 4, 4, 3), "device": case.device}
        say(utilisation("tiny", rank=rank, **given))
        return
    groups, repeats = (4, 3) if name == "0.5B" else (2, 2)
    say(
        utilisation(
            name, rank=rank, groups=groups, repeats=repeats, tflops=case.tflops,
            liger="liger" in kinds,
        )
    )  # fmt: skip


# -- sampling --------------------------------------------------------------------------------------


def sampling(case: Case, say: Say) -> None:
    """Tokens per second of a policy server over HTTP, by number of calls at a time, of the model
    and on a GPU of a random one of 1.5B's shape: "embedded", or "vllm"."""
    if case.name == "vllm":
        has_vllm()
    asyncio.run(sample(case, needed(case), "", say))
    if not case.tiny:
        asyncio.run(sample(case, str(widened(case)), "1.5B_", say))


def widened(case: Case) -> Path:
    """A random model of 1.5B's shape with the model's tokenizer and vocabulary."""
    _, tokenizer = load_model(needed(case), device="cpu")
    shape, folder = MODELS["1.5B"], Path(case.folder, "1.5B")
    model = random_model(shape, case.device)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def sample(case: Case, directory: str, prefix: str, say: Say) -> None:
    counts, tokens = ((1, 4), 4) if case.tiny else ((1, 8, 64, 256), 128)
    engine = {"kind": case.name, "max_batch": counts[-1], "max_context": 512}
    async with Serving(case, directory, engine) as server:
        for count in (1, *counts):  # the first one is what is only slow at first
            seconds = await calls(server, count, tokens)
            say({f"{prefix}{count}_tokens_per_s": count * tokens / seconds})


async def calls(server: PolicyServer, count: int, tokens: int) -> float:
    """Seconds of calls at the same time, each of which samples so many tokens."""
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits, raise_for_status=True) as http:

        async def call(number: int) -> None:
            question = {"role": "user", "content": f"Count from {number} to {number + 99}."}
            body = {
                "model": server.model, "messages": [question], "max_tokens": tokens,
                "logprobs": True, "return_token_ids": True, "ignore_eos": True,
            }  # fmt: skip
            async with http.post(f"{server.base_url}/chat/completions", json=body) as reply:
                (choice,) = (await reply.json())["choices"]
                assert len(choice["token_ids"]) == tokens, choice["finish_reason"]

        started = time.monotonic()
        await asyncio.gather(*map(call, range(count)))
        return time.monotonic() - started


class Serving:
    """Context with a started policy server of a model in bfloat16."""

    def __init__(self, case: Case, directory: str, engine: Figures) -> None:
        config = resolve(
            {
                "output": str(Path(case.folder, "served")), "engine": engine,
                "policy": {"model": directory, "dtype": "bfloat16"},
            },
            source="tests.benchmarks.gpu",
        )  # fmt: skip
        self.model, tokenizer = load_model(directory, "bfloat16", case.device)
        self.server = policy_server(config, self.model, tokenizer)

    async def __aenter__(self) -> PolicyServer:
        await self.server.start()
        return self.server

    async def __aexit__(self, *failure: object) -> None:
        await self.server.close()


# -- options ---------------------------------------------------------------------------------------

LEARNERS: Mapping[str, Figures] = {
    "offload": {"offload": True},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "checkpointing": {"gradient_checkpointing": True},
}
QUANTIZED = "4bit", "8bit"
VLLM: Mapping[str, Figures] = {
    "ipc": {"sync": "ipc"},
    "ipc sleep": {"sync": "ipc", "sleep": 1},
    "ipc sleep 2": {"sync": "ipc", "sleep": 2},
    "nccl": {"sync": "nccl"},
}


def options(case: Case, say: Say) -> None:
    """Two steps of training with a setting and without, and how far apart their policies are; or
    vLLM's new weights by a method, which are checked against the learner's log-probs."""
    if case.name in VLLM:
        has_vllm()
        if case.name == "nccl" and torch.cuda.device_count() < 2:
            raise AbsentError("it needs a second GPU")
        asyncio.run(publish(case, {"kind": "vllm", "vllm": VLLM[case.name]}, say))
        return
    if case.name in ("offload", "adamw8bit") and case.tiny:
        raise AbsentError("it needs a GPU")
    if case.name in ("adamw8bit", *QUANTIZED) and find_spec("bitsandbytes") is None:
        raise AbsentError("bitsandbytes is not installed")
    quantize = case.name if case.name in QUANTIZED else ""
    plain = trained(case, lora=bool(quantize))
    other = trained(case, lora=bool(quantize), quantize=quantize, **LEARNERS.get(case.name, {}))
    apart = (other.after - plain.after).abs()
    say({
        "moved": float((other.after - other.before).abs().mean()),  # by the two steps
        "plain_moved": float((plain.after - plain.before).abs().mean()),
        "difference_mean": float(apart.mean()),
        "difference_max": float(apart.max()),
        "difference_before": float((other.before - plain.before).abs().mean()),
        "finite": bool(other.after.isfinite().all()),
        **{f"plain_{key}": value for key, value in plain.figures.items()},
        **other.figures,
    })  # fmt: skip


class Trained(Struct):
    """Log-probs of a batch before and after two steps on it, and what the second one took."""

    before: Tensor
    after: Tensor
    figures: Figures


def trained(case: Case, *, lora: bool, quantize: str = "", **settings: Any) -> Trained:
    if quantize:
        loaded = load_quantized(needed(case), quantize, "bfloat16", case.device)
    else:
        loaded = load_model(needed(case), "bfloat16", case.device)
    model, tokenizer = loaded
    network: Any = model
    learner = TorchLearner(
        network, tokenizer, adapters=adapted(network) if lora else None, **settings
    )
    batch = rollouts(prompts(tokenizer), network.get_input_embeddings().weight.shape[0])
    before, seconds = learner.logprobs(batch), 0.0
    for _ in range(2):
        seconds = update(learner, batch, LR)
        learner.rest()
    resting, peak = allocated_mb(), peak_mb()
    made = Trained(
        before, learner.logprobs(batch),
        {"step_seconds": seconds, "resting_mb": resting, "peak_mb": peak},
    )  # fmt: skip
    del learner, model, network
    gc.collect()
    if not case.tiny:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return made


async def publish(case: Case, engine: Figures, say: Say) -> None:
    """Send changed weights three times. Calls are answered before and after each."""
    context = Serving(case, needed(case), engine | {"max_context": 512})
    async with context as server:
        for version in (1, 2, 3):
            await calls(server, 8, 16)
            before = free_mb()
            async with server.updating():
                freed = free_mb() - before
                with torch.no_grad():
                    for weight in context.model.parameters():
                        weight.add_(0.001 * torch.randn_like(weight))
                started = time.monotonic()
                await server.publish(version)
            say({"publish_seconds": time.monotonic() - started, "freed_mb": freed})
        await calls(server, 8, 16)


def adapted(model: Any) -> LoraAdapters:
    adapters = LoraAdapters(model)
    adapters.add(POLICY, rank=RANK, alpha=2.0 * RANK)
    return adapters


def allocated_mb() -> float:
    return torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0


def free_mb() -> float:
    return torch.cuda.mem_get_info()[0] / 1e6 if torch.cuda.is_available() else 0.0


# -- tree attention --------------------------------------------------------------------------------


def tree(case: Case, say: Say) -> None:
    """Gradients of all weights by trie and by rows, relative to those of rows that go one by one
    through transformers' own attention. "64" is of the model, whose heads have 64 units, "128" of
    two layers of 1.5B's shape."""
    turns: Shape = (24, 4, 4, 3) if case.tiny else TURNS
    for dtype in ("float32", "bfloat16"):
        if case.name == "64":
            network, tokenizer = load_model(needed(case), dtype, case.device)
            if gap := trie_gap(network, tokenizer):  # type: ignore[arg-type]
                say({f"{dtype}_doctor": str(gap)})
        else:
            shape = MODELS["tiny" if case.tiny else "1.5B"]
            network = random_model(shape, case.device, layers=2).to(getattr(torch, dtype))
        model: Any = network
        batch = batch_of(rows(turns, 1, model.get_input_embeddings().weight.shape[0]))
        usual, logprobs = gradients(model, batch, None)
        for packing in ("trie", "rows"):
            try:
                found, own = gradients(model, batch, packing)
            except RuntimeError as error:  # a kernel that this hardware lacks
                say({f"{dtype}_{packing}": str(error).splitlines()[0]})
                continue
            apart = {name: relative(found[name], usual[name]) for name in usual}
            every = [torch.cat([each.flatten() for each in some.values()])
                     for some in (found, usual)]  # fmt: skip
            say({
                f"{dtype}_{packing}_gradient": relative(*every),
                f"{dtype}_{packing}_worst_weight": max(apart.values()),
                f"{dtype}_{packing}_logprobs": float((own - logprobs).abs().max()),
            })  # fmt: skip


def gradients(
    model: Any, batch: Batch, packing: Packing | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Of a weighted sum of the log-probs, by weight, and the log-probs. packing None: row by row
    without a plan, which is transformers' own attention."""
    weight_N = torch.randn(batch.n_tokens, generator=torch.Generator().manual_seed(0))
    logprobs_N = torch.empty(batch.n_tokens)
    model.zero_grad()
    for index, p in scored(model, batch, packing):
        logprobs_N[index] = p.detach().float().cpu()
        torch.autograd.backward(p, weight_N[index].to(p))
    found = {name: w.grad.float().cpu() for name, w in model.named_parameters()}
    model.zero_grad()
    return found, logprobs_N


def scored(model: Any, batch: Batch, packing: Packing | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices of actions and their log-probs."""
    if packing is not None:
        for pack in pack_rows(batch.rows, packing, 16_384):
            yield pack.index, forward_logprobs(model, pack)
        return
    first = 0
    for row in batch.rows:
        ids, at = row.tokens[None].to(model.device), (row.actions - 1).to(model.device)
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, at]
        given = row.tokens[row.actions].to(model.device), row.temperature.to(model.device)
        yield (
            torch.arange(first, first := first + len(row.actions)),
            action_logprobs(model.get_output_embeddings(), hidden, *given)[0],
        )


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-20))


# -- the process of a case -------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Case, Say], None]] = {
    "agents": agents, "update": updates, "sampling": sampling, "options": options, "tree": tree,
}  # fmt: skip


def needed(case: Case) -> str:
    if not case.model:
        raise AbsentError(case.why)
    return case.model


def has_vllm() -> None:
    if find_spec("vllm") is None:
        raise AbsentError("vLLM is not installed")


def machine() -> Figures:
    """What the figures are of."""
    has = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has else "cpu, tiny shapes: not those of a GPU",
        "cuda": has,
        "torch": torch.__version__,
    }


def measure(case: Case, say: Say) -> None:
    """Say the figures of a case."""
    Path(case.folder).mkdir(parents=True, exist_ok=True)
    try:
        with no_progress_bars():
            SECTIONS[case.section](case, say)
    except AbsentError as error:
        say({"absent": str(error)})


@contextmanager
def ending() -> Iterator[None]:
    """Context in which SIGTERM raises LateError."""

    def late(*_: object) -> None:
        raise LateError

    signal.signal(signal.SIGTERM, late)
    with suppress(LateError):
        yield


def main() -> None:
    def say(figures: Figures) -> None:
        print(json.dumps(figures), flush=True)

    if sys.argv[1] == "machine":
        say(machine())
        return
    with ending():
        measure(convert(json.loads(sys.argv[1]), Case), say)


if __name__ == "__main__":
    main()
