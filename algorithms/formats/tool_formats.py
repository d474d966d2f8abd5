"""Formats in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.algorithms.formats.deepseek import DeepSeekV3, DeepSeekV31
from agentrl.algorithms.formats.llama3_json import Llama3Json
from agentrl.algorithms.formats.mistral import Mistral
from agentrl.algorithms.formats.phi4_mini_json import Phi4MiniJson
from agentrl.algorithms.formats.pythonic import Pythonic
from agentrl.algorithms.formats.qwen3_coder import Qwen3Coder
from agentrl.algorithms.model.tool_parser import TOOL_FORMAT, ToolParser
from agentrl.base.loading import load_attribute
from agentrl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from agentrl.algorithms.model.load import Tokenizer

KEY = "policy.tool_format"
TOOL_FORMATS: Mapping[str, type[ToolParser]] = {
    "hermes": ToolParser,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "phi4_mini_json": Phi4MiniJson,
}


def load_format(name: str, root: Path) -> type[ToolParser]:
    """The parser of a tool format, one of `TOOL_FORMATS` or "file.py:name" in the folder `root`.
    Raises ConfigError for an unknown name."""
    if ":" in name:
        own: type[ToolParser] = load_attribute(name, root, key=KEY)
        return own
    if name not in TOOL_FORMATS:
        near = nearest(name, TOOL_FORMATS)
        raise ConfigError(f"{KEY} = {name!r}; {near}, or your own as file.py:name")
    return TOOL_FORMATS[name]


def parser_of(tokenizer: Tokenizer) -> type[ToolParser]:
    """The parser of the format in which a model writes calls, by the name in its tokenizer's files,
    or "package.module:name"; that of Hermes without a name. Raises ConfigError for an unknown
    name."""
    return load_format(tokenizer.init_kwargs.get(TOOL_FORMAT, "hermes"), Path())
