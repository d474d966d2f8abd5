"""Built-in chat templates with tools, and the choice of a template and its tool format for a
tokenizer, which saves them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from agentrl.algorithms.model.tool_formats import (
    TOOL_FORMAT,
    TOOL_FORMATS,
    ToolParser,
    load_format,
    mark,
    parser_of,
)
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import frozen_policies, trained_policies, view
from agentrl.core.errors import ConfigError, PolicyError, nearest
from agentrl.core.types import Json

if TYPE_CHECKING:
    from agentrl.algorithms.model.chat import Tokenizer


FOLDER = Path(__file__).with_name("chat_templates")
KEYS = ("chat_template", "tool_format")
SYSTEM_LINE = (
    "{%- set default_system = '' %}"  # the line of chatml.jinja with the default system message
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template that renders tools, their calls and results."""

    text: str  # Jinja; `{% generation %}` encloses text that the model writes
    tool_format: str  # name of the parser of its tool calls
    end: str  # the token that ends the model's turns
    # Special tokens of this format; a model that has them belongs to this family.
    tokens: tuple[str, ...]
    sign: str = ""  # a text that identifies the published template of the only matching model


@cache
def templates() -> Mapping[str, ChatTemplate]:
    return OWN | _chatml()


def _chatml() -> dict[str, ChatTemplate]:
    text, tokens = (FOLDER / "chatml.jinja").read_text(encoding="utf-8"), ("<|im_start|>",)
    return {
        name: ChatTemplate(
            text.replace(SYSTEM_LINE, SYSTEM_LINE.replace("''", f"'{usual}'")),
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
# The line of mistral.jinja for lists of calls, which older models write.
LISTED = "{%- set listed = false %}"
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
    vocabulary = tokenizer.get_vocab()
    return [token for token in (*template.tokens, template.end) if token not in vocabulary]


def proposed(tokenizer: Tokenizer) -> str | None:
    """The name of the template for the family of a tokenizer's model, or None."""
    written = str(tokenizer.chat_template or "")
    fits = [
        name for name, template in templates().items() if not unknown_tokens(template, tokenizer)
    ]
    families = [name for name in fits if not templates()[name].sign]
    # A vocabulary may have tokens of other families too, which its template does not write.
    families.sort(key=lambda name: templates()[name].tokens[0] not in written)
    signed = [name for name in fits if (sign := templates()[name].sign) and sign in written]
    return next(iter([*signed, *families]), None)


def check(config: RunConfig) -> None:
    """Raises ConfigError for a template or format that does not exist, before a model is loaded."""
    for name, member in config.policies.items():
        keys = [key for key in KEYS if getattr(member, key)]
        if keys and not member.model:
            raise ConfigError(
                f"policies.{name}.{keys[0]}: it is an adapter of policy.model, of which all have"
                f" one tokenizer; set policy.{keys[0]}, or policies.{name}.model"
            )
    for name in (*trained_policies(config), *frozen_policies(config)):
        policy_config = view(config, name)
        if template := policy_config.policy.chat_template:
            read_template(template, Path(config.root))
        if tool_format := policy_config.policy.tool_format:
            load_format(tool_format, Path(config.root))


def read_template(name: str, root: Path) -> tuple[str, ChatTemplate | None]:
    """The text of a built-in template or of a file, and the template if it is built in. Raises
    ConfigError if it does not exist."""
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


log = logging.getLogger("agentrl.algorithm")
Message = dict[str, Json]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": "Where is Ada?"}
FUNCTION: Json = {"name": "find_person", "arguments": {"who": "Ada"}}
CALL: Json = {"id": "call00000", "type": "function", "function": FUNCTION}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SCHEMA: Json = {"type": "object", "properties": {"who": {"type": "string"}}}
TOOL: Json = {"type": "function", "function": {"name": "find_person", "parameters": SCHEMA}}
# Errors that a template may raise on messages.
ON_MESSAGES = (TypeError, ValueError, LookupError, AttributeError)


def choose(tokenizer: Tokenizer, config: RunConfig) -> None:
    """Apply `policy.chat_template` and `policy.tool_format`, and check the template that a policy
    has then. config: the policy's view of the run.

    Raises PolicyError for a template that does not match the model or has an error, and for a
    format that it does not write; ConfigError for an unknown name."""
    name, model_name = config.policy.chat_template, f"model {tokenizer.name_or_path!r}"
    template = _use(name, tokenizer, config) if name else None
    where = f"policy.chat_template = {name!r}" if name else model_name
    if not tokenizer.chat_template:
        raise PolicyError(
            f"{model_name}: its tokenizer has no chat template; {template_fix(tokenizer)}, add"
            " chat_template.jinja to the directory, or train an instruction-tuned model"
        )
    _check_template(tokenizer, where)
    requested, shown = config.policy.tool_format, _shown_call(tokenizer)
    shape = format_of(shown)
    if requested and shape and not _reads(load_format(requested, Path(config.root)), shown):
        raise PolicyError(
            f"policy.tool_format = {requested!r}: the chat template writes calls as {shape}, so the"
            f" model would see other calls than it is to write; set it to {shape!r}, or set a"
            " policy.chat_template for it"
        )
    if chosen := requested or (template.tool_format if template else shape if name else ""):
        own_file = ".py:" in chosen  # absolute, because checkpoints are loaded from other folders
        tokenizer.init_kwargs[TOOL_FORMAT] = str(config.path(chosen)) if own_file else chosen
    elif shape and not _reads(parser_of(tokenizer), shown):
        log.warning(
            "The model's chat template writes tool calls as %s, and they are read as hermes: set"
            " policy.tool_format = %r.",
            shape,
            shape,
        )


def _use(name: str, tokenizer: Tokenizer, config: RunConfig) -> ChatTemplate | None:
    """Set the tokenizer's template; returns it if it is built in."""
    text, template = read_template(name, Path(config.root))
    if template and (unknown := unknown_tokens(template, tokenizer)):
        better = proposed(tokenizer)
        instead = f"{better!r}, or " if better else ""
        raise PolicyError(
            f"policy.chat_template = {name!r}: the model has no token {', '.join(unknown)}; set it"
            f" to {instead}a file with a template in the format of this model"
        )
    tokenizer.chat_template = text
    if template:
        tokenizer.eos_token = template.end  # at which the model must stop
    return template


def template_fix(tokenizer: Tokenizer) -> str:
    """A fix for a tokenizer with a chat template without tools."""
    name = proposed(tokenizer)
    if name is None or templates()[name].text == tokenizer.chat_template:
        return "name a file with a template that does in policy.chat_template"
    return (
        f"set policy.chat_template = {name!r} (in Python: policy={{'model': ..., 'chat_template':"
        f" {name!r}}}), the built-in template for this model, which has tools"
        f" (calls in the format {templates()[name].tool_format!r}, policy.tool_format)"
    )


def _check_template(tokenizer: Tokenizer, where: str) -> None:
    """Raise PolicyError for a template that cannot render a question, with or without a system
    message (some require one)."""
    for messages in ([QUESTION], [SYSTEM, QUESTION]):
        try:
            tokenizer.apply_chat_template(messages, tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            line = f"has an error in line {error.lineno}: {error}"
            raise PolicyError(f"{where}: its chat template {line}; correct it") from None
        except (jinja2.TemplateError, RecursionError, *ON_MESSAGES) as error:
            failed = f"cannot render the message of a user: {error}"
        else:
            return
    raise PolicyError(f"{where}: its chat template {failed}; correct it")


def _shown_call(tokenizer: Tokenizer) -> str:
    """The text of a tool call as the template renders it, with its marks; empty if it renders
    none."""
    try:
        before = _render(tokenizer, [QUESTION], add_generation_prompt=True)
        after = _render(tokenizer, [QUESTION, CALLED])
    except (jinja2.TemplateError, RecursionError, *ON_MESSAGES):
        return ""  # the template renders no calls, or only together with results
    shown = after[len(before) :] if after.startswith(before) else after.rpartition("Ada?")[2]
    return shown if "find_person" in shown else ""


def _render(tokenizer: Tokenizer, messages: list[Message], **options: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, **options)
    return text


def format_of(shown: str) -> str:
    """The name of the format of a call; empty if unknown."""
    first, *others = TOOL_FORMATS
    # Formats without a distinctive mark would also find calls inside those of other formats.
    others.sort(key=lambda name: bool({"{", "["} & set(TOOL_FORMATS[name].opens)))
    return next((name for name in (first, *others) if _reads(TOOL_FORMATS[name], shown)), "")


def _reads(parser: type[ToolParser], shown: str) -> bool:
    _, calls = parser().whole(shown)
    return [call.function.name for call in calls] == ["find_person"]
