"""A whole run in a folder: a LangChain agent, tasks, verifier, run file and an untrained model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

AGENT = '''
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(ChatOpenAI(model="policy"), [add])
'''

ASKS = """
import os, httpx

def agent(text):
    body = {{"model": "policy", "messages": [{{"role": "user", "content": text * {times}}}]}}
    url = os.environ["OPENAI_BASE_URL"]
    answer = httpx.post(f"{{url}}/chat/completions", json=body, timeout=30)
    return answer.json()["choices"][0]["message"]["content"]
"""
VERIFIER = """
def verify(task, result):
    return float(len(result) % 7)
"""

RUN = """
name = "tiny"
output = "out"
[agent]
path = "agent.py:agent"
[tasks]
train = "tasks.jsonl"
heldout = "tasks.jsonl"
[verifier]
path = "verifier.py:verify"
[policy]
model = "{model}"
[sampling]
max_tokens = 8
[eval]
tasks = 4
[algorithm]
lr = 1e-3
[runner]
lease = 3.0
"""
# An audit is one more process, which the first rollouts wait for: `test_run.py` has a run with one.
NO_AUDIT = """
[audit]
before = false
"""


@pytest.fixture
def run_folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """Folder of a run whose model knows nothing and whose reward varies with every answer."""
    tasks = [{"input": f"What is {i} plus {i + 1}?", "answer": 2 * i + 1} for i in range(20)]
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "verifier.py").write_text(VERIFIER)
    (tmp_path / "tasks.jsonl").write_bytes(b"".join(msgspec.json.encode(t) + b"\n" for t in tasks))
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_model_dir) + NO_AUDIT)
    return tmp_path
