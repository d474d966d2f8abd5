"""Updates of a small model on conversations with tool answers, for the CPU time of +echo."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.chat import Chat, Codec
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.objective.ratios import ALL_OUTPUTS
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.types import Group, Reward
from tests import factories
from tests.tiny_models import CORPUS, llama

WORDS = " ".join(CORPUS).split()
ROLLOUTS, CALLS, ANSWER, RESULT = 8, 4, 24, 24  # words


@cache
def folder() -> Path:
    return llama(Path(mkdtemp()), seed=1)


def updates(preset: str) -> Callable[[int], Any]:
    """A function that makes training step number n on groups of its own."""
    model, tokenizer = load_model(str(folder()), "float32", "cpu")
    updater = Updater(
        RunConfig(algorithm=AlgorithmConfig(preset=preset, lr=1e-4)),
        make(preset, {}, supplies=ALL_OUTPUTS),
        TorchLearner(model, tokenizer, threads=1),
        preprocessor=Preprocessor(tokenizer=tokenizer),
    )
    chat = Chat(tokenizer, Codec(tokenizer))
    return lambda number: updater.update(number, [group(chat, tokenizer, number)])


@cache
def group(chat: Chat, tokenizer: Any, number: int) -> Group:
    draw = random.Random(number)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    rows = []
    for row in range(ROLLOUTS):
        messages: list[dict[str, Any]] = [{"role": "user", "content": text(20)}]
        calls = []
        for n in range(CALLS):
            said = text(ANSWER)
            calls.append(
                factories.call(
                    f"{row}/{n}", chat.encode(messages),
                    tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False), index=n,
                    messages=[*messages], answer={"role": "assistant", "content": said},
                )
            )  # fmt: skip
            messages += [{"role": "assistant", "content": said},
                         {"role": "tool", "content": text(RESULT)}]  # fmt: skip
        rows.append(factories.rollout(str(row), calls, [Reward(value=float(row % 2))], index=row))
    return factories.group(*rows)
