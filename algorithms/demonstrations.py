"""Demonstrations: conversations to imitate, as rows of prompts and the tokens that the policy would
have to sample. The prompt of an assistant message is rendered as by the policy server, from the
messages before it, and its tokens are those that the chat template writes after this prompt, up to
the end of the turn. So a template needs no marks, and its changes of earlier messages are in the
prompts. Invariant: a row's actions are exactly such tokens. Messages share a row as long as each
prompt begins with the tokens before it; a template that drops earlier thinking starts a new row.

`format_problem` reports whether a tiny model has learned the format of the demonstrations.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import msgspec
import torch
from transformers import PreTrainedModel

from agentrl.algorithms.conversations import Message
from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.chat import Chat, Codec, RequestError, Tokenizer
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.model.scaled import Inputs
from agentrl.core.errors import TrainingError
from agentrl.core.types import Json

log = logging.getLogger("agentrl.algorithm")
Answer = tuple[list[int], list[int]]  # the tokens of a prompt, and those to sample


class ConversationReader:
    """Renders conversations with a policy's chat template. ends: token ids that end a turn.
    inputs: the model's, if it reads more than text."""

    def __init__(
        self, tokenizer: Tokenizer, ends: Iterable[int], inputs: Inputs | None = None
    ) -> None:
        self._tokenizer, self._codec = tokenizer, Codec(tokenizer)
        self._chat = (inputs.chat if inputs else Chat)(tokenizer, self._codec)
        self._ends, self._reads_more = set(ends), inputs is not None
        self._end = min(self._ends)
        if tokenizer.eos_token_id in self._ends:
            self._end = tokenizer.eos_token_id
        self._said_endless = False

    def rows(self, conversation: Mapping[str, Json]) -> list[TokenRow]:
        """The rows of {"messages": [...], "tools": [...]}. Raises TrainingError with the message if
        the template does not render the tokens that the policy would sample."""
        rows: list[tuple[list[int], list[int]]] = []
        for prompt, completion in self.answers(conversation):
            if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
                rows.append(([], []))
            tokens, actions = rows[-1]
            tokens += [*prompt[len(tokens) :], *completion]
            actions += range(len(prompt), len(tokens))
        return [_row(tokens, actions) for tokens, actions in rows]

    def answers(self, conversation: Mapping[str, Json]) -> list[Answer]:
        """Prompt and tokens of each assistant message, except one that begins the conversation,
        because a policy never samples it. `imitate`: indices of the messages to include; default:
        all."""
        messages, tools = conversation["messages"], conversation.get("tools")
        options = conversation.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise TrainingError("chat_template_kwargs is not an object")
        answers = []
        if self._reads_more:
            self._fetch(messages)
        for index in _imitated(messages, conversation.get("imitate")):
            if index:
                try:
                    answers.append(self._answer(messages, index, tools, options))
                except (RequestError, TrainingError) as error:
                    raise TrainingError(f"messages[{index}]: {error}") from None
        if not answers:
            raise TrainingError("no message of the assistant follows another message")
        return answers

    def _fetch(self, messages: Json) -> None:
        """Read the images of the messages. In a thread, because an event loop may run in this
        one."""
        with ThreadPoolExecutor(1) as pool:
            try:
                fetched = self._chat.fetch(msgspec.json.encode(messages))
                pool.submit(asyncio.run, fetched).result()
            except RequestError as error:
                raise TrainingError(str(error)) from None

    def _answer(
        self, messages: list[Message], index: int, tools: Json, options: dict[str, Json]
    ) -> Answer:
        message = messages[index]
        if not (message.get("content") or message.get("tool_calls")):
            raise TrainingError("the assistant says nothing in it")
        written = str((message.get("content"), message.get("tool_calls")))
        for text in (self._text([end]) for end in self._ends):
            if text.strip() and text in written:
                raise TrainingError(f"the text has {text!r}, which ends a turn; leave it out")
        rendered = self._chat.encode(messages[:index], tools, **options)
        prompt, read = [*rendered], [int(id) for id in getattr(rendered, "read", rendered)]
        ended = options | {"add_generation_prompt": False}
        conversation = [*self._chat.encode(messages[: index + 1], tools, **ended)]
        begins = conversation[: len(prompt)] == prompt
        completion = conversation[len(prompt) :] if begins else self._after(prompt, conversation)
        end = next((n for n, token in enumerate(completion) if token in self._ends), None)
        if end is not None:
            return read, completion[: end + 1]
        while completion and not self._text(completion[-1:]).strip():  # between turns
            completion.pop()
        self._say_endless()
        return read, [*completion, self._end]  # otherwise a policy would never learn to end

    def _after(self, prompt: list[int], conversation: list[int]) -> list[int]:
        """The tokens of the text that `conversation` has after `prompt`, if a token spans both."""
        before, text = self._text(prompt), self._text(conversation)
        answer = text.removeprefix(before)
        # Some tokenizers add a space at the start of a text.
        for anchor in (self._text([self._end]), "") if text.startswith(before) else ():
            completion = self._codec.encode(anchor + answer)[len(self._codec.encode(anchor)) :]
            if self._text([*prompt, *completion]) == text:
                return completion
        raise TrainingError(
            "the chat template writes the messages before it in another way once the answer "
            "follows, so it does not tell what the policy would sample (does its prompt open the "
            "thinking, and the answer has none?); change the conversation or the template"
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _say_endless(self) -> None:
        if not self._said_endless:
            self._said_endless = True
            log.warning(
                "the chat template ends the assistant's messages with no token that ends a "
                "completion; the policy learns to end them with %r", self._text([self._end]),
            )  # fmt: skip


def _imitated(messages: Json, chosen: Json) -> list[int]:
    """The indices of the messages to imitate. Raises TrainingError for others than messages of the
    assistant."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TrainingError("messages is not a list of objects")
    assistant = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    if chosen is None:
        return assistant
    if not isinstance(chosen, list) or any(index not in assistant for index in chosen):
        raise TrainingError(
            f"imitate = {chosen!r:.80}: give indices of the assistant's, of {assistant}"
        )
    return sorted(chosen)


def _row(tokens: list[int], actions: list[int]) -> TokenRow:
    ones = torch.ones(len(actions))
    index = torch.tensor(actions, dtype=torch.int64)
    return TokenRow(torch.tensor(tokens), index, 0 * ones, ones, torch.zeros_like(index))


MAX_ROWS = 64  # conversations that are read
PACK_TOKENS = 1024  # of a forward pass, which would take a GB for all of them on a long prompt
TOO_HIGH = 0.1  # nats per token; a model that has learned the format has a hundredth of it


def format_problem(model: PreTrainedModel, rows: Sequence[TokenRow]) -> str:
    """The reason why rollouts of the model will fail, as the part of a sentence after its loss; "":
    none."""
    if (loss := format_loss(model, rows)) <= TOO_HIGH:
        return ""
    return (
        f"and of {loss:.2f} where they leave no choice, which is too high: it does not write"
        " their format. Give `imitator` more steps, or shorter and more similar conversations"
    )


@torch.no_grad()
def format_loss(model: PreTrainedModel, rows: Sequence[TokenRow]) -> float:
    """The mean loss, in nats, of predictable tokens: tokens that are the only successor of the
    previous token, and tokens that continue copied text, such as a name. 0 if there are none."""
    rows = rows[:MAX_ROWS]
    written = [list(pairwise(row.tokens.tolist())) for row in rows]  # the pair at i ends at i + 1
    acted = [
        [pairs[at - 1] for at in row.actions.tolist()]
        for pairs, row in zip(written, rows, strict=True)
    ]
    often, before = Counter(chain(*acted)), Counter(first for first, _ in chain(*acted))
    settled = [
        often[pair] == before[pair[0]] > len(rows) / 2
        or (often[pair] < len(rows) / 10 and pair in pairs[: at - 1])
        for pairs, row in zip(written, rows, strict=True)
        for at in row.actions.tolist()
        for pair in [pairs[at - 1]]
    ]
    losses = torch.empty(len(settled))
    for pack in pack_rows(rows, "trie", PACK_TOKENS):
        losses[pack.index] = -forward_logprobs(model, pack).cpu()
    losses = losses[torch.tensor(settled)]
    return float(losses.mean()) if len(losses) else 0.0
