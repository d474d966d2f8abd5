"""The JSON Schema of the run file, with what is said of each setting as its description."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from agentrl.config import infrastructure, schema
from agentrl.config.base import EXTERNAL
from agentrl.config.schema import RunConfig

COMMENTED = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)


def run_file_schema() -> dict[str, Any]:
    """Of tables with several kinds the tag may be left out, for the default kind, or be that of a
    kind from outside the library."""
    made = msgspec.json.schema(RunConfig)
    for name, table in made["$defs"].items():
        section = vars(schema).get(name) or vars(infrastructure)[name]
        _describe(section, table["properties"])
        field = section.__struct_config__.tag_field
        if section.__struct_config__.tag == EXTERNAL:
            table["properties"] |= {field: {"type": "string"}}
            del table["properties"]["factory"]
            table["required"].remove("factory")
        elif section in _default_kinds():
            table["required"].remove(field)
        if table.get("required") == []:
            del table["required"]
    for table in made["$defs"].values():
        for choice in _choices(table["properties"]):
            del choice["discriminator"]  # OpenAPI's, which does not know names from outside
    return made


def _describe(section: type[msgspec.Struct], properties: dict[str, Any]) -> None:
    """The comments beside the fields of a class and its bases."""
    for base in section.__mro__:
        if base.__module__.startswith("agentrl."):
            for name, comment in COMMENTED.findall(inspect.getsource(base)):
                if name in properties:
                    properties[name].setdefault("description", comment)


def _default_kinds() -> set[type]:
    config = RunConfig()
    tables = (config.engine, config.learner, config.runner, config.selfplay)
    return {*map(type, tables), schema.RewardModelConfig}


def _choices(properties: dict[str, Any]) -> list[dict[str, Any]]:
    """The properties that are a union of kinds."""
    inner = [one.get("additionalProperties") for one in properties.values()]
    every = [*properties.values(), *(one for one in inner if isinstance(one, dict))]
    return [one for one in every if "discriminator" in one]
