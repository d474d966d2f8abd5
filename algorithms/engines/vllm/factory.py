"""Builds the policy server for vLLM from `[engine]` of the run file."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.engines.vllm.fleet import VllmFleet
from agentrl.algorithms.engines.vllm.process import VllmProcess, gpus_taken
from agentrl.algorithms.engines.vllm.server import VllmServer
from agentrl.algorithms.engines.vllm.serving import TrainedModel, VllmHost
from agentrl.algorithms.model.adapters import Adapters
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.cpu_threads import computing_with
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.inputs import Inputs, inputs_of
from agentrl.algorithms.model.load import Tokenizer, checkpoint_weights
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.model.tool_parser import TOOL_FORMAT
from agentrl.algorithms.preflight.estimate import vllm_share
from agentrl.algorithms.preflight.proof import tolerance
from agentrl.base.access import read_sent_key
from agentrl.config import RunConfig
from agentrl.config.infrastructure import VllmConfig, VllmEngineConfig
from agentrl.errors import PolicyError
from agentrl.types import POLICY

PROBE = "The quick brown fox jumps over the lazy dog."


def vllm_server(
    config: RunConfig,
    model: Any,
    tokenizer: Tokenizer,
    adapters: Adapters | None = None,
    name: str = POLICY,
) -> VllmServer:
    """The server for vLLM, as a child process or at `engine.vllm.urls`. Every publish sends it the
    weights of `model` or its adapters."""
    engine, dtype = config.engine, config.policy.dtype
    assert isinstance(engine, VllmEngineConfig)
    learned = _trained_model(model, tokenizer, adapters, engine.threads or 1)
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
        own = engine.vllm
        if own.tool_parser == "hermes" and (written := tokenizer.init_kwargs.get(TOOL_FORMAT)):
            if ":" in written:
                raise PolicyError(
                    f"policy.tool_format = {written!r}: vLLM cannot read it; set "
                    "engine.vllm.tool_parser, and engine.vllm.arguments for a plug-in of vLLM"
                )
            own = msgspec.structs.replace(own, tool_parser=written)
        host = VllmProcess(
            msgspec.structs.replace(engine, max_context=context, vllm=own),
            folder / "vllm.log",
            secrets.token_hex(16),
            dtype=dtype,
            gpu=learned.gpu >= 0,
            adapters=max(len(learned.adapters), engine.vllm.max_adapters) if adapters else 0,
            rank=learned.rank,
            side_by_side=in_flight,
            memory=_gpu_memory(config, engine.vllm, model),
            media=_media(learned.inputs),
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


def _media(inputs: Inputs | None) -> tuple[str, ...]:
    """Arguments of a child whose model reads more than text."""
    if inputs is None:
        return ()
    limits = {"video": 0} if inputs.probe() else {"video": 0, "image": 0}
    return "--limit-mm-per-prompt", json.dumps(limits)


def _gpu_memory(config: RunConfig, vllm: VllmConfig, model: Any) -> float:
    """Fraction of the GPU's memory for a vLLM child; 0: vLLM's default. Raises PolicyError if the
    learner leaves too little, and for settings that need a GPU without one."""
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
    inputs = inputs_of(model)

    @torch.no_grad()
    def score(policy: str, tokens: Sequence[int]) -> list[float]:
        applied = nullcontext() if adapters is None else adapters.using(policy)
        # vLLM computes at the same time, and more threads than cores are a hundred times slower.
        with computing_with(threads), applied:
            return _logprobs(model, tokens) if inputs is None else _logprobs_of_text(model, tokens)

    def complete(save: Callable[[Path], None]) -> Callable[[Path], None]:
        """Write what vLLM reads images with beside the weights, as in a checkpoint of the hub."""

        def saved(directory: Path) -> None:
            save(directory)
            if inputs is not None:
                inputs.save(directory)
                tokenizer.save_pretrained(directory)

        return saved

    whole = TrainedModel(
        save=complete(model.save_pretrained),
        weights=lambda: checkpoint_weights(model, model.state_dict()),
        save_tokenizer=tokenizer.save_pretrained,
        score=score,
        probe=tokenizer(PROBE)["input_ids"],
        inputs=inputs,
        gpu=(model.device.index or 0) if model.device.type == "cuda" else -1,
    )
    if adapters is None:
        return whole
    first = adapters.names[0]
    return dataclasses.replace(
        whole,
        save=complete(lambda directory: adapters.merge(first, directory)),
        weights=lambda: checkpoint_weights(model, adapters.merged(first)),
        adapters=adapters.names,
        save_base=complete(adapters.save_base),
        save_adapter=adapters.save,
        rank=max(map(adapters.rank, adapters.names)),
    )


def _logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    row = torch.tensor(tokens, device=model.device)
    logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
    scores: list[float] = logprobs.gather(1, row[1:, None])[:, 0].tolist()
    return scores


def _logprobs_of_text(model: Any, tokens: Sequence[int]) -> list[float]:
    """As `TrainedModel.score`, of ids of which some are no text."""
    row = torch.tensor(tokens)
    text = (row[1:] >= 0).nonzero().flatten() + 1
    ones = torch.ones(len(text))
    actions = TokenRow(row, text, ones, ones, torch.zeros_like(text))
    (pack,) = pack_rows([actions], "rows", len(tokens))
    scores = torch.zeros(len(tokens) - 1)
    scores[text - 1] = forward_logprobs(model, pack).float().cpu()
    found: list[float] = scores.tolist()
    return found
