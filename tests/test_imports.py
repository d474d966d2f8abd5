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


@pytest.mark.parametrize("name", ["agentrl", "agentrl.store", "agentrl.runners"])
def test_import_needs_no_learning_stack(name: str) -> None:
    subprocess.run([sys.executable, "-c", CHECK.format(name=name)], check=True)


@pytest.mark.parametrize("name", ["agentrl", "agentrl.store", "agentrl.runners"])
def test_import_takes_under_half_a_second(name: str) -> None:
    code = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"
    best = min(
        float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)
    )
    assert best < 0.5
