"""The settings of the part in [policy] and [policies.NAME]."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from agentrl.config.base import optional

Template = Annotated[
    str,
    msgspec.Meta(
        description="a file with a Jinja template in place of the model's, or the name of one with"
        " tools: chatml, qwen, smollm, qwen3_coder, llama3, mistral, mistral_v3,"
        " gemma, phi, deepseek"
    ),
]
ToolFormat = Annotated[
    str,
    msgspec.Meta(
        description="the format in which the model writes calls, by vLLM's names: hermes,"
        " llama3_json, mistral, pythonic, qwen3_coder, deepseek_v3, deepseek_v31, phi4_mini_json,"
        " or a parser of your own as package.module:name; default: that of the named template"
        " or of the file, else hermes"
    ),
]


def chat_template_of(config: Any) -> str:
    """config: a policy's view of a run."""
    return str(optional(config, "policy.chat_template") or "")


def tool_format_of(config: Any) -> str:
    """config: a policy's view of a run."""
    return str(optional(config, "policy.tool_format") or "")
