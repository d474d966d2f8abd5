"""Checks of the model, the tasks and the verifier of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.algorithms.model.load import context_length, vocabulary_size
from agentrl.algorithms.model.text import Codec
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.config import RunConfig
from agentrl.doctor import Status
from agentrl.errors import AgentRLError
from agentrl.runners.scoring import verifiers
from agentrl.threads import run_blocking
from agentrl.types import Json

PADDING = 1024  # rows of an embedding without a token, to make it a round number
RESULTS: tuple[Json, ...] = ("", "1", {}, [])  # what agents may return


def verifier(config: RunConfig, task: dict[str, Json]) -> tuple[Status, str] | None:
    """Calls it with a task and results of several types. What it raises for all of them alike is
    not about the result. Raises AgentRLError for what is no verifier or no reward."""
    sources = config.verifier
    if not task or not (sources.path or sources.rewards):
        return None
    call, errors = verifiers.load(sources.path, sources.rewards, Path(config.root)), set()
    if call.wants_trace or call.wants_workspace:  # only a rollout can show those
        return None
    for result in RESULTS:
        try:
            rewards = run_blocking(call(task=task, result=result, trace=None))
        except AgentRLError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's function is a boundary
            errors.add(f"{type(error).__name__}: {error}")
        else:
            shown = ", ".join(f"{row.name} {row.value:g}" for row in rewards)
            return "ok", f"the first task with the result {result!r}: {shown}"
    if len(errors) > 1:
        return "ok", "it takes a result that only the agent returns"
    return "fail", f"it raises {errors.pop()} for the first task; correct it: all rollouts fail"


def tokenizer(model: LoadedModel) -> tuple[Status, str]:
    """Whether the ids of the tokenizer are those of the model."""
    rows, tokens = vocabulary_size(model.model), len(model.tokenizer)
    sizes = f"{tokens} tokens for {rows} embeddings of {model.source}"
    if not 0 <= rows - tokens <= PADDING:
        return "fail", f"{sizes}; put the tokenizer files of this very model there"
    ends: Any = getattr(getattr(model.model, "generation_config", None), "eos_token_id", None)
    own = model.tokenizer.eos_token_id
    if ends is None or own in ([ends] if isinstance(ends, int) else ends):
        return "ok", sizes
    return "warn", f"its eos_token is {own}, that of generation_config.json {ends}; make them agree"


def context(model: LoadedModel, config: RunConfig, task: dict[str, Json]) -> tuple[Status, str]:
    """Whether a task and an answer fit."""
    limit, asked = context_length(model.model), config.engine.max_context
    room, answer = min(asked, limit or asked), config.sampling.max_tokens or 0
    size = len(Codec(model.tokenizer).encode(str(task.get("input", ""))))
    if size + answer < room:
        return "ok", f"{room} tokens, of which the first task takes {size}"
    return "fail", (
        f"a task of {size} tokens and sampling.max_tokens = {answer} do not fit a context of {room}"
        f"; lower sampling.max_tokens, or raise engine.max_context (the model: {limit or 'any'})"
    )
