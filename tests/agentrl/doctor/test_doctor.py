"""The doctor finds what is broken in a set-up, and says how to mend it."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from transformers import AutoTokenizer

from agentrl import doctor
from agentrl.algorithms import estimate, proof
from agentrl.algorithms.engines.base import PolicyServer
from agentrl.algorithms.model.packing import Pack
from agentrl.algorithms.proof import tolerance, with_proven_packing
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.cli import inspect
from agentrl.cli.inspect import examine
from agentrl.cli.main import cli
from agentrl.core.config import RunConfig, load, resolve
from agentrl.core.config.learning import PolicyConfig
from agentrl.core.errors import PolicyError
from agentrl.doctor import machine, policy
from agentrl.store import open_store
from tests import warm
from tests.factories import run_folder

AGENT = """
from openai import OpenAI


def agent(text):
    messages = [{"role": "user", "content": text}]
    answer = OpenAI().chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content
"""
VERIFIER = "def verify(task, result): return float(result == task['answer'])\n"
TASKS = '{"input": "x", "answer": "y"}\n'
INSERT = "insert into _sqlite_migrations (migration_set, name, applied_at) values (?, ?, ?)"
TIME = "Mon, 01 Jan 2024 00:00:00 GMT"


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A run that lacks nothing."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    more = f'output = "{tmp_path}/out"\nsampling.max_tokens = 16\n'
    return run_folder(tmp_path, AGENT, VERIFIER, TASKS, more)


def examined(folder: Path, *overrides: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the command, which starts the processes of a run to play a rollout:
    forked, they take a tenth of the time."""
    command = ["-m", "agentrl", "doctor", str(folder / "run.toml"), *overrides, "--json"]
    done = warm.run(*command, cwd=folder)
    return done.returncode, json.loads(done.stdout)


def test_the_memory_of_each_policy_has_its_name(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"roles": ["one"], "lora": {"rank": 2}}
    data = {
        "policy": {"model": str(tiny_model_dir)},
        "policies": {"one": one, "two": one | {"roles": ["two"]}},
    }
    monkeypatch.setattr(policy, "memory", lambda config, source: ("fail", "9 GiB"))
    found = inspect._examine_policy(resolve(data, source="test"), str(tmp_path))
    assert [each.name for each in found] == ["memory of one"]


def test_a_run_that_lacks_nothing(folder: Path) -> None:
    code, report = examined(folder)
    assert (code, report["ok"]) == (0, True), report
    assert {each["status"] for each in report["findings"]} == {"ok"}
    names = [each["name"] for each in report["findings"]]
    assert {
        "gpu",
        "disk",
        "memory",
        "tokenizer",
        "context",
        "turns",
        "trie",
        "sampler",
        "rollout",
    } <= set(names)


def test_a_failure_is_the_exit_code(folder: Path) -> None:
    (folder / "verifier.py").unlink()
    result = CliRunner().invoke(cli, ["doctor", str(folder / "run.toml")])
    assert result.exit_code == 1
    assert result.output.startswith("fail settings: verifier.path = 'verifier.py:verify'")


def test_a_slow_check_says_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(doctor, "PATIENCE", 0.05)

    def probe() -> tuple[str, str]:
        """Whether it answers. It may not."""
        said = ""
        while "waiting" not in said:
            time.sleep(0.01)
            said += capsys.readouterr().err
        told.append(said.splitlines()[0])
        return "ok", "it does"

    told = list[str]()
    (finding,) = doctor.run_check(probe)
    assert (finding.name, finding.status) == ("probe", "ok")
    assert told == ["waiting for probe: Whether it answers (0 s so far)"]


def test_without_a_run_file_the_machine_is_checked() -> None:
    assert [each.status for each in examine(None)] == ["ok"] * 3


Patch = pytest.MonkeyPatch
Breaking = Callable[[Path, Patch], list[str]]
BROKEN: dict[str, tuple[Breaking, str, str, str]] = {}


def broken(check: str, status: str, cure: str) -> Callable[[Breaking], Breaking]:
    """A set-up of which this check finds something, with this cure. What it is broken by may return
    settings for the command line."""

    def add(breaking: Breaking) -> Breaking:
        BROKEN[breaking.__name__] = breaking, check, status, cure
        return breaking

    return add


@broken("gpu", "fail", "update the driver, or install the torch for it")
def wrong_cuda(folder: Path, patch: Patch) -> list[str]:
    patch.setattr(machine, "DRIVER", folder)
    return []


@broken("settings", "fail", "add chat_template.jinja to the directory")
def no_template(folder: Path, patch: Patch) -> list[str]:
    (folder / "model" / "chat_template.jinja").unlink()
    return []


def taken_port() -> int:
    taken = socket.create_server(("127.0.0.1", 0))
    port: int = taken.getsockname()[1]
    taken.detach()  # open until this process ends
    return port


@broken("ports", "fail", "set engine.port to a free port")
def port_taken(folder: Path, patch: Patch) -> list[str]:
    return [f"engine.port={taken_port()}"]


@broken("ports", "fail", "set runner.port to a free port, or 0 for any")
def port_of_the_gateway_taken(folder: Path, patch: Patch) -> list[str]:
    return [f"runner.port={taken_port()}"]


@broken("tokenizer", "fail", "put the tokenizer files of this very model there")
def tokenizer_of_another_model(folder: Path, patch: Patch) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_tokens([f"word{n}" for n in range(400)])
    tokenizer.save_pretrained(folder / "model")
    return []


@broken("rollout", "fail", "correct the agent or the verifier")
def verifier_that_raises(folder: Path, patch: Patch) -> list[str]:
    (folder / "verifier.py").write_text("def verify(task, result): return task['anser'] == result")
    return []


@broken("disk", "fail", "lower keep_checkpoints")
def disk_full(folder: Path, patch: Patch) -> list[str]:
    patch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    return []


@broken("store", "fail", "upgrade agentrl or choose another store")
def store_of_a_newer_schema(folder: Path, patch: Patch) -> list[str]:
    (folder / "out").mkdir()
    asyncio.run(open_store(f"sqlite:///{folder}/out/store.db").close())
    with closing(sqlite3.connect(folder / "out" / "store.db")) as conn, conn:
        conn.execute(INSERT, ("agentrl", "0999_future", "2099"))
    return []


class Clock(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return TIME

    def log_message(self, *arguments: object) -> None: ...


@broken("clock", "warn", "synchronise both by NTP")
def clock_off_by_years(folder: Path, patch: Patch) -> list[str]:
    server = HTTPServer(("127.0.0.1", 0), Clock)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    patch.setattr(machine, "CHECKS", (machine.clock,))
    return [f'store="http://127.0.0.1:{server.server_port}"']


@broken("store", "fail", "is it running there?")
def postgres_away(folder: Path, patch: Patch) -> list[str]:
    patch.setattr("agentrl.store.postgres.connection.REFUSED_PATIENCE", 0.0)
    return ['store="postgresql://nobody@127.0.0.1:9/none"']


@broken("keys", "fail", "set it to the policy server's API key")
def key_of_the_policy_server_missing(folder: Path, patch: Patch) -> list[str]:
    patch.delenv("POLICY_KEY", raising=False)
    return ["engine.host=0.0.0.0", "engine.advertise=10.0.0.2", "engine.key_env=POLICY_KEY"]


@broken("settings", "fail", "set engine.key_env to the name of an environment variable")
def policy_server_for_anybody(folder: Path, patch: Patch) -> list[str]:
    return ["engine.host=0.0.0.0", "engine.advertise=10.0.0.2"]


@broken("keys", "fail", "name a certificate and its key")
def certificate_missing(folder: Path, patch: Patch) -> list[str]:
    return ["engine.ssl_certfile=/none.pem", "engine.ssl_keyfile=/none.pem"]


@broken("keys", "fail", "set it to the endpoint's API key")
def key_missing(folder: Path, patch: Patch) -> list[str]:
    patch.delenv("JUDGE_KEY", raising=False)
    return ['upstreams.judge={base_url="http://127.0.0.1:9/v1", key_env="JUDGE_KEY"}']


@broken("proxies", "warn", "name in NO_PROXY api.example.com")
def upstream_behind_a_proxy(folder: Path, patch: Patch) -> list[str]:
    patch.setenv("https_proxy", "http://127.0.0.1:9")
    patch.setenv("no_proxy", "localhost")
    return ['upstreams.judge={base_url="https://api.example.com/v1"}']


@broken("memory", "fail", "learner.gradient_checkpointing=true")
def too_little_memory(folder: Path, patch: Patch) -> list[str]:
    patch.setattr(estimate, "available", lambda config: 240_000_000)
    return ["learner.token_budget=65536", "engine.max_batch=8"]


@broken("memory", "fail", "a name on the hub, which this machine has to reach once")
def a_model_on_a_hub_that_is_not_reached(folder: Path, patch: Patch) -> list[str]:
    def unreachable(source: str, **given: Any) -> Any:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files")

    patch.setattr(estimate, "shape_of", unreachable)
    return []


@broken("context", "fail", "lower sampling.max_tokens")
def answers_longer_than_the_context(folder: Path, patch: Patch) -> list[str]:
    return ["sampling.max_tokens=512"]


@broken("sampler", "fail", "[vllm]'")
def vllm_missing(folder: Path, patch: Patch) -> list[str]:
    return ["engine.kind=vllm"]


def replace_in_template(folder: Path, old: str, new: str) -> list[str]:
    file = folder / "model" / "chat_template.jinja"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return []


@broken("tool_calls", "warn", "choose a model whose template renders them")
def template_without_tools(folder: Path, patch: Patch) -> list[str]:
    return replace_in_template(folder, "{%- if tools %}", "{%- if false %}")


@broken("thinking", "warn", "fix chat_template.jinja")
def template_that_drops_thinking(folder: Path, patch: Patch) -> list[str]:
    return replace_in_template(
        folder, "{{- message.content or '' }}", "{{- message.content.split('</think>')[-1] }}"
    )


@broken("turns", "warn", "fix chat_template.jinja")
def template_that_rewords_turns(folder: Path, patch: Patch) -> list[str]:
    return replace_in_template(
        folder, "{{- message.content or '' }}", "{{- '- ' + (message.content or '') }}"
    )


@broken("rollout", "fail", "correct the agent or the verifier")
def agent_that_asks_no_model(folder: Path, patch: Patch) -> list[str]:
    (folder / "agent.py").write_text("agent = lambda text: text")
    return []


@broken("sampler", "fail", "another engine.kind")
def sampler_of_other_weights(folder: Path, patch: Patch) -> list[str]:
    serve = policy.policy_server

    def other(config: RunConfig, model: Any, *more: Any) -> PolicyServer:
        served = copy.deepcopy(model)
        with torch.no_grad():
            served.get_input_embeddings().weight.mul_(1.1)
        return serve(config, served, *more)

    patch.setattr(policy, "policy_server", other)
    return []


@broken("trie", "fail", "set learner.packing=rows")
def trie_that_differs(folder: Path, patch: Patch) -> list[str]:
    exact, packed = proof.forward_logprobs, proof.PROMPT_TOKENS + 4 * proof.ANSWER_TOKENS

    def wrong(model: Any, pack: Pack) -> torch.Tensor:
        return exact(model, pack) + 0.1 * (len(pack.tokens) <= packed)

    patch.setattr(proof, "forward_logprobs", wrong)
    return []


@broken("trie", "fail", "set learner.packing=rows")
def trie_that_this_hardware_lacks(folder: Path, patch: Patch) -> list[str]:
    def lacking(model: Any, pack: Pack) -> torch.Tensor:
        raise RuntimeError("no kernel image is available for execution on the device")

    patch.setattr(proof, "forward_logprobs", lacking)
    return []


@broken("settings", "fail", "did you mean 'lr'")
def setting_misspelled(folder: Path, patch: Patch) -> list[str]:
    return ["algorithm.lrr=1"]


@broken("settings", "fail", "")
def task_file_broken(folder: Path, patch: Patch) -> list[str]:
    (folder / "tasks.jsonl").write_text("{'input': 1}\n")
    return []


PLAYED = (verifier_that_raises.__name__, agent_that_asks_no_model.__name__)


@pytest.mark.parametrize("name", PLAYED)
def test_what_a_rollout_shows_is_named_with_its_cure(
    name: str, folder: Path, monkeypatch: Patch
) -> None:
    breaking, check, status, cure = BROKEN[name]
    code, report = examined(folder, *breaking(folder, monkeypatch))
    found = [each for each in report["findings"] if each["status"] != "ok"]
    assert code == 1
    assert [(each["name"], each["status"]) for each in found] == [(check, status)]
    assert cure in f"{found[0]['sentence']}; {found[0]['cure']}"


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - set(PLAYED)))
def test_what_is_broken_is_named_with_its_cure(name: str, folder: Path, monkeypatch: Patch) -> None:
    breaking, check, status, cure = BROKEN[name]
    overrides = breaking(folder, monkeypatch)
    for slow in {"sampler", "rollout"} - {check}:  # which take seconds
        monkeypatch.setattr(policy, slow, lambda *given: None)
    found = [each for each in examine(folder / "run.toml", overrides) if each.status != "ok"]
    assert [(each.name, each.status) for each in found] == [(check, status)]
    assert cure in f"{found[0].sentence}; {found[0].cure}"


def test_training_starts_with_the_quick_checks(folder: Path, monkeypatch: Patch) -> None:
    disk_full(folder, monkeypatch)
    result = CliRunner().invoke(cli, ["train", str(folder / "run.toml")])
    assert "for checkpoints; free some" in str(result.exception)
    assert not (folder / "out").exists()


def test_training_goes_on_with_rows_where_a_trie_differs(
    folder: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(folder / "run.toml", [f"policy.model={folder}/model"])
    models = load_policies(config)
    assert with_proven_packing(config, models) is config
    trie_that_differs(folder, monkeypatch)
    changed = with_proven_packing(config, models)
    assert changed.learner == replace(config.learner, packing="rows")
    (line,) = caplog.messages
    assert "learner.packing = rows): log-probs within 0.1 and gradients" in line
    asked = replace(config, learner=replace(config.learner, packing="trie"))
    with pytest.raises(PolicyError, match=r"learner\.packing = 'trie' differs here: .* to 'rows'"):
        with_proven_packing(asked, models)
    assert with_proven_packing(changed, models) is changed


def test_a_port_of_ipv6_is_looked_at_where_it_is(monkeypatch: Patch) -> None:
    asked: list[Any] = []

    def create_server(address: tuple[str, int], *, family: int) -> socket.socket:
        asked.append((address, family))
        return socket.socket()

    monkeypatch.setattr(socket, "create_server", create_server)
    engine = {"host": "::1", "port": 7000}
    assert machine.ports(resolve({"engine": engine}, source="test")) is None
    assert machine.ports(resolve({"runner": {"port": 7001}}, source="test")) is None
    assert asked == [(("::1", 7000), socket.AF_INET6), (("127.0.0.1", 7001), socket.AF_INET)]


@pytest.mark.parametrize(("largest", "expected"), [(0.16, "ok"), (0.8, "fail")])
def test_a_sampler_is_judged_by_all_its_tokens(
    largest: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding of bfloat16 puts single tokens of SmolLM2 up to 0.17 off."""
    told = torch.full((16,), -1.0)
    scored = told.clone()
    scored[3] += largest
    monkeypatch.setattr(policy, "forward_logprobs", lambda *_: scored)
    monkeypatch.setattr(policy, "inputs_of", lambda _: None)
    content = [{"logprob": float(x)} for x in told]
    choice = {"token_ids": list(range(16)), "logprobs": {"content": content}}
    answer = {"choices": [choice], "prompt_token_ids": [1, 2]}
    model: Any = SimpleNamespace(model=SimpleNamespace(dtype=torch.bfloat16), adapters=None)
    allowed = tolerance(PolicyConfig(dtype="bfloat16"))
    assert (policy._gap(model, [], answer) <= allowed) == (expected == "ok")
