"""Who works on a Harbor task: a model with a shell, or a command or a harness in the container."""

from __future__ import annotations

import base64
import io
import json
import shlex
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.base import threads
from agentrl.base.model_clients import model_variables
from agentrl.environments import Endpoint
from agentrl.errors import AgentError
from agentrl.harbor.trial import Trial
from agentrl.runners.harnesses.preset import Preset
from agentrl.runners.processes.contract import private_folders
from agentrl.tasks.harbor_format import HarborStep, HarborTask, resolved

NO_LIMIT = 86_400.0  # seconds, of a task without a time for its agent
LARGEST_COMMAND = 100_000  # bytes; Linux refuses arguments above 128 KiB
PIECE = 60_000  # characters of a solution in one command
SHELL = 'if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
SYSTEM = (
    "You work in a Linux container. Use the tool `bash` until the task is done; then answer without"
    " a tool call. Each command runs in a new shell, in the working directory."
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command and return its output and exit status.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


@dataclass(frozen=True)
class ModelWithShell:
    """Asks the policy what to run, until it answers without a tool call or its time is up."""

    turns: int  # model calls of a step
    seconds: float  # of a command
    output: int  # characters of a command's output that the model sees
    system: str = SYSTEM

    def begin(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    async def work(
        self, trial: Trial, step: HarborStep, endpoint: Endpoint, talk: list[dict[str, Any]]
    ) -> None:
        """`talk`: the conversation of earlier steps, which goes on."""
        until = time.monotonic() + (step.seconds or NO_LIMIT)
        talk.append({"role": "user", "content": step.instruction})
        for _ in range(self.turns):
            reply = await endpoint.chat(talk, TOOLS)
            talk.append(reply)
            calls = reply.get("tool_calls") or []
            for call in calls:
                said = await self._run(trial, step, call, until)
                talk.append({"role": "tool", "tool_call_id": call.get("id", ""), "content": said})
            if not calls or time.monotonic() >= until:
                return

    async def _run(self, trial: Trial, step: HarborStep, call: Any, until: float) -> str:
        command = _command(call)
        if command is None:
            return "There is one tool, bash, with one argument, command: a text."
        if "\0" in command or len(command.encode()) > LARGEST_COMMAND:
            return f"The command has a NUL or more than {LARGEST_COMMAND} bytes; make it shorter."
        left = until - time.monotonic()
        if left <= 0:
            return "The time is up."
        seconds = min(self.seconds, left)
        try:
            done = await trial.run(["sh", "-c", SHELL, command], step, seconds)
        except TimeoutError:
            return f"It ran longer than {seconds:.4g} s; it and all other processes were ended."
        said = done.stdout + (f"\n{done.stderr}" if done.stderr else "")
        if len(said) > self.output:
            half = self.output // 2
            left_out = len(said) - 2 * half
            said = f"{said[:half]}\n... ({left_out} characters are left out)\n{said[-half:]}"
        status = f"\n(exit status {done.status})" if done.status else ""
        return f"{said.rstrip()}{status}".strip()


@dataclass(frozen=True)
class CommandInside:
    """A program of the image. It finds the model in its variables, such as OPENAI_BASE_URL, and
    the instruction in HARBOR_INSTRUCTION and on its stdin."""

    command: list[str]

    def begin(self) -> list[dict[str, Any]]:
        return []

    async def work(
        self, trial: Trial, step: HarborStep, endpoint: Endpoint, talk: list[dict[str, Any]]
    ) -> None:
        env = model_variables(endpoint.url, endpoint.key)
        if len(given := step.instruction.encode()) <= LARGEST_COMMAND:
            env["HARBOR_INSTRUCTION"] = step.instruction
        await _run_agent(trial, step, self.command, env, given)


@dataclass(frozen=True)
class HarnessInside:
    """A coding harness whose program is in the image. It has a HOME of its own for each step, with
    its configuration files."""

    preset: Preset
    args: list[str]
    context: int

    def begin(self) -> list[dict[str, Any]]:
        return []

    async def work(
        self, trial: Trial, step: HarborStep, endpoint: Endpoint, talk: list[dict[str, Any]]
    ) -> None:
        prompt, home = step.instruction, f"/tmp/.agentrl-home-{step.name or 'task'}"
        if "\0" in prompt or len(prompt.encode()) > LARGEST_COMMAND:
            raise AgentError(f"the task is too long for an argument of {self.preset.program}")
        known = {"url": endpoint.url, "key": endpoint.key, "prompt": prompt}
        preset = self.preset.filled(home=Path(home), context=self.context, **known)
        with tempfile.TemporaryDirectory(prefix="agentrl-") as files:
            await threads.call(preset.write_files, Path(files))
            await trial.give(Path(files), home)
        env = model_variables(endpoint.url, endpoint.key)
        env |= private_folders(home, Path(await trial.folder())) | preset.env
        await _run_agent(trial, step, [preset.program, *preset.argv, *self.args], env)


async def _run_agent(
    trial: Trial, step: HarborStep, command: list[str], env: dict[str, str], stdin: bytes = b""
) -> None:
    try:
        done = await trial.run(command, step, step.seconds or NO_LIMIT, env, stdin)
    except TimeoutError:
        return  # what it has done by then is judged
    if done.status:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise AgentError(f"the agent ended with exit status {done.status}: {last[:300]}")


async def play(
    trial: Trial, agent: ModelWithShell | CommandInside | HarnessInside, endpoint: Endpoint
) -> dict[str, float]:
    """Let the agent work on all steps of a task; return the rewards."""
    talk = agent.begin()
    for step in trial.task.steps:
        await trial.begin(step)
        await agent.work(trial, step, endpoint, talk)
        await trial.judge(step)
        if trial.is_over(step):
            break
    return trial.rewards()


def solution(task: HarborTask) -> list[dict[str, Any]] | None:
    """The replies that run each step's `solve.sh`; None if there is none."""
    if not all((step.solution / "solve.sh").is_file() for step in task.steps):
        return None
    own = resolved(task.about.solution.env, task.variables)
    given = {"DEBIAN_FRONTEND": "noninteractive", **own}
    variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in given.items())
    replies = []
    for step in task.steps:
        replies += [_asks(command) for command in _copied(step)]
        replies.append(_asks(f"chmod +x /solution/solve.sh && {variables} /solution/solve.sh"))
        replies.append({"role": "assistant", "content": "Done."})
    return replies


def _copied(step: HarborStep) -> Iterator[str]:
    """Commands that write the step's solution to /solution."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(step.solution, ".")
    text = base64.b64encode(packed.getvalue()).decode()
    yield "rm -rf /solution && mkdir -p /solution && : > /tmp/.solution"
    for start in range(0, len(text), PIECE):
        yield f"printf %s {text[start : start + PIECE]} >> /tmp/.solution"
    yield "base64 -d /tmp/.solution | tar -xz -C /solution && rm /tmp/.solution"


def _asks(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    call = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _command(call: Any) -> str | None:
    try:
        found = json.loads(call["function"]["arguments"])["command"]
        found.encode()  # half an emoji is no text
        return found if call["function"]["name"] == "bash" and isinstance(found, str) else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
