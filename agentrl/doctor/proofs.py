"""Proofs that a run works on this hardware: they compute, serve and play for some seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import torch
from msgspec.structs import replace
from rich.console import Console

from agentrl import trainer
from agentrl.algorithms.engines.base import VERSION_HEADER
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.preflight.proof import one_row, tolerance, trie_gap
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.serving import policy_server
from agentrl.base.files import make_folder
from agentrl.base.loading import task_file
from agentrl.config import RunConfig
from agentrl.config.schema import EvalConfig
from agentrl.doctor import Status
from agentrl.doctor.templates import QUESTION
from agentrl.evaluation.checkpoint.runs import evaluation_run
from agentrl.store import open_store
from agentrl.types import Json, RolloutState

ANSWER_TOKENS = 16  # tokens of an answer
UNHELD_SECONDS = 0.2  # seconds after which a call that did not wait would have ended
CALL_TIMEOUT = 60.0  # timeout of a call in seconds


def trie(model: LoadedModel, config: RunConfig) -> tuple[Status, str] | None:
    """Compare log-probs and gradients of branches with a common prefix, packed as trie and rows."""
    gap = None if config.learner.packed == "rows" else trie_gap(model.model, model.tokenizer)
    if gap is None or gap.within(config.policy):
        return gap and ("ok", str(gap))
    return "fail", f"{gap}; set learner.packing=rows"


async def sampler(model: LoadedModel, config: RunConfig) -> tuple[Status, str]:
    """Serve the policy, compare its log-probs with the learner's, and check that a call waits for
    new weights. Raises PolicyError if the server does not start or vLLM's own checks fail."""
    server = policy_server(config, model.model, model.tokenizer, model.adapters, model.policies[0])
    await server.start()
    inputs = inputs_of(model.model)
    messages = (inputs and inputs.probe()) or [QUESTION]
    body = {"model": server.model, "messages": messages, "max_tokens": ANSWER_TOKENS}
    body |= {"logprobs": True, "return_token_ids": True}
    try:
        async with _client(config) as http:
            url = f"{server.base_url}/chat/completions"
            gap = _gap(model, messages, (await http.post(url, json=body)).raise_for_status().json())
            async with server.updating():
                waiting = asyncio.create_task(http.post(url, json=body))
                ended, _ = await asyncio.wait([waiting], timeout=UNHELD_SECONDS)
                started = time.monotonic()
                await server.publish(1)
                seconds = time.monotonic() - started
            version = (await waiting).headers[VERSION_HEADER]
    finally:
        await server.close()
    allowed = tolerance(config.policy)
    sentence = f"log-probs {gap:.2g} from the learner's, {allowed:g} is allowed"
    sentence += f", new weights in {seconds:.2g} s"
    if not gap <= allowed or ended or version != "1":
        waits = "did not wait" if ended or version != "1" else "waited"
        return "fail", f"{sentence}, for which a call {waits}; set another engine.kind"
    return "ok", f"{sentence}, for which a call waited"


def _client(config: RunConfig) -> httpx.AsyncClient:
    """A client of the policy server."""
    access = config.engine.access
    headers = {"authorization": f"Bearer {access.key}"} if access.key else {}
    tls = access.client_tls()
    return httpx.AsyncClient(headers=headers, verify=tls, trust_env=False, timeout=CALL_TIMEOUT)


def _gap(model: LoadedModel, messages: Sequence[dict[str, Json]], answer: Any) -> float:
    """The largest difference of the sampled tokens' log-probs from the learner's; in bfloat16 their
    root mean square: the largest of a real model is that of rounding, and above 0.1."""
    (choice,), prompt = answer["choices"], answer["prompt_token_ids"]
    if inputs := inputs_of(model.model):
        prompt = inputs.read(prompt, messages)
    row = one_row([*prompt, *choice["token_ids"]], len(prompt))
    told = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
    applied = model.adapters.using(model.policies[0]) if model.adapters else nullcontext()
    with torch.no_grad(), applied:
        scored = forward_logprobs(model.model, pack_rows([row], "rows", len(row.tokens))[0])
    apart = scored.cpu() - told
    narrow = model.model.dtype.itemsize == 2
    return float(apart.square().mean().sqrt() if narrow else apart.abs().max())


async def rollout(config: RunConfig, task: dict[str, Json]) -> tuple[Status, str]:
    """Run one task through agent, gateway, policy server, verifier and store, as an evaluation."""
    config = evaluation_run(config, "doctor", None)
    file = task_file([task], make_folder(Path(config.output)) / "task.jsonl")
    tasks, evals = replace(config.tasks, heldout=file), EvalConfig(tasks=1, sampled=False)
    config = replace(config, tasks=tasks, eval=evals)
    async with open_store(config.store) as store:
        seconds = await trainer.supervise(store, config, console=Console(quiet=True), alone=True)
        (row,) = await store.rollouts(config.name)
        trace = await store.trace(row.id)
    calls = trace.transitions if trace else []
    if row.state is not RolloutState.SUCCEEDED or not calls:
        why = row.failure.message if row.failure else "the agent made no model call"
        return "fail", f"{why}; correct the agent or the verifier"
    return "ok", f"{len(calls)} model calls, outcome {row.reward():g}, {seconds:.0f} s"
