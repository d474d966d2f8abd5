"""Checks of a run's policy: its chat template, its model, and whether the run works on this
hardware.

The checks of the last kind compute, serve and play for some seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import torch
from msgspec.structs import replace
from rich.console import Console

from agentrl import trainer
from agentrl.algorithms import estimate
from agentrl.algorithms.engines.base import VERSION_HEADER
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.chat import Chat, Codec, RequestError, Tokenizer
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import vocabulary_gap, vocabulary_size
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.model.templates import template_fix
from agentrl.algorithms.proof import one_row, tolerance, trie_gap
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.serving import policy_server
from agentrl.core.config import RunConfig
from agentrl.core.config.schema import EvalConfig
from agentrl.core.errors import PolicyError
from agentrl.core.files import make_folder
from agentrl.core.loading import task_file
from agentrl.core.types import Group, Json, RolloutState, one_line
from agentrl.doctor import Status
from agentrl.evaluation import evaluation_run
from agentrl.store import open_store

Message = dict[str, Json]
QUESTION: Message = {"role": "user", "content": "Where is Ada?"}
THANKS: Message = {"role": "user", "content": "Thanks."}
FUNCTION: Json = {"name": "find_person", "arguments": '{"who": "Ada"}'}
CALL: Json = {"id": "call00000", "type": "function", "function": FUNCTION}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "call00000", "content": "Antarctica"}
TOOL: Json = {"type": "function", "function": {"name": "find_person", "parameters": {}}}
ROWS = "so each call of a conversation is a separate row, which makes updates longer"
FIX_HINT = "fix chat_template.jinja or choose a model with another template"


def tool_calls(tokenizer: Tokenizer) -> tuple[Status, str]:
    """Whether the template renders tools, tool calls and their results."""
    try:
        _tokens(tokenizer, [QUESTION], [TOOL])
        shown = tokenizer.decode(_tokens(tokenizer, [QUESTION, CALLED, RESULT], [TOOL]))
    except PolicyError:  # which names the tool of this check
        fix = f"{template_fix(tokenizer)}, or choose a model whose template renders them"
        return "warn", f"the chat template shows no tools; if the agent needs them, {fix}"
    conversation = shown.rpartition("Where is Ada?")[2]
    if "find_person" in conversation and "Antarctica" in conversation:
        return "ok", "the chat template shows tools, calls and results"
    fix = f"if the agent needs it, {template_fix(tokenizer)}, {FIX_HINT}"
    return "warn", f"the chat template leaves out tool calls or their results; {fix}"


def thinking(tokenizer: Tokenizer) -> tuple[Status, str]:
    """Whether the thinking of earlier turns stays in the prompt."""
    thought: Message = {"role": "assistant", "content": "<think>\nLook south.\n</think>\n\nSouth."}
    if "Look south." in tokenizer.decode(_tokens(tokenizer, [QUESTION, thought, THANKS])):
        return "ok", "thinking blocks of earlier turns stay in the prompt"
    return "warn", f"the chat template drops the thinking of earlier turns, {_fix_hint(tokenizer)}"


def turns(tokenizer: Tokenizer) -> tuple[Status, str]:
    """Whether the next turn's prompt begins with the tokens of this turn's prompt and answer."""
    answer: Message = {"role": "assistant", "content": "In the south."}
    sampled = (*Codec(tokenizer).encode("In the south."), tokenizer.eos_token_id)
    turn = _tokens(tokenizer, [QUESTION]) + sampled
    if _tokens(tokenizer, [QUESTION, answer, THANKS])[: len(turn)] == turn:
        return "ok", "the tokens of a turn survive the next turn"
    sentence = "the chat template does not repeat a turn as it was sampled"
    return "warn", f"{sentence}, {_fix_hint(tokenizer)}"


def _fix_hint(tokenizer: Tokenizer) -> str:
    return f"{ROWS}; if the agent needs it, {template_fix(tokenizer)}, {FIX_HINT}"


def _tokens(tokenizer: Tokenizer, messages: list[Message], tools: Json = None) -> tuple[int, ...]:
    try:
        return Chat(tokenizer, Codec(tokenizer)).encode(messages, tools)
    except RequestError as error:
        raise PolicyError(str(error)) from None


def memory(config: RunConfig, source: str) -> tuple[Status, str]:
    """Whether a run's peak memory fits. source: directory or hub name of the policy's model."""
    fits, sentence = estimate.memory(config, readable_shape(source))
    return ("ok" if fits else "fail"), sentence


def readable_shape(source: str) -> Any:
    """The model without its weights. Raises PolicyError, with the model's name and a fix, if it
    cannot be read from its folder or from the hub."""
    try:
        return estimate.shape_of(source)
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"model {source!r}: cannot be read: {one_line(str(error))}; policy.model: the folder "
            "of a model, or a name on the hub, which this machine has to reach once"
        ) from None


def tokenizer(model: LoadedModel) -> tuple[Status, str]:
    """Whether the vocabulary of the tokenizer matches that of the model."""
    rows, tokens = vocabulary_size(model.model), len(model.tokenizer)
    if gap := vocabulary_gap(model.model, model.tokenizer):
        return "fail", f"{model.source}: {gap}"
    return "ok", f"{tokens} tokens for {rows} embeddings of {model.source}"


def context(model: LoadedModel, config: RunConfig, task: Mapping[str, Json]) -> tuple[Status, str]:
    """Whether a task and an answer fit into the context."""
    limit, configured = context_length(model.model), config.engine.max_context
    longest, answer = min(configured, limit or configured), config.sampling.max_tokens or 0
    size = len(Codec(model.tokenizer).encode(str(task.get("input", ""))))
    answer_text = (
        f"sampling.max_tokens {answer}" if answer else f"an answer at most {longest - size}"
    )
    sentence = f"{longest} tokens, of which a task takes {size} and {answer_text}"
    fix = f"lower sampling.max_tokens or raise engine.max_context (the model: {limit or 'any'})"
    return ("ok", sentence) if size + answer < longest else ("fail", f"{sentence}; {fix}")


ANSWER_TOKENS = 16  # tokens of an answer
UNHELD_SECONDS = 0.2  # seconds within which a call that does not wait ends
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
    """The largest difference of the sampled tokens' log-probs from the learner's; in bfloat16 the
    root mean square of all differences, because rounding alone makes the largest one exceed 0.1."""
    (choice,), prompt = answer["choices"], answer["prompt_token_ids"]
    if inputs := inputs_of(model.model):
        prompt = inputs.read(prompt, messages)
    row = one_row([*prompt, *choice["token_ids"]], len(prompt))
    reported = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
    applied = model.adapters.using(model.policies[0]) if model.adapters else nullcontext()
    with torch.no_grad(), applied:
        scored = forward_logprobs(model.model, pack_rows([row], "rows", len(row.tokens))[0])
    apart = scored.cpu() - reported
    narrow = model.model.dtype.itemsize == 2
    return float(apart.square().mean().sqrt() if narrow else apart.abs().max())


async def rollout(config: RunConfig, task: dict[str, Json]) -> tuple[Status, str]:
    """Run one task through agent, gateway, policy server, verifier and store, as an evaluation."""
    config = evaluation_run(config, "doctor", None)
    file = task_file([task], make_folder(Path(config.output)) / "task.jsonl")
    tasks, evals = replace(config.tasks, heldout=file), EvalConfig(tasks=1, samples=0)
    config = replace(config, tasks=tasks, eval=evals)
    async with open_store(config.store) as store:
        seconds = await trainer.supervise(store, config, console=Console(quiet=True), alone=True)
        (row,) = await store.rollouts(config.name)
        trace = await store.trace(row.id)
    calls = trace.transitions if trace else []
    if row.state is not RolloutState.SUCCEEDED or not calls:
        why = row.failure.message if row.failure else "the agent made no model call"
        return "fail", f"{why}; correct the agent or the verifier"
    group = Group(id="", run="", step=0, rollouts=[replace(row, transitions=calls)])
    sized = estimate.tried(config, readable_shape(config.model_path()), [group])
    return "ok", f"{len(calls)} model calls, outcome {row.reward():g}, {seconds:.0f} s; {sized}"
