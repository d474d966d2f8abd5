"""Translate the tools of a Responses request to chat completion functions, and their calls back.

A tool in a namespace becomes the function `namespace__name`. A custom tool, whose input is plain
text, becomes a function with the single argument `input`. Tools that run on the agent's machine are
offered to the model or refused; only tools that run on OpenAI's servers are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from agentrl.runners.dialects import base
from agentrl.runners.dialects.base import UntranslatableError
from agentrl.runners.dialects.conversation import Body
from agentrl.types import Json

SEPARATOR = "__"
HOSTED = {"code_interpreter", "file_search", "image_generation", "mcp", "programmatic_tool_calling"}
HOSTED |= {"web_search", "web_search_2025_08_26", "web_search_preview"}
HOSTED |= {"web_search_preview_2025_03_11"}
# What is read of tools. Other fields are for OpenAI's server, and are listed.
READ = {"namespace": {"type", "name", "tools"}}
READ["function"] = {"type", "name", "description", "parameters", "strict"}
READ["custom"] = {"type", "name", "description", "format"}
INPUT: Body = {"type": "object", "properties": {"input": {"type": "string"}}}
INPUT |= {"required": ["input"], "additionalProperties": False}


class Origin(NamedTuple):
    """The agent's tool behind a function that the model is offered."""

    kind: str  # function or custom
    name: str
    namespace: str


class ClientTools:
    """The tools that a request offers; of two with the same name, the later one."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self._functions: dict[str, Body] = {}
        self._origins: dict[str, Origin] = {}

    def add(self, tools: Json, where: str, namespace: str = "") -> None:
        for index, tool in enumerate(base.objects(tools, where)):
            here, kind = f"{where}[{index}]", tool.get("type")
            if kind in READ:
                unread = sorted(name for name in tool.keys() - READ[kind] if tool[name])
                self.ignored += [f"tools.{kind}.{name}" for name in unread]
            if kind == "namespace" and not namespace:
                self.add(tool.get("tools"), f"{here}.tools", base.text(tool.get("name"), here))
            elif kind in ("function", "custom"):
                self._add(tool, here, namespace)
            elif kind in HOSTED:
                self.ignored.append(f"{where}: {kind}")
            else:
                what = f"{kind!r:.80} is not possible behind this gateway"
                raise UntranslatableError(f"{here}.type", f"{what}; offer it as a function")

    @property
    def chat(self) -> list[Body]:
        """The `tools` of the chat completion."""
        return [{"type": "function", "function": one} for one in self._functions.values()]

    def item(self, function: str) -> Body:
        """Return the first fields of the output item for a call of `function`."""
        kind, name, namespace = self._origins.get(function) or Origin("function", function, "")
        item: Body = {"type": f"{kind}_tool_call" if kind == "custom" else "function_call"}
        return item | {"name": name} | ({"namespace": namespace} if namespace else {})

    def _add(self, tool: Body, where: str, namespace: str) -> None:
        name = base.text(tool.get("name"), f"{where}.name")
        kept = READ[tool["type"]] - {"type", "format"}
        function = {k: v for k, v in tool.items() if k in kept}
        if tool["type"] == "custom":
            function |= {"parameters": INPUT}
            if (syntax := tool.get("format") or {}).get("type") == "grammar":
                rules = f"The input follows this grammar ({syntax.get('syntax')}):"
                lines = [function.get("description"), f"{rules}\n{syntax.get('definition')}"]
                function["description"] = "\n\n".join(filter(None, lines))
        function["name"] = flat = flat_name(name, namespace)
        self._functions[flat] = function
        self._origins[flat] = Origin(tool["type"], name, namespace)


def flat_name(name: Json, namespace: Json) -> Json:
    """Return the function name of a tool."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """Extract a custom tool's input from the function's arguments; malformed arguments as is."""
    try:
        return str(msgspec.json.decode(arguments, type=dict[str, str])["input"])
    except (msgspec.DecodeError, KeyError):
        return arguments


def arguments_of(value: str, written: str | None) -> str:
    """Return the function's arguments for a custom tool's input `value`: the text that the model
    has `written` if it is equivalent."""
    if written is not None and custom_input(written) == value:
        return written
    return msgspec.json.encode({"input": value}).decode()
