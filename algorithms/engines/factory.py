"""The policy server that a run file asks for."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.engines.vllm.fleet import VllmFleet
from agentrl.algorithms.engines.vllm.process import VllmProcess, VllmSettings
from agentrl.algorithms.engines.vllm.server import VllmServer
from agentrl.algorithms.engines.vllm.serving import TrainedModel, VllmHost
from agentrl.algorithms.model.load import Model, Tokenizer, checkpoint_weights
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.plugins import engine_factory
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.plugins import check_protocol
from agentrl.types import POLICY

PROBE = "The quick brown fox jumps over the lazy dog."
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


def policy_server(
    config: RunConfig,
    model: Model,
    tokenizer: Tokenizer,
    adapters: Adapters | None = None,
    name: str = POLICY,
) -> PolicyServer:
    """A server, not yet started, of the weights that learners train: those of a model, by `name`,
    or of its adapters.

    Raises PolicyError for a model it cannot serve, and where vLLM is asked for and missing."""
    engine = config.engine
    if factory := engine_factory(config):
        server: PolicyServer = factory(config, model, tokenizer, adapters, name)
        check_protocol(server, PolicyServer, by=factory, key="engine.kind")
        return server
    if engine.kind == "embedded":
        return EmbeddedServer(
            model,
            tokenizer,
            host=engine.host,
            port=engine.port,
            name=name,
            max_batch=engine.max_batch,
            max_context=engine.max_context,
            threads=engine.threads,
            adapters=adapters,
        )
    return vllm_server(config, model, tokenizer, adapters)


def vllm_server(
    config: RunConfig, model: Any, tokenizer: Tokenizer, adapters: Adapters | None = None
) -> VllmServer:
    """vLLM, as a child or where it runs already, brought up to date with the weights of `model`, or
    with its adapters."""
    engine, dtype = config.engine, config.policy.dtype
    learned = _learned(model, tokenizer, adapters, engine.threads)
    folder = Path(config.output, "vllm").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    host: VllmHost
    if engine.vllm.urls:
        host = VllmFleet(
            engine.vllm.urls,
            host=engine.host,
            port=engine.port,
            api_key=_secret(engine.vllm.key_env),
            start_timeout=engine.vllm.start_timeout,
            # One of several that hangs is found before the update as a whole is late.
            timeout=0.9 * engine.vllm.timeout,
            adapters=bool(learned.adapters),
        )
    else:
        text = model.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", engine.max_context)
        settings = VllmSettings(
            host=engine.host,
            port=engine.port,
            dtype=dtype,
            max_batch=engine.max_batch,
            max_context=min(engine.max_context, positions),
            threads=engine.threads,
            tool_parser=engine.vllm.tool_parser,
            arguments=tuple(engine.vllm.arguments),
            start_timeout=engine.vllm.start_timeout,
            gpu=learned.gpu >= 0,
            adapters=max(len(learned.adapters), engine.vllm.max_adapters) if adapters else 0,
            rank=learned.rank,
        )
        host = VllmProcess(settings, folder / "vllm.log", secrets.token_hex(16))
    return VllmServer(
        learned,
        host,
        folder=folder / "served",
        way=engine.vllm.sync,
        timeout=engine.vllm.timeout,
        tolerance=engine.vllm.tolerance or TOLERANCE[dtype],
    )


def _learned(
    model: Any, tokenizer: Tokenizer, adapters: Adapters | None, threads: int
) -> TrainedModel:
    @torch.no_grad()
    def score(policy: str, tokens: Sequence[int]) -> list[float]:
        row = torch.tensor(tokens, device=model.device)
        before = torch.get_num_threads()
        # vLLM computes beside this: more threads than cores take a hundred times as long.
        torch.set_num_threads(threads)
        try:
            with nullcontext() if adapters is None else adapters.using(policy):
                logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        finally:
            torch.set_num_threads(before)
        found: list[float] = logprobs.gather(1, row[1:, None])[:, 0].tolist()
        return found

    def save_tokenizer(directory: Path) -> None:
        tokenizer.save_pretrained(directory)

    probe: list[int] = tokenizer(PROBE)["input_ids"]
    gpu = (model.device.index or 0) if model.device.type == "cuda" else -1
    if adapters is None:
        return TrainedModel(
            model.save_pretrained,
            lambda: checkpoint_weights(model, model.state_dict()),
            save_tokenizer,
            score,
            probe,
            gpu,
        )
    return TrainedModel(
        lambda directory: adapters.merge(adapters.names[0], directory),
        lambda: checkpoint_weights(model, adapters.merged(adapters.names[0])),
        save_tokenizer,
        score,
        probe,
        gpu,
        adapters=adapters.names,
        save_base=adapters.save_base,
        save_adapter=adapters.save,
        rank=max(map(adapters.rank, adapters.names)),
    )


def _secret(name: str) -> str:
    if name and not os.environ.get(name):
        raise ConfigError(
            f"engine.vllm.key_env: the environment has no {name}; set it to the servers' API key"
        )
    return os.environ[name] if name else ""
