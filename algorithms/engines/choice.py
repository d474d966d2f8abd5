"""The policy server that a run file asks for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from agentrl.algorithms.adapters import Adapters
from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.embedded import EmbeddedServer
from agentrl.algorithms.engines.vllm import VllmServer
from agentrl.algorithms.engines.vllm_process import Settings
from agentrl.algorithms.model import Model, Tokenizer
from agentrl.config import RunConfig
from agentrl.types import POLICY

PROBE = "The quick brown fox jumps over the lazy dog."
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def policy_server(
    config: RunConfig, model: Model, tokenizer: Tokenizer, adapters: Adapters | None = None
) -> PolicyServer:
    """A server, not yet started, of the weights that the learner trains: those of a model, or of
    its adapters.

    Raises PolicyError for a model it cannot serve, and where vLLM is asked for and missing."""
    engine = config.engine
    if engine.kind == "embedded":
        return EmbeddedServer(
            model,
            tokenizer,
            host=engine.host,
            port=engine.port,
            max_batch=engine.max_batch,
            max_context=engine.max_context,
            threads=engine.threads,
            adapters=adapters,
        )
    return vllm_server(config, model, tokenizer, adapters)


def vllm_server(
    config: RunConfig, model: Any, tokenizer: Tokenizer, adapters: Adapters | None = None
) -> VllmServer:
    """A vLLM child that starts from, and is brought up to date with, the weights of `model`, with
    the adapter that is trained merged into them."""
    engine, dtype = config.engine, config.policy.dtype
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", engine.max_context)

    def export(directory: Path) -> None:
        if adapters is None:
            model.save_pretrained(directory)
        else:
            adapters.merge(POLICY, directory)
        tokenizer.save_pretrained(directory)

    @torch.no_grad()
    def score(tokens: Sequence[int]) -> list[float]:
        row = torch.tensor(tokens, device=model.device)
        with nullcontext() if adapters is None else adapters.using(POLICY):
            logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = logprobs.gather(1, row[1:, None])[:, 0].tolist()
        return found

    settings = Settings(
        host=engine.host,
        port=engine.port,
        dtype=dtype,
        max_batch=engine.max_batch,
        max_context=min(engine.max_context, positions),
        threads=engine.threads,
        tool_parser=engine.vllm.tool_parser,
        arguments=tuple(engine.vllm.arguments),
        start_timeout=engine.vllm.start_timeout,
        gpu=model.device.type == "cuda",
    )
    return VllmServer(
        export,
        score,
        tokenizer(PROBE)["input_ids"],
        settings,
        folder=Path(config.output, "vllm"),
        timeout=engine.vllm.timeout,
        tolerance=engine.vllm.tolerance or TOLERANCE[dtype],
    )
