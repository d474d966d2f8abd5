"""What a learner cannot compute of a request: parts that are not text, and other distributions.

A text model is trained. Instead of an image it would see placeholder tokens, and two prompts with
other images but the same placeholders would be equal, so such a call is refused unless it goes to a
model that is not trained.

A learner computes log-probs at a temperature. Penalties, biases, grammars and forced tool calls are
logits processors: under them, a server's log-probs are not the policy's, or those of no
distribution that was sampled from, depending on the server (vLLM: `--logprobs-mode`). Such a call
is recorded with `Transition.processors`, and the learner scores its tokens itself
(`algorithms/README.md`).

Invariant: an unknown field may be a processor of a server that is not known here, so it counts as
one; a field in `PLAIN` determines the prompt, the form of the response or when sampling ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from agentrl.types import Json

TEXTS = {"text", "input_text", "output_text", "refusal", "thinking", "reasoning"}  # types of parts
LONGEST = 200  # characters of a value that is recorded

PLAIN = {"model", "messages", "prompt", "suffix", "tools", "functions", "documents", "echo", "n"}
PLAIN |= {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop"}
PLAIN |= {"stream", "stream_options", "stream_interval", "user", "metadata", "store", "modalities"}
PLAIN |= {"logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "service_tier"}
PLAIN |= {"parallel_tool_calls", "reasoning_effort", "include_reasoning", "verbosity", "request_id"}
PLAIN |= {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt"}
PLAIN |= {"priority", "session_id", "kv_transfer_params", "ec_transfer_params"}
PLAIN |= {"chat_template", "chat_template_kwargs", "add_generation_prompt", "add_special_tokens"}
PLAIN |= {"continue_final_message", "truncate_prompt_tokens", "truncation_side", "detokenize"}
PLAIN |= {"media_io_kwargs", "mm_processor_kwargs", "skip_special_tokens", "return_token_ids"}
PLAIN |= {"spaces_between_special_tokens", "include_stop_str_in_output", "return_prompt_text"}
PLAIN |= {"return_tokens_as_token_ids", "return_token_offsets", "return_mm_kwargs"}
PLAIN |= {"routed_experts_prompt_start", "web_search_options", "prediction"}
PLAIN |= {"prompt_cache_options"}

NEUTRAL: dict[str, tuple[Json, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "typical_p": (1,),
}
"""Values with which a processor does nothing; so do null, false and all that is empty."""


def processors(fields: Mapping[str, Json], tools: Sequence[Mapping[str, Json]]) -> dict[str, str]:
    """Return the processors of a chat completion or completion, as the JSON that was sent."""
    found = {}
    for name in fields.keys() - PLAIN:
        sent = fields[name]
        text = bytes(sent) if isinstance(sent, msgspec.Raw) else msgspec.json.encode(sent)
        if not _is_neutral(name, text):
            found[name] = text[: 4 * LONGEST].decode(errors="replace")[:LONGEST]
    functions = (tool.get("function") for tool in tools)
    if any(isinstance(one, dict) and one.get("strict") is True for one in functions):
        found["tools.strict"] = "true"  # vLLM 0.24 and later: a grammar for the arguments
    return dict(sorted(found.items()))


def _is_neutral(name: str, text: bytes) -> bool:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # too large a number, or too deep
        return False
    return value in (None, "", [], {}) or value is False or value in NEUTRAL.get(name, ())


def why_not_text(
    fields: Mapping[str, Json], messages: Sequence[Mapping[str, Json]], policy: str, role: str
) -> str:
    """Explain why `policy` cannot be trained on a prompt; empty if it is text."""
    found = "prompt_embeds" if fields.get("prompt_embeds") else _not_text(messages)
    if not found:
        return ""
    return (
        f"the policy {policy!r} is trained on text, and this call has {found}, which training would"
        f" not see: describe it in words, or map the role {role!r} in [roles] to an endpoint of"
        " [upstreams], which is not trained"
    )


def _not_text(messages: Sequence[Mapping[str, Json]]) -> str:
    """Describe the first part of chat messages that is not text, such as an image; empty if all
    are."""
    for number, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else [content or ""]
        for index, part in enumerate(parts):
            kind = "text" if isinstance(part, str) else _kind(part)
            if kind not in TEXTS:
                return f"{kind or 'a part without a type'} in messages[{number}].content[{index}]"
        if message.get("audio"):
            return f"audio in messages[{number}]"
    return ""


def _kind(part: Json) -> str:
    """Return the type of a part; vLLM takes it from the other fields if it is missing."""
    found = part if isinstance(part, dict) else {}
    untyped = sorted(found.keys() - {"type", "uuid"}, key=lambda name: name in TEXTS)
    return str(found.get("type") or next(iter(untyped), ""))
