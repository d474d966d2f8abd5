"""Takes out one part after another, each in a process forked from this one, which has imported what
the library needs and nothing of it: what other parts contribute is imported, what the part
contributes is asked for and refused, and two steps are trained on the embedded engine.

python tests/without/each.py MODEL FOLDER TABLES < {part: what is asked for}

FOLDER gets a file PART.json for each. TABLES: settings of parts, which are imported first.
"""

import asyncio
import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
IMPORTED = (
    "aiohttp.web", "click.testing", "httpx", "jinja2", "matplotlib.figure", "mlflow", "numpy",
    "openai.resources.chat", "opentelemetry.sdk.trace", "peft", "psycopg_pool", "rich.live",
    "safetensors.torch", "sqlite_utils", "starlette.applications",
    "tensorboard.summary.writer.event_file_writer", "trackio",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2",
    "uvicorn", "uvloop", "wandb",
)  # fmt: skip
AT_ONCE = 2


async def answers(paths: list[str]) -> list[str]:
    """What a gateway answers to posts."""
    from aiohttp import web
    from aiohttp.test_utils import TestClient, TestServer

    from agentrl.runners.gateway.attribution import AttemptRegistry
    from agentrl.runners.gateway.endpoints import Endpoints

    app, nothing = web.Application(), (None, None, None)
    Endpoints(AttemptRegistry(), *nothing).add_to(app)  # type: ignore[arg-type]
    async with TestClient(TestServer(app)) as client:
        found = [await client.post(path.replace("{", "").replace("}", "")) for path in paths]
        assert {answer.status for answer in found} <= {404}
        return [(await answer.json())["error"]["message"] for answer in found]


def look(commands: Any, settings: Any, libraries: Any, schemes: Any, posts: Any) -> Any:
    """Imports what installed parts contribute; what commands, settings and stores of others say."""
    from click.testing import CliRunner

    from agentrl.base.loading import load_attribute
    from agentrl.base.parts import KINDS, parts
    from agentrl.cli.main import cli
    from agentrl.config import load
    from agentrl.errors import ConfigError, Invalid
    from agentrl.store import open_store
    from agentrl.store.urls import split_secret

    for part in parts():
        for kind in KINDS:
            for target in getattr(part, kind).values():
                importlib.import_module(target.partition(":")[0])
    assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
    sentences = []
    for command in commands:
        asked = CliRunner().invoke(cli, command.split())
        assert asked.exit_code == 2
        sentences.append(asked.output)
    for setting in settings:
        try:
            load(Path("examples/staff/run.toml"), [setting])
        except ConfigError as error:
            sentences.append(str(error))
    for module in libraries:
        try:
            load_attribute(f"{module}:x", Path(), key="agent.path")
        except ConfigError as error:
            sentences.append(str(error))
    for url in [f"{scheme}://me:hush@host/db" for scheme in schemes]:
        for use in (open_store, split_secret):
            try:
                use(url)
            except Invalid as error:
                sentences.append(str(error))
    assert not any("hush" in sentence for sentence in sentences)
    sentences += asyncio.run(answers(posts)) if posts else []
    told = [*commands, *settings, *libraries, *schemes, *schemes, *posts]
    assert len(sentences) == len(told)
    return {"parts": len(parts()), "sentences": sentences}


async def ask(text: str) -> str:
    import openai

    async with openai.AsyncOpenAI() as client:
        messages: Any = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


async def train(model: str, folder: Path) -> int:
    """Two steps; the number of those that were committed."""
    from agentrl.algorithms.train import main
    from agentrl.config import resolve
    from agentrl.runners.main import RunnerThread
    from agentrl.store import open_store

    folder.mkdir()
    (folder / "tasks.jsonl").write_text('{"input": "Oslo"}\n{"input": "Lima"}\n')
    config = resolve(
        {
            "name": "two", "root": str(folder), "output": str(folder / "out"), "steps": 2,
            "agent": {"path": "agent.py:agent"}, "tasks": {"train": "tasks.jsonl"},
            "policy": {"model": model, "device": "cpu"}, "sampling": {"max_tokens": 4},
            "algorithm": {"groups": 1, "group_size": 2}, "learner": {"threads": 1},
        },
        source="test",
    )  # fmt: skip
    runner = RunnerThread(
        config.store, "two", agent=lambda: ask, verifier=lambda task, result: len(result) % 7
    )
    runner.start()
    try:
        async with asyncio.timeout(120):
            await main.run(config)
    finally:
        await asyncio.to_thread(runner.stop)
    async with open_store(config.store) as store:
        return sum(row.committed for row in await store.steps("two"))


def without(part: str, asked: list[Any], model: str, folder: Path) -> Any:
    os.environ["WITHOUT_PARTS"] = part
    runpy.run_path(str(HERE / "sitecustomize.py"))
    return look(*asked) | {"steps": asyncio.run(train(model, folder / part))}


def fits(target: str) -> bool:
    """Whether a table that is imported before the settings is one of a run file."""
    module, _, name = target.partition(":")
    own = getattr(importlib.import_module(module), name)
    import msgspec

    from agentrl.config import AlgorithmConfig, RunConfig
    from agentrl.config.base import structs_of

    every = [
        f.type for table in (RunConfig, AlgorithmConfig) for f in msgspec.structs.fields(table)
    ]
    return any(set(structs_of(own)) <= set(structs_of(kind)) for kind in every)


def forked(file: Path, work: Callable[[], Any]) -> None:
    if os.fork():
        return
    try:
        found = work()
    except BaseException:  # noqa: BLE001 - the test shows it
        found = {"error": traceback.format_exc()}
    file.write_text(json.dumps(found))
    os._exit(0)


def main(model: str, folder: Path, tables: list[str], parts: dict[str, list[Any]]) -> None:
    jobs: list[tuple[str, Callable[[], Any]]] = [
        (target, lambda target=target: fits(target)) for target in tables
    ]  # type: ignore[misc]
    jobs += [
        (part, lambda part=part, asked=asked: without(part, asked, model, folder))
        for part, asked in parts.items()
    ]  # type: ignore[misc]
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    for number, (name, work) in enumerate(jobs):
        if number >= AT_ONCE:
            os.wait()
        forked(folder / f"{name}.json", work)
    for _ in jobs[:AT_ONCE]:
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(), json.load(sys.stdin))
