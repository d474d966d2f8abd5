"""A command: what it is told, how it answers, and what it may use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind, Rollout, RolloutState
from agentrl.runners.executors import command, supervisor

NESTED = "[" * 5000 + "]" * 5000  # JSON, and deeper than any parser goes


def python(code: str) -> list[str]:
    return [sys.executable, "-Sc", code]


def configured(command: object, runner: dict[str, Any] | None = None, **agent: Any) -> RunConfig:
    data = {"name": "test", "agent": {"command": command} | agent, "runner": runner or {}}
    return resolve(data, source="test")


async def result(bench: Any, make: Any, command: object, value: Any = "x", **agent: Any) -> Any:
    (rollout,) = await play(bench, make, command, value, **agent)
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    return rollout.result


async def play(bench: Any, make: Any, command: object, *inputs: Any, **agent: Any) -> list[Rollout]:
    """The rollouts of a command on tasks with these inputs."""
    executor = await make("command", config=configured(command, **agent))
    found: list[Rollout] = await bench.run(executor, *({"input": value} for value in inputs))
    return found


PROGRAM = python("import json, sys; exec(json.load(sys.stdin))")  # which its task is


async def test_what_it_finds_in_its_environment(
    bench: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET", "the runner's own")
    monkeypatch.setenv("MY_FLAG", "passed")
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    env = await result(bench, make, python(code), pass_env=["MY_*"], env={"ADDED": "1"})
    url = bench.gateway.base_url
    root = url.removesuffix("/v1")
    (rollout,) = await bench.store.rollouts("test")
    (span,) = (await bench.store.trace(rollout.id)).spans
    assert env["OPENAI_BASE_URL"] == url
    assert env["ANTHROPIC_BASE_URL"] == env["OTEL_EXPORTER_OTLP_ENDPOINT"] == root
    assert (env["GOOGLE_GEMINI_BASE_URL"], env["GEMINI_API_BASE"]) == (root, url)
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == env["GEMINI_API_KEY"]
    assert env["OTEL_EXPORTER_OTLP_HEADERS"].endswith(env["OPENAI_API_KEY"])
    assert env["TRACEPARENT"] == f"00-{rollout.attempt}-{span.id}-01"
    assert (env["AGENTRL_TASK"], env["MY_FLAG"], env["ADDED"]) == ('"x"', "passed", "1")
    assert env["PATH"] == os.environ["PATH"]
    assert "AWS_SECRET" not in env
    assert rollout.attempt not in env["OPENAI_API_KEY"]


@pytest.mark.parametrize("name", ["GEMINI_API_KEY", "GOOGLE_API_KEY"])
@pytest.mark.parametrize("how", ["pass_env", "env"])
async def test_a_key_of_googles_that_the_user_gives_leads_to_google(
    bench: Any, make: Any, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setenv(name, "the user's own")
    given = {"pass_env": [name]} if how == "pass_env" else {"env": {name: "the user's own"}}
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    env = await result(bench, make, python(code), **given)
    assert env[name] == "the user's own"
    assert {"GOOGLE_GEMINI_BASE_URL", "GEMINI_API_BASE"}.isdisjoint(env)


async def test_a_nul_that_no_program_can_be_given_is_said(bench: Any, make: Any) -> None:
    for argv, env in ((["true", "a\0b"], {}), (["true"], {"ODD": "a\0b"})):
        (rollout,) = await play(bench, make, argv, "x", env=env)
        assert "embedded null byte" in rollout.failure.message, argv


async def test_its_parent_knows_no_secrets(
    bench: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hush")
    code = """
import os
for parent in os.getppid(), int(open(f"/proc/{os.getppid()}/stat").read().split()[3]):
    try:
        print(open(f"/proc/{parent}/environ").read())
    except PermissionError:
        print("closed")
"""
    found = await result(bench, make, python(code))
    assert "hush" not in found
    assert "PATH=" in found or found.split() == ["closed", "closed"]  # for root, or others


SEALED = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
AS_KEEPER = f"""
import runpy, socket, sys
ours, theirs = socket.socketpair()
ours.close()
sys.argv = ["supervisor", str(theirs.detach())]
runpy.run_path({supervisor.__file__!r}, run_name="__main__")
{SEALED}
"""
AS_COMMAND = f"""
import atexit, sys
from agentrl.cli.main import main
atexit.register(lambda: exec({SEALED!r}))
sys.argv = ["agentrl", *sys.argv[1:]]
main()
"""
COMMANDS = (
    ["train", "none.toml"],
    ["process", "algorithm", "none.json"],
    ["runner", "start", "--store", "nothing://", "--run", "test"],
    ["store", "serve", "nothing://"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_process_of_a_run_is_sealed(command: list[str]) -> None:
    """Tried as root, who may look into everything: so the process is asked."""
    program = [sys.executable, "-c", AS_COMMAND, *command]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("0\n")


def test_supervisors_are_sealed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_KEEPER], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"


async def test_what_a_sealed_process_starts_is_not(bench: Any, make: Any) -> None:
    assert await result(bench, make, python(SEALED)) == 1


async def test_the_task_in_every_size(bench: Any, make: Any) -> None:
    code = """
import json, os, sys
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["AGENTRL_TASK_FILE"]))
print(json.dumps([len(task), json.loads(os.environ.get("AGENTRL_TASK", "null")) == task]))
"""
    largest = command.MAX_VARIABLE_BYTES - 2  # without the quotes
    tasks = ["é" * 10, "x" * largest, "x" * (largest + 1), "é" * 2_000_000]
    rollouts = await play(bench, make, python(code), *tasks)
    expected = [[len(task), i < 2] for i, task in enumerate(tasks)]
    assert [rollout.result for rollout in rollouts] == expected


HUGE = '{"n": 1' + "0" * 5000 + "}"  # no integer of JSON
PRINTED = {
    '{"a": [1]}\n': {"a": [1]}, "17": 17, "two\nlines\n": "two\nlines", "": "", NESTED: NESTED,
    "[7, 1e3]\n": [7, 1000.0], f"{2**70}\n": f"{2**70}", f"{HUGE}\n": HUGE,
}  # fmt: skip


async def test_a_result_is_json_or_text(bench: Any, make: Any) -> None:
    write = "import sys; sys.stdout.write({!r}); sys.stderr.write('noise')"
    rollouts = await play(bench, make, PROGRAM, *map(write.format, PRINTED))
    for (printed, answer), rollout in zip(PRINTED.items(), rollouts, strict=True):
        assert rollout.result == answer, (printed[:20], rollout.failure)


async def test_a_result_file_outweighs_stdout(bench: Any, make: Any) -> None:
    command = """sh -c 'echo noise; echo "[1, 2]" > "$AGENTRL_RESULT_FILE"'"""
    assert await result(bench, make, command) == [1, 2]


async def test_it_works_in_its_folder(bench: Any, make: Any, tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("found")
    assert await result(bench, make, ["cat", "here.txt"], folder=str(tmp_path)) == "found"


LINKED = "read: Too many levels of symbolic links"
FAILS = {
    "import sys; print('why', file=sys.stderr); sys.exit(4)": "exit status 4: why",
    f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})": "was killed by SIGSEGV",
    "print('x' * 20_000_000)": "more than 16777216 bytes to stdout",
    "import os; os.mkdir(os.environ['AGENTRL_RESULT_FILE'])": "read: Is a directory",
    "import os; p = os.environ['AGENTRL_RESULT_FILE']; os.symlink(p, p)": LINKED,
    "import os; os.symlink('/etc/passwd', os.environ['AGENTRL_RESULT_FILE'])": LINKED,
    "import os, shutil; folder = os.path.dirname(os.environ['AGENTRL_RESULT_FILE']);"
    " shutil.rmtree(folder); os.symlink('/etc', folder)": LINKED,
}


async def test_how_it_fails(
    bench: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rollouts = await play(bench, make, PROGRAM, *FAILS)
    for (code, says), rollout in zip(FAILS.items(), rollouts, strict=True):
        assert rollout.failure is not None, code
        assert rollout.failure.kind is ErrorKind.AGENT, code
        assert says in rollout.failure.message, code


async def test_a_variable_that_only_the_runner_has_is_named(
    bench: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "own")
    code = "import os; os.environ['SEARCH_TOKEN']"
    (rollout,) = await play(bench, make, python(code), "x")
    assert rollout.failure.message.endswith('set agent.pass_env = ["SEARCH_TOKEN"]')
    assert await result(bench, make, python(f"{code}; print(1)"), pass_env=["SEARCH_*"]) == 1


async def test_only_the_end_of_its_stderr_is_kept(bench: Any, make: Any) -> None:
    code = "import sys; sys.stderr.write('x' * 1_000_000 + '\\nlast words\\n'); sys.exit(1)"
    (rollout,) = await play(bench, make, python(code), "x")
    assert rollout.failure.message.endswith(": last words")
    assert len(rollout.failure.traceback) == 20_000


async def test_a_program_that_vanished_is_said(bench: Any, make: Any, tmp_path: Path) -> None:
    program = tmp_path / "agent.sh"
    program.write_text("#!/no/such/shell\n")
    program.chmod(0o755)
    (rollout,) = await play(bench, make, [str(program)], "x")
    assert "exit status 127: cannot run" in rollout.failure.message


async def test_its_key_ends_with_its_attempt(bench: Any, make: Any) -> None:
    code = "import os, json; print(json.dumps([os.environ[n] for n in ('OPENAI_API_KEY',)]))"
    (key,) = await result(bench, make, python(code))
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        url = f"{bench.gateway.base_url}/chat/completions"
        late = await client.post(url, json={"messages": [{"role": "user", "content": "x"}]})
    assert late.status_code in (401, 403)
    assert bench.model.requests == []


async def test_a_supervisor_that_is_killed_is_no_failure_of_the_agent(
    bench: Any, make: Any
) -> None:
    """The agent goes with it, and the rollout is tried again."""
    code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    (rollout,) = await play(bench, make, python(code), "x")
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert rollout.attempts == 3


@pytest.mark.parametrize("again", [True, False])
async def test_a_template_that_is_killed_costs_an_attempt_at_most(
    bench: Any, make: Any, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    executor = await make("command", config=configured(python("print(1)")))
    template = executor._launcher._template
    template.kill()
    template.wait()
    if not again:
        monkeypatch.setattr(executor._launcher, "_program", ("-c", "exit()"))
    (rollout,) = await bench.run(executor, {"input": "x"}, max_attempts=1)
    if again:
        assert rollout.result == 1
    else:
        assert rollout.failure.kind is ErrorKind.LOST_RUNNER


NODE = """
const { OPENAI_BASE_URL, OPENAI_API_KEY, AGENTRL_TASK } = process.env;
const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
  method: "POST",
  headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
  body: JSON.stringify({ messages: [{ role: "user", content: JSON.parse(AGENTRL_TASK) }] }),
});
console.log((await response.json()).choices[0].message.content);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
async def test_another_language_in_limited_memory(bench: Any, make: Any) -> None:
    command = ["node", "--input-type=module", "--eval", NODE]
    executor = await make("command", config=configured(command, runner={"memory_mb": 500}))
    (rollout,) = await bench.run(executor, {"input": "hello"})
    assert rollout.result == "echo hello", rollout.failure
    assert len((await bench.store.trace(rollout.id)).transitions) == 1


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ({"command": []}, r"agent\.path is missing"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": ["cat"], "folder": "/no/such/folder"}, "no folder /no/such/folder"),
        ({"command": ["cat"], "path": "a.py:b"}, "are both set"),
    ],
)
async def test_what_the_user_can_mend(make: Any, agent: Any, says: str) -> None:
    config = resolve({"name": "test", "agent": agent}, source="test")
    with pytest.raises(ConfigError, match=says):
        await make("command", config=config)
