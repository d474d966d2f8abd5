"""Losses of pairs and labels against TRL's own trainers, and what they teach.

python -m tests.benchmarks.preferences [--trl PYTHON] [--only SECTION] [--json]

parity: largest relative difference of loss and gradient over all losses, on rows with tool tokens
between calls. speed: CPU seconds of a DPO update, reference cached on both sides, prompts of 8 or 1
times the completion; memory: growth of the process by one update, vocabulary 32,768. learning: a
tiny policy that says the words of the prompt, better after "sure"; pairs of its own samples; pairs
of other prompts in the right order and samples that are right, by loss and seed. staff: offline DPO
on six steps of the demo, greedy on its held-out tasks, and CPU seconds of `agentrl train`. rlhf:
truth and proxy of `make rlhf`. rft: the demo by rejection sampling. mining: 100,000 rollouts."""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.objective.core import Algo, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.preferences.completions import (
    MISMATCHED,
    WEIGHT,
    with_mismatched,
)
from agentrl.algorithms.preferences.draft import choose_pairs
from agentrl.algorithms.presets.registry import make
from agentrl.core.types import Group, Reward
from tests import factories
from tests.benchmarks.report import arguments, report
from tests.factories import call

PARTS = ("parity", "speed", "memory", "learning", "staff", "rlhf", "rft", "mining")
NAMES = ("outcome", WEIGHT, MISMATCHED)
CHILD = Path(__file__).with_name("trl_preferences.py")
TOOLS = (
    "dpo", "dpo+nll", "robust", "hinge", "ipo", "exo", "nca", "bco", "sppo", "aot", "apo-zero",
    "apo-down", "simpo", "cpo",
)  # fmt: skip
WORDS = [f"w{letter}" for letter in "abcdefghij"]
# Learning rate, steps and options, chosen on seeds 10 to 13. IPO's beta asks for a margin of
# 1/(2 beta) nats a token: 5 at the default of 0.1, at which both sides are ruined. At 0.1 the
# sigmoid of KTO is flat where its KL estimate is as large as the difference that it should make.
LEARNING: dict[str, tuple[float, int, dict[str, float]]] = {
    "dpo+nll": (1e-3, 120, {"beta": 0.3, "nll_share": 0.2}), "ipo": (6e-4, 160, {"beta": 0.5}),
    "kto": (1e-3, 120, {"beta": 0.5}), "simpo": (6e-4, 120, {}), "orpo": (1e-3, 120, {"beta": 0.3}),
}  # fmt: skip


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")


# -- rows ------------------------------------------------------------------------------------------


def pairs(
    count: int, prompt: int, said: int, vocabulary: int, *, tools: bool, seed: int = 1
) -> list[Group]:
    """Pairs, the better side first. tools: every second side has a second call, after tokens that
    nobody sampled."""
    dice = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=dice).tolist()

    groups = []
    for k in range(count):
        start, rows = tokens(prompt), []
        for j in range(2):
            calls = [call(f"{k}/{j}/0", start, tokens(said + (5 * k + 3 * j) % 7))]
            if tools and (k + j) % 2:
                before = [*start, *calls[0].completion, *tokens(4)]
                calls.append(call(f"{k}/{j}/1", before, tokens(2 + j)))
            rows.append(factories.rollout(f"{k}/{j}", calls, [Reward(value=1.0 - j)], group=f"{k}"))
        groups.append(Group(id=f"{k}", run="run", step=0, rollouts=rows))
    return groups


def batch_of(groups: list[Group], algo: Algo) -> Batch:
    batch = build_batch(groups, reward_names=NAMES)
    return batch if algo.side is None else replace(batch, row_unit=algo.side.row_unit(batch))


def as_rows(batch: Batch) -> list[dict[str, list[int]]]:
    return [{"tokens": r.tokens.tolist(), "actions": r.actions.tolist()} for r in batch.rows]


def model_of(vocabulary: int, width: int, layers: int, spread: float) -> LlamaForCausalLM:
    settings = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=8192, tie_word_embeddings=False, pad_token_id=0, bos_token_id=2,
        eos_token_id=1, initializer_range=spread,
    )  # fmt: skip
    return LlamaForCausalLM(settings).eval()


def algorithm(name: str) -> Algo:
    options = {"kto": {"undesirable": 1.5}}.get(name, {})
    return make(name, options, supplies=("old", "sampler", "reference"))


class Ours:
    """A learner and a reference of the same weights as TRL's."""

    def __init__(self, policy: Any, reference: Any, tokenizer: Any) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.reference = TorchLearner(reference, tokenizer, threads=1, token_budget=10**6)

    def gradient(self, name: str, groups: list[Group]) -> tuple[float, dict[str, torch.Tensor]]:
        algo = algorithm(name)
        batch = batch_of(groups, algo)
        learner = TorchLearner(
            copy.deepcopy(self.policy), self.tokenizer, threads=1, token_budget=10**6
        )
        q = self.reference.logprobs(batch).double()
        terms = loss_terms(algo, batch, GivenLogProbs(reference=q), fresh=True)
        report = learner._backward(
            batch, lambda p, i: loss_coefficients(algo, terms, p, i), None, None, None
        )
        if algo.side is None or terms.added is None:
            loss = -float((terms.weight * report.logprobs.double()).sum())
        else:
            now = report.logprobs.double()
            loss = terms.added.metrics(now)["preferences/loss"]
        found = {n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None}
        return loss, found


# -- against TRL -----------------------------------------------------------------------------------


def run_trl(python: str, folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(CHILD), str(folder), *words], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def parity(python: str) -> dict[str, Any]:
    torch.manual_seed(0)
    policy = model_of(64, 32, 2, 0.3)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    tools, short = pairs(6, 9, 3, 64, tools=True), pairs(6, 1, 3, 64, tools=False)
    labels = pairs(6, 9, 3, 64, tools=False, seed=2)
    moved = build_batch(with_mismatched(labels), reward_names=NAMES)
    whose = [moved.rollouts[u] for u in moved.row_rollout.tolist()]
    every = list(zip(whose, as_rows(moved), strict=True))
    plain, shifted = (
        [row for id, row in every if ("~" in id) is is_moved] for is_moved in (False, True)
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy.save_pretrained(folder / "policy")
        reference.save_pretrained(folder / "reference")
        any_algo = algorithm("dpo")
        given = {
            "tools": as_rows(batch_of(tools, any_algo)),
            "short": as_rows(batch_of(short, any_algo)),
            "kto": {"rows": plain, "moved": shifted},
        }
        (folder / "rows.json").write_text(json.dumps(given))
        theirs = run_trl(python, folder, "parity")
        ours = Ours(policy, reference, word_tokenizer(64))
        groups = {"orpo": short, "kto": with_mismatched(labels)}
        worst: dict[str, float] = {}
        for loss in (*TOOLS, "orpo", "kto", "sft"):
            _, gradient = ours.gradient(loss, groups.get(loss, tools))
            wanted = load_file(folder / f"{loss}.safetensors")
            scale = max(float(g.abs().max()) for g in wanted.values())
            worst[loss] = max(float((gradient[n] - g).abs().max()) for n, g in wanted.items())
            worst[loss] /= scale
        sft, _ = ours.gradient("sft", tools)
    found = {"parity_relative": max(worst.values()), "parity_by_loss": worst, "losses": theirs}
    return found | {"sft_loss_difference": abs(sft - theirs["sft"])}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def one_update(vocabulary: int, prompt: int, said: int, count: int, rounds: int) -> dict[str, Any]:
    """Of ours: the rows, the sums of the reference, the least CPU seconds, the megabytes added."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = model_of(vocabulary, 256, 4, 0.02)
    algo = algorithm("dpo")
    batch = batch_of(pairs(count, prompt, said, vocabulary, tools=False), algo)
    learner = TorchLearner(policy, word_tokenizer(vocabulary), threads=1, token_budget=10**6)
    q = learner.logprobs(batch).double()
    terms = loss_terms(algo, batch, GivenLogProbs(reference=q), fresh=True)
    assert terms.added is not None
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
    seconds = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        learner.step(batch, lambda p, i: loss_coefficients(algo, terms, p, i), lr=1e-5)
        seconds = min(seconds, time.process_time() - started)
    rows, sums = as_rows(batch), terms.added.reference.tolist()
    return {"seconds": seconds, "added_mb": peak() - before, "rows": rows, "sums": sums}


def against_trl(python: str, vocabulary: int, prompt: int, said: int, count: int, n: int) -> Any:
    """TRL's and our update, each in a process of its own, on the same pairs."""
    words = ["-m", "tests.benchmarks.preferences", "--update", f"{vocabulary},{prompt},{said}"]
    done = subprocess.run(
        [sys.executable, *words, str(count), str(n)], capture_output=True, text=True, check=True
    )
    ours = json.loads(done.stdout.splitlines()[-1])
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("policy", "reference"):
            model_of(vocabulary, 256, 4, 0.02).save_pretrained(folder / part)
        given = {"rows": ours["rows"], "rows reference": ours["sums"]}
        (folder / "rows.json").write_text(json.dumps(given))
        return ours, run_trl(python, folder, "speed", "rows", str(n))


def speed(python: str) -> dict[str, float]:
    found = {}
    for key, prompt, said, count in (("8to1", 512, 64, 4), ("1to1", 64, 64, 16)):
        ours, theirs = against_trl(python, 4096, prompt, said, count, 3)
        found[f"trl_over_ours_{key}"] = theirs["seconds"] / ours["seconds"]
    return found


def memory(python: str) -> dict[str, float]:
    ours, theirs = against_trl(python, 32_768, 512, 64, 8, 1)
    return {"memory_over_trl": ours["added_mb"] / theirs["added_mb"]}


# -- learning --------------------------------------------------------------------------------------


def chat(words: Sequence[str], said: Sequence[str] = ()) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": " ".join(words)}]
    return turns + ([{"role": "assistant", "content": " ".join(said)}] if said else [])


def asked(dice: random.Random, *, held: bool) -> list[str]:
    while True:
        words = dice.sample(WORDS, dice.randint(2, 4))
        if (sum((i + 3) * 31 * (WORDS.index(w) + 1) for i, w in enumerate(words)) % 5 == 0) is held:
            return words


def score(words: Sequence[str], said: Sequence[str]) -> float:
    """1 after sure, 0.5 alone, else 0."""
    return 1.0 if said == ["sure", *words] else 0.5 if said == list(words) else 0.0


def build(folder: Path, seed: int) -> Path:
    from agentrl.tiny.models import WORDS_TEMPLATE, imitator
    from agentrl.tiny.models import word_tokenizer as small

    dice = random.Random(seed)

    def answer(words: list[str]) -> list[str]:
        kind = dice.choices(("alone", "sure", "no"), (0.55, 0.25, 0.2))[0]
        return words if kind == "alone" else [kind, *words]

    shown = [chat(words, answer(words)) for words in (asked(dice, held=False) for _ in range(3000))]
    tokenizer = small([*WORDS, "sure", "no"])
    imitator(folder, shown, seed=seed, template=WORDS_TEMPLATE, tokenizer=tokenizer, steps=600)
    return folder


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: Sequence[list[str]], copies: int) -> list[Group]:
    """Groups of rollouts of one call, with the oracle's score."""
    model.set_attn_implementation("sdpa")
    groups = []
    for number, words in enumerate(prompts):
        ids = tokenizer.apply_chat_template(
            chat(words), add_generation_prompt=True, return_dict=False
        )
        start = torch.tensor([ids] * copies)
        out = model.generate(
            start, attention_mask=torch.ones_like(start), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=8, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        rows = []
        for k, row in enumerate(out[:, len(ids) :].tolist()):
            end = tokenizer.eos_token_id
            said = row[: row.index(end) + 1] if end in row else row
            text = tokenizer.decode(said, skip_special_tokens=True).split()
            reward = [Reward(value=score(words, text))]
            id = f"{number}/{k}"
            rows.append(factories.rollout(id, [call(id, ids, said)], reward, group=f"{number}"))
        groups.append(Group(id=f"{number}", run="run", step=0, rollouts=rows))
    return groups


def split_pairs(groups: list[Group], per_group: int) -> list[Group]:
    """Distinct pairs, of which each is a group of its own."""
    from msgspec.structs import replace as changed

    seen, found = set(), []
    for group in groups:
        values = [row.reward() for row in group.rollouts]
        for a, b in choose_pairs(values, "all", 0.25, per_group, ""):
            sides = [group.rollouts[i] for i in (a, b)]
            key = tuple(s.transitions[0].prompt.tobytes() + s.transitions[0].completion.tobytes()
                        for s in sides)  # fmt: skip
            id = f"{group.id}.{len(found)}"
            rows = [
                changed(s, id=f"{id}/{i}", group=id, rewards=[Reward(value=1.0 - i)])
                for i, s in enumerate(sides)
            ]
            found += [] if key in seen else [Group(id=id, run="run", step=0, rollouts=rows)]
            seen.add(key)
    return found


def right(groups: list[Group]) -> float:
    """The share of samples that are said after "sure"."""
    return fmean(row.reward() == 1.0 for group in groups for row in group.rollouts)


def learn(name: str, source: Path, train: list[Group], held: list[Group], seed: int) -> Any:
    rate, steps, options = LEARNING[name]
    algo = make(name, options, supplies=("old", "sampler", "reference"))
    assert algo.side is not None
    model, tokenizer = load_model(source, device="cpu")
    learner = TorchLearner(model, tokenizer, threads=1, token_budget=10**6)
    base = TorchLearner(copy.deepcopy(model), tokenizer, threads=1, token_budget=10**6)
    dice = random.Random(seed)
    started = time.process_time()
    for step in range(steps):
        chosen = dice.sample(train, min(24, len(train)))
        batch = batch_of(chosen if algo.side.paired else with_mismatched(chosen), algo)
        q = base.logprobs(batch).double()
        terms = loss_terms(algo, batch, GivenLogProbs(reference=q), fresh=True)
        lr = rate * min((step + 1) / 5, 1 - step / steps)
        learner.step(batch, lambda p, i, terms=terms: loss_coefficients(algo, terms, p, i), lr=lr)
    dpo = algorithm("simpo" if name in ("simpo", "orpo") else "dpo")
    assert dpo.side is not None
    batch = batch_of(held, dpo)
    terms = loss_terms(
        dpo, batch, GivenLogProbs(reference=base.logprobs(batch).double()), fresh=True
    )
    assert terms.added is not None
    after = terms.added.metrics(learner.logprobs(batch).double())
    before = terms.added.metrics(base.logprobs(batch).double())
    torch.manual_seed(seed + 100)
    judge = random.Random(seed + 7)
    prompts = [asked(judge, held=True) for _ in range(60)]
    return {
        "accuracy": after["rewards/accuracies"],
        "right_before": right(sample(base.model, tokenizer, prompts, 4)),
        "right_after": right(sample(model, tokenizer, prompts, 4)),
        "chosen_fall": before["logps/chosen"] - after["logps/chosen"],
        "cpu_seconds": time.process_time() - started,
    }


def learning(seeds: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            source = build(Path(folder, "policy"), seed)
            model, tokenizer = load_model(source, device="cpu")
            dice = random.Random(seed + 50)
            torch.manual_seed(seed + 50)
            prompts = [asked(dice, held=False) for _ in range(250)]
            train = split_pairs(sample(model, tokenizer, prompts, 6), 3)
            others = [asked(dice, held=True) for _ in range(60)]
            held = split_pairs(sample(model, tokenizer, others, 6), 3)
            for name in names:
                for key, value in learn(name, source, train, held, seed).items():
                    found.setdefault(key, {}).setdefault(name, []).append(value)
    return dict(found)


# -- the demo's own traces -------------------------------------------------------------------------


def staff(seeds: Sequence[int], store: str = "") -> dict[str, Any]:
    """Offline DPO on six steps of the demo, in which it is played as in its run file. Settings were
    chosen on demos of seeds 10 to 13. Held out are the demo's own tasks, so all of the some sixty
    pairs are learned from."""
    scores, seconds = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(store or Path(name, "staff"))
        cli, demo = [sys.executable, "-m", "agentrl"], "examples/staff/run.toml"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}

        def run(*words: str) -> None:
            subprocess.run([*cli, *words], check=True, env=env, stdout=subprocess.DEVNULL)

        if not store:
            few = ("eval.tasks=1", "eval.samples=0", "name=staff")
            run("train", demo, "steps=6", f"output={folder}", *few)
        for seed in seeds:
            own, url = Path(name, f"{seed}"), f"sqlite:///{name}/{seed}.db"
            Path(name, f"{seed}.db").write_bytes((folder / "store.db").read_bytes())
            mine = ("--how", "all", "--least", "0.5", "--per-group", "4", "--test", "0")
            run("data", "mine", "pairs", "--run", "staff", "--store", url, *mine)
            file = Path(name, f"{seed}.toml")
            file.write_text(
                f'steps = 60\nstore = "{url}"\nseed = {seed}\n[policy]\nmodel = "{folder}/policy"\n'
                '[data]\nname = "pairs"\n[algorithm]\npreset = "dpo"\ngroups = 16\nlr = 3e-4\n'
                'warmup = 4\nschedule = "linear"\n[learner]\nkind = "torch"\nthreads = 1\n'
            )
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run("train", str(file), f"output={own}", "name=dpo")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            (last,) = sorted((own / "checkpoints").glob("000060.*"))
            scored = ("eval.tasks=80", "eval.samples=0", f"output={name}/eval{seed}")
            model = (f"policy.model={folder}/policy", "policy.build=", f"name=eval{seed}")
            run("eval", demo, str(last), *model, *scored)
            (found,) = Path(name).glob(f"eval{seed}*/store.db")
            scores.append(asyncio.run(_score(f"sqlite:///{found}")))
    return {"staff_offline": scores, "staff_cpu_seconds": seconds}


def rlhf(seeds: Sequence[int]) -> dict[str, Any]:
    """`make rlhf`: truth before and after PPO on the reward model, and without the KL penalty truth
    and proxy at the first and last evaluation."""
    command = [sys.executable, str(Path("examples/rlhf/rlhf.py").resolve()), "--json", "--seed"]
    root = str(Path.cwd())
    found: dict[str, list[Any]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*command, str(seed)], cwd=folder, check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
                capture_output=True,
            )  # fmt: skip
        told = json.loads(done.stdout.splitlines()[-1])
        for key, name in (("rlhf_truth", "eval/score"), ("rlhf_proxy", "reward/rm/mean")):
            for end, title in (("", "with the KL penalty"), ("_free", "without it")):
                curve = told[f"{title}: {name}"]
                found.setdefault(f"{key}{end}", []).append([curve[0], curve[-1]])
        found.setdefault("rlhf_seconds", []).append(sum(told["seconds"]))
    return dict(found)


def rft(seeds: Sequence[int], steps: int = 25) -> dict[str, list[float]]:
    """The demo by rejection sampling alone: greedy on its held-out tasks, before and after."""
    found: dict[str, list[float]] = {"rft_before": [], "rft_after": []}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "examples/staff/run.toml", f"output={folder}/run", f"seed={seed}"]
            words += ["algorithm.preset=rft", f"steps={steps}", "eval.samples=0", "-q"]
            subprocess.run([sys.executable, "-m", "agentrl", *words], check=True, stdout=2)
            scores = asyncio.run(_scores(f"sqlite:///{folder}/run/store.db"))
        found["rft_before"].append(scores[0])
        found["rft_after"].append(scores[-1])
    return found


async def _scores(url: str) -> list[float]:
    from agentrl.store import open_store

    async with open_store(url) as store:
        (run,) = await store.runs()
        return [
            r.metrics["eval/score"] for r in await store.steps(run) if "eval/score" in r.metrics
        ]


def mining(rollouts: int = 100_000, members: int = 8) -> dict[str, Any]:
    """Seconds to mine so many rollouts of one call, by `agentrl data mine --how all`, twice."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        asyncio.run(_fill(url, rollouts, members))
        seconds, digests = [], set()
        for name in ("one", "two"):
            words = ["data", "mine", name, "--run", "run", "--store", url, "--how", "all"]
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "agentrl", *words, "--per-group", "4"], check=True,
                capture_output=True, text=True,
            )  # fmt: skip
            seconds.append(time.monotonic() - started)
            digests.add(done.stdout.split("digest ")[1].split()[0])
    return {"mining_seconds": max(seconds), "mining_digests": len(digests), "mined": rollouts}


async def _fill(url: str, rollouts: int, members: int) -> None:
    from agentrl.core.types import NewRollout, Outcome
    from agentrl.store import open_store

    dice = random.Random(0)
    async with open_store(url) as store:
        await store.open_run("run", {})
        for first in range(0, rollouts, 1000):
            await store.enqueue(
                [
                    NewRollout(
                        id=f"{n:07}", run="run", group=f"g{n // members:07}", index=n % members,
                        task={"input": f"{n // members}"},
                    )
                    for n in range(first, first + 1000)
                ]
            )  # fmt: skip
            attempts = await store.claim(1000, runner="r", lease=600.0)
            calls, ends = [], []
            for attempt in attempts:
                number = int(attempt.rollout.group[1:])
                prompt = [1, number % 30_000, number // 30_000, *range(40)]
                said = call(attempt.id, prompt, [dice.randrange(9) for _ in range(12)])
                calls.append(msgspec.structs.replace(said, attempt=attempt.id))
                reward = [Reward(value=dice.choice([0.0, 0.5, 1.0]))]
                ends.append(Outcome(attempt=attempt.id, fence=attempt.fence, rewards=reward))
            await store.add_transitions(calls)
            await store.finish(ends)


async def _score(url: str) -> float:
    from agentrl.store import open_store

    async with open_store(url) as store:
        (run,) = await store.runs()
        (row,) = await store.steps(run)
        return row.metrics["eval/score"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trl", help="a Python that has TRL 1.16")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", default=",".join(LEARNING))
    parser.add_argument("--staff", default="", help="output of a demo run of six steps")
    parser.add_argument("--update", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.update:
        sizes = [int(x) for x in given.update[0].split(",")]
        print(json.dumps(one_update(*sizes, int(given.update[1]), int(given.update[2]))))
        return
    seeds, found = range(given.seeds), dict[str, Any]()
    parts: dict[str, Any] = {
        "learning": lambda: learning(seeds, given.losses.split(",")),
        "staff": lambda: staff(seeds, given.staff),
        "rlhf": lambda: rlhf(seeds),
        "rft": lambda: rft(seeds),
        "mining": mining,
    }
    if given.trl:
        compared = {"parity": parity, "speed": speed, "memory": memory}
        parts |= {name: lambda part=part: part(given.trl) for name, part in compared.items()}
    for name, part in parts.items():
        if given.only in (None, name):
            found |= part()
    report(found, as_json=given.json)


if __name__ == "__main__":
    main()
