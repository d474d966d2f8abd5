"""The fields of OpenAI's and vLLM's requests that the embedded server does not act on.

A field that would change the answer is refused, unless its value changes nothing. Only fields that
cannot change it are ignored, and others that no list here names, with a line in the log."""

from __future__ import annotations

import logging

import msgspec

from agentrl.algorithms.model.chat import RequestError
from agentrl.types import Json

log = logging.getLogger("agentrl.algorithm")

NO_GUIDE = "needs guided decoding, which the embedded server does not have"
OWN_DISTRIBUTION = "the embedded server samples with temperature, top_p and top_k only"
NO_SUCH_OPTION = "the embedded server does not have this option"
VLLM = 'leave it out, or serve the policy with engine.kind = "vllm"'

GUIDED: dict[str, tuple[Json, ...]] = {
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"), "structural_tag": (),
    "structured_outputs": ({},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "guided_decoding_backend": (), "guided_whitespace_pattern": (),
}  # fmt: skip
"""Field -> its values, besides null, that change nothing; so below."""
PROCESSED: dict[str, tuple[Json, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,),
    "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": (), "min_tokens": (0,),
    "typical_p": (1,), "length_penalty": (1,), "use_beam_search": (False,), "best_of": (1,),
    "logits_processors": ([],), "vllm_xargs": ({},), "thinking_token_budget": (),
    "repetition_detection": (),
}  # fmt: skip
OTHER: dict[str, tuple[Json, ...]] = {
    "functions": ([],), "modalities": (["text"],), "audio": (), "web_search_options": (),
    "echo": (False,), "suffix": ("",), "prompt_logprobs": (), "prompt_embeds": (),
    "truncate_prompt_tokens": (), "documents": ([],), "chat_template": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "moderation": (),
    "add_special_tokens": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "return_tokens_as_token_ids": (False,),
}  # fmt: skip
REFUSED = {
    name: (values, why)
    for table, why in ((GUIDED, NO_GUIDE), (PROCESSED, OWN_DISTRIBUTION), (OTHER, NO_SUCH_OPTION))
    for name, values in table.items()
}
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "request_id", "priority",
    "cache_salt", "include_reasoning", "spaces_between_special_tokens", "mm_processor_kwargs",
    "kv_transfer_params",
}  # fmt: skip
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_told: set[str] = set()


def check_fields(raw: bytes, known: tuple[str, ...]) -> None:
    """Raise RequestError for a field that would change the answer and has no effect here. raw: a
    JSON object. known: the fields that the server acts on."""
    for name, value in _fields.decode(raw).items():
        if name in REFUSED:
            _check(name, msgspec.json.decode(value))
        elif name not in known and name not in HARMLESS and name not in _told:
            _told.add(name)
            log.warning("the embedded server ignores the field %r of requests", name)


def _check(name: str, value: Json) -> None:
    harmless, why = REFUSED[name]
    if value is None or value in harmless:
        return
    raise RequestError(
        f"{name} = {msgspec.json.encode(value).decode():.80}: {why}; {VLLM}", param=name
    )
