"""One-sentence summaries of failed rollouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from agentrl.types import ErrorKind, Failure

LONGEST_MESSAGE = 400  # characters of a message
# What the embedded server, vLLM, SGLang, OpenAI and Anthropic say of a prompt that is too long.
TOO_LONG = re.compile(r"context[ _-](length|window|size)|model's context|prompt is too long", re.I)
LOOPS = (  # what the calls of an agent do that asks until it gets a form that it never gets
    "added nothing to the policy's last answer, such as a tool's result: the agent asks again until"
    " it gets a tool call or a structured answer, and gets words"
)
VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\S*\d\S*")
CURES = {  # of rollouts that all fail in the same way
    ErrorKind.AGENT: "Correct the agent (agent.path, agent.command or agent.harness)",
    ErrorKind.NO_CALL: "Let the agent call the policy",
    ErrorKind.TIMEOUT: "Raise agent.timeout, or make the agent faster",
    ErrorKind.LIMIT: "Raise agent.max_calls or agent.max_tokens",
    ErrorKind.MODEL: "See to the model's server (policy, engine, upstreams)",
    ErrorKind.VERIFIER: "Correct it",
    ErrorKind.WORKSPACE: "Correct [workspace]: its source and its commands",
    ErrorKind.LOST_RUNNER: "See to the runner's machine and sandbox",
    ErrorKind.CANCELLED: "Let the rollouts end",
}


def same_cause(failure: Failure) -> tuple[ErrorKind, str]:
    """What failures of one cause have in common: the kind, and the message without what differs
    between rollouts, such as numbers, ids and quoted values."""
    line = next(iter(failure.message.strip().splitlines()), "")
    return failure.kind, VARIES.sub("#", line)


def how_many(failed: int) -> str:
    return f"{failed} rollout{'s' * (failed != 1)} failed"


def cure_of(kind: ErrorKind, message: str) -> str:
    """What to do about rollouts that all fail in this way."""
    if TOO_LONG.search(message):
        return "Raise engine.max_context, or let the agent and its environment send less"
    return CURES[kind]


def commonest_message(failures: Sequence[Failure]) -> str:
    """The most frequent message, on one line."""
    ((message, _),) = Counter(failure.message for failure in failures).most_common(1)
    return one_line(message)


def one_line(message: str) -> str:
    """A message on one line, shortened to LONGEST_MESSAGE characters."""
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]} ..."
