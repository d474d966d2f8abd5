"""Finds the tokens of tool results and other answers of the environment in a prompt.

A chat template writes a message's text between special marks, so the tokens of the text are found
by their bytes, between the end of the policy's earlier action and the end of the prompt. If a text
occurs there more than once, such as the name of a role, it is located by rendering the prompt with
another text in its place. Invariant: a token that contains anything but the text (a mark, another
message, the next header) is not an observation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.model.chat import Chat, Codec, RequestError, Tokenizer, text_content
from agentrl.algorithms.objective.core import Echo
from agentrl.core.types import Json, Transition

log = logging.getLogger("agentrl.algorithm")
PROBE = "observation probe 8f31"  # a text that no tool returns
Message = dict[str, Json]


@dataclass(slots=True)
class AnswerTexts:
    """Finds the observations that `echo` names; see `merge.Observations`.

    Called with a call and the earlier call that its prompt continues: yields for each token of the
    answers to the earlier call its index in the prompt, and the tool's name, or else the role."""

    echo: Echo
    tokenizer: Tokenizer
    chat: Chat = field(init=False)
    codec: Codec = field(init=False)
    spaceless: bool = field(init=False)  # whether tokens have no spaces, as those of whole words
    missing: int = 0  # texts that were not found in the prompt as it was sent
    empty: int = 0  # steps without an observation
    improbable: bool = False  # whether it was logged that most are too improbable

    def __post_init__(self) -> None:
        self.codec = Codec(self.tokenizer)
        self.chat = Chat(self.tokenizer, self.codec)
        self.spaceless = b" " not in self._bytes(self.codec.encode("a b"))

    def __call__(self, call: Transition, earlier: Transition) -> Iterator[tuple[int, str]]:
        start = len(earlier.prompt) + len(earlier.completion)
        gap = call.prompt[start:]
        if not len(gap) or min(gap) < 0:  # below 0: images, which no policy writes
            return
        pieces = [bytes(self.codec.token(token)[1]) for token in gap]
        ends = list(accumulate(map(len, pieces)))
        text, cursor = b"".join(pieces), 0
        for number, message in self.answers(call, earlier):
            span = self.span(text, cursor, call, number)
            if span is None:
                self._count_missing(call, message)
                continue
            first, cursor = span
            source = source_of(message, call.messages[len(earlier.messages)])
            if message.get("role") in self.echo.roles and source in (self.echo.tools or (source,)):
                for at, (size, end) in enumerate(zip(map(len, pieces), ends, strict=True)):
                    if size and first <= end - size and end <= cursor:
                        yield start + at, source

    def answers(self, call: Transition, earlier: Transition) -> list[tuple[int, Message]]:
        """The messages that answer the earlier call's action, up to the next assistant message,
        with their indices in the request."""
        first = len(earlier.messages) + 1
        new = enumerate(call.messages[first:], first)
        answering = takewhile(lambda pair: pair[1].get("role") != "assistant", new)
        return [(number, message) for number, message in answering if _text(message).strip()]

    def span(
        self, text: bytes, cursor: int, call: Transition, number: int
    ) -> tuple[int, int] | None:
        """Start and end of the text of message `number` in `text`, the last bytes of the prompt;
        None: not found."""
        content = _text(call.messages[number])
        texts: tuple[str, ...] = (content, content.strip())  # many templates strip
        if self.spaceless:
            texts = ("".join(content.split()),)
        for wanted in map(str.encode, texts):
            at = text.find(wanted, cursor)
            if at >= 0 and text.find(wanted, at + 1) < 0:
                return at, at + len(wanted)
            if at >= 0:
                end = len(text) - self.rest(call, number)
                first = end - len(wanted)
                return (first, end) if text[first:end] == wanted and first >= cursor else None
        return None

    def rest(self, call: Transition, number: int) -> int:
        """Bytes of the prompt after the text of message `number`; 0 if it cannot be rendered."""
        probed = {**call.messages[number], "content": PROBE}
        messages = [*call.messages[:number], probed, *call.messages[number + 1 :]]
        try:
            prompt: Sequence[int] = self.chat.encode(messages, call.tools)
        except RequestError:
            return 0
        text = self._bytes(prompt)
        return len(text) - text.rfind(PROBE.encode()) - len(PROBE)

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(bytes(self.codec.token(token)[1]) for token in tokens)

    def check(self, batch: Batch) -> None:
        """Log the first step without an observation."""
        if not batch.n_tokens or len(batch.observation_row):
            return
        self.empty += 1
        if self.empty == 1:
            log.warning(
                "+echo: step %d has no observation to learn from: no message of role %s%s follows "
                "an "
                "action in a prompt that continues its tokens",
                batch.step, " or ".join(self.echo.roles),
                f" and tool {' or '.join(self.echo.tools)}" if self.echo.tools else "",
            )  # fmt: skip

    def check_learned(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the first step of which most observations are too improbable to be learned."""
        share = metrics.get("echo/below_chance", 0.0)
        if share > 0.5 and not self.improbable:
            self.improbable = True
            log.warning(
                "+echo: step %d learns nothing from %.0f%% of what tools answered, which the "
                "policy finds far less probable than any token by chance: it was not trained on "
                "such text",
                step, 100 * share,
            )  # fmt: skip

    def _count_missing(self, call: Transition, message: Message) -> None:
        """Count a text that was not found, and log the first."""
        if message.get("role") in self.echo.roles:
            self.missing += 1
            if self.missing == 1:
                log.warning(
                    "+echo: what %s answered is not in the prompt of call %s as it was sent, so "
                    "it is not learned from: the chat template renders it in another way",
                    message.get("role"), call.id,
                )  # fmt: skip


def source_of(message: Message, answered: Message) -> str:
    """The name of the tool whose result a message is, else its role."""
    if message.get("role") != "tool":
        return str(message.get("role"))
    calls = answered.get("tool_calls")
    names = {
        str(call.get("id")): str(call.get("function", {}).get("name"))
        for call in (calls if isinstance(calls, list) else [])
    }
    only = next(iter(names.values())) if len(names) == 1 else "tool"
    return str(message.get("name") or names.get(str(message.get("tool_call_id")), only))


def _text(message: Message) -> str:
    try:
        return str(text_content(message.get("content"), "message") or "")
    except RequestError:
        return ""
