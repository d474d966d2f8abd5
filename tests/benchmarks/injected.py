"""Faults in the places where a rollout is prepared, played and judged: does any become a reward?

`python -m tests.benchmarks.injected --json` plays a rollout for each fault in each place of

- the plug-ins whose interpreters are in `.environments` (`make test-environments` makes them): the
  faults are inside of the packages that they play (`tests/environments/injected`)
- an environment of turns, one that plays itself and one that verifies, written by a user
- the same three in processes of their own, as packages are that share nothing
- verifiers, sync and async, and one beside them
- judges' answers, and those of their servers
- agents in the executors async, threads, pool and command, in workspaces, and in containers of
  podman (if it is installed): what they raise, their hanging, their late results, the end of their
  process or container, and verifiers of their results

`--only NAME ...` plays some of these: names of plug-ins, `own` for a user's environments and
verifiers, `judges`, `executors`, `workspaces`, `containers`. `absent` lists what cannot be played
here. `--merge FILE ...` adds up what others have printed by `--json`.

Each rollout must have failed, with a cause that names the fault, or, of a judge, the reward must be
missing. `became_a_reward` counts those with a number, `unnamed` failures without a cause, and
`ran_late` those whose time ended before the fault came, as on a busy machine: play them again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from agentrl.algorithms import judges
from agentrl.algorithms.judges import JudgeClient
from agentrl.core.config import resolve
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.config.rewards import PointwiseJudge, PrincipleJudge
from agentrl.core.errors import AgentRLError
from agentrl.core.types import NewRollout
from agentrl.core.user_code import UserCodeLoop
from agentrl.environments import hosted
from agentrl.environments.runner import played_environment, stage
from agentrl.runners.main import Worker, attempt_runner
from agentrl.store import open_store
from tests.benchmarks.report import arguments, report
from tests.environments.injected.__main__ import PLAYED
from tests.runners.executors import real

ROOT = Path(__file__).parents[2]
Ends = dict[str, dict[str, Any]]
OWN = ("own", "judges", "executors", "workspaces", "containers")
RUN = "injected"
RAISED = ("exception", "time-out", "hang", "lost sandbox", "exit")
VALUES = ("no reward", "nan", "text", "digits", "out of range", "list", "nothing", "numpy nan",
          "decimal nan", "truth in text", "text array", "bytes", "coroutine", "one missing",
          "generator")  # fmt: skip
FAULTS = RAISED + VALUES
PROCESS = ("killed", "closed")  # not in the runner's own process
LATE = "ran longer than"
TIMEOUT = 5.0  # seconds of a rollout
# Functions of a user's file: what is no reward, by kind.
NO_REWARD = """
import asyncio, decimal, math

def no_reward(kind, value):
    import numpy
    known = {"no reward": None, "nan": math.nan, "text": "good", "digits": "1.0",
             "out of range": 7.0, "list": [1.0], "nothing": {}, "numpy nan": numpy.float32("nan"),
             "decimal nan": decimal.Decimal("NaN"), "truth in text": "True",
             "text array": numpy.array("1.0"), "bytes": bytearray(b"1.0"),
             "one missing": {"outcome": 1.0, "format": None}, "generator": iter([1.0])}
    if kind == "coroutine": return {"outcome": never_awaited()}
    return known.get(kind, value)

async def never_awaited(): return 1.0
"""
# A user's file: `fault(place)` does what the file beside it says there.
FILE = (
    NO_REWARD
    + """
import os, sys, time, signal
from pathlib import Path
import agentrl
from agentrl.environments import Environment, Episode

def told(): return Path(__file__).with_name("fault").read_text().partition(":")

def fault(place, value=1.0):
    here, _, kind = told()
    if here != place: return value
    if kind == "exception": raise RuntimeError("broken")
    if kind == "time-out": raise TimeoutError("no answer")
    if kind == "hang": time.sleep(22)
    if kind == "lost sandbox": raise ConnectionResetError("sandbox sb-1 is gone")
    if kind == "exit": sys.exit(3)
    if kind == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "closed": os._exit(4)
    if kind == "no stdout": os.close(1); sys.stdout.close(); os._exit(0)
    return no_reward(kind, value)

class Game(Episode):
    def reset(self):
        said = fault("reset", "begin")
        return said if isinstance(said, str) and said == "begin" else None
    def step(self, reply):
        kind = told()[2] if told()[0] == "end" else ""
        if kind == "text": return "", 1.0, "no"
        if kind == "none": return "", 1.0, None
        if kind == "five": return "", 1.0, True, False, {}
        if kind == "never": return "", 1.0, False
        if kind == "role": return "", {"nobody": 1.0}, True
        if kind == "half": return "", {"agent": 1.0, "other": None}, True
        return "", fault("step"), True
    def rewards(self):
        # None is the sum of the steps' rewards, as a plug-in may mean
        return fault("rewards", None)
    def close(self):
        if told() == ("close", ":", "late reward"): agentrl.reward(1.0)
        fault("close")

class Turns(Environment):
    limit = 5
    def tasks(self, split): return [{"id": split, "input": 1}]
    def open(self, input):
        fault("open")
        return Game()

class Itself(Environment):
    def tasks(self, split): return [{"id": split, "input": 1}]
    async def run(self, input, endpoint):
        if told()[0] in ("before", "run") and told()[2] == "hang": await asyncio.sleep(22)
        fault("before")
        await endpoint.chat([{"role": "user", "content": "x"}])
        return fault("run")

class Judging(Environment):
    def tasks(self, split): return [{"id": split, "input": "x"}]
    def verify(self, task, result): return fault("verify")

class TurnsApart(Turns): isolation = "process"
class ItselfApart(Itself): isolation = "process"
class JudgingApart(Judging): isolation = "process"

def verify(task, result): return fault("verifier")
async def verify_async(result):
    return fault("verifier async")
def beside(result): return fault("beside")
"""
)


def cases() -> Iterator[tuple[str, str, tuple[str, ...], dict[str, Any]]]:
    """Name, class of the environment, places, and tables of the run file."""
    yield "turns", "Turns", ("open", "reset", "step", "close"), {}
    yield "itself", "Itself", ("before", "run"), {}
    yield "judging", "Judging", ("verify",), {}
    yield "apart turns", "TurnsApart", ("open", "reset", "step", "close"), {}
    yield "apart itself", "ItselfApart", ("before", "run"), {}
    yield "apart judging", "JudgingApart", ("verify",), {}
    ways = (("verifier", "verify", {}), ("verifier async", "verify_async", {}))
    for place, name, rewards in (*ways, ("beside", "verify", {"beside": "file.py:beside"})):
        verifier = {"path": f"file.py:{name}", "rewards": rewards, "range": [-1.0, 1.0]}
        yield f"verifiers/{place}", "Judging", (place,), {"verifier": verifier}


# What is no fault in a place: values where none is read, and "None", the sum of the rewards.
MEANT = {(place, kind) for place in ("open", "close", "before") for kind in VALUES}
MEANT.add(("beside", "out of range"))  # only the outcome has a range


async def own(folder: Path) -> Ends:
    """What became of the rollouts of a user's environments and verifiers."""
    (folder / "file.py").write_text(textwrap.dedent(FILE))
    found: Ends = {}
    for name, class_, places, tables in cases():
        named = EnvironmentName.read(f"file.py:{class_}:x", {}, folder)
        known = {"verifier": {"path": named.part("verifier"), "range": [-1.0, 1.0]}} | tables
        task = hosted.tasks(named, "train")[0]
        # One that is apart starts a process, and another after each that was ended.
        timeout = TIMEOUT * (4 if name.startswith("apart") else 1)
        async with stage(named, timeout=timeout, **known) as on:
            for fault in [("", ""), *faults_in(name, places)]:
                (folder / "fault").write_text(":".join(fault) if any(fault) else "")
                done = await on.play(task, _said)
                found[f"{name}/{' '.join(fault)}"] = {
                    "outcome": done.outcome, "problem": done.problem
                }  # fmt: skip
    return found


def faults_in(name: str, places: Iterable[str]) -> Iterator[tuple[str, str]]:
    apart = name.startswith("apart")
    for place in places:
        kinds = FAULTS + (*PROCESS, "no stdout") * apart
        yield from ((place, kind) for kind in kinds if (place, kind) not in MEANT)
    if "step" in places:
        yield from (("end", kind) for kind in ("text", "none", "five", "never", "role", "half"))
        yield "close", "late reward"


async def _said(role: str, messages: list[Any], tools: list[Any]) -> Any:
    return {"role": "assistant", "content": "x"}


# A user's agent, verifier and command: the task says what goes wrong in them.
AGENT = (
    NO_REWARD
    + """
import json, os, shutil, signal, sys, time

def fail(kind):
    if kind == "exception": raise RuntimeError("broken")
    if kind == "time-out": raise TimeoutError("no answer")
    if kind == "lost sandbox": raise ConnectionResetError("sandbox sb-1 is gone")
    if kind == "exit": sys.exit(3)
    if kind == "hang": time.sleep(60)
    if kind == "late": time.sleep(SECONDS + 1)
    if kind == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "closed": os._exit(4)
    if kind == "large": return "x" * (17 * 2**20)
    if kind == "no files": shutil.rmtree(os.getcwd())
    return "done"

def plain(task): return fail(task["fault"])
async def agent(task):
    if task["fault"] == "hang": await asyncio.sleep(60)
    return fail(task["fault"])
def verify(task, result):
    kind = task["verify"]
    if kind == "hang": time.sleep(SECONDS + 3)
    else: fail(kind)
    return no_reward(kind, float(result == "done"))
async def verify_late(task, result): return verify(task, result)
def verify_files(task, result, workspace):
    return verify(task, (workspace.path / "a.txt").read_text())

if __name__ == "__main__": print(json.dumps(plain(json.load(sys.stdin))))
"""
)
SECONDS = 5.0  # of a rollout, in which a process has to start
ENDED = ("exception", "time-out", "lost sandbox", "exit", "hang", "late", "large")
VERIFIED = tuple(kind for kind in FAULTS if kind != "hang")


async def runs(name: str, tables: dict[str, Any], tasks: dict[str, Any], folder: Path) -> Ends:
    """What became of an agent's rollouts, by what went wrong in each."""
    (folder / "agent.py").write_text(AGENT.replace("SECONDS", f"{SECONDS:g}"))
    data: dict[str, Any] = {"name": RUN, "root": str(folder), "output": str(folder / name)}
    data |= {"upstreams": {"script": {"text": ""}}, "roles": {"*": "script"}}
    data |= {"verifier": {"path": "agent.py:verify", "range": [-1.0, 1.0]}} | tables
    data["runner"] = {"concurrency": 1, "drain": 0.1} | tables.get("runner", {})
    data["agent"] = {"calls_optional": True, "timeout": SECONDS} | tables["agent"]
    config, found = resolve(data, source="injected"), Ends()
    async with open_store(config.store) as store:
        await store.open_run(RUN, {})
        started = attempt_runner(
            store, RUN, config, folder, RUN, None, config.verifier.path,
            find_environment=played_environment,
        )  # fmt: skip
        async with started as execution:
            stop = asyncio.Event()
            worker = Worker(RUN, execution, config.runner, name=RUN)
            working = asyncio.create_task(worker.run(stop))
            for number, (key, task) in enumerate(tasks.items()):
                group, known = f"{RUN}/{number}", {"fault": "", "verify": ""}
                row = {"files": {"a.txt": "done"}, "verify": task.get("verify", "")} | task
                row["input"] = known | {"fault": task.get("fault", "")}
                row = {name: value for name, value in row.items() if value is not None}
                one = NewRollout(id=f"{group}/0", task=row, run=RUN, group=group, index=0,
                                 timeout=SECONDS, max_attempts=1)  # fmt: skip
                await store.enqueue([one])
                await store.settled(group)
                rollout = next(r for r in await store.rollouts(RUN) if r.group == group)
                outcome = next((r.value for r in rollout.rewards if r.name == "outcome"), None)
                problem = rollout.failure.message if rollout.failure else ""
                found[f"{name}/{key}"] = {"outcome": outcome, "problem": problem[:400]}
                print(name, key, found[f"{name}/{key}"], file=sys.stderr, flush=True)
            stop.set()
            await working
    return found


def faults_of(agent: Iterable[str], verifier: Iterable[str] = ()) -> dict[str, Any]:
    tasks: dict[str, Any] = {"": {}} | {f"agent {kind}": {"fault": kind} for kind in agent}
    return tasks | {f"verifier {kind}": {"verify": kind} for kind in verifier}


async def executors(folder: Path) -> Ends:
    command = {"command": [sys.executable, "-S", str(folder / "agent.py")]}
    late = {"verifier": {"path": "agent.py:verify_late", "range": [-1.0, 1.0]}}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "async": ({"path": "agent.py:agent"}, faults_of(ENDED, [*VERIFIED, "hang", "late"])),
        "threads": ({"path": "agent.py:plain"}, faults_of(ENDED)),
        "pool": ({"path": "agent.py:agent"}, faults_of((*ENDED, *PROCESS))),
        "command": (command, faults_of((*ENDED, *PROCESS))),
    }
    found: Ends = {}
    for kind, (agent, tasks) in kinds.items():
        runner: dict[str, Any] = {"executor": kind}
        runner |= {"pool": {"processes": 1}} if kind == "pool" else {}
        tables = {"agent": agent, "runner": runner} | (late if kind == "async" else {})
        found |= await runs(f"executors {kind}", tables, tasks, folder)
    return found


async def workspaces(folder: Path) -> Ends:
    """Files that cannot be made, that the agent deletes, and verifiers of them."""
    tables = {
        "agent": {"command": [sys.executable, "-S", str(folder / "agent.py")]},
        "workspace": {"source": "task.files"},
        "verifier": {"path": "agent.py:verify_files", "range": [-1.0, 1.0]},
    }
    tasks = faults_of((*ENDED, *PROCESS, "no files"), [*VERIFIED, "hang"])
    broken = {"missing": None, "number": 1, "no folder": "no/such", "outside": {"../b": "x"},
              "no revision": "git:.@nothing", "value": {"a.txt": 1}}  # fmt: skip
    tasks |= {f"files {key}": {"files": files} for key, files in broken.items()}
    return await runs("workspaces", tables, tasks, folder)


CONTAINED = """
said=$(cat)
case "$said" in
*exception*) echo broken >&2; exit 1;;
*exit*) exit 3;;
*hang*) sleep 60;;
*killed*) kill -9 $$;;
*ended*) kill -9 -1; kill 1; sleep 60;;
*missing*) exec /no/such/program;;
*large*) head -c 18000000 /dev/zero | tr '\\0' x;;
*lost*) sleep 60;;
*) echo '"done"';;
esac
"""
IN_CONTAINERS = ("exception", "exit", "hang", "killed", "ended", "missing", "large", "lost")


async def containers(folder: Path) -> Ends | None:
    if real.missing() or real.ENGINE != "podman":
        return None
    os.environ |= real.environment()
    container = {"image": real.busybox_image(), "cli": "podman", "network": "none"}
    tables = {
        "agent": {"command": ["sh", "-c", CONTAINED]},
        "runner": {"executor": "container", "container": container},
    }
    losing = asyncio.create_task(lost_containers())
    try:
        return await runs("containers", tables, faults_of(IN_CONTAINERS, VERIFIED), folder)
    finally:
        losing.cancel()


async def lost_containers() -> None:
    """Kill, from outside, each container in which the agent waits for that."""
    while True:
        await asyncio.sleep(0.5)
        ask = ["podman", "ps", "--quiet", "--no-trunc"]
        done = await asyncio.to_thread(subprocess.run, ask, capture_output=True, text=True)
        for name in done.stdout.split():
            look = ["podman", "exec", name, "sh", "-c", "cat /proc/[0-9]*/environ 2>/dev/null"]
            seen = await asyncio.to_thread(subprocess.run, look, capture_output=True)
            if b"lost" in seen.stdout:
                await asyncio.to_thread(subprocess.run, ["podman", "kill", name])


VERDICT = '{"reason": "r", "score": 9}'
SERVED: dict[str, Any] = {
    "": {"choices": [{"message": {"content": VERDICT}}]},
    "no choice": {"choices": []},
    "choices are null": {"choices": None},
    "no choices": {"object": "chat.completion"},
    "no message": {"choices": [{"finish_reason": "content_filter"}]},
    "message is null": {"choices": [{"message": None}]},
    "content is null": {"choices": [{"message": {"content": None}}]},
    "content is parts": {"choices": [{"message": {"content": [{"type": "text"}]}}]},
    "content is a number": {"choices": [{"message": {"content": 9}}]},
    "refusal": {"choices": [{"message": {"content": None, "refusal": VERDICT}}]},
    "cut off": {"choices": [{"message": {"content": VERDICT[:-1]}, "finish_reason": "length"}]},
    "reasoning only": {"choices": [{"message": {"content": "", "reasoning_content": VERDICT}}]},
    "error": {"error": {"message": "overloaded"}},
    "array": [9],
    "number": 9,
}


async def asked(folder: Path) -> Ends:
    """What became of what a judge's server answers with status 200."""
    said: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("agentrl.algorithm").addHandler(keep)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(SERVED[key])

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    judge = {"upstream": "j", "kind": "pointwise"}
    data = {"judges": {"q": judge}, "upstreams": {"j": {"base_url": url, "model": "m"}}}
    config, found = resolve(data, source="injected"), Ends()
    store_url = f"sqlite:///{folder / 'judged.db'}"
    async with aiohttp.ClientSession() as session, open_store(store_url) as store:
        for key in SERVED:
            client = JudgeClient("q", config.judges["q"], config, store, session)
            record, outcome = [{"role": "assistant", "content": key}], None
            said.clear()
            try:
                [outcome] = await client.score([record])  # type: ignore[list-item]
            except AgentRLError as error:
                said.append(str(error))
            found[f"judges served/{key}"] = {"outcome": outcome, "problem": " ".join(said)}
    await runner.cleanup()
    return found


def judged() -> Ends:
    """What became of judges' answers: a verdict is one only in the form that was asked for."""
    point, principles = PointwiseJudge(upstream="j"), PrincipleJudge(upstream="j", rubric=["a"])
    asked = {
        "score": (
            judges.pointwise(point, []),
            ("11", "-1", "NaN", '"9"', "true", "null", "5.5"),
        ),
        "verdicts": (judges.principles(principles, []), ('{"1": 1}', '{"1": "maybe"}', "[]")),
    }
    found: Ends = {}
    for key, (question, values) in asked.items():
        texts = [f'{{"reason": "r", "{key}": {value}}}' for value in values]
        for text in (*texts, "", "timeout", "[1]", f'{{"{key}":'):
            outcome, problem = None, ""
            try:
                outcome = next(iter(question.read(text).values()))
            except ValueError as error:
                problem = str(error)
            found[f"judges/{key} {text}"] = {"outcome": outcome, "problem": problem}
    return found


def plugin(name: str) -> Ends | None:
    """What became of the rollouts of a plug-in, or None without its interpreter."""
    python = ROOT / f".environments/{name}/bin/python"
    if not (python.parents[1] / ".installed").is_file():
        return None
    command = [str(python), "-m", "tests.environments.injected", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    with suppress(ValueError):
        found: Ends = json.loads(done.stdout.strip().rpartition("\n")[2])
        return {f"{name}/{key}": ended for key, ended in found.items()}
    raise RuntimeError(f"{name}: {done.stderr[-2000:]}")


async def here(name: str, folder: Path) -> Ends | None:
    if name == "judges":
        return judged() | await asked(folder)
    play: Any = {"own": own, "executors": executors, "workspaces": workspaces}
    return await (play | {"containers": containers})[name](folder)  # type: ignore[no-any-return]


def run_here(name: str) -> Ends | None:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=UserCodeLoop) as on:
        return on.run(here(name, Path(folder)))


def measure(names: list[str]) -> dict[str, Any]:
    ends: Ends = {}
    absent = []
    for name in names:
        if (found := run_here(name) if name in OWN else plugin(name)) is None:
            absent.append(name)
        else:
            ends |= found
    clean = {key: ended for key, ended in ends.items() if key.rstrip().endswith("/")}
    faults = {key: ended for key, ended in ends.items() if key not in clean}
    numbers = [key for key, ended in faults.items() if ended["outcome"] is not None]
    unnamed = [key for key, ended in faults.items() if not ended["problem"]]
    late = [key for key, ended in faults.items() if LATE in ended["problem"]
            and not key.endswith(("hang", "late"))]  # fmt: skip
    broken = [key for key, ended in clean.items() if ended["outcome"] is None]
    return {
        "faults": len(faults), "became_a_reward": len(numbers), "unnamed": len(unnamed),
        "ran_late": len(late), "clean_failed": len(broken),
        "which": [*numbers, *unnamed, *late, *broken],
        "by_place": dict(Counter(key.partition("/")[0] for key in faults)), "absent": absent,
    }  # fmt: skip


def merged(files: list[str]) -> dict[str, Any]:
    parts = [json.loads(Path(file).read_text()) for file in files]
    whole = {key: sum((part[key] for part in parts), type(parts[0][key])())
             for key in parts[0] if key != "by_place"}  # fmt: skip
    by_place: Counter[str] = sum((Counter(part["by_place"]) for part in parts), Counter())
    return whole | {"by_place": dict(by_place)}


def main() -> None:
    options = arguments(__doc__)
    options.add_argument("--only", nargs="*", default=[*OWN, *PLAYED], metavar="NAME")
    options.add_argument("--merge", nargs="*", default=[], metavar="FILE")
    given = options.parse_args()
    if unknown := {*given.only} - {*OWN, *PLAYED}:
        options.error(f"there is no {', '.join(unknown)}; there is {', '.join([*OWN, *PLAYED])}")
    found = merged(given.merge) if given.merge else measure(given.only)
    report(found, as_json=given.json)
    sys.exit(bool(found["became_a_reward"] or found["unnamed"]))


if __name__ == "__main__":
    main()
