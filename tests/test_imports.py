"""The base packages load fast and without torch or LangChain."""

import subprocess
import sys

import pytest

CHECK = """
import sys
for name in ("torch", "transformers", "langchain", "langchain_core"):
    sys.modules[name] = None  # importing it raises ImportError
import {name}
"""


PROCESSES = (
    "agentrl.algorithm_process", "agentrl.environments.helper", "agentrl.live.gateway",
    "agentrl.live.supervisor", "agentrl.runners.executors.child", "agentrl.runners.main",
    "agentrl.telemetry.sinks", "agentrl.view.server",
)  # fmt: skip


@pytest.mark.parametrize("name", ["agentrl", "agentrl.store", "agentrl.runners", *PROCESSES])
def test_import_needs_no_learning_stack(name: str) -> None:
    subprocess.run([sys.executable, "-c", CHECK.format(name=name)], check=True)


def test_help_needs_neither_learning_stack_nor_servers() -> None:
    code = CHECK.format(name="agentrl.cli.main").replace("langchain_core", "aiohttp")
    code += "agentrl.cli.main.cli(['--help'])"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_help_takes_little_cpu_because_commands_are_not_imported() -> None:
    code = "import sys, time, agentrl.cli.main as m\n"
    code += "try:\n m.cli(['--help'])\nexcept SystemExit:\n pass\n"
    code += "print(time.process_time(), 'agentrl.cli.inspect' in sys.modules, file=sys.stderr)"
    runs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        for _ in range(3)
    ]
    said = [run.stderr.split() for run in runs]
    assert {imported for _, imported in said} == {"False"}
    assert min(float(seconds) for seconds, _ in said) <= 0.3


@pytest.mark.parametrize("name", ["agentrl", "agentrl.store", "agentrl.runners"])
def test_import_takes_under_half_a_second(name: str) -> None:
    code = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
    best = min(
        float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)
    )
    assert best < 0.5
