"""How much memory a run is said to need, against what its process takes at most.

python -m tests.benchmarks.estimate --model DIRECTORY [--json] [--only NAME ...]

Each configuration is a child process that does what a step does at its limits: it loads the model,
samples with full contexts in all rows of the batch, updates twice on these rollouts, and writes a
checkpoint. Its largest resident set is the peak, imports included. For a model that sees images the
contexts are full of these, other ones in each group.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tests.benchmarks.report import arguments, report

LORA = {"lora": {"rank": 16}}
ROWS = {"learner": {"packing": "rows"}}
# Tables of the run file by name; "groups" x 8 rollouts.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "lora bf16 trie": {"policy": {"dtype": "bfloat16", **LORA}},
    "lora bf16 rows": {"policy": {"dtype": "bfloat16", **LORA}, **ROWS},
    "full bf16": {"policy": {"dtype": "bfloat16"}},
    "full fp32": {"policy": {"dtype": "float32"}},
    "lora fp32": {"policy": {"dtype": "float32", **LORA}},
    "8x8 rows": {"policy": {"dtype": "bfloat16"}, **ROWS, "groups": 8},
}
SEEING: dict[str, dict[str, Any]] = {  # of an image-text model
    "frozen tower": {"policy": {"vision": "frozen"}},
    "trained tower": {"policy": {"vision": "trained"}},
    "trained, checkpointing": {
        "policy": {"vision": "trained"}, "learner": {"gradient_checkpointing": True}
    },
    "frozen, lora": {"policy": {"vision": "frozen", **LORA}},
}  # fmt: skip
SIZE, CONTEXT, SEEN, ANSWER = 8, 128, 640, 16  # SEEN: tokens of a context with images
Prompt = tuple[list[int], Any]  # as the engine reads it, and its rotary positions


def run_of(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """The run file of a configuration."""
    tables = json.loads(json.dumps((CONFIGURATIONS | SEEING)[name]))
    groups = tables.pop("groups", 4)
    tables["policy"] |= {"model": str(model), "device": "cpu"}
    return {
        "output": str(folder),
        "algorithm": {"preset": "grpo", "groups": groups, "group_size": SIZE},
        "sampling": {"max_tokens": ANSWER},
        "engine": {"max_batch": groups * SIZE, "max_context": SEEN if name in SEEING else CONTEXT},
        **tables,
    }


def measure(name: str, model: Path) -> dict[str, float]:
    """Estimate and peak of a configuration, in GB, in this process."""
    from agentrl.algorithms.engines.embedded.engine import Engine
    from agentrl.algorithms.estimate import process_bytes, shape_of
    from agentrl.algorithms.learners.memory import process_peak
    from agentrl.algorithms.model.scaled import inputs_of
    from agentrl.algorithms.train.load_policies import load_policies
    from agentrl.algorithms.train.stages import load_algorithm, make_updater
    from agentrl.core.config import resolve

    with TemporaryDirectory() as folder:
        config = resolve(run_of(name, model, Path(folder)), source=name)
        needed = process_bytes(config, shape_of(str(model)))
        (loaded,) = load_policies(config)
        updater = make_updater(config, "policy", load_algorithm(config), loaded)
        engine = Engine(
            loaded.model, eos=[0], max_batch=config.engine.max_batch,
            max_context=config.engine.max_context,
            threads=1, adapters=loaded.adapters, deliver=_deliver,
            policies=[loaded.adapters and "policy"],
        )  # fmt: skip
        engine.start()
        groups = config.algorithm.groups
        own = inputs_of(loaded.model)
        prompts = _looks if own else _prompts
        rollouts = [
            row for step in range(2) for row in _sample(engine, prompts(engine, groups, step, own))
        ]
        for step in range(2):
            updater.update(step, _groups(rollouts[step * groups * SIZE :][: groups * SIZE]))
        updater.learner.save(Path(folder, "checkpoint"))
        engine.close()
    peak = process_peak()
    shown = {part: round(size / 1e9, 3) for part, size in needed.items()}
    ratio = sum(needed.values()) / peak
    return {"estimate_over_peak": ratio, "peak_gb": peak / 1e9, **shown}


def _deliver(updates: Any) -> None:
    for call, update in updates:
        call.receive(update)


def _prompts(engine: Any, groups: int, step: int, _: object) -> list[Prompt]:
    dice, size = random.Random(step), len(engine.eos)
    length = CONTEXT - ANSWER
    return [([dice.randrange(size) for _ in range(length)], None) for _ in range(groups)]


def _looks(engine: Any, groups: int, step: int, eyes: Any) -> list[Prompt]:
    """Prompts of as many images as fit, with a word before each."""
    from agentrl.algorithms.vision.images import ids_of, positions

    made: list[Prompt] = []
    for group in range(groups):
        ids, images = [1], list[Any]()
        while True:
            seen = eyes.catalogue.add(_noise(f"{step} {group} {len(images)}"))
            if len(ids) + seen.size + 2 > SEEN - ANSWER:
                break
            images.append(seen)
            ids += [*ids_of(seen).tolist(), 1]
        shown = np.array(ids, np.int64)
        places = positions(shown, images) if len(images[0].places) > 1 else None
        made.append((ids, places))
    return made


def _noise(seed: str) -> bytes:
    from PIL import Image

    dice = np.random.default_rng(list(seed.encode()))
    file = BytesIO()
    Image.fromarray(dice.integers(0, 255, (336, 336, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def _sample(engine: Any, prompts: list[Prompt]) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, answer and its log-probs of each rollout, all of them sampled together."""
    from agentrl.algorithms.engines.embedded.attention import GenerationRequest
    from agentrl.core.types import Sampling

    dice = random.Random(0)
    waiting: list[tuple[list[int], Future[Any]]] = []
    for prompt, rotary in prompts:
        for _ in range(SIZE):
            done: Future[Any] = Future()
            waiting.append((prompt, done))
            engine.submit(
                GenerationRequest(
                    np.array(prompt, np.int32), Sampling(max_tokens=ANSWER), dice.randrange(2**32),
                    done.set_result, ignore_eos=True, rotary=rotary,
                )
            )  # fmt: skip
    ended = [(prompt, done.result()) for prompt, done in waiting]
    return [(prompt, update.tokens, update.logprobs) for prompt, update in ended]


def _groups(rollouts: list[tuple[list[int], list[int], list[float]]]) -> list[Any]:
    from agentrl.core.types import Reward, float32
    from tests.factories import call, group, rollout

    made = []
    for n, (prompt, answer, logprobs) in enumerate(rollouts):
        fields = {"attempt": f"r{n}", "policy": "policy", "logprobs": float32(logprobs)}
        said = call(f"{n}", prompt, answer, **fields)
        made.append(rollout(f"r{n}", [said], [Reward(value=float(n % 3))]))
    starts = range(0, len(made), SIZE)
    return [group(*made[start : start + SIZE], id=f"g{start}") for start in starts]


def sees(model: Path) -> bool:
    return "vision_config" in json.loads((model / "config.json").read_text())


def estimate_over_peak(model: Path, names: list[str] | None = None) -> dict[str, dict[str, float]]:
    """The figures of each configuration, one child process after the other."""
    found = {}
    for name in names or list(SEEING if sees(model) else CONFIGURATIONS):
        command = [sys.executable, "-m", __spec__.name, "--model", str(model), "--here", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--only", nargs="*", choices=[*CONFIGURATIONS, *SEEING])
    parser.add_argument("--here", choices=[*CONFIGURATIONS, *SEEING], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.here, options.model)))
        return
    found = estimate_over_peak(options.model, options.only)
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
