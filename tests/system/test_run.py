"""The main job from the command line, on an untrained tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

import pytest

from agentrl.core.config import load
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout, RolloutState
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.trainer import clear, hide_secrets
from tests import warm
from tests.system.test_kill import wait_for_progress

T = TypeVar("T")
SMALL = ["steps=2", "algorithm.groups=2", "algorithm.group_size=4"]


def agentrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("-m", "agentrl", *arguments, cwd=folder)


def read(folder: Path, query: Callable[[Store], Awaitable[T]]) -> T:
    async def work() -> T:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            return await query(store)

    return asyncio.run(work())


def rollouts(folder: Path) -> list[Rollout]:
    return read(folder, lambda store: store.rollouts("tiny"))


def measured(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step."""
    return [row.metrics for row in read(folder, lambda store: store.steps("tiny")) if row.committed]


def test_train_show_evaluate_and_continue(run_folder: Path) -> None:
    untrained = agentrl(run_folder, "eval", "run.toml")
    assert untrained.returncode == 0, untrained.stderr
    assert "scoring the policy before training: " in untrained.stdout
    assert "held-out tasks" in untrained.stdout
    (first,) = run_folder.glob("*-eval-*")
    shutil.rmtree(first)

    audited = [*SMALL, "audit.before=true"]
    trained = agentrl(run_folder, "train", "run.toml", *audited)
    assert trained.returncode == 0, trained.stderr
    assert "held-out tasks" in trained.stdout
    assert "warning: audit of the verifier: exploitable: " in trained.stdout
    phases = ("reading the tasks", "loading the model ", "starting the policy server", "scoring 4 ")
    assert [trained.stdout.index(f"\n{phase}") for phase in phases] == sorted(
        trained.stdout.index(f"\n{phase}") for phase in phases
    )
    assert (run_folder / "out" / "curve.png").is_file()

    steps = read(run_folder, lambda store: store.steps("tiny"))
    committed = [row for row in steps if row.committed]
    assert [row.step for row in committed] == [0, 1]
    for row in committed:
        # Sampler and learner share weights, so the first update after a publish must agree.
        assert row.metrics["logprob_difference/max"] <= 1e-4
        assert row.metrics["rollouts"] == 8
    assert {row.state for row in rollouts(run_folder)} == {RolloutState.SUCCEEDED}

    shown = agentrl(run_folder, "show", "tiny/train/g0000000/0000", "--store", "out/store.db")
    assert shown.returncode == 0, shown.stderr
    assert "What is" in shown.stdout
    prompts = agentrl(
        run_folder, "show", "tiny/train/g0000000/0000", "--prompt", "--store", "out/store.db"
    )
    assert "call 0, agent, " in prompts.stdout
    assert "<|im_start|>user" in prompts.stdout

    again = agentrl(run_folder, "train", "run.toml", *audited)
    assert again.returncode == 0, again.stderr
    assert len(rollouts(run_folder)) == 2 * 8 + 2 * 2 * 4

    changed = agentrl(run_folder, "train", "run.toml", *audited, "algorithm.lr=0.5")
    assert changed.returncode == 2
    assert "algorithm.lr: 0.001 -> 0.5" in changed.stderr

    last = read(run_folder, lambda store: store.run("tiny")).checkpoint
    checkpoint = str((run_folder / "out" / last).resolve())
    scored = agentrl(run_folder, "eval", "run.toml")
    assert scored.returncode == 0, scored.stderr
    (settings,) = run_folder.glob("*-eval-*/run.json")
    assert json.loads(settings.read_text())["policy"]["model"] == checkpoint
    assert "held-out tasks" in scored.stdout
    assert "scoring the policy after step 2: " in scored.stdout
    (evaluated,) = run_folder.glob("*-eval-*/store.db")
    with sqlite3.connect(evaluated) as connection:
        assert connection.execute("select distinct version from transitions").fetchall() == [(2,)]

    fewer = agentrl(run_folder, "train", "run.toml", *audited, "steps=1")
    assert fewer.returncode == 2
    assert "has 2 steps already" in fewer.stderr

    (run_folder / "out" / "mine.txt").write_text("not the run's")
    fresh = agentrl(run_folder, "train", "run.toml", *audited, "steps=1", "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    assert read(run_folder, lambda store: store.run("tiny")).step == 1
    assert (run_folder / "out" / "mine.txt").exists()


@pytest.mark.slow
def test_a_run_over_postgres_is_interrupted_and_continues(
    run_folder: Path, postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "other")
    url = f"{postgres()}&password=hushed"
    small = ["algorithm.groups=1", "algorithm.group_size=2", "eval.tasks=0", f"store={url}"]
    for steps in (1, 2):
        hidden = "agent.env.TOKEN='hushed'"
        trained = agentrl(run_folder, "train", "run.toml", *small, hidden, f"steps={steps}")
        assert trained.returncode == 0, trained.stderr
        assert (run_folder / "out" / "run.json").stat().st_mode & 0o777 == 0o600
        written = [path.read_bytes() for path in (run_folder / "out").rglob("*.json")]
        assert not any(b"hushed" in text for text in written)
        assert "hushed" not in trained.stdout + trained.stderr

    async def committed() -> list[int]:
        async with open_store(url) as store:
            assert "hushed" not in repr((await store.run("tiny")).config)
            return [row.step for row in await store.steps("tiny") if row.committed]

    assert asyncio.run(committed()) == [0, 1]
    assert not (run_folder / "out" / "store.db").exists()
    printed = agentrl(run_folder, "train", "run.toml", *small, "--dry-run")
    assert "store = " in printed.stdout
    assert "hushed" not in printed.stdout + printed.stderr
    config = load(run_folder / "run.toml", small)
    with pytest.raises(ConfigError, match="may hold other runs"):
        clear(hide_secrets(config))


async def test_a_run_over_http_outlives_its_server(run_folder: Path) -> None:
    (run_folder / "keys").write_text("admin:hushed-key\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    url = f"http://hushed-key@127.0.0.1:{port}"
    serve = ["store", "serve", "sqlite:///served.db", "--port", str(port), "--keys", "keys"]
    small = ["algorithm.groups=1", "algorithm.group_size=2", "eval.tasks=2", "steps=3"]

    def started(*arguments: str) -> warm.Process:
        return warm.start("-m", "agentrl", *arguments, cwd=run_folder)

    server = started(*serve)
    training = started("train", "run.toml", *small, f"store={url}")
    try:
        async with open_store(url) as store:
            cursor = 0
            while (state := await store.run("tiny")) is None or state.step < 1:
                cursor = await store.wait(cursor, timeout=5.0)
            server.kill()
            server.wait()
            server.close()
            server = started(*serve)
            assert await asyncio.to_thread(training.wait) == 0
            committed = [row.step for row in await store.steps("tiny") if row.committed]
    finally:
        for process in (server, training):
            process.close()
    assert committed == [0, 1, 2]
    assert not (run_folder / "out" / "store.db").exists()
    assert b"hushed" not in (run_folder / "out" / "run.json").read_bytes()


def test_port_in_use(run_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = agentrl(run_folder, "train", "run.toml", f"engine.port={port}")
    assert result.returncode == 2
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr


def test_agent_that_cannot_be_imported(run_folder: Path) -> None:
    (run_folder / "agent.py").write_text("import no_such_package_anywhere\n")
    result = agentrl(run_folder, "train", "run.toml", *SMALL)
    assert result.returncode == 2
    assert "no_such_package_anywhere" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_adapter_is_trained_evaluated_and_merged(run_folder: Path, tiny_model_dir: Path) -> None:
    lora = ["policy.lora.rank=4", 'policy.lora.targets=["q_proj", "v_proj"]']
    trained = agentrl(run_folder, "train", "run.toml", *SMALL, *lora)
    assert trained.returncode == 0, trained.stderr
    run = read(run_folder, lambda store: store.run("tiny"))
    checkpoint = run_folder / "out" / run.checkpoint
    assert json.loads((checkpoint / "adapter_config.json").read_text())["r"] == 4
    assert not list(checkpoint.glob("model*.safetensors"))
    steps = [row for row in read(run_folder, lambda store: store.steps("tiny")) if row.committed]
    assert all(row.metrics["logprob_difference/max"] <= 1e-4 for row in steps)

    scored = agentrl(run_folder, "eval", "run.toml")  # the checkpoint says what it is
    assert scored.returncode == 0, scored.stderr
    (settings,) = run_folder.glob("*-eval-*/run.json")
    policy = json.loads(settings.read_text())["policy"]
    assert (policy["model"], policy["lora"]["rank"]) == (str(tiny_model_dir), 4)
    assert policy["lora"]["adapter"] == str(checkpoint)

    merged = agentrl(run_folder, "export", "model", str(checkpoint), "--to", "merged", "--merge")
    assert merged.returncode == 0, merged.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in (run_folder / "merged").iterdir()
    }


class Far(BaseHTTPRequestHandler):
    """An endpoint that knows one answer, of three characters."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant"}}
        choice["message"]["content"] = "yes"
        answer = {"id": "a", "object": "chat.completion", "created": 0, "choices": [choice]}
        body = json.dumps(answer | {"model": "far"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def far() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Far) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


async def test_a_run_without_a_model_of_its_own_is_evaluated(run_folder: Path, far: str) -> None:
    """No policy is ever published, and nobody waits for one."""
    own = ["policy.model=", f"upstreams.far.base_url={far}"]
    command = ["-m", "agentrl", "eval", "run.toml", *own, "roles.agent=far"]
    evaluated = await asyncio.to_thread(warm.run, *command, cwd=run_folder)
    assert evaluated.returncode == 0, evaluated.stderr
    (folder,) = run_folder.glob("tiny-eval-*")
    async with open_store(f"sqlite:///{folder / 'store.db'}", create=False) as store:
        (row,) = await store.steps(folder.name)
        played = await store.rollouts(folder.name)
        trace = await store.trace(played[0].id)
    assert row.metrics["eval/score"] == 3.0  # the verifier counts characters
    assert [rollout.reward() for rollout in played] == [3.0] * 4
    assert trace is not None
    assert [(call.policy, call.version) for call in trace.transitions] == [("far", None)]


SCRIPT = """
import os, httpx
from agentrl.trainer import Trainer

def agent(text):
    body = {{"model": "policy", "messages": [{{"role": "user", "content": text}}]}}
    answer = httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, timeout=30)
    return answer.json()["choices"][0]["message"]["content"]

tasks = [{{"input": f"What is {{i}} plus 1?"}} for i in range(9)]
small = {{"groups": 1, "group_size": 4}}
Trainer(agent, tasks, lambda task, result: len(result) % 7, "{model}", steps=500, output="out",
        name="tiny", algorithm=small, sampling={{"max_tokens": 8}},
        **{{"policy.device": "cpu"}}).fit()
"""


def test_ctrl_c_in_a_trainer_is_one_traceback_that_says_how_to_go_on(
    run_folder: Path, tiny_model_dir: Path
) -> None:
    (run_folder / "train.py").write_text(SCRIPT.format(model=tiny_model_dir))
    with (run_folder / "said").open("wb") as errors:
        process = warm.start("-m", "train", cwd=run_folder, output=errors, errors=errors)
    with closing(process):
        wait_for_progress(process, run_folder / "out" / "store.db", 500)
        os.kill(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    said = (run_folder / "said").read_text()
    assert said.count("Traceback") == 1
    place = r"KeyboardInterrupt: stopped; fit\(\), without fresh, continues after step \d+ of 500"
    assert re.search(place, said)
