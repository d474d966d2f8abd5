"""Gives tokenizers the chosen chat template and tool format, which are saved with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from agentrl.algorithms.formats.templates import (
    ChatTemplate,
    proposed,
    read_template,
    templates,
    unknown_tokens,
)
from agentrl.algorithms.formats.tool_formats import TOOL_FORMATS, load_format, parser_of
from agentrl.algorithms.model.tool_parser import TOOL_FORMAT, ToolParser
from agentrl.config import RunConfig
from agentrl.errors import PolicyError
from agentrl.types import Json

if TYPE_CHECKING:
    from agentrl.algorithms.model.load import Tokenizer

log = logging.getLogger("agentrl.algorithm")
Message = dict[str, Json]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
QUESTION: Message = {"role": "user", "content": "Where is Ada?"}
FUNCTION: Json = {"name": "find_person", "arguments": {"who": "Ada"}}
CALL: Json = {"id": "call00000", "type": "function", "function": FUNCTION}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SCHEMA: Json = {"type": "object", "properties": {"who": {"type": "string"}}}
TOOL: Json = {"type": "function", "function": {"name": "find_person", "parameters": SCHEMA}}
ON_MESSAGES = (TypeError, ValueError, LookupError, AttributeError)  # of a template


def choose(tokenizer: Tokenizer, config: RunConfig) -> None:
    """Apply `policy.chat_template` and `policy.tool_format`, and check the template that a policy
    has then. config: the policy's view of the run.

    Raises PolicyError for a template that does not suit the model or has an error, and a format
    that it does not write; ConfigError for one that does not exist."""
    name, own = config.policy.chat_template, f"model {tokenizer.name_or_path!r}"
    template = _use(name, tokenizer, config) if name else None
    where = f"policy.chat_template = {name!r}" if name else own
    if not tokenizer.chat_template:
        raise PolicyError(
            f"{own}: its tokenizer has no chat template; {template_cure(tokenizer)}, add"
            " chat_template.jinja to the directory, or train an instruction-tuned model"
        )
    _check_template(tokenizer, where)
    asked, shown = config.policy.tool_format, _shown_call(tokenizer)
    found = format_of(shown)
    if asked and found and not _reads(load_format(asked, Path(config.root)), shown):
        raise PolicyError(
            f"policy.tool_format = {asked!r}: the chat template writes calls as {found}, so the"
            f" model would see other calls than it is to write; set it to {found!r}, or set a"
            " policy.chat_template for it"
        )
    if chosen := asked or (template.tool_format if template else found if name else ""):
        own_file = ".py:" in chosen  # found from everywhere, also when a checkpoint is loaded
        tokenizer.init_kwargs[TOOL_FORMAT] = str(config.path(chosen)) if own_file else chosen
    elif found and not _reads(parser_of(tokenizer), shown):
        log.warning(
            "The model's chat template writes tool calls as %s, and they are read as hermes: set"
            " policy.tool_format = %r.",
            found,
            found,
        )


def _use(name: str, tokenizer: Tokenizer, config: RunConfig) -> ChatTemplate | None:
    """Give the tokenizer a template; returns it if it is built in."""
    text, template = read_template(name, Path(config.root))
    if template and (unknown := unknown_tokens(template, tokenizer)):
        other = proposed(tokenizer)
        instead = f"{other!r}, or " if other else ""
        raise PolicyError(
            f"policy.chat_template = {name!r}: the model has no token {', '.join(unknown)}; set it"
            f" to {instead}a file with a template in the format of this model"
        )
    tokenizer.chat_template = text
    if template:
        tokenizer.eos_token = template.end  # at which the model must stop
    return template


def template_cure(tokenizer: Tokenizer) -> str:
    """What to do if a tokenizer's chat template has no tools."""
    name = proposed(tokenizer)
    if name is None or templates()[name].text == tokenizer.chat_template:
        return "name a file with a template that does in policy.chat_template"
    return (
        f"set policy.chat_template = {name!r} (in Python: policy={{'model': ..., 'chat_template':"
        f" {name!r}}}), the built-in template for this model, which has tools"
        f" (calls in the format {templates()[name].tool_format!r}, policy.tool_format)"
    )


def _check_template(tokenizer: Tokenizer, where: str) -> None:
    """Raise PolicyError for a template that cannot render a question, also after a system message,
    which some ask for."""
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
    """A call as the template shows it, with what is around it; empty if it shows none."""
    try:
        before = _render(tokenizer, [QUESTION], add_generation_prompt=True)
        after = _render(tokenizer, [QUESTION, CALLED])
    except (jinja2.TemplateError, RecursionError, *ON_MESSAGES):
        return ""  # it takes no calls, or only together with their results
    shown = after[len(before) :] if after.startswith(before) else after.rpartition("Ada?")[2]
    return shown if "find_person" in shown else ""


def _render(tokenizer: Tokenizer, messages: list[Message], **options: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, **options)
    return text


def format_of(shown: str) -> str:
    """The name of the format of a call; empty if it is none that is known."""
    first, *others = TOOL_FORMATS
    # Those without a mark of their own would find their calls inside those of others.
    others.sort(key=lambda name: bool({"{", "["} & set(TOOL_FORMATS[name].opens)))
    return next((name for name in (first, *others) if _reads(TOOL_FORMATS[name], shown)), "")


def _reads(parser: type[ToolParser], shown: str) -> bool:
    _, calls = parser().whole(shown)
    return [call.function.name for call in calls] == ["find_person"]
