"""`agentrl init`: a first run file, or the JSON Schema of run files.

A run file without `name` is named after its folder, so two run files do not share a run by
accident.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any, get_args, get_origin

import click
import msgspec
from msgspec.structs import astuple

from agentrl import trainer
from agentrl.core.config import RunConfig
from agentrl.core.config.base import EXTERNAL, Section, structs_of
from agentrl.core.errors import ConfigError, StoreError
from agentrl.core.processes import run_blocking
from agentrl.core.types import Sampling
from agentrl.store import open_store

STARTER = Path(__file__).with_name("starter")
SETTINGS = "run.toml"
FILES = (SETTINGS, "agent.py", "shop.py", "products.csv", "tasks.py", "verifier.py", "policy.py")
PRETRAINED = (SETTINGS, "agent.py", "tasks.jsonl", "heldout.jsonl", "verifier.py")
LANGCHAIN = ("langchain", "langchain_openai")
FIELD = re.compile(r"    (\w+): [^#]*(?:# (.*))?$")


def _print_schema(context: click.Context, option: click.Parameter, requested: bool) -> None:
    if requested:
        click.echo(msgspec.json.format(msgspec.json.encode(run_file_schema())).decode())
        context.exit()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
@click.option("--model", help="Hub name or directory of a chat model, instead of a tiny one.")
@click.option(
    "--from-traces",
    "traces",
    metavar="OUT",
    help="Store of `agentrl traces import`: a run that imitates these, then trains live.",
)
@click.option(
    "--where",
    multiple=True,
    metavar="NAME>=NUMBER",
    help="With --from-traces: which traces are good, by their feedback. Repeatable.",
)
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_schema,
    help="Print the JSON Schema of run files, with which editors complete them, and stop.",
)
def init(folder: Path, model: str | None, traces: str | None, where: tuple[str, ...]) -> None:
    """Write a commented run file with agent, tasks, verifier and a tiny model into FOLDER.

    With --model, settings for that model are measured on this machine. Overwrites no file."""
    if traces is not None:
        _from_traces(folder, model, traces, where)
        return
    if where:
        raise click.UsageError("--where has no effect without --from-traces")
    source, files = (STARTER / "pretrained", PRETRAINED) if model else (STARTER, FILES)
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder} has {', '.join(present)} already; name another folder")
    text = (source / SETTINGS).read_text(encoding="utf-8")
    if model:
        from agentrl.models import pretrained

        measured = pretrained.settings(model)
        measured["model"] = json.dumps(measured["model"], ensure_ascii=False)  # as in the TOML file
        text = Template(text).substitute(measured)
    missing = [] if model else [name for name in LANGCHAIN if find_spec(name) is None]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in files[1:]:
            variant = STARTER / "openai" / name
            shutil.copyfile(
                variant if missing and variant.exists() else source / name, folder / name
            )
        (folder / SETTINGS).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write into {folder} ({error.strerror})") from None
    note = f" ({missing[0]} is not installed: the agent does not use it)" if missing else ""
    click.echo(f"Wrote {', '.join(files)}{note}. Next: agentrl train {folder / SETTINGS}")


def _from_traces(folder: Path, model: str | None, store: str, conditions: tuple[str, ...]) -> None:
    """Write the run of recorded traces."""
    from agentrl.models import pretrained
    from agentrl.recorded.project import write_project
    from agentrl.recorded.training import Training, Where, training_of, usual_where

    if model is None:
        raise click.UsageError("--from-traces needs --model, the model that imitates the traces")

    async def read() -> tuple[Where, Training]:
        async with open_store(store, readonly=True) as opened:
            where = Where.read(conditions) if conditions else await usual_where(opened)
            return where, await training_of(opened, where)

    where, training = run_blocking(read())
    files = write_project(folder, training, where, model, pretrained.settings)
    for reason, count in training.left_out.most_common():
        click.echo(f"left out: {count} {reason}")
    roles = ", ".join(training.roles)
    click.echo(
        f"Wrote {', '.join(files)}: {len(training.demonstrations)} demonstrations of {roles} where"
        f" {where}, {len(training.tasks)} tasks, {len(training.heldout)} held out. Put your agent"
        f" into {folder / 'agent.py'} and your judgement into {folder / 'verifier.py'}. Next:"
        f" agentrl train {folder / SETTINGS}"
    )


def run_file_schema() -> dict[str, Any]:
    """The JSON Schema of the run file. A table with several kinds may omit its tag, for the default
    kind, or have the tag of a kind from outside the library."""
    schema, config = msgspec.json.schema(RunConfig), RunConfig()
    tables = (table for table in astuple(config) if isinstance(table, Section))
    structs = sections()
    kinds_by_field = (_tables_of(field) for field in msgspec.structs.fields(RunConfig))
    defaults = {*map(type, tables), *(kinds[0] for kinds in kinds_by_field if len(kinds) > 1)}
    for name, table in schema["$defs"].items():
        section = structs[name]
        field = section.__struct_config__.tag_field
        if section.__struct_config__.tag == EXTERNAL:
            table["properties"] |= {field: {"type": "string"}}
            del table["properties"]["factory"]
            table["required"].remove("factory")
        elif field and section in defaults:
            table["required"].remove(field)
        for key in table["properties"].keys() & (descriptions := comments(section)).keys():
            table["properties"][key].setdefault("description", descriptions[key])
        if table.get("required") == []:
            del table["required"]
    properties = schema["$defs"]["RunConfig"]["properties"]
    # agentrl sets these two
    del properties["file"], schema["$defs"]["LiveConfig"]["properties"]["running"]
    properties["roles"]["properties"] = {"match": properties.pop("role_rules")}
    for table in schema["$defs"].values():
        inner = [setting.get("additionalProperties") for setting in table["properties"].values()]
        for setting in [*table["properties"].values(), *(setting for setting in inner if setting)]:
            if isinstance(setting, dict):
                # OpenAPI's keyword; it cannot describe kinds of plug-ins.
                setting.pop("discriminator", None)
    return schema


def sections() -> dict[str, type[msgspec.Struct]]:
    """The tables of run files by the names of their classes."""
    return {"Sampling": Sampling} | _below(Section)


def _below(base: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    structs = {section.__name__: section for section in base.__subclasses__()}
    for section in list(structs.values()):
        structs |= _below(section)
    return structs


def comments(section: type[msgspec.Struct]) -> dict[str, str]:
    """The description of each setting of a class and its bases: the comments above and beside its
    field, or the first sentence of the docstring if it is a table."""
    config, descriptions = section.__struct_config__, dict[str, str]()
    for base in section.__mro__:
        if base.__module__.startswith("agentrl.") and issubclass(base, msgspec.Struct):
            above: list[str] = []
            for text in inspect.getsource(base).splitlines():
                if text.startswith("    # "):
                    above.append(text[6:])
                    continue
                if match := FIELD.match(text):
                    descriptions.setdefault(match[1], " ".join([*above, match[2] or ""]).strip())
                above = []
    for field in msgspec.structs.fields(section):
        if not descriptions.get(field.name) and (tables := _tables_of(field)):
            descriptions[field.name] = _summary(
                tables[-1].__base__ if len(tables) > 1 else tables[0]
            )
        for meta in getattr(field.type, "__metadata__", ()):
            descriptions[field.name] = descriptions.get(field.name) or meta.description or ""
    descriptions |= {config.tag_field: _summary(section)} if config.tag_field else {}
    return {name: _sentence(text) for name, text in descriptions.items()}


def _sentence(text: str) -> str:
    """A description with a capital letter and a full stop."""
    return text and text[0].upper() + text[1:] + "." * (text[-1] not in ".!?")


def _tables_of(field: msgspec.structs.FieldInfo) -> tuple[type[msgspec.Struct], ...]:
    """The kinds of a setting that is a table, or tables by name."""
    if isinstance(field.default, msgspec.Struct):
        return (type(field.default),)
    return structs_of(get_args(field.type)[-1]) if get_origin(field.type) is dict else ()


def _summary(table: Any) -> str:
    """The first sentence of a table's docstring."""
    return " ".join(inspect.cleandoc(table.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def check_name(config: RunConfig) -> None:
    """Raises ConfigError if the run of this name belongs to another run file that still exists. A
    run file that was moved or renamed continues its run. Other mistakes of a copied run file are
    reported first."""
    other = run_blocking(_stored(config)) if config.file else ""
    if other not in ("", config.file) and Path(other).is_file():
        if config.tasks.train:  # without tasks there is little to check
            trainer.check(config)
        raise ConfigError(
            f"run {config.name!r} in {config.output} is that of {other}: give name=NAME for a run"
            f" of its own, or name={config.name} to continue that one"
        )


async def _stored(config: RunConfig) -> str:
    """The run file of the stored run; "": there is no run, or its run file sets `name`."""
    with suppress(StoreError):
        async with open_store(config.store, create=False) as store:
            state = await store.run(config.name)
            return str(state.config.get("file", "")) if state else ""
    return ""
