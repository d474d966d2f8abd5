"""`agentrl serve` as a user meets it: the command's process, and the clients of agents."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from click.testing import CliRunner
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from msgspec.structs import replace

from agentrl.cli.main import cli
from agentrl.core.access import ANYBODY
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, NotFound
from agentrl.models.export import choose
from agentrl.models.serve import Served, measured, settings_of
from tests.agentrl.models import trained
from tests.agentrl.models.banner import read_banner

NEEDS_VLLM = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: run `make test-engines`"
)
pytestmark = pytest.mark.timeout(600)
QUESTION: Any = [{"role": "user", "content": "What is the team of Ada?"}]


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory, wide_model_dir: Path, certificate: dict[str, str]
) -> Path:
    folder = tmp_path_factory.mktemp("served")
    trained.make(folder, wide_model_dir)
    for file in certificate.values():
        shutil.copy(file, folder)
    return folder


def content(root: Path) -> dict[Path, bytes]:
    """Of the run's folder, without what SQLite makes to read."""
    files = (path for path in (root / "runs").rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.suffix not in (".db-shm", ".db-wal")}


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=NEEDS_VLLM)])
def url(root: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of the server, which has TLS and two keys, and ends by Ctrl-C."""
    command = [sys.executable, "-m", "agentrl", "serve", "mine", "--port", "0"]
    command += ["--engine", request.param]
    command += ["--key-env", "MY_KEYS", "--certfile", "cert.pem", "--keyfile", "key.pem"]
    env = {**os.environ, "MY_KEYS": "first second", "OMP_NUM_THREADS": "1"}
    before = content(root)
    with subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        url, said = read_banner(process)
        assert "after step 2 (the best by held-out score, 90.0%)" in said
        assert (
            "temperature of calls: 1, unless they set one. Held-out score at temperature 0: 90.0%"
            " (95 % interval 80.0% to 100.0%)"
        ) in said
        yield url
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert (process.wait(timeout=60), rest) == (0, "Stopped.\n")
    assert content(root) == before


@pytest.fixture(scope="module")
def trust(root: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=root / "cert.pem")


@pytest.fixture
def http(trust: ssl.SSLContext) -> Iterator[httpx.Client]:
    with httpx.Client(verify=trust, timeout=30.0) as client:
        yield client


def claude(url: str, key: str, trust: ssl.SSLContext) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(verify=trust)
    root = url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=root, api_key=key, http_client=http, max_retries=0)


def test_an_agent_of_openai_gets_answers_whole_and_streamed(url: str, http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=url, api_key="second", http_client=http, max_retries=0)
    answer = client.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens in range(1, 6)
    parts = client.chat.completions.create(
        model="gpt-4o", messages=QUESTION, temperature=0, stream=True, max_tokens=5
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    again = client.chat.completions.create(
        model="gpt-4o", messages=QUESTION, temperature=0, max_tokens=5
    )
    assert again.choices[0].message.content == text
    more = client.responses.create(model="gpt-4o", input="Ada?", max_output_tokens=5)
    assert more.usage is not None
    assert more.usage.output_tokens in range(1, 6)
    assert [model.id for model in client.models.list()] == ["policy"]


def test_an_agent_of_anthropic_gets_answers(url: str, trust: ssl.SSLContext) -> None:
    with claude(url, "first", trust) as client:
        answer = client.messages.create(model="claude", max_tokens=5, messages=QUESTION)
    assert answer.usage.output_tokens in range(1, 6)


def test_an_agent_of_langchain_runs_on_it(url: str, http: httpx.Client) -> None:
    def team(name: str) -> str:
        """The team of a person."""
        return "sales"

    model = ChatOpenAI(
        base_url=url,
        api_key="first",
        model="gpt-4o",
        http_client=http,
        max_tokens=5,  # type: ignore[arg-type, call-arg]
    )
    done = create_agent(model, tools=[team]).invoke({"messages": QUESTION})
    assert [message.type for message in done["messages"]] == ["human", "ai"]


def test_the_example_with_tools_in_the_documents_runs(
    url: str, http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs/how-to/use-the-model.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    code = next(block for block in blocks if "tools=" in block)
    for old, new in (("http://127.0.0.1:8000/v1", url), ('"any")', '"first")')):
        assert old in code
        code = code.replace(old, new)
    CliRunner().invoke(cli, ["init", str(tmp_path / "mine")], catch_exceptions=False)
    monkeypatch.syspath_prepend(tmp_path / "mine")  # with the tools that its model knows
    monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=http))
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    monkeypatch.delitem(sys.modules, "shop")
    assert isinstance(names["ask"]("What is the price of the purple desk?"), str)


def test_who_has_no_key_is_refused_in_every_api(
    url: str, http: httpx.Client, trust: ssl.SSLContext
) -> None:
    ours = openai.OpenAI(base_url=url, api_key="third", http_client=http, max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or unknown"):
        ours.chat.completions.create(model="m", messages=QUESTION)
    with (
        claude(url, "third", trust) as client,
        pytest.raises(anthropic.AuthenticationError, match="the API key is missing or unknown"),
    ):
        client.messages.create(model="m", max_tokens=5, messages=QUESTION)
    assert http.get(f"{url}/models").status_code == 401
    assert http.get(f"{url.removesuffix('/v1')}/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["mine", "--host", "0.0.0.0"], ConfigError, "anybody could call; give --key-env"),
        (["mine", "--key-env", "ABSENT"], ConfigError, "the environment has no ABSENT"),
        (["mine", "--checkpoint", "3"], ConfigError, "only 000002, 000004, 000006"),
        (["mine", "--certfile", "key.pem"], ConfigError, r"^--certfile 'key.pem': .*\(--keyfile\)"),
        (["mine", "--keyfile", "key.pem"], ConfigError, "--keyfile needs --certfile"),
        (["mine", "engine.max_contxt=9"], ConfigError, "max_contxt"),
        (["other"], NotFound, "has a run 'other'"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(error, match=message):
        CliRunner().invoke(cli, ["serve", *words], catch_exceptions=False)


def test_an_engine_of_another_kind_has_a_table_of_its_own(root: Path, tmp_path: Path) -> None:
    store = f"sqlite:///{root / 'runs/mine/store.db'}"
    chosen = asyncio.run(choose(store, "mine"))
    overrides = ("engine.vllm.gpu_memory=0.5", "engine.kind=vllm")
    config = settings_of(Served(chosen, "127.0.0.1", 0, ANYBODY, overrides), tmp_path)
    assert (config.engine.kind, config.engine.vllm.gpu_memory) == ("vllm", 0.5)
    assert (config.engine.host, config.engine.port) == ("127.0.0.1", 0)
    assert config.engine.access.key  # nobody else may call it
    assert config.policy.model == str(chosen.saved.path)
    assert config.output == str(tmp_path)


def test_a_policy_of_a_data_set_is_sampled_as_asked_for(root: Path, tmp_path: Path) -> None:
    chosen = asyncio.run(choose(f"sqlite:///{root / 'runs/mine/store.db'}", "mine"))
    plain = RunConfig()
    learned = replace(
        chosen.config, agent=plain.agent, tasks=plain.tasks, verifier=plain.verifier,
        data=replace(plain.data, name="pairs"),
    )  # fmt: skip
    served = Served(
        dataclasses.replace(chosen, config=learned), "127.0.0.1", 0, ANYBODY,
        ("sampling.temperature=0.5",),
    )  # fmt: skip
    config = settings_of(served, tmp_path)
    assert config.sampling.temperature == 0.5
    assert "temperature of calls: 0.5" in measured(served.chosen, config.sampling)
