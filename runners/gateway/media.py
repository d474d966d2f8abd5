"""What of a call is not text, and what a policy sees of it.

A text model is trained. Instead of an image it would see placeholder tokens, and two prompts with
other images but the same placeholders would be equal, so such a call is refused unless it goes to a
model that is not trained. A part may teach an attempt's `Sight` to see more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from agentrl.base.images import KIND
from agentrl.store.base import Store
from agentrl.types import Json, Transition

if TYPE_CHECKING:
    from agentrl.runners.gateway.attribution import ReceivedCall
    from agentrl.runners.gateway.request import Fields
    from agentrl.runners.gateway.upstream import Messages, Route

TEXTS = {"text", "input_text", "output_text", "refusal", "thinking", "reasoning"}  # types of parts
MEDIA = ("image", "images", "multi_modal_data", "prompt_embeds", "video", "videos")  # fields
EMPTY = {b"null", b"[]", b"{}", b'""', b"false"}


class Sight:
    """How the calls of an attempt are seen: here, as text only."""

    def __init__(self, advice: str = "") -> None:
        """advice: the end of a refusal of what is text but for images."""
        self._advice = advice

    def why_not(self, call: ReceivedCall, policy: str) -> str:
        """Explain why `policy` cannot be trained on a call; empty if it can."""
        fields, messages = call.request.fields, call.request.messages
        why = why_not_text(fields, messages, policy, call.role)
        images = why and not (media_field(fields) or not_text(messages, frozenset({KIND})))
        return why + self._advice if images else why

    async def sent(self, call: ReceivedCall, messages: Messages, route: Route) -> Fields:
        """Return the fields of a call for the route's server, with these messages: the call's own,
        or as they were adapted to the policy."""
        fields = call.request.fields
        return fields if messages is call.request.messages else fields | {"messages": messages}

    async def add(
        self, store: Store, call: ReceivedCall, rows: Sequence[Transition]
    ) -> Sequence[bool]:
        """Store the rows of a call, and before them what they refer to; the results are those of
        `add_transitions`."""
        return await store.add_transitions(rows)


def why_not_text(
    fields: Mapping[str, Json], messages: Sequence[Mapping[str, Json]], policy: str, role: str
) -> str:
    """Explain why `policy` cannot be trained on a prompt; empty if it is text."""
    found = media_field(fields) or not_text(messages)
    return not_trained(found, policy, role) if found else ""


def not_trained(found: str, policy: str, role: str) -> str:
    return (
        f"the policy {policy!r} is trained on text, and this call has {found}, which training would"
        f" not see: describe it in words, or {other_model(role)}"
    )


def other_model(role: str) -> str:
    return f"map the role {role!r} in [roles] to an endpoint of [upstreams], which is not trained"


def media_field(fields: Mapping[str, Json]) -> str:
    """Return the first field of a request that has other than text; empty if none has."""
    return next((name for name in MEDIA if not is_empty(fields.get(name))), "")


def not_text(messages: Sequence[Mapping[str, Json]], seen: frozenset[str] = frozenset()) -> str:
    """Describe the first part of chat messages that is not text, such as an image; empty if all
    are. `seen`: types of parts that are as good as text."""
    for number, message in enumerate(messages):
        for index, part in enumerate(parts_of(message)):
            kind = "text" if isinstance(part, str) else kind_of(part)
            if kind not in TEXTS and kind not in seen:
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
    """Return the type of a part; vLLM takes it from the other fields if it is missing."""
    found = part if isinstance(part, dict) else {}
    untyped = sorted(found.keys() - {"type", "uuid"}, key=lambda name: name in TEXTS)
    return str(found.get("type") or next(iter(untyped), ""))
