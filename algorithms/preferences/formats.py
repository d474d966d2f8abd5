"""Formats of data sets: rows of preferences and demonstrations, imported and exported.

The columns of an imported row determine its format. A row whose columns have other types than the
format's is an error that names the column. Numbers and truth values may be text, and messages may
be ShareGPT's. Imported items have no tokens: a run renders them with its policy's chat template and
learns from the tokens that the template adds for each answer.

Images of imported rows are data URLs in messages, or files in a column `images` with parts of type
"image" as placeholders, as in TRL. Stored messages name them by their digests.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import chain
from math import isfinite, nan
from typing import Annotated, Any, TypeVar

import msgspec

from agentrl.algorithms.preferences.draft import Draft
from agentrl.core.errors import ConfigError
from agentrl.core.images import (
    KIND,
    SCHEME,
    ImageRefusedError,
    digests,
    read_image,
    url_of,
    with_data_urls,
)
from agentrl.core.types import Image, Json, Transition, float32, int32
from agentrl.core.values import NotJsonError, as_json
from agentrl.store.base import Store
from agentrl.store.records import Item, Kind

Messages = list[dict[str, Json]]
Written = Callable[[Messages, Mapping[str, Image]], Messages]


async def export_rows(
    store: Store, items: Iterable[Item], written: Written = with_data_urls
) -> list[dict[str, Any]]:
    """The items in TRL's columns, with exact token ids if they are known. written: how messages
    show images, by default as data URLs."""
    rows: list[dict[str, Any]] = []
    for item in items:
        names = {"chosen": item.chosen, "rejected": item.rejected}
        sides = await store.sides([name for name in names.values() if name])
        first = sides[item.chosen][0]
        image_digests = {
            image for calls in sides.values() for call in calls for image in call.images
        }
        images = await store.images("", sorted(image_digests)) if image_digests else {}
        prompt = written(first.messages, images)
        row: dict[str, Any] = {"prompt": prompt, "split": item.split}
        if first.tools:
            row["tools"] = first.tools
        for word, digest in names.items():
            if digest:
                calls = sides[digest]
                messages = [*calls[-1].messages[len(first.messages) :], calls[-1].answer]
                key = word if item.kind == "pair" else "completion"
                row[key] = written([message for message in messages if message], images)
                if all(call.exact for call in calls):
                    start = len(first.prompt)
                    completion_ids = [*calls[-1].prompt[start:], *calls[-1].completion]
                    row |= {"prompt_ids": list(first.prompt), f"{key}_ids": completion_ids}
        labels = {"label": item.label, "labels": item.steps, "margin": item.margin}
        rows.append(row | {key: value for key, value in labels.items() if value not in (None, [])})
    return rows


Row = dict[str, Any]
COLUMNS = ("images", "image")
PROMPT_COLUMNS = ("prompt", "context", "messages", "conversations")  # columns with the first images
ANSWER_COLUMNS = ("chosen", "rejected", "completion")  # each continues the prompt columns


def with_digests(row: Row) -> tuple[Row, list[Image]]:
    """The row with the digests of its images in its messages, and the images. Raises ConfigError
    for an image that no policy can see, and for more or fewer images than parts."""
    files = _files(row)
    talks = {
        key: row[key]
        for key in (*PROMPT_COLUMNS, *ANSWER_COLUMNS)
        if isinstance(row.get(key), list | dict)
    }
    if files and not any(_is_gap(part) for talk in talks.values() for part in _parts(talk)):
        talks = _shown_first(row, len(files))
    images: dict[str, Image] = {}
    used = start = 0  # images of this column, and of the columns before the answers
    for key in (key for key in (*PROMPT_COLUMNS, *ANSWER_COLUMNS) if key in talks):
        at = start if key in ANSWER_COLUMNS else used
        talks[key], at = _named(talks[key], key, files, at, images)
        used = max(used, at)
        start = start if key in ANSWER_COLUMNS else at
    if used != len(files):
        raise ConfigError(
            f"{len(files)} images, and {used} parts of type 'image' in the messages: give one for "
            "each"
        )
    other_columns = {key: x for key, x in row.items() if not (files and key in COLUMNS)}
    return other_columns | talks, list(images.values())


def _named(
    talk: Any, where: str, files: list[str], at: int, images: dict[str, Image]
) -> tuple[Any, int]:
    """A column with digests, and the number of files used so far."""

    def part(value: Any, place: str) -> Any:
        nonlocal at
        if _is_gap(value):
            at += 1
            url = files[at - 1] if at <= len(files) else ""
            if not url:
                raise ConfigError(f"{place} is an image, and the row has {len(files)} images")
            value = {"type": KIND, KIND: {"url": url}}
        if url_of(value) is None:
            return value
        try:
            image = read_image(value)
        except ImageRefusedError as error:
            raise ConfigError(f"{place} is an image that cannot be seen: {error}") from None
        images[image.digest] = image
        about = value[KIND] if isinstance(value[KIND], dict) else {}
        return {"type": KIND, KIND: {**about, "url": SCHEME + image.digest}}

    messages = []
    for number, message in enumerate([talk] if isinstance(talk, dict) else talk):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            place = f"{where}[{number}].content"
            parts = [part(value, f"{place}[{index}]") for index, value in enumerate(content)]
            message = {**message, "content": parts}
        messages.append(message)
    return messages[0] if isinstance(talk, dict) else messages, at


def _is_gap(part: Any) -> bool:
    """Whether a part is the placeholder of the row's next image."""
    return isinstance(part, dict) and part.get("type") == "image"


def _parts(talk: Any) -> list[Any]:
    messages = [talk] if isinstance(talk, dict) else talk
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return [part for content in contents if isinstance(content, list) for part in content]


def _shown_first(row: Row, count: int) -> dict[str, Any]:
    """The columns of messages with all images before the first text of a user, as TRL has them."""
    gaps: list[Any] = [{"type": "image"}] * count
    prompt_key = next((key for key in PROMPT_COLUMNS if row.get(key)), None)
    talks = {
        key: row[key]
        for key in (*PROMPT_COLUMNS, *ANSWER_COLUMNS)
        if isinstance(row.get(key), list | dict)
    }
    for key in [prompt_key] if prompt_key else [key for key in ANSWER_COLUMNS if key in talks]:
        talk = row[key]
        if isinstance(talk, str):
            talks[key] = [{"role": "user", "content": [*gaps, {"type": "text", "text": talk}]}]
            continue
        messages = [dict(message) for message in ([talk] if isinstance(talk, dict) else talk)]
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is not None:
            text = first.get("content")
            parts = text if isinstance(text, list) else [{"type": "text", "text": text or ""}]
            first["content"] = [*gaps, *parts]
        talks[key] = messages
    return talks


def _files(row: Row) -> list[str]:
    """The images of the column `images`, as data URLs."""
    column = next((row[key] for key in COLUMNS if row.get(key) is not None), None)
    values: list[Any] = column if isinstance(column, list) else [] if column is None else [column]
    return [_url(value) for value in values]


def _url(value: Any) -> str:
    body: Any = value.get("bytes") if isinstance(value, dict) else value
    if hasattr(body, "save"):  # a decoded image of `datasets`
        file = BytesIO()
        body.save(file, "PNG")
        body = file.getvalue()
    if isinstance(body, bytes):
        # The type is detected from the file.
        return f"data:image/png;base64,{b64encode(body).decode()}"
    if isinstance(body, str) and body.startswith("data:"):
        return body
    raise ConfigError(
        f"images: {value!r:.80} is not an image; give the bytes of its file, or leave the column "
        "out"
    )


T = TypeVar("T")
Message = dict[str, Json]
FORMATS = (
    "chosen and rejected (with prompt, or messages that begin alike); prompt, completion, label; "
    "prompt, completion; prompt, completions and labels; context and completions with ranks; "
    "messages, or ShareGPT's conversations; PRM800K's question and label; "
    "Math-Shepherd's input and label"
)
STEP_END = "ки"  # ends a step in Math-Shepherd's text
# ShareGPT's names of roles, which differ between its users.
ROLES = {"human": "user", "prompter": "user"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "bing", "bard", "model"), "assistant")
ROLES |= dict.fromkeys(("observation", "function_response"), "tool")
ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
CALL = "function_call"  # ShareGPT's role of an assistant's message that calls a tool
NO_ANSWER = "rows without a prompt or an answer"
TIES = "ties, or the worse completion first"


class Ranked(msgspec.Struct):
    completion: Json
    rank: Json


class Problem(msgspec.Struct):
    problem: str


class Attempted(msgspec.Struct):
    text: str
    rating: float | None = None


class Step(msgspec.Struct):
    completions: list[Attempted] | None = None
    chosen_completion: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Solution(msgspec.Struct):
    steps: list[Step] | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Json] | str = ""


def add_row(draft: Draft, place: str, row: Row) -> None:
    """Add the items of a row, or count why it is unusable. place: its file and line.

    Raises ConfigError for columns of an unknown format, or of other types than the format's."""
    try:
        row, images = with_digests(row)
        draft.images |= {image.digest: image for image in images}
        plain: Row = as_json(row)
        _add(draft, {key: value for key, value in plain.items() if value is not None})
    except NotJsonError as error:
        raise ConfigError(f"{place}: {error.at('row')}") from None
    except (ConfigError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{place}: {error}") from None


def _add(draft: Draft, row: Row) -> None:
    if (labelled := _labelled_steps(row)) is not None:
        question, texts, labels = labelled
        if len(texts) != len(labels):
            draft.counts["rows with more or fewer labels than steps"] += 1
            return
        # One call per label: the answer up to the end of its step.
        ends = ["\n".join(texts[:n]) for n in range(1, len(texts) + 1)]
        answers = [{"role": "assistant", "content": text} for text in ends]
        _add_item(draft, row, "steps", question, answers, steps=labels)
    elif "chosen" in row and "rejected" in row:
        _add_pair(draft, row)
    elif "completion" in row and "label" in row:
        prompt, label = _prompt(row), _number(row["label"], "label")
        _add_item(draft, row, "label", prompt, _completion(row, prompt), label=label)
    elif "prompt" in row and "completion" in row:
        prompt = _prompt(row)
        _add_item(draft, row, "demonstration", prompt, _completion(row, prompt))
    elif "completions" in row:
        _add_ranked(draft, row)
    elif key := next((key for key in ("messages", "conversations") if key in row), None):
        talk = _with_system(row, _imitated(row, _messages(row, key)))
        size = next((n for n, message in enumerate(talk) if n and _is_learned(message)), len(talk))
        _add_item(draft, row, "demonstration", talk[:size], talk[size:])
    else:
        raise ConfigError(f"columns {', '.join(row)}: no known format. Known are {FORMATS}")


def _imitated(row: Row, talk: list[Message]) -> list[Message]:
    """The messages, with weight 0 for answers that are not in the column `imitate`."""
    if "imitate" not in row:
        return talk
    wanted = _convert(row["imitate"], set[int], "imitate")
    return [
        message if index in wanted or message["role"] != "assistant" else {**message, "weight": 0}
        for index, message in enumerate(talk)
    ]


def _add_pair(draft: Draft, row: Row) -> None:
    prompt, chosen, rejected = _prompt(row), _messages(row, "chosen"), _messages(row, "rejected")
    if not prompt:
        chosen, rejected = _dialogue(chosen), _dialogue(rejected)
    if min(len(chosen), len(rejected)) > 1 and (
        not prompt or all(_after(prompt, answer) for answer in (chosen, rejected))
    ):
        size = _common(chosen, rejected)
        system = [
            message for message in prompt[:1] if message["role"] == "system" != chosen[0]["role"]
        ]
        prompt, chosen, rejected = [*system, *chosen[:size]], chosen[size:], rejected[size:]
    chosen, rejected = (answer[_after(prompt, answer) :] for answer in (chosen, rejected))
    names = [(f"{side}_rating", f"score_{side}") for side in ("chosen", "rejected")]
    rated = [next((key for key in keys if key in row), None) for keys in names]
    better, worse = (None if key is None else _number(row[key], key) for key in rated)
    margin = None if better is None or worse is None else better - worse
    if "margin" in row:
        margin = _number(row["margin"], "margin")
    if margin is not None and margin <= 0:
        draft.counts[TIES] += 1
        return
    _add_item(draft, row, "pair", prompt, chosen, rejected, margin=margin)


def _add_ranked(draft: Draft, row: Row) -> None:
    ranked = _convert(row["completions"], list[Ranked], "completions")
    ranks = [_number(entry.rank, "rank") for entry in ranked]
    order = sorted(range(len(ranked)), key=lambda i: ranks[i])
    for worse in order[1:]:
        if ranks[worse] == ranks[order[0]]:
            draft.counts[TIES] += 1
        else:
            sides = ({"completion": ranked[i].completion} for i in (order[0], worse))
            answers = (_messages(side, "completion") for side in sides)
            _add_item(draft, row, "pair", _prompt(row), *answers)


def _add_item(
    draft: Draft,
    row: Row,
    kind: Kind,
    prompt: list[Message],
    *answers: list[Message],
    **fields: Any,
) -> None:
    tools = _tools(row.get("tools"))
    sides = [_calls(prompt, answer, tools, alone=kind == "steps") for answer in answers]
    if not all(sides) or not prompt:
        draft.counts[NO_ANSWER] += 1
        return
    digests = [draft.side(calls) for calls in sides]
    fields |= {"rejected": digests[1]} if len(digests) > 1 else {}
    draft.add(kind, msgspec.json.encode(prompt), digests[0], **fields)


# -- columns ---------------------------------------------------------------------------------------


def _convert(value: Any, kind: type[T], column: str) -> T:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{column}: {error}") from None


def _number(value: Any, column: str) -> float:
    text = value.strip() if isinstance(value, str) else value
    try:
        number = float(msgspec.convert(text, bool | float, strict=False))
    except (msgspec.ValidationError, OverflowError):
        number = nan
    if not isfinite(number):
        raise ConfigError(f"{column}: {value!r:.80} is neither a number nor true or false")
    return number


def _completion(row: Row, prompt: Sequence[Message]) -> list[Message]:
    messages = _messages(row, "completion")
    return messages[_after(prompt, messages) :]


def _after(prompt: Sequence[Message], answer: Sequence[Message]) -> int:
    """The number of messages with which an answer repeats its prompt, as UltraFeedback's do; 0: it
    does not."""
    questions = [_text_of(message) for message in prompt if message["role"] != "system"]
    places = [n for n, message in enumerate(answer, 1) if message["role"] != "system"]
    if not questions or len(places) < len(questions):
        return 0
    if [_text_of(answer[n - 1]) for n in places[: len(questions)]] == questions:
        return places[len(questions) - 1]
    if answer[places[0] - 1]["role"] == "assistant":  # it continues the prompt
        return 0
    # The prompt may be the last question alone.
    last = [n for n in places if [_text_of(answer[n - 1])] == questions]
    return last[-1] if last else 0


def _text_of(message: Message) -> tuple[Json, Json]:
    content = message.get("content") or ""
    return message["role"], content.strip() if isinstance(content, str) else content


TURN = re.compile(r"\n\n(Human|Assistant):[ \n]?")  # of HH-RLHF's texts


def _dialogue(messages: list[Message]) -> list[Message]:
    """The messages of a text with turns of a human and an assistant."""
    texts = [message.get("content") for message in messages]
    if len(texts) != 1 or not isinstance(text := texts[0], str) or not TURN.match(text):
        return messages
    _, *turns = TURN.split(text)
    roles = ("user" if who == "Human" else "assistant" for who in turns[::2])
    return [*chain(*map(_text_message, turns[1::2], roles))]


def _prompt(row: Row) -> list[Message]:
    key = next((key for key in ("prompt", "context", "conversations") if key in row), "")
    return _with_system(row, _dialogue(_messages(row, key, "user"))) if key else []


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    """The messages, preceded by ShareGPT's column `system`."""
    system = _messages(row, "system", "system") if "system" in row else []
    return [*system, *messages]


def _tools(value: Any) -> list[dict[str, Json]]:
    value = _decoded(value, "tools")
    if isinstance(value, list):
        value = [_decoded(tool, "tools") for tool in value]
    tools = _convert(value or [], list[dict[str, Json]], "tools")
    return [
        {"type": "function", "function": tool}
        if "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]


def _decoded(value: Any, column: str) -> Any:
    """The value of a text of JSON, as which tables hold lists; others unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{column}: the text is not JSON ({error})") from None


def _messages(row: Row, column: str, role: str = "assistant") -> list[Message]:
    """The messages of a column: a text of the `role`, a message, or a list of them."""
    value = row[column]
    if isinstance(value, str):
        if column not in ("messages", "conversations") and not _is_chat(value):
            return _text_message(value, role)
        value = _decoded(value, column)
    listed = [value] if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise ConfigError(f"{column}: {value!r:.80} is neither text nor messages; write it as text")
    return [_message(item, f"{column}[{index}]") for index, item in enumerate(listed)]


def _is_chat(text: str) -> bool:
    """Whether a text is a list of messages in JSON."""
    if not text.lstrip().startswith("["):
        return False
    with suppress(msgspec.DecodeError):
        items = msgspec.json.decode(text)
        kinds = [
            isinstance(item, dict) and ("content" in item or "from" in item or "tool_calls" in item)
            for item in items
        ]
        return bool(kinds) and all(kinds)
    return False


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r:.80}, not a message with a role and content")
    shared = value.get("role") is None and "from" in value
    message: Message = _sharegpt(value, where) if shared else value
    if not isinstance(message.get("role"), str):
        raise ConfigError(f'{where}: the message has no "role" that is text')
    parts = message.get("content") or ""
    if parts == "" and not (message.get("tool_calls") or "content" in message):
        raise ConfigError(f"{where}: the message has no content")
    if not isinstance(parts, str) and not _are_objects(parts):
        raise ConfigError(f"{where}: its content must be text or a list of parts")
    if not _are_objects(message.get("tool_calls") or []):
        raise ConfigError(f"{where}: its tool_calls must be a list of objects")
    # Rows that differ in the order of fields are equal.
    return {"role": message["role"]} | {key: message[key] for key in sorted(message)}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _sharegpt(message: Message, where: str) -> Message:
    name, value = message["from"], message.get("value")
    if name == CALL:
        try:
            called = msgspec.json.decode(str(value), type=CalledFunction | list[CalledFunction])
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{where}: {CALL} has no JSON with name and arguments ({error})"
            ) from None
        calls = called if isinstance(called, list) else [called]
        return {"role": "assistant", "tool_calls": [_called(entry) for entry in calls]}
    if not isinstance(name, str) or name not in ROLES:
        raise ConfigError(
            f"{where}: from {name!r:.80} is not a known role; write {', '.join(ROLES)}"
        )
    others = {key: entry for key, entry in message.items() if key not in ("from", "value", "role")}
    return others | {"role": ROLES[name]} | ({} if value is None else {"content": value})


def _called(function: CalledFunction) -> Json:
    text = function.arguments
    text = text if isinstance(text, str) else msgspec.json.encode(text).decode()
    return {"type": "function", "function": {"name": function.name, "arguments": text}}


def _labelled_steps(row: Row) -> tuple[list[Message], list[str], list[float | None]] | None:
    """Question, steps and labels from TRL's, PRM800K's or Math-Shepherd's columns, or None."""
    if "completions" in row and "labels" in row:
        completions = _convert(row["completions"], list[Any], "completions")
        marks = _convert(row["labels"], list[Any], "labels")
        labels = [None if mark is None else _number(mark, "labels") for mark in marks]
        return _prompt(row), [_text(completion) for completion in completions], labels
    if "question" in row and "label" in row:
        question = _convert(row["question"], Problem, "question").problem
        solution_steps = _convert(row["label"], Solution, "label").steps or []
        tried = [(step.completions or [], step.chosen_completion or 0) for step in solution_steps]
        if lost := [i for i, (completions, n) in enumerate(tried) if n >= len(completions) > 0]:
            raise ConfigError(f"label: step {lost[0]} has no completion of its chosen number")
        # A step without completions was written by a labeller; sampled text ends there.
        complete = next(
            (i for i, (completions, _) in enumerate(tried) if not completions), len(tried)
        )
        steps = [completions[n] for completions, n in tried[:complete]]
        right = [float((step.rating or 0) > 0) for step in steps]
        return _text_message(question, "user"), [step.text for step in steps], list(right)
    if "input" in row and "label" in row:
        text, label = (_convert(row[key], str, key) for key in ("input", "label"))
        first, *later = text.split(STEP_END)[:-1] or [text]
        question_text, _, start = first.partition(" Step 1:")
        lines = [line.strip() for line in label.split("\n")]  # a step may have several
        ends = [float(line[-1] == "+") for line in lines if line.endswith(("+", "-"))]
        return (
            _text_message(question_text, "user"),
            [part.strip() for part in (f"Step 1:{start}", *later)],
            [*ends],
        )
    return None


def _text_message(text: str, role: str) -> list[Message]:
    return [{"role": role, "content": text}] if text else []


def _text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    messages = _messages({"completions": completion}, "completions")
    return "\n".join(
        _convert(message.get("content") or "", str, "completions") for message in messages
    )


def _common(a: Sequence[Message], b: Sequence[Message]) -> int:
    """The number of leading messages that two conversations share, not counting their last
    messages."""
    size = min(len(a), len(b)) - 1
    return next((i for i in range(size) if a[i] != b[i]), max(size, 0))


def _is_learned(message: Message) -> bool:
    """Whether it is an answer to learn from; weight 0 is OpenAI's mark of one that is not."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _calls(
    prompt: Sequence[Message],
    answers: Sequence[Message],
    tools: list[dict[str, Json]],
    *,
    alone: bool,
) -> list[Transition]:
    """A call for each answer, with the prompt and, unless `alone`, earlier messages as context."""
    return [
        Transition(
            id=f"{index}", attempt="import", index=index, exact=False, tools=tools,
            prompt=int32(), completion=int32(), logprobs=float32(),
            messages=before, answer=message, images=digests(before),
        )
        for index, message in enumerate(answers)
        for before in [[*prompt, *([] if alone else answers[:index])]]
        if _is_learned(message)
    ]  # fmt: skip
