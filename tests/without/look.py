"""Imports what installed parts contribute, and prints what commands, settings and stores of others
say."""

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from agentrl.base.loading import load_attribute
from agentrl.base.parts import KINDS, parts
from agentrl.cli.main import cli
from agentrl.config import from_store, load
from agentrl.errors import ConfigError, Invalid
from agentrl.runners.gateway.attribution import AttemptRegistry
from agentrl.runners.gateway.endpoints import Endpoints
from agentrl.store import open_store
from agentrl.store.urls import split_secret


async def asked(paths: list[str]) -> list[str]:
    """What a gateway answers to posts."""
    app, nothing = web.Application(), (None, None, None)
    Endpoints(AttemptRegistry(), *nothing).add_to(app)  # type: ignore[arg-type]
    async with TestClient(TestServer(app)) as client:
        answers = [await client.post(path.replace("{", "").replace("}", "")) for path in paths]
        assert {answer.status for answer in answers} <= {404}
        return [(await answer.json())["error"]["message"] for answer in answers]


commands, settings, kinds, libraries, schemes, posts = json.loads(sys.argv[1])
for part in parts():
    for kind in KINDS:
        for target in getattr(part, kind).values():
            import_module(target.partition(":")[0])
assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
sentences = []
for command in commands:
    done = CliRunner().invoke(cli, command.split())
    assert done.exit_code == 2
    sentences.append(done.output)
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
for kind in kinds:  # a run that uses another kind was stored where the part is installed
    table, _, tag = kind.rpartition(".")
    from_store({table: {tag: {"x": 1}}})
for url in [f"{scheme}://me:hush@host/db" for scheme in schemes]:
    for use in (open_store, split_secret):
        try:
            use(url)
        except Invalid as error:
            sentences.append(str(error))
sentences += asyncio.run(asked(posts)) if posts else []
assert not any("hush" in sentence for sentence in sentences)
told = [*commands, *settings, *libraries, *schemes, *schemes, *posts]
assert len(sentences) == len(told)
print(json.dumps({"parts": len(parts()), "sentences": sentences}))
