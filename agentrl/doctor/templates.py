"""Checks of a policy's chat template with conversations of agents."""

from __future__ import annotations

from agentrl.algorithms.formats.choose import template_cure
from agentrl.algorithms.model.chat import Chat, RequestError
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.text import Codec
from agentrl.doctor import Status
from agentrl.errors import PolicyError
from agentrl.types import Json

Message = dict[str, Json]
QUESTION: Message = {"role": "user", "content": "Where is Ada?"}
THANKS: Message = {"role": "user", "content": "Thanks."}
FUNCTION: Json = {"name": "find_person", "arguments": '{"who": "Ada"}'}
CALL: Json = {"id": "call00000", "type": "function", "function": FUNCTION}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "tool_call_id": "call00000", "content": "Antarctica"}
TOOL: Json = {"type": "function", "function": {"name": "find_person", "parameters": {}}}
ROWS = "so each call of a conversation is a separate row, which makes updates longer"
CURE = "fix chat_template.jinja or choose a model with another template"


def tool_calls(tokenizer: Tokenizer) -> tuple[Status, str]:
    """Whether the template renders tools, tool calls and their results."""
    try:
        _tokens(tokenizer, [QUESTION], [TOOL])
        shown = tokenizer.decode(_tokens(tokenizer, [QUESTION, CALLED, RESULT], [TOOL]))
    except PolicyError as error:
        return "warn", str(error)
    conversation = shown.rpartition("Where is Ada?")[2]
    if "find_person" in conversation and "Antarctica" in conversation:
        return "ok", "the chat template shows tools, calls and results"
    cure = f"if the agent needs it, {template_cure(tokenizer)}, {CURE}"
    return "warn", f"the chat template leaves out tool calls or their results; {cure}"


def thinking(tokenizer: Tokenizer) -> tuple[Status, str]:
    """Whether the thinking of earlier turns stays in the prompt."""
    thought: Message = {"role": "assistant", "content": "<think>\nLook south.\n</think>\n\nSouth."}
    if "Look south." in tokenizer.decode(_tokens(tokenizer, [QUESTION, thought, THANKS])):
        return "ok", "thinking blocks of earlier turns stay in the prompt"
    return "warn", f"the chat template drops the thinking of earlier turns, {_cure(tokenizer)}"


def turns(tokenizer: Tokenizer) -> tuple[Status, str]:
    """Whether the next turn's prompt begins with the tokens of this turn's prompt and answer."""
    answer: Message = {"role": "assistant", "content": "In the south."}
    sampled = (*Codec(tokenizer).encode("In the south."), tokenizer.eos_token_id)
    turn = _tokens(tokenizer, [QUESTION]) + sampled
    if _tokens(tokenizer, [QUESTION, answer, THANKS])[: len(turn)] == turn:
        return "ok", "the tokens of a turn survive the next turn"
    sentence = "the chat template does not repeat a turn as it was sampled"
    return "warn", f"{sentence}, {_cure(tokenizer)}"


def _cure(tokenizer: Tokenizer) -> str:
    return f"{ROWS}; if the agent needs it, {template_cure(tokenizer)}, {CURE}"


def _tokens(tokenizer: Tokenizer, messages: list[Message], tools: Json = None) -> tuple[int, ...]:
    try:
        return Chat(tokenizer, Codec(tokenizer)).encode(messages, tools)
    except RequestError as error:
        raise PolicyError(str(error)) from None
