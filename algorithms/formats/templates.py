"""Chat templates with tools, by name, and which of them suits a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.algorithms.formats.deepseek import mark
from agentrl.algorithms.formats.tool_formats import load_format
from agentrl.config import RunConfig
from agentrl.config.policies import frozen_policies, trained_policies, view
from agentrl.errors import ConfigError, nearest

if TYPE_CHECKING:
    from agentrl.algorithms.model.load import Tokenizer

FOLDER = Path(__file__).with_name("templates")
KEYS = ("chat_template", "tool_format")
SYSTEM = "{%- set default_system = '' %}"  # the line of chatml.jinja with the usual system message


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template that renders tools, their calls and results."""

    text: str  # Jinja, in which `{% generation %}` encloses what the model writes
    tool_format: str  # in which it writes calls: a parser's name
    end: str  # the token that ends the model's turns
    tokens: tuple[str, ...]  # which it writes besides: a model that has them is of its family
    sign: str = ""  # a text in the published template of the one model that it is for


@cache
def templates() -> Mapping[str, ChatTemplate]:
    return OWN | _chatml()


def _chatml() -> dict[str, ChatTemplate]:
    text, tokens = (FOLDER / "chatml.jinja").read_text(encoding="utf-8"), ("<|im_start|>",)
    return {
        name: ChatTemplate(
            text.replace(SYSTEM, SYSTEM.replace("''", f"'{usual}'")),
            "hermes",
            "<|im_end|>",
            tokens,
            sign=usual,
        )
        for name, usual in USUAL.items()
    }


def _read(name: str, tool_format: str, end: str, *tokens: str, sign: str = "") -> ChatTemplate:
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(text, tool_format, end, tokens, sign)


USUAL = {
    "smollm": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "chatml": "",
}
LISTED = "{%- set listed = false %}"  # the line of mistral.jinja for older models' lists of calls
MISTRAL = _read("mistral", "mistral", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]")
OWN = {
    "qwen3_coder": _read(
        "qwen3_coder", "qwen3_coder", "<|im_end|>", "<|im_start|>", sign="<function="
    ),
    "llama3": _read(
        "llama3", "llama3_json", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"
    ),
    "mistral": MISTRAL,
    "mistral_v3": replace(
        MISTRAL,
        text=MISTRAL.text.replace(LISTED, LISTED.replace("false", "true")),
        tokens=MISTRAL.tokens[:-1],
    ),
    "gemma": _read("gemma", "pythonic", "<end_of_turn>", "<start_of_turn>"),
    "phi": _read("phi", "phi4_mini_json", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    "deepseek": _read(
        "deepseek", "deepseek_v3", mark("end of sentence"), mark("User"), mark("tool calls begin")
    ),
}


def unknown_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Tokens of a template that a tokenizer would read as plain text."""
    known = tokenizer.get_vocab()
    return [token for token in (*template.tokens, template.end) if token not in known]


def proposed(tokenizer: Tokenizer) -> str | None:
    """The name of the template for the family of a tokenizer's model, or None."""
    written = str(tokenizer.chat_template or "")
    fits = [name for name, one in templates().items() if not unknown_tokens(one, tokenizer)]
    families = [name for name in fits if not templates()[name].sign]
    # A vocabulary may have tokens of other families too, which its template does not write.
    families.sort(key=lambda name: templates()[name].tokens[0] not in written)
    signed = [name for name in fits if (sign := templates()[name].sign) and sign in written]
    return next(iter([*signed, *families]), None)


def check(config: RunConfig) -> None:
    """Raises ConfigError for a template or format that does not exist, before a model is loaded."""
    for name, member in config.policies.items():
        given = [key for key in KEYS if getattr(member, key)]
        if given and not member.model:
            raise ConfigError(
                f"policies.{name}.{given[0]}: it is an adapter of policy.model, of which all have"
                f" one tokenizer; set policy.{given[0]}, or policies.{name}.model"
            )
    for name in (*trained_policies(config), *frozen_policies(config)):
        own = view(config, name)
        if template := own.policy.chat_template:
            read_template(template, Path(config.root))
        if tool_format := own.policy.tool_format:
            load_format(tool_format, Path(config.root))


def read_template(name: str, root: Path) -> tuple[str, ChatTemplate | None]:
    """The text of a built-in template or of a file, and the template if it is built in. Raises
    ConfigError for one that does not exist."""
    if built_in := templates().get(name):
        return built_in.text, built_in
    path = root / name
    if path.suffix or path.is_file():
        try:
            return path.read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"policy.chat_template = {name!r}: {path} cannot be read ({error}); give a file"
                f" with a Jinja template, or one of {', '.join(templates())}"
            ) from None
    raise ConfigError(
        f"policy.chat_template = {name!r}; {nearest(name, templates())}, or a file with a Jinja"
        " template"
    )
