"""Commands about run files: their JSON Schema, and a first one to change."""

from __future__ import annotations

import inspect
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec

from agentrl.config import RunConfig, agents, infrastructure, prompts, rewards, schema, to_toml
from agentrl.config.base import EXTERNAL
from agentrl.config.policies import trained_policies, view
from agentrl.errors import ConfigError

STARTER = Path(__file__).with_name("starter")
FILES = ("run.toml", "agent.py", "tasks.jsonl", "verifier.py", "policy.py")
COMMENTED = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


@click.group()
def config() -> None:
    """The run file."""


@config.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of the run file, by which editors check and complete it."""
    click.echo(msgspec.json.format(msgspec.json.encode(run_file_schema())).decode())


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def init(folder: Path) -> None:
    """Write a commented run file with agent, tasks, verifier and a tiny model into FOLDER.

    No file is overwritten."""
    present = [name for name in FILES if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder} has {', '.join(present)} already; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(STARTER / name, folder / name)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder} ({error.strerror})") from None
    click.echo(f"Wrote {', '.join(FILES)}. Next: agentrl train {folder / 'run.toml'}")


def show_settings(config: RunConfig) -> None:
    """Print a run file with every setting and, as comments, the memory and time it needs. Raises
    ConfigError for what does not go together."""
    lines: list[str] = []
    if find_spec("torch") and find_spec("transformers"):  # the extra `train`
        from agentrl.algorithms.train.build import group_requirements, load_algorithms

        group_requirements(config, load_algorithms(config))
        if config.learner.kind == "torch":
            lines = _estimates(config)
    click.echo("".join(f"# {line}\n" for line in lines) + to_toml(config), nl=False)
    if config.learner.kind == "verl":
        from agentrl.algorithms.learners.verl.settings import describe_settings

        click.echo(describe_settings(config), nl=False)


def _estimates(config: RunConfig) -> list[str]:
    from agentrl.algorithms.train.estimate import describe

    found: list[str] = []
    for own in (view(config, name) for name in trained_policies(config)):
        source = own.model_path()
        if own.policy.build and not Path(source or "?").is_dir():
            return ["memory and time are estimated as the run begins, when policy.build has run"]
        try:
            found += describe(own, source) if source else []
        except (OSError, ValueError) as error:  # there is no such model here
            found.append(f"memory and time of {source}: not known ({str(error).splitlines()[0]})")
    return found


def run_file_schema() -> dict[str, Any]:
    """A table with several kinds may leave out its tag, for the default kind, or have the tag of a
    kind from outside the library."""
    made, config = msgspec.json.schema(RunConfig), RunConfig()
    tables = (config.engine, config.learner, config.runner, config.selfplay)
    defaults = {*map(type, tables), rewards.RewardModelConfig}
    for name, table in made["$defs"].items():
        parts = (infrastructure, agents, prompts, rewards, schema)
        section = next(vars(part)[name] for part in parts if name in vars(part))
        _describe(section, table["properties"])
        field = section.__struct_config__.tag_field
        if section.__struct_config__.tag == EXTERNAL:
            table["properties"] |= {field: {"type": "string"}}
            del table["properties"]["factory"]
            table["required"].remove("factory")
        elif section in defaults:
            table["required"].remove(field)
        if table.get("required") == []:
            del table["required"]
    properties = made["$defs"]["RunConfig"]["properties"]
    properties["roles"]["properties"] = {"match": properties.pop("role_rules")}
    for table in made["$defs"].values():
        inner = [one.get("additionalProperties") for one in table["properties"].values()]
        for one in [*table["properties"].values(), *(one for one in inner if one)]:
            if isinstance(one, dict):
                one.pop("discriminator", None)  # OpenAPI's, which does not know external kinds
    return made


def _describe(section: type[msgspec.Struct], properties: dict[str, Any]) -> None:
    """Add the comments beside the fields of a class and its bases."""
    for base in section.__mro__:
        if base.__module__.startswith("agentrl."):
            for name, comment in COMMENTED.findall(inspect.getsource(base)):
                if name in properties:
                    properties[name].setdefault("description", comment)
