"""`agentrl init FOLDER --from-traces OUT`: a run that imitates recorded traces and can continue
live. Writes the run file, an agent file to complete, tasks and held-out tasks, demonstrations,
pairs, answers of tools, and a skeleton of a verifier. Each role of the traces becomes a policy with
its own adapter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.core.data_files import write_rows
from agentrl.core.errors import ConfigError
from agentrl.recorded.training import Training, Where

FILES = (
    "run.toml",
    "agent.py",
    "verifier.py",
    "tasks.jsonl",
    "heldout.jsonl",
    "demonstrations.jsonl",
    "pairs.jsonl",
    "tools.jsonl",
)
EPOCHS = 2  # maximum passes over each conversation
MIN_STEPS, MAX_STEPS = 30, 400  # steps of the warm-up
STEPS_PER_EPOCH = 40
MIN_BATCH, MAX_BATCH = 8, 32  # conversations per step of the warm-up
# Learning rates of the warm-up and of what follows it, in those of `pretrained.learning_rate`
WARMUP_LR, IMITATED_LR = 2, 0.4


def write_project(
    folder: Path,
    training: Training,
    where: Where,
    model: str,
    measure: Callable[[str], dict[str, Any]],
) -> list[str]:
    """Write the files of a run; returns their names. measure: measures the settings of a model on
    this machine. Raises ConfigError if there is nothing to imitate, and for existing files."""
    if present := [name for name in FILES if (folder / name).exists()]:
        raise ConfigError(f"{folder} has {', '.join(present)} already; name another folder")
    if not training.demonstrations:
        reasons = "; ".join(f"{count} {why}" for why, count in training.left_out.most_common())
        raise ConfigError(
            f"no trace is good and can be imitated where {where} ({reasons or 'there are none'})"
        )
    if not training.tasks:
        raise ConfigError(f"no task has a good trace where {where}, so nothing can be trained live")
    settings = measure(model)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "run.toml": run_file(training, settings, where),
        "agent.py": agent_file(training),
        "verifier.py": VERIFIER,
    }
    tools = [*training.definitions.values(), *training.tools]
    rows = {
        "tasks.jsonl": training.tasks,
        "heldout.jsonl": training.heldout,
        "pairs.jsonl": training.pairs,
        "demonstrations.jsonl": training.demonstrations,
        "tools.jsonl": tools,
    }
    written = []
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        written.append(name)
    for name, content in rows.items():
        if content:
            write_rows(content, folder / name)
            written.append(name)
    return written


def run_file(training: Training, settings: dict[str, Any], where: Where) -> str:
    """The run file, with the settings that were measured for the model."""
    roles, text = training.roles, json.dumps
    batch, steps = warmup_size(len(training.demonstrations) // max(1, len(roles)))
    heldout = (
        'heldout = "heldout.jsonl"  # the latest tasks; no trace of them is imitated\n'
        if training.heldout
        else ""
    )
    policies = (
        "".join(
            f"\n[policies.{name}]\nroles = [{text(role, ensure_ascii=False)}]\n"
            for role, name in policy_names(roles).items()
        )
        if len(roles) > 1
        else ""
    )
    evaluation = (
        "\n[eval]\nevery = 5  # steps between evaluations on the held-out tasks\n"
        if training.heldout
        else ""
    )
    return f"""# agentrl doctor run.toml    checks the machine, the agent and all that the run needs
# agentrl train run.toml     imitates the traces where {_in_line(where)}, then trains live

steps = 20  # of reinforcement learning, after the warm-up

[agent]
path = "agent.py:agent"  # your agent's place is marked in this file
timeout = {settings["timeout"]}.0  # seconds for one rollout
error_reward = 0.0  # an agent that raises has failed

[tasks]
train = "tasks.jsonl"  # the first inputs of the traces, each once
{heldout}
[verifier]
path = "verifier.py:verify"  # a skeleton: it compares with what good traces ended with

[policy]  # the base model{"; each role is an adapter on it" if policies else ""}
model = {text(settings["model"], ensure_ascii=False)}
dtype = "{settings["dtype"]}"

[policy.lora]
rank = {settings["rank"]}
{policies}
[warmup]  # imitates the traces before the first step
data = "demonstrations.jsonl"
steps = {steps}  # at most: it ends when held-out conversations are learned
batch = {batch}
lr = {settings["lr"] * WARMUP_LR:g}

[engine]
threads = {settings["threads"]}
max_batch = {settings["concurrency"]}
max_context = {settings["context"]}

[sampling]
temperature = 1.0
max_tokens = {settings["max_tokens"]}  # of one completion

[algorithm]
groups = 4  # tasks per step
group_size = 8  # rollouts per task, which are compared with each other
lr = {settings["lr"] * IMITATED_LR:g}
{evaluation}
[runner]
processes = 1
concurrency = {settings["concurrency"]}
"""


def warmup_size(count: int) -> tuple[int, int]:
    """Batch and steps of a warm-up for this number of conversations of a role: small batches first,
    because the number of updates matters most; larger ones if there is enough data for 40
    updates."""
    batch = min(MAX_BATCH, max(MIN_BATCH, count // STEPS_PER_EPOCH))
    return batch, min(MAX_STEPS, max(MIN_STEPS, -(-count * EPOCHS // batch)))


def _in_line(value: object) -> str:
    """A text of the traces, escaped so that it cannot end the comment or docstring around it."""
    return json.dumps(str(value), ensure_ascii=False)[1:-1].replace("\x7f", "")


def policy_names(roles: list[str]) -> dict[str, str]:
    """Names of policies by role: letters, digits, `_` and `-`, each once."""
    names: dict[str, str] = {}
    for role in roles:
        base = name = re.sub(r"[^A-Za-z0-9_-]+", "_", role).strip("_-") or "role"
        number = 1
        while name in names.values():
            number += 1
            name = f"{base}_{number}"
        names[role] = name
    return names


def agent_file(training: Training) -> str:
    """The agent file: for traces of one role a runnable agent with the recorded tools; for several
    roles a placeholder for the user's agent."""
    roles = training.roles
    if len(roles) > 1:
        return SEVERAL.replace("ROLES", ", ".join(map(_in_line, roles)))
    first = training.demonstrations[0]["messages"]
    system = next((m["content"] for m in first if m["role"] == "system"), "")
    text = json.dumps(system, ensure_ascii=False) if isinstance(system, str) else repr(system)
    return ONE.replace("SYSTEM_TEXT", text)


VERIFIER = '''"""The verifier: the reward of one rollout, higher is better. THIS IS A SKELETON.

It compares with what a good trace of the task ended with (`expected`), letter by letter but for
case and spaces. Replace it by what your feedback was about: the names are in `agentrl traces look`.
"""

import json
from typing import Any


def verify(task: dict[str, Any], result: Any) -> float:
    return float(plain(result) == plain(task["expected"]))


def plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return " ".join(text.lower().split())
'''

SEVERAL = '''"""The agent. During training OPENAI_BASE_URL and OPENAI_API_KEY point to the policy.

The traces have calls of these roles: ROLES. Each is a policy; a call's role is the name of the
LangGraph node or agent that makes it, or what `agentrl.role("NAME")` says around it.
"""

from pathlib import Path
from typing import Any

from agentrl.recorded.tools import RecordedTools

# What the tools answered in the traces, for tools that cannot be run here:
# tools.function("NAME") is one as a function, tools.call("NAME", {...}) one call.
path = Path(__file__).with_name("tools.jsonl")
tools = RecordedTools(path) if path.exists() else None


def agent(input: Any) -> Any:
    # ------------------------------------------------------------------------------------------
    # YOUR AGENT HERE: call it with the input of a task, which is that of the traces, and return
    # its result. Or name its file in run.toml: agent.path = "FILE.py:NAME".
    # ------------------------------------------------------------------------------------------
    raise NotImplementedError("agent.py: put your agent in the marked place")
'''

ONE = '''"""The agent: a loop of calls and tools, as the traces have it. Replace it by your own.

During training OPENAI_BASE_URL and OPENAI_API_KEY point to the policy.
"""

import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from agentrl.recorded.tools import RecordedTools

SYSTEM = SYSTEM_TEXT
TURNS = 20  # calls of a rollout, at most
client = AsyncOpenAI()
# What the tools answered in the traces. A call that was not recorded is answered as the nearest
# one, below a line that says so: put your real tools here where they can be run.
path = Path(__file__).with_name("tools.jsonl")
tools = RecordedTools(path) if path.exists() else None


async def agent(input: Any) -> str:
    # YOUR AGENT HERE, if it does more than this.
    text = input if isinstance(input, str) else json.dumps(input, ensure_ascii=False)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    messages.append({"role": "user", "content": text})
    options = {"tools": tools.definitions} if tools and tools.definitions else {}
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, **options)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not (message.tool_calls and tools):
            return message.content or ""
        for call in message.tool_calls:
            result = tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
'''
