"""`make newest`: whether agentrl works with the newest versions of the packages that it and its
users' agents need, which constraints.txt pins.

Installs what pyproject.toml allows, unpinned, into an environment of its own, trains the example
agent, and runs the tests that talk to other packages: first with warnings as errors, then what
failed once more without, which leaves what is really broken. Prints a table of the packages that
are newer than their pins, or in whose code something failed. Exit code: 1 if anything is broken."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.agentrl.doctor.test_tried import pins

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-newest"
EXTRAS = "dev,data"
DEMO = "examples/staff/run.toml"
DEMO_SETTINGS = ("steps=2", "algorithm.groups=2", "algorithm.group_size=2", "eval.tasks=4")
# The tests of the code that talks to packages, with the packages that a failure may come from if no
# line of its traceback lies in one.
TESTS: dict[str, tuple[str, ...]] = {
    "runners/apis/test_sdks.py": ("openai", "anthropic", "langchain-openai"),
    "runners/apis/test_reasoning.py": ("openai", "anthropic", "langchain-openai"),
    "runners/tracing": (
        *("langchain", "langchain-core", "langgraph"),
        *("openai-agents", "opentelemetry-sdk", "uvicorn"),
    ),
    "runners/test_agents.py": ("langchain", "langchain-openai"),
    "runners/gateway/test_gateway.py": ("aiohttp", "openai"),
    "runners/gateway/test_gateway_routes.py": ("aiohttp", "openai"),
    "runners/gateway/test_templates.py": ("jinja2",),
    "runners/test_games.py": ("open-spiel",),
    "agentrl/telemetry": ("opentelemetry-sdk", "mlflow-skinny", "tensorboard", "trackio", "wandb"),
    "agentrl/cli/mcp/test_mcp.py": ("mcp",),
    "agentrl/models/test_serve.py": ("openai", "anthropic", "langchain-openai"),
    "agentrl/core/test_row_files.py": ("datasets", "pyarrow"),
    "agentrl/models": ("gguf", "transformers", "tokenizers"),
    "algorithms/vision/test_loading.py": ("transformers", "pillow"),
    "algorithms/vision/test_images.py": ("transformers", "pillow"),
    "agentrl/view/test_pages.py": ("starlette", "jinja2"),
    "agentrl/core/test_http.py": ("aiohttp", "httpx"),
    "store/test_sqlite.py": ("sqlite-utils",),
    "store/test_migrations.py": ("sqlite-utils",),
    "store/test_queries.py": ("sqlite-utils",),
    "store/postgres": ("psycopg", "psycopg-pool"),
    "store/http": ("starlette", "uvicorn", "aiohttp", "httpx"),
    "algorithms/engines/test_embedded.py": ("transformers", "tokenizers"),
    "algorithms/engines/test_engine.py": ("transformers", "tokenizers"),
    "algorithms/learners/test_learner.py": ("transformers", "safetensors"),
    "algorithms/model": ("transformers", "tokenizers", "peft", "bitsandbytes"),
    "algorithms/prompts": ("gepa", "langchain", "langgraph"),
    "system/test_team.py": ("langchain", "langgraph", "peft"),
}
TEST_TOOLS = {"pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "pluggy", "execnet"}
UNKNOWN = "(none of them)"  # the row of failures that no package's code or version explains
FRAME = re.compile(r"site-packages/([A-Za-z0-9_]+)")
BORROWED = re.compile("torch$|triton$|nvidia-")
# Only what is imported needs bytecode; without a registry this ends in 20 to 100 s.
PIP = "-m pip install -q --disable-pip-version-check --no-compile --retries 1 --timeout 15"
ALL = "tests"  # in place of a test: that they could not run, or not all of them
OVERTIME = 124  # in place of an exit code, as of `timeout`
GRACE = 20.0  # seconds between an interruption and the end
READ_INSTALLED = (
    "import json; from importlib.metadata import distributions, packages_distributions as tops; "
    "print(json.dumps([{d.name: d.version for d in reversed([*distributions()])}, tops()]))"
)


class Failure(NamedTuple):
    test: str  # its file, for tests with "::" and the name
    message: str  # one line
    traceback: str
    broken: bool = True  # False: only if warnings are errors, or not again


class Packages(NamedTuple):
    pinned: Mapping[str, str]  # versions by canonical names
    newest: Mapping[str, str]
    modules: Mapping[str, str]  # package by the name of its top-level module

    @property
    def newer(self) -> set[str]:
        old = self.pinned
        return {
            name
            for name, version in self.newest.items()
            if name in old and Version(version) > Version(old[name])
        }


def suspects(failure: Failure, packages: Packages) -> list[str]:
    """The package whose code raised; without one the newer ones that the test is about."""
    for module in reversed(FRAME.findall(failure.traceback)):
        package = packages.modules.get(module)
        if package and package not in TEST_TOOLS:
            return [package]
    path = failure.test.partition("::")[0].removeprefix("tests/")
    about = (names for start, names in TESTS.items() if f"{path}/".startswith(f"{start}/"))
    return [name for names in about for name in names if name in packages.newer] or [UNKNOWN]


def table(packages: Packages, failures: Sequence[Failure]) -> list[tuple[str, str, str, str]]:
    """Rows of package, pin, newest and what failed, for packages that are newer than their pin or
    in whose code something failed; those with failures first."""
    found: dict[str, list[Failure]] = {}
    for failure in failures:
        for name in suspects(failure, packages):
            found.setdefault(name, []).append(failure)
    clean = "not all tried" if any(each.test == ALL for each in failures) else "nothing"
    rows = []
    for name in sorted(packages.newer | found.keys(), key=lambda name: (name not in found, name)):
        broken = sum(each.broken for each in found.get(name, []))
        warned = len(found.get(name, [])) - broken
        counts = [f"{broken} broken"] * bool(broken) + [f"{warned} with warnings"] * bool(warned)
        versions = packages.pinned.get(name, "-"), packages.newest.get(name, "-")
        rows.append((name, *versions, ", ".join(counts) or clean))
    return rows


def report(packages: Packages, failures: Sequence[Failure]) -> str:
    """The table, and below it each failure with its message."""
    rows = [("package", "pin", "newest", "what failed"), *table(packages, failures)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for failure in sorted(failures, key=lambda each: (not each.broken, each.test)):
        kind = "broken" if failure.broken else "warns "
        names = ", ".join(suspects(failure, packages))
        lines.append(f"{kind}  {failure.test} [{names}]\n        {failure.message}")
    return "\n".join(lines)


def read_junit(file: Path) -> list[Failure]:
    """The failures and errors in what pytest wrote as JUnit XML."""
    failures = []
    for case in ElementTree.parse(file).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        # Where a file cannot be collected, its module is the name.
        test = f"{(module or name).replace('.', '/')}.py" + f"::{name}" * bool(module)
        for found in (*case.findall("failure"), *case.findall("error")):
            text = found.text or ""
            last = [line[4:] for line in text.splitlines() if line.startswith("E   ")][-1:]
            message = found.get("message", "") if module or not last else last[0]
            failures.append(Failure(test, message.strip().partition("\n")[0], text))
    return failures


def run(command: Sequence[str | Path], deadline: float) -> tuple[int, str]:
    """Exit code and output of a command, which is interrupted at the deadline, a monotonic time."""
    env = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = child.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = OVERTIME
            child.send_signal(signal.SIGINT)  # pytest writes what it knows
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            child.kill()
            child.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


def borrow(folder: Path) -> list[str]:
    """Link torch of this environment, and what it needs of CUDA, into a folder. They are a large
    download, and vLLM and drivers decide their versions. Returns them as constraints."""
    folder.mkdir(parents=True)
    found = []
    for package in distributions():
        if not BORROWED.match(package.name):
            continue
        found.append(f"{package.name}=={package.version}")
        for top in {file.parts[0] for file in package.files or ()} - {".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))).resolve())
    return found


def install(deadline: float) -> None:
    """Make the environment anew and install into it. Exits if that fails."""
    say(f"Installing the newest packages into {ENVIRONMENT.name} ...")
    python = ENVIRONMENT / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    (site,) = ENVIRONMENT.glob("lib/python*/site-packages")
    constraints = borrow(ENVIRONMENT / "torch/site-packages")
    (site / "torch.pth").write_text(f"{ENVIRONMENT / 'torch/site-packages'}\n")
    (ENVIRONMENT / "constraints.txt").write_text("\n".join(constraints) + "\n")
    what = ("-c", ENVIRONMENT / "constraints.txt", "-e", f".[{EXTRAS}]")
    for arguments in (("--upgrade", "pip"), what):
        code, output = run([python, *PIP.split(), *arguments], deadline)
        if code:
            why = "not in time" if code == OVERTIME else "see pip's message above"
            sys.exit(f"{output[-2000:]}\nCould not install the newest packages: {why}")


def installed(deadline: float) -> Packages:
    python = ENVIRONMENT / "bin/python"
    versions, modules = json.loads(run([python, "-c", READ_INSTALLED], deadline)[1])
    return Packages(
        pins("constraints.txt"),
        {canonicalize_name(name): version.partition("+")[0] for name, version in versions.items()},
        {module: canonicalize_name(names[0]) for module, names in modules.items()},
    )


def train_demo(deadline: float) -> list[Failure]:
    say(f"Training {DEMO} for two steps ...")
    with tempfile.TemporaryDirectory() as folder:
        agentrl = ENVIRONMENT / "bin/agentrl"
        code, output = run(
            [agentrl, "train", DEMO, *DEMO_SETTINGS, f"output={folder}/run"], deadline
        )
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    why = "not finished in time" if code == OVERTIME else f"exit code {code}"
    return [Failure(DEMO, f"{why}: {lines[-1]}", output)] if code else []


def run_tests(deadline: float, *options: str) -> list[Failure]:
    """Run the tests, or with --last-failed those of before that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        pytest: list[str | Path] = [
            ENVIRONMENT / "bin/python",
            "-m",
            "pytest",
            "--tb=short",
            "-n",
            "2",
            "--dist",
        ]
        pytest += ["loadfile", "-o", f"cache_dir={ENVIRONMENT}/pytest", f"--junitxml={file}"]
        code, output = run([*pytest, *options, *(f"tests/{each}" for each in TESTS)], deadline)
        failures = read_junit(file) if file.exists() else []
    if code in {0, 1} and (failures or not code):
        return failures
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    why = "not finished in time" if code == OVERTIME else f"pytest's exit code {code}"
    return [*failures, Failure(ALL, f"{why}: {lines[-1]}", "")]


def graded(first: Sequence[Failure], again: Sequence[Failure]) -> list[Failure]:
    """The failures of the first run, broken unless the second, without warnings as errors, passed.
    A failure of both has the second's message: that of the error, not of a warning before it."""
    second = {failure.test: failure for failure in again}
    known = {failure.test for failure in first}
    failures = [
        second.get(each.test, each._replace(broken=each.test == ALL or ALL in second))
        for each in first
    ]
    return failures + [each for each in again if each.test not in known]


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="when to stop and report")
    deadline = time.monotonic() + 60 * parser.parse_args().minutes
    install(deadline)
    packages = installed(deadline)
    failures = train_demo(deadline)
    say("Running the tests that talk to other packages, with warnings as errors ...")
    if first := run_tests(deadline - (deadline - time.monotonic()) / 4):
        say(f"{len(first)} failed; once more, with warnings as warnings ...")
        again = run_tests(deadline, "--last-failed", "-o", "filterwarnings=default")
        failures += graded(first, again)
    say(report(packages, failures))
    sys.exit(any(failure.broken for failure in failures))


if __name__ == "__main__":
    main()
