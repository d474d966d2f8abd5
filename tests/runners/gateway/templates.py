"""Chat templates in the styles of four families of models, by the roles that they show."""

from __future__ import annotations

import json
from typing import Any

import jinja2

HEAD = "{% macro turn(role, text) %}<|im_start|>{{ role }}\n{{ text }}<|im_end|>\n{% endmacro %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
END = "<|im_start|>assistant\n"
# The first system message and the tools are one turn; developers are not known.
QWEN25 = (
    HEAD
    + "{% set first = messages[0].content if messages[0].role == 'system' else 'You help.' %}"
    + "{{ turn('system', first ~ '\n' ~ "
    + "(tools | map('tojson') | join('\n') if tools else '')) }}"
    + "{% for m in messages %}"
    + "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    + "{{ turn(m.role, m.content) }}"
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}{{ turn('user', m.content) }}{% endif %}"
    + "{% endfor %}"
    + END
)
# The same roles; earlier thoughts are shown where they come with a call.
QWEN3 = QWEN25.replace(
    "assistant\n{{ m.content or '' }}",
    "assistant\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}",
)
# Refuses a system message that is not the first, and other roles.
QWEN35 = (
    HEAD
    + TOOLS
    + "{% for m in messages %}{% set text = (m.content or '') | trim %}"
    + "{% if m.role == 'system' %}{% if not loop.first %}"
    + "{{ raise_exception('a system message must be the first') }}{% endif %}"
    + "{{ turn('system', text) }}"
    + "{% elif m.role == 'user' %}{{ turn('user', text) }}"
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ text }}"
    + CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}{{ turn('user', text) }}"
    + "{% else %}{{ raise_exception('an unknown role') }}{% endif %}{% endfor %}"
    + END
)
# Shows any role with a text; a call replaces the text beside it, and there is one of them.
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if loop.first %}{{ (tools or []) | tojson }}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('only one call at once') }}{% endif %}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3.5": QWEN35, "llama3": LLAMA3}


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def render(template: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    """Raises jinja2.TemplateError where the template does."""

    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    environment = jinja2.Environment()
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = json.dumps
    plain = [message | {"content": text_of(message)} for message in messages]
    return environment.from_string(template).render(messages=plain, tools=tools)
