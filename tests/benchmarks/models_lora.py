"""Adapters on every class of causal language models, against peft; and resume.

Each class is built small and random (`model_classes`), in float32. An adapter on the default
targets gets random weights, and is compared with peft's own model, which has loaded the adapter
that was saved here: the log-probs of rows computed one by one, the gradients, the adapter that peft
saves, and the log-probs of the merged model as transformers loads it. A class is

- right: log-probs within 1e-4 nats, gradients within 1e-5 of the largest one, files equal;
- refused: with a sentence, before anything is trained;
- wrong, or a bare error: any other exception.

Resume: a run of three steps against one that is stopped after the first, saved and loaded by a new
learner; all weights have the same bits. Full weights, and adapters.

`--only NAME ...` takes some classes, `--group K/N` the K-th of N parts of the list; eight parts
take a few minutes each.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import WEIGHTS, LoraAdapters
from agentrl.algorithms.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.core.errors import AgentRLError
from agentrl.core.types import POLICY, Rollout
from tests import factories
from tests.benchmarks import model_classes
from tests.benchmarks.report import arguments

NATS, OF_LARGEST = 1e-4, 1e-5
RANK, ALPHA = 4, 8.0
SIZES = (11, 19, 37)  # tokens before the last action of a rollout's second call
PREFIX = "base_model.model."


class Wrong(Exception):
    """Another result than peft's."""


def batch_of(seed: int) -> Batch:
    """Rollouts of two calls, of which the second extends the first."""
    dice = random.Random(seed)

    def tokens(size: int) -> list[int]:
        return [dice.randrange(3, model_classes.VOCABULARY) for _ in range(size)]

    def rollout(index: int, size: int) -> Rollout:
        first = factories.call(f"{index}/0", tokens(size // 2), tokens(3))
        prompt = [*first.prompt, *first.completion, *tokens(size - size // 2 - 6)]
        second = factories.call(f"{index}/1", prompt, tokens(3))
        return factories.rollout(str(index), [first, second], index=index, attempt="a")

    rows = [rollout(index, size) for index, size in enumerate(SIZES)]
    return build_batch([factories.group(*rows)])


def credit(batch: Batch) -> Tensor:
    return torch.linspace(-1, 1, batch.n_tokens)


def step(learner: TorchLearner, seed: int) -> None:
    batch = batch_of(seed)
    psi = credit(batch).double()
    report = learner.step(batch, lambda _, index: psi[index], lr=1e-2)
    if not report.applied:
        raise Wrong("the update is not finite")


def loaded(folder: Path, *, lora: bool) -> TorchLearner:
    """A learner of the model in a folder, or of an adapter on it."""
    model: Any
    model, tokenizer = load_model(folder, device="cpu", template=False)
    adapters = None
    if lora:
        adapters = LoraAdapters(model)
        adapters.add(POLICY, rank=RANK, alpha=ALPHA, seed=1)
    return TorchLearner(model, tokenizer, adapters=adapters, threads=1, max_grad_norm=1e9)


def rows_alone(model: Any, batch: Batch) -> Tensor:
    """Log-probs of a model of transformers or peft, each row by itself."""
    found = []
    for row in batch.rows:
        logits = model(input_ids=row.tokens[None], use_cache=False).logits[0]
        before = logits[row.actions - 1].float().log_softmax(-1)
        found.append(before.gather(1, row.tokens[row.actions][:, None])[:, 0])
    return torch.cat(found)


def gradients(learner: TorchLearner, batch: Batch) -> dict[str, Tensor]:
    """Of the sum over actions of -credit * log-prob, by name; zeros where there is none."""
    found: dict[str, Tensor] = {}
    parameters, plain = learner.parameters(), learner.optimizer.step

    def keep(lr: float) -> None:
        for name, parameter in parameters.items():
            grad = parameter.grad
            found[name] = torch.zeros_like(parameter) if grad is None else grad.clone()

    learner.optimizer.step = keep  # type: ignore[method-assign]
    psi = credit(batch).double()
    learner.step(batch, lambda _, index: psi[index], lr=0.0)
    learner.optimizer.step = plain  # type: ignore[method-assign]
    return found


def close(what: str, ours: Tensor, theirs: Tensor, within: float) -> None:
    gap = float((ours.detach() - theirs.detach()).abs().max())
    if not gap <= within:
        raise Wrong(f"{what} differ by {gap:.2g}, of at most {within:.2g}")


def compare_with_peft(base: Path, work: Path) -> str:
    """Raises Wrong where an adapter is not peft's; returns what it is on."""
    learner, batch = loaded(base, lora=True), batch_of(0)
    adapters = learner.adapters
    assert adapters is not None
    generator = torch.Generator().manual_seed(0)
    for parameter in learner.parameters().values():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    adapters.save(POLICY, work / "adapter")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), work / "adapter", is_trainable=True
    ).eval()
    theirs.save_pretrained(work / "theirs")
    own, peft = (load_file(work / name / WEIGHTS) for name in ("adapter", "theirs"))
    if own.keys() != peft.keys():
        raise Wrong(f"peft's adapter has other weights, such as {min(own.keys() ^ peft.keys())}")
    for key, tensor in own.items():
        close(key, tensor, peft[key], 0.0)
    logprobs = rows_alone(theirs, batch)
    close("log-probs", learner.logprobs(batch), logprobs, NATS)
    (-credit(batch) * logprobs).sum().backward()
    wanted = {
        name.removeprefix(PREFIX).replace(".default.weight", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    found = gradients(learner, batch)
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, gradient in found.items():
        known = wanted[name]
        other = torch.zeros_like(gradient) if known is None else known
        close(f"gradients of {name}", gradient, other, OF_LARGEST * largest)
    adapters.merge(POLICY, work / "merged")
    merged = AutoModelForCausalLM.from_pretrained(work / "merged").eval()
    with torch.no_grad():
        close("log-probs of the merged model", rows_alone(merged, batch), logprobs, NATS)
    return adapters.coverage(POLICY)


def compare_resume(base: Path, work: Path, *, lora: bool) -> str:
    """Raises Wrong unless a run that was stopped continues as one that was not."""
    whole, stopped = loaded(base, lora=lora), loaded(base, lora=lora)
    for seed in range(3):
        step(whole, seed)
    step(stopped, 0)
    folder = work / f"resume-{lora}"
    save_checkpoint(folder, stopped, {})
    resumed = loaded(base, lora=lora)
    load_checkpoint(folder, resumed)
    for seed in (1, 2):
        step(resumed, seed)
    others = resumed.parameters()
    for name, parameter in whole.parameters().items():
        if not torch.equal(parameter, others[name]):
            raise Wrong(f"{name} has other bits after a resume")
    return ""


def judged(compare: Callable[[], str]) -> tuple[str, str]:
    """The verdict on one comparison, and its reason."""
    try:
        return "right", compare()
    except Wrong as error:
        return "wrong", str(error)
    except AgentRLError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001  (it is counted)
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return "bare_error", f"{type(error).__name__} at {where}: {str(error)[:200]}"


@contextmanager
def built(name: str) -> Iterator[tuple[Path, Path]]:
    """A folder with a model of the class, and one to work in."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of a class whose branches are computed apart
        base = Path(folder, "base")
        model_classes.save(name, base)
        yield base, Path(folder)


def measure(names: list[str], show: Callable[[str], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table: dict[str, dict[str, str]] = {}
    for name in names:
        with built(name) as (base, work):
            found = {
                "lora": judged(lambda: compare_with_peft(base, work)),
                "resume": judged(lambda: compare_resume(base, work, lora=False)),
                "lora_resume": judged(lambda: compare_resume(base, work, lora=True)),
            }
        table[name] = {}
        for part, (verdict, reason) in found.items():
            table[name] |= {part: verdict, f"{part}_reason": reason}
        show(f"{name}: " + "; ".join(f"{k} {v} {r}".strip() for k, (v, r) in found.items()))
    counts = {
        f"{part}_{verdict}s" if verdict == "bare_error" else f"{part}_{verdict}": sum(
            row[part] == verdict for row in table.values()
        )
        for part in ("lora", "resume", "lora_resume")
        for verdict in ("right", "refused", "wrong", "bare_error")
    }
    return {"classes": len(table), **counts, "table": table}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--group", default="1/1", metavar="K/N")
    given = parser.parse_args()
    part, parts = map(int, given.group.split("/"))
    names = given.only or model_classes.names()[part - 1 :: parts]
    found = measure(names, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
