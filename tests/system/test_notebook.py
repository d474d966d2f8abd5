"""A `Trainer` in a real IPython kernel: its callbacks, and what interrupting a cell leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

SECONDS = 240.0
SETUP = """
import os, httpx
from agentrl import Trainer

def agent(text):
    body = {{"model": "policy", "messages": [{{"role": "user", "content": text}}]}}
    answer = httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, timeout=30)
    return answer.json()["choices"][0]["message"]["content"]

class Watch:
    def __init__(self, fails=-1):
        self.fails = fails
    def on_step(self, row):
        if row.step == self.fails:
            raise KeyError("my plot")
        print("SAW", row.step, flush=True)

def fit(steps, *callbacks):
    tasks = [{{"input": f"What is {{i}} plus 1?"}} for i in range(9)]
    small = {{"groups": 1, "group_size": 4}}
    return Trainer(agent, tasks, lambda task, result: len(result) % 7, "{model}", steps=steps,
                   name="tiny", callbacks=callbacks, algorithm=small,
                   sampling={{"max_tokens": 8}}, **{{"policy.device": "cpu"}}).fit()
"""


class Notebook:
    """Cells that are run in a kernel."""

    def __init__(self, folder: Path) -> None:
        self.kernel, self.client = start_new_kernel(cwd=str(folder))

    def run(self, code: str, interrupt: Callable[[str], bool] = lambda said: False) -> str:
        """The output of a cell, which is interrupted when `interrupt` says so of it."""
        asked, said, done, end = self.client.execute(code), "", False, time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                message: Any = self.client.get_iopub_msg(timeout=1.0)
            except Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            said += content["text"] if kind == "stream" else ""
            said += f"{content['ename']}: {content['evalue']}" if kind == "error" else ""
            if kind == "status" and content["execution_state"] == "idle":
                return said
            if not done and (done := interrupt(said)):
                self.kernel.interrupt_kernel()
        raise AssertionError(f"the cell did not end: {said}")

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_cell_that_is_interrupted_or_fails_leaves_a_run_that_goes_on(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    notebook = Notebook(tmp_path)
    try:
        notebook.run(SETUP.format(model=tiny_model_dir))
        first = notebook.run("fit(500, Watch())", lambda said: "SAW 2" in said)
        assert "KeyboardInterrupt: stopped; fit(), without fresh, continues after" in first
        steps = [int(line[4:]) for line in first.splitlines() if line.startswith("SAW")]
        failed = notebook.run(f"fit({steps[-1] + 6}, Watch(fails={steps[-1] + 3}))")
        assert "TrainingError: the callback Watch.on_step raised KeyError at step" in failed
        assert "my plot" in failed
        last = notebook.run(f"result = fit({steps[-1] + 6}); print(len(result.history))")
        assert last.split()[-1] == str(steps[-1] + 7)  # with the last evaluation
    finally:
        notebook.close()
