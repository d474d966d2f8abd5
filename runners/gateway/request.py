"""A model call as the agent requests it: how it is sent, and whether a learner can compute its
log-probs. It is sent with `return_token_ids` and `logprobs`, and with the rollout's sampling
parameters that the agent does not set. The agent's fields are passed on byte for byte, except the
arguments of tool calls, which are restored to the model's original text.

A learner computes log-probs at a temperature. Penalties, biases, grammars and forced tool calls are
logits processors: with them, a server's log-probs are not the policy's, or not those of the
sampling distribution, depending on the server (vLLM: `--logprobs-mode`). Such a call is recorded
with `Transition.processors`, and the learner scores its tokens itself (`algorithms/README.md`).

The trained model reads text only. Instead of an image it would see placeholder tokens, and prompts
that differ only in their images would be equal, so such a call is rejected unless it goes to a
model that is not trained. A feature may give an attempt an `ImagePolicy` that accepts more.

Invariant: an unknown field may be a logits processor of some server, so it counts as one; a field
in `PLAIN` determines the prompt, the format of the response or the end of sampling.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from multidict import CIMultiDict

from agentrl.core.http import KEY_HEADERS
from agentrl.core.images import KIND
from agentrl.core.types import Image, Json, Sampling, Transition
from agentrl.runners.apis.base import TEXT, Dialect, Translation, UntranslatableError, typed
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.store.base import Store

if TYPE_CHECKING:
    from agentrl.runners.gateway.attribution import CallOrigin, ReceivedCall
    from agentrl.runners.gateway.upstream import Messages, Route, Upstream

Fields = dict[str, Any]
"""A JSON object. Its values are `msgspec.Raw`, the received bytes, or set by the gateway."""

# Headers of a single connection; all others are passed on.
HOP_BY_HOP = {"accept-encoding", "authorization", "connection", "content-length"}
HOP_BY_HOP |= {"content-encoding", "date", "host", "keep-alive", "proxy-authorization", "server"}
HOP_BY_HOP |= {"te", "trailer", "transfer-encoding", "upgrade"}
HOP_BY_HOP |= {*KEY_HEADERS, "x-policy-version", "x-processors"}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

MAX_VALUE_CHARS = 200  # characters of a value that is recorded

TEXTS = {"text", "input_text", "output_text", "refusal", "thinking", "reasoning"}  # types of parts
MEDIA = ("image", "images", "multi_modal_data", "prompt_embeds", "video", "videos")  # fields
EMPTY = {b"null", b"[]", b"{}", b'""', b"false"}

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


class ModelRequest(Struct, frozen=True):
    """A request of the agent, independent of the server that will answer it."""

    dialect: Dialect
    fields: Fields  # body for the policy server; `model` as the agent named it
    translation: Translation | None
    index: int  # number within the attempt, in the order of arrival
    model: str
    stream: bool
    asks_token_ids: bool  # whether the agent itself requested token ids
    asks_logprobs: bool
    messages: list[dict[str, Json]]  # the conversation; a text prompt is one user message
    tools: list[dict[str, Json]]
    images: tuple[str, ...] = ()  # digests of the images that `messages` name, in order
    files: Mapping[str, Image] = {}  # digest -> image
    unseen: str = ""  # why one of its images has no digest
    conversation: int | None = None  # key of `messages`, see `ConversationMemory.recall`

    @property
    def inexact(self) -> str:
        """Why no response can be recorded exactly; empty if it can."""
        echo = self.dialect is TEXT and value(self.fields, "echo")
        return "its response repeats the prompt (echo)" if echo else ""

    @property
    def ignored(self) -> list[str]:
        """Options of the request that have no effect."""
        return [] if self.translation is None else self.translation.ignored

    @property
    def processors(self) -> dict[str, str]:
        """Options that change the distribution, see `Transition.processors`."""
        return processors(self.fields, self.tools)

    def encode(
        self, route: Route, defaults: Sampling, *, capture: bool, fitting: int | None = None
    ) -> tuple[bytes, Sampling]:
        """Return the body for the route's server and the effective sampling parameters.

        `defaults`: those of the rollout, with a seed for this call; frozen endpoints keep their
        own. `fitting`: tokens that fit after the prompt, if the agent requests more."""
        body = self.fields | {"model": route.model or self.model}
        if capture:
            body["return_token_ids"] = True
            if not self.asks_logprobs:
                body["logprobs"] = 1 if self.dialect is TEXT else True
        sampling = _fill_sampling(body, None if route.frozen else defaults)
        if fitting:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = fitting
            sampling = msgspec.structs.replace(sampling, max_tokens=fitting)
        return msgspec.json.encode(body), sampling


def read_request(
    dialect: Dialect, raw: bytes, memory: ConversationMemory, index: int
) -> ModelRequest:
    """Parse a request.

    Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError unless it is a JSON object,
    UntranslatableError if it cannot be translated for the policy server."""
    translation = None
    if dialect.translate is None:
        fields: Fields = _fields.decode(raw)
    else:
        body = msgspec.json.decode(raw, type=dict[str, Any])
        with typed():
            translation = dialect.translate(body, memory)
        fields = dict(translation.chat)
    stream = value(fields, "stream")
    if stream is not None and not isinstance(stream, bool):
        why = f"{stream!r:.80} is neither true nor false"
        raise UntranslatableError("stream", why, code="invalid_type")
    logprobs, messages, prompt = (value(fields, k) for k in ("logprobs", "messages", "prompt"))
    conversation = None
    if isinstance(messages, list):
        sent, joined = fields["messages"], translation is not None
        written = bytes(sent) if isinstance(sent, msgspec.Raw) else b""
        recalled, conversation = memory.recall(messages, joined=joined, raw=written)
        if recalled is not messages:
            fields["messages"] = messages = recalled
        if translation is not None:
            translation.chat["messages"] = messages
    if "messages" not in fields and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    return ModelRequest(
        dialect,
        fields,
        translation,
        index=index,
        model=str(value(fields, "model") or ""),
        stream=stream is True,
        asks_token_ids=value(fields, "return_token_ids") is True,
        asks_logprobs=logprobs is not None and logprobs is not False,
        messages=_dicts(messages),
        tools=_dicts(value(fields, "tools")),
        conversation=conversation,
    )


def _dicts(value: Json) -> list[dict[str, Json]]:
    """Return the objects of a list, for storing; the policy server rejects anything else."""
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    return list(storable(items))


def _fill_sampling(body: Fields, defaults: Sampling | None) -> Sampling:
    """Set parameters to `defaults`, if given, where the agent does not set them or they are forced;
    return the effective parameters."""
    chosen = {name: value(body, name) for name in ("temperature", "top_p", "top_k", "seed")}
    limit = value(body, "max_completion_tokens")
    limit = value(body, "max_tokens") if limit is None else limit
    if defaults is not None:
        if limit is None and defaults.max_tokens is not None:
            limit = body["max_tokens"] = defaults.max_tokens
        filling = {"temperature": defaults.temperature, "top_p": defaults.top_p}
        filling |= {"top_k": defaults.top_k} if defaults.top_k else {}
        if defaults.override_agent:
            for name in ("temperature", "top_p", "top_k"):
                body.pop(name, None)
                chosen[name] = None
        filling |= {"seed": defaults.seed} if defaults.seed is not None else {}
        for name, default in filling.items():
            if chosen[name] is None:
                chosen[name] = body[name] = default
    return Sampling(  # the policy server rejects values that are not numbers
        temperature=_number(chosen["temperature"], float, 1.0),
        top_p=_number(chosen["top_p"], float, 1.0),
        top_k=_number(chosen["top_k"], int, 0),
        max_tokens=_number(limit, int, None),
        seed=_number(chosen["seed"], int, None),
    )


def _number(value: Json, kind: type, default: Any) -> Any:
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # vLLM reads 5.0 as 5, too
    if isinstance(value, bool) or not isinstance(value, int | kind):
        return default
    wide = isinstance(value, int) and value.bit_length() > 63
    return default if wide else kind(value)


def value(fields: Fields, name: str) -> Json:
    """Return the decoded value of a field; None if it is missing."""
    field = fields.get(name)
    return _decoded(field) if isinstance(field, msgspec.Raw) else field


def _decoded(raw: msgspec.Raw) -> Json:
    """Decode JSON; numbers that Python cannot read, such as 1e400, as text."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return json.loads(bytes(raw), parse_int=_number_or_text, parse_float=_number_or_text)


def _number_or_text(written: str) -> Json:
    try:
        return msgspec.json.decode(written)
    except msgspec.ValidationError:
        return written


def storable(value: Json) -> Json:
    """Return JSON with integers of more than 64 bits, which the store refuses, as text."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return _with_texts(value)
    return value


def _with_texts(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _with_texts(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    wide = isinstance(value, int) and not -(2**63) <= value < 2**64
    return str(value) if wide else value


def processors(fields: Mapping[str, Json], tools: Sequence[Mapping[str, Json]]) -> dict[str, str]:
    """Return the processors of a chat completion or completion, as the JSON that was sent."""
    options = {}
    for name in fields.keys() - PLAIN:
        sent = fields[name]
        text = bytes(sent) if isinstance(sent, msgspec.Raw) else msgspec.json.encode(sent)
        if not _is_neutral(name, text):
            options[name] = text[: 4 * MAX_VALUE_CHARS].decode(errors="replace")[:MAX_VALUE_CHARS]
    functions = (tool.get("function") for tool in tools)
    if any(isinstance(function, dict) and function.get("strict") is True for function in functions):
        options["tools.strict"] = "true"  # vLLM 0.24 and later: a grammar for the arguments
    return dict(sorted(options.items()))


def _is_neutral(name: str, text: bytes) -> bool:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):  # too large a number, or too deep
        return False
    return value in (None, "", [], {}) or value is False or value in NEUTRAL.get(name, ())


def forwarded(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers without those of a single connection."""
    return CIMultiDict((k, _text(v)) for k, v in headers.items() if k.lower() not in HOP_BY_HOP)


def _text(value: str) -> str:
    """Convert a header's value that is not UTF-8, which aiohttp requires, from Latin-1."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode(errors="surrogateescape").decode("latin-1")
    return value


# -- lines on the console about calls that a policy answers, each said once ------------------------


def warn_of_name(upstream: Upstream, route: Route, caller: CallOrigin, model: str) -> None:
    """Say that a policy answers for a model that the run file does not name, once for each name."""
    role, active = caller.role_of(model), caller.active
    chosen = model in active.roles or upstream.router.is_chosen(model, role, active.seats)
    if chosen or active.scoring:
        return
    name = repr(model[:80]).replace("%", "%%")
    table = msgspec.json.encode(model[:80]).decode().replace("%", "%%")
    upstream.warn_once(
        f"the policy %r answers for the model {name}, which neither a policy nor an endpoint has as"
        " its name, and is trained on these calls. If they are not the agent's own work, but a"
        f" judge's or a simulated user's, add their model as [upstreams.{table}], or map their"
        " role, now %r, to an endpoint of [upstreams] in [roles]",
        *(route.policy, role),
    )


def warn_of_processors(upstream: Upstream, route: Route, options: Collection[str]) -> None:
    """Warn that calls are not sampled from the policy's own distribution."""
    if options:
        upstream.warn_once(
            f"policy {route.policy}: calls with {', '.join(options)} are not sampled from the"
            " policy's own distribution; the learner scores their tokens itself, as if they were"
            " (calls/processed)"
        )


def warn_of_inexact(upstream: Upstream, route: Route, reasons: Iterable[str]) -> None:
    """Warn that a response is recorded as inexact, with the first reason."""
    if reason := next(filter(None, reasons), ""):
        upstream.warn_once("policy %s: a call is inexact, as %s", route.policy, reason)


def warn_of_sampling(upstream: Upstream, route: Route, used: Sampling, defaults: Sampling) -> None:
    """Warn that the agent's sampling is not the run file's."""
    names = ("temperature", "top_p", "top_k", "max_tokens")
    wanted = ((name, getattr(defaults, name)) for name in names)
    overruled = [name for name, value in wanted if value not in (None, getattr(used, name))]
    if overruled:
        upstream.warn_once(
            "policy %s: the agent overrules the run file's sampling with %s; "
            "sampling.override_agent = true would keep the run file's temperature, top_p and top_k",
            *(route.policy, ", ".join(f"{name} = {getattr(used, name)}" for name in overruled)),
        )


# -- what of it is not text -----------------------------------------------------------------------


class ImagePolicy:
    """How the calls of an attempt are seen: here, as text only."""

    def __init__(self, advice: str = "") -> None:
        """advice: the end of the error message for content that has only text and images."""
        self._advice = advice

    def rejection_reason(self, call: ReceivedCall, policy: str) -> str:
        """Explain why `policy` cannot be trained on a call; empty if it can."""
        fields, messages = call.request.fields, call.request.messages
        why = text_rejection_reason(fields, messages, policy, call.role)
        images = why and not (media_field(fields) or not_text(messages, frozenset({KIND})))
        return why + self._advice if images else why

    async def sent(self, call: ReceivedCall, messages: Messages, route: Route) -> Fields:
        """Return the fields of a call for the route's server, with these messages: the original
        ones, or messages that were adapted to the policy."""
        fields = call.request.fields
        return fields if messages is call.request.messages else fields | {"messages": messages}

    async def add(
        self, store: Store, call: ReceivedCall, rows: Sequence[Transition]
    ) -> Sequence[bool]:
        """Store the rows of a call, and first the images that they refer to; returns the results of
        `add_transitions`."""
        return await store.add_transitions(rows)


def text_rejection_reason(
    fields: Mapping[str, Json], messages: Sequence[Mapping[str, Json]], policy: str, role: str
) -> str:
    """Explain why `policy` cannot be trained on a prompt; empty if it is text."""
    not_text_part = media_field(fields) or not_text(messages)
    return not_trained(not_text_part, policy, role) if not_text_part else ""


def not_trained(media: str, policy: str, role: str) -> str:
    return (
        f"the policy {policy!r} is trained on text, and this call has {media}, which training would"
        f" not see: describe it in words, or {other_model(role)}"
    )


def other_model(role: str) -> str:
    return f"map the role {role!r} in [roles] to an endpoint of [upstreams], which is not trained"


def media_field(fields: Mapping[str, Json]) -> str:
    """Return the first field of a request that has other than text; empty if none has."""
    return next((name for name in MEDIA if not is_empty(fields.get(name))), "")


def not_text(messages: Sequence[Mapping[str, Json]], accepted: frozenset[str] = frozenset()) -> str:
    """Describe the first part of chat messages that is not text, such as an image; empty if all
    are. `accepted`: types of parts that count as text."""
    for number, message in enumerate(messages):
        for index, part in enumerate(parts_of(message)):
            kind = "text" if isinstance(part, str) else kind_of(part)
            if kind not in TEXTS and kind not in accepted:
                return f"{kind or 'a part without a type'} in messages[{number}].content[{index}]"
        if name := next((name for name in ("audio", *MEDIA) if message.get(name)), ""):
            return f"{name} in messages[{number}]"
    return ""


def parts_of(message: Mapping[str, Json]) -> list[Json]:
    content = message.get("content")
    return content if isinstance(content, list) else [content or ""]


def is_empty(sent: Json) -> bool:
    return bytes(sent) in EMPTY if isinstance(sent, msgspec.Raw) else not sent


def kind_of(part: Json) -> str:
    """Return the type of a part; like vLLM, infer a missing type from the other fields."""
    fields = part if isinstance(part, dict) else {}
    untyped = sorted(fields.keys() - {"type", "uuid"}, key=lambda name: name in TEXTS)
    return str(fields.get("type") or next(iter(untyped), ""))
