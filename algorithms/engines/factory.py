"""Builds the policy server from `[engine]` of the run file."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.engines.embedded.server import EmbeddedServer
from agentrl.algorithms.engines.vllm.fleet import VllmFleet
from agentrl.algorithms.engines.vllm.process import VllmProcess, gpus_taken
from agentrl.algorithms.engines.vllm.server import VllmServer
from agentrl.algorithms.engines.vllm.serving import TrainedModel, VllmHost
from agentrl.algorithms.model.cpu_threads import computing_with
from agentrl.algorithms.model.load import Model, Tokenizer, checkpoint_weights, context_length
from agentrl.algorithms.model.lora import Adapters
from agentrl.algorithms.model.memory import vllm_share
from agentrl.algorithms.model.proof import tolerance
from agentrl.algorithms.plugins import engine_factory
from agentrl.base.access import read_sent_key
from agentrl.config import RunConfig, VllmEngineConfig
from agentrl.errors import ConfigError, PolicyError
from agentrl.plugins import check_protocol
from agentrl.types import POLICY

PROBE = "The quick brown fox jumps over the lazy dog."


def policy_server(
    config: RunConfig,
    model: Model,
    tokenizer: Tokenizer,
    adapters: Adapters | None = None,
    name: str = POLICY,
) -> PolicyServer:
    """A policy server, not yet started, for the trained model (as policy `name`) or its adapters.

    Raises PolicyError for a model that it cannot serve, and for a missing vLLM."""
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
            keys=engine.keys if config.algorithm.samples_during_update else None,
            access=engine.access,
        )
    if isinstance(engine, VllmEngineConfig):
        return vllm_server(config, model, tokenizer, adapters)
    raise ConfigError(f"engine.kind = {engine.kind!r} is not served here")


def vllm_server(
    config: RunConfig, model: Any, tokenizer: Tokenizer, adapters: Adapters | None = None
) -> VllmServer:
    """The server for vLLM, as a child process or at `engine.vllm.urls`. Every publish sends it the
    weights of `model` or its adapters."""
    engine, dtype = config.engine, config.policy.dtype
    assert isinstance(engine, VllmEngineConfig)
    learned = _trained_model(model, tokenizer, adapters, engine.threads)
    in_flight = config.algorithm.samples_during_update
    folder = Path(config.output, "vllm").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    host: VllmHost
    if engine.vllm.urls:
        host = VllmFleet(
            engine.vllm.urls,
            host=engine.host,
            port=engine.port,
            api_key=read_sent_key(engine.vllm.key_env, "engine.vllm.key_env", "the servers'"),
            access=engine.access,
            start_timeout=engine.vllm.start_timeout,
            # Less than the limit of the whole update, so one server that hangs is found first.
            timeout=0.9 * engine.vllm.timeout,
            adapters=bool(learned.adapters),
        )
    else:
        context = min(engine.max_context, context_length(model) or engine.max_context)
        host = VllmProcess(
            msgspec.structs.replace(engine, max_context=context),
            folder / "vllm.log",
            secrets.token_hex(16),
            dtype=dtype,
            gpu=learned.gpu >= 0,
            adapters=max(len(learned.adapters), engine.vllm.max_adapters) if adapters else 0,
            rank=learned.rank,
            side_by_side=in_flight,
            memory=_gpu_memory(config, model),
        )
    return VllmServer(
        learned,
        host,
        folder=folder / "served",
        method=engine.vllm.sync,
        timeout=engine.vllm.timeout,
        tolerance=engine.vllm.tolerance or tolerance(config.policy),
        in_flight=in_flight,
        sleep=engine.vllm.sleep,
    )


def _gpu_memory(config: RunConfig, model: Any) -> float:
    """Fraction of the GPU's memory for a vLLM child; 0: vLLM's default. Raises PolicyError if the
    learner leaves too little, and for settings that need a GPU without one."""
    assert isinstance(config.engine, VllmEngineConfig)
    vllm = config.engine.vllm
    if model.device.type != "cuda":
        if vllm.sleep or vllm.gpu_memory:
            raise PolicyError(
                "engine.vllm.sleep and engine.vllm.gpu_memory need a GPU, and the policy is on "
                f"{model.device.type}; remove them"
            )
        return 0.0
    if (model.device.index or 0) >= gpus_taken(vllm.arguments):
        return vllm.gpu_memory  # vLLM has GPUs of its own
    total = torch.cuda.get_device_properties(model.device).total_memory
    return vllm.gpu_memory or vllm_share(config, model, total)


def _trained_model(
    model: Any, tokenizer: Tokenizer, adapters: Adapters | None, threads: int
) -> TrainedModel:
    @torch.no_grad()
    def score(policy: str, tokens: Sequence[int]) -> list[float]:
        row = torch.tensor(tokens, device=model.device)
        applied = nullcontext() if adapters is None else adapters.using(policy)
        # vLLM computes at the same time, and more threads than cores are a hundred times slower.
        with computing_with(threads), applied:
            logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        scores: list[float] = logprobs.gather(1, row[1:, None])[:, 0].tolist()
        return scores

    whole = TrainedModel(
        save=model.save_pretrained,
        weights=lambda: checkpoint_weights(model, model.state_dict()),
        save_tokenizer=tokenizer.save_pretrained,
        score=score,
        probe=tokenizer(PROBE)["input_ids"],
        gpu=(model.device.index or 0) if model.device.type == "cuda" else -1,
    )
    if adapters is None:
        return whole
    first = adapters.names[0]
    return dataclasses.replace(
        whole,
        save=lambda directory: adapters.merge(first, directory),
        weights=lambda: checkpoint_weights(model, adapters.merged(first)),
        adapters=adapters.names,
        save_base=adapters.save_base,
        save_adapter=adapters.save,
        rank=max(map(adapters.rank, adapters.names)),
    )
