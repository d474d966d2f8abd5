"""The import of recorded traces into a store, as the rollouts of one run.

A trace becomes a rollout of the run `recorded`, with its calls and spans, and its feedback as
rewards, so all commands that read stores can read it: view, show, `data mine`. Its id is a digest
of its content and start: importing again adds nothing but new feedback. Traces with the same first
input form a group. No call is exact, because a recording does not contain the sampled tokens.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from agentrl.core.errors import Conflict
from agentrl.core.images import KIND, SCHEME, ImageRefusedError, digests, read_image, url_of
from agentrl.core.otlp import AGENT_NAME, DESCRIPTION, TOOL_NAME
from agentrl.core.types import (
    ErrorKind,
    Failure,
    Image,
    NewRollout,
    Outcome,
    Reward,
    RolloutState,
    Sampling,
    Scope,
    Span,
    StepReward,
    Transition,
    float32,
    int32,
)
from agentrl.recorded import messages
from agentrl.recorded.nodes import Issues, Node, Note, Object, shortened, storable
from agentrl.recorded.sources import MALFORMED, files_of, traces_of
from agentrl.recorded.tree import Tree, tree_of
from agentrl.store import Store, open_store

RUN = "recorded"  # the run of imported traces
LEASE = 600.0  # seconds; writing a batch takes less
BATCH = 100  # traces that are written together
BATCH_NODES = 2000  # approximate maximum of spans in a batch
LATEST = 2**33 * 10**9  # nanoseconds, see `agentrl.store.rows`
MAX_TOKEN_COUNT = 2**31  # tokens
MAX_NAME_CHARS = 200  # characters of a role, a model, a step
UNKNOWN = "unknown"  # model
TOOL_SCHEMA = "gen_ai.tool.definition"  # attribute of a span
NO_TOKENS, NO_LOGPROBS = int32(), float32()
Item = TypeVar("Item")


class Recorded(NamedTuple):
    """A trace in the store's records. Calls and spans get their attempt's id when it is known."""

    rollout: NewRollout
    calls: list[Transition]
    spans: list[Span]
    rewards: list[Reward]
    images: list[Image]
    result: Any
    failure: Failure | None


@dataclass(slots=True)
class Imported:
    """The result of an import."""

    traces: int = 0  # added traces
    known: int = 0  # traces that existed already
    calls: int = 0
    spans: int = 0
    rewards: int = 0
    rows: dict[str, int] = field(default_factory=dict)  # by format
    issues: Issues = field(default_factory=Issues)


async def import_traces(
    source: Path, out: str, change: Callable[[Recorded], Recorded] | None = None
) -> Imported:
    """Add the traces of a file or folder to a store, which is created if there is none. change:
    applied to each trace before it is stored, such as `Redactor.applied`. Raises ConfigError if
    nothing can be read, Conflict while another import runs."""
    done = Imported()
    files_of(source)  # fails before the store is created
    async with open_store(out) as store, holding(store):
        traces = traces_of(source, done.issues, done.rows)
        records = (record for items in traces if (record := _converted(items, done.issues)))
        for batch in _chunks(records, _weight):
            if change:
                batch = [change(record) for record in batch]
            await store.hold_run(RUN, _owner(), lease=LEASE)
            await add_traces(store, batch, done)
    return done


@asynccontextmanager
async def holding(store: Store) -> AsyncIterator[None]:
    """Context in which no other process writes traces. Raises Conflict if one does."""
    await store.open_run(RUN, {"name": RUN}, owner=_owner(), lease=LEASE)
    await _remove_unfinished(store)
    try:
        yield
    finally:
        await store.hold_run(RUN, _owner(), lease=0.0)


def _converted(items: Iterable[Node | Note], issues: Issues) -> Recorded | None:
    """Convert a trace to the store's records; None if it has no nodes, or cannot be stored."""
    try:
        items = list(items)
        tree = tree_of(items, issues)
        if tree is None:
            issues.add("feedback is about no trace of the source and is left out", _names(items))
        return recorded_of(tree, issues) if tree else None
    except MALFORMED as error:
        issues.add("a trace cannot be stored and is left out", f"{type(error).__name__}: {error}")
        return None


def _weight(record: Recorded) -> int:
    return BATCH_NODES // BATCH + len(record.spans) + len(record.calls)


def _names(notes: Iterable[Node | Note]) -> str:
    return ", ".join(sorted({note.name for note in notes}))


def _owner() -> str:
    return f"traces-{os.getpid()}"


async def _remove_unfinished(store: Store) -> None:
    """Remove the leftovers of a killed import."""
    for state in (RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.CANCELLED):
        if left := [row.id for row in await store.rollouts(RUN, state=state)]:
            await store.cancel(left)
            await store.forget(left)


async def add_traces(store: Store, batch: Sequence[Recorded], done: Imported) -> None:
    """Write traces. For existing traces only new feedback is added, so redacted traces stay
    redacted."""
    by_id = {record.rollout.id: record for record in batch}
    new = await _enqueue(store, [record.rollout for record in by_id.values()])
    done.traces, done.known = done.traces + new, done.known + len(batch) - new
    left = dict(by_id)
    if new:
        claimed = await store.claim(new, runner=RUN, lease=LEASE, run=RUN)
        claimed_records = {attempt.id: left.pop(attempt.rollout.id) for attempt in claimed}
        calls = [
            replace(call, attempt=id)
            for id, record in claimed_records.items()
            for call in record.calls
        ]
        if images := {
            image.digest: image for record in claimed_records.values() for image in record.images
        }:
            await store.put_images(RUN, [*images.values()])
        for chunk in _chunks(calls, lambda call: 1 + len(call.messages)):
            await store.add_transitions(chunk)
        fences = {attempt.id: attempt.fence for attempt in claimed}
        await store.finish(
            [_outcome(id, fences[id], record) for id, record in claimed_records.items()]
        )
        done.calls += len(calls)
        done.spans += sum(len(record.spans) for record in claimed_records.values())
        done.rewards += sum(len(record.rewards) for record in claimed_records.values())
    # Feedback is added separately: only rewards that come with an outcome would replace those of an
    # earlier import.
    stored = {id: set[tuple[Any, ...]]() for id in by_id}
    for id in (id for id, record in left.items() if record.rewards):
        if trace := await store.trace(id, limit=1):
            stored[id] = {_reward_key(row) for row in trace.rollout.rewards}
    rewards = [
        StepReward(rollout=id, reward=row)
        for id, record in by_id.items()
        for row in record.rewards
        if _reward_key(row) not in stored[id]
    ]
    for begin in range(0, len(rewards), BATCH_NODES):
        await store.add_rewards(rewards[begin : begin + BATCH_NODES])


async def _enqueue(store: Store, rollouts: list[NewRollout]) -> int:
    try:
        return await store.enqueue(rollouts)
    except Conflict:  # some rows exist in another group, because their inputs were redacted since
        new = [row for row in rollouts if not await store.trace(row.id, limit=1)]
        return await store.enqueue(new)


def _reward_key(row: Reward) -> tuple[Any, ...]:
    return row.scope, row.target, row.name, row.source, row.value


def _chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive traces in chunks of about BATCH_NODES nodes, for bounded memory."""
    chunk, total = list[Item](), 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if total >= BATCH_NODES:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _outcome(attempt: str, fence: int, record: Recorded) -> Outcome:
    spans = [replace(span, attempt=attempt) for span in record.spans]
    return Outcome(
        attempt=attempt, fence=fence, result=record.result, spans=spans, failure=record.failure
    )


def recorded_of(tree: Tree, issues: Issues) -> Recorded:
    """A tree as records of the store."""
    root, where = tree.root, tree.root.trace[:40]
    task_input = shortened(storable(plain(first_input(tree))), issues, where)
    content = _content_digest(tree)
    id = _digest([content, root.start // 10**6])
    images: list[Image] = []
    call_ids = {node.id for node in tree.calls}
    calls: list[Transition] = []
    transition_ids: dict[str, str] = {}  # node -> transition
    clean = _cleaner(images, issues, where)
    for node in tree.nodes:
        if node.id in call_ids:
            transition_ids[node.id] = f"{id}-{len(calls)}"
            calls.append(_call(node, transition_ids[node.id], len(calls), clean))
        elif node.call:
            issues.add(
                "a model call has no messages or no answer, and is a span only",
                f"{node.name[:60]} of {where}",
            )
    spans = [_span(node, issues) for node in tree.nodes]
    rewards = [*_rewards(tree, spans, transition_ids, issues)]
    task: Object = {
        "input": task_input,
        "recorded": {"trace": root.trace[:200], "started": root.start / 1e9, "content": content},
    }
    rollout = NewRollout(
        id=id,
        run=RUN,
        group=group_of(task_input),
        index=int(id[:6], 16),
        task=task,
    )
    failure = None
    if root.error:
        failure = Failure(kind=ErrorKind.AGENT, message=shortened(root.error, issues, where))
    answer = root.call and root.call.answer
    output = answer.get("content") if answer else plain(root.output)
    result = shortened(storable(output), issues, where)
    return Recorded(rollout, calls, spans, rewards, images, result, failure)


def first_input(tree: Tree) -> Any:
    """The first input of a trace: its root's input, or else the first call's last message. For a
    trace with a single call on a single user message, this message."""
    users = [m for m in tree.root.call.messages if m["role"] == "user"] if tree.root.call else []
    if len(users) == 1:
        return users[0]["content"]
    if tree.root.input not in (None, "", {}, []):
        return tree.root.input
    for node in tree.calls:
        if node.call:
            return next(
                (m["content"] for m in reversed(node.call.messages) if m["role"] == "user"), None
            )
    return None


def plain(value: Any) -> Any:
    """A value with LangChain's serialised messages as chat messages."""
    if isinstance(value, dict):
        if value.get("type") == "constructor" and str((value.get("id") or [""])[-1]).endswith(
            ("Message", "MessageChunk")
        ):
            return messages.message_of(value)
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def group_of(value: Any) -> str:
    """The group of the traces with a first input."""
    return _digest(["input", normalised(value)])


def normalised(value: Any) -> str:
    """A first input normalised to recognise equal tasks: without case, spaces and order of
    fields."""
    text = value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()
    return " ".join(text.lower().split())


def _content_digest(tree: Tree) -> str:
    hasher = sha256()
    message_digests: dict[int, str] = {}  # a cache, because many calls share messages

    def digest(message: Object) -> str:
        if id(message) not in message_digests:
            message_digests[id(message)] = _digest(message)
        return message_digests[id(message)]

    for node in tree.nodes:
        hasher.update(_encoded(_content(node, digest)))
    return hasher.hexdigest()[:32]


def _content(node: Node, digest: Callable[[Object], str]) -> Any:
    """The content of a node, without ids and times."""
    call = node.call and [
        [*map(digest, node.call.messages)],
        node.call.answer,
        node.call.tools,
        node.call.model,
    ]
    tool = node.tool and [node.tool.name, node.tool.arguments, node.tool.result]
    return [
        node.name,
        node.kind,
        node.error,
        node.role,
        call,
        tool,
        None if node.call or node.tool else [node.input, node.output],
    ]


def _digest(value: Any) -> str:
    return sha256(_encoded(value)).hexdigest()[:32]


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic", enc_hook=str)


Clean = Callable[[Object], Object]


def _cleaner(images: list[Image], issues: Issues, where: str) -> Clean:
    """A function that makes messages storable, once for all calls that share one."""
    cache: dict[int, tuple[Object, Object]] = {}

    def clean(message: Object) -> Object:
        if id(message) not in cache:
            cleaned = shortened(storable(_with_digests(message, images, issues)), issues, where)
            # The cache keeps the message alive, so its id stays unique.
            cache[id(message)] = message, cleaned
        return cache[id(message)][1]

    return clean


def _call(node: Node, id: str, index: int, clean: Clean) -> Transition:
    call = node.call
    assert call is not None
    options, max_tokens = call.sampling, call.sampling.get("max_tokens")
    sampling = Sampling(
        temperature=float(options.get("temperature", 1.0)),
        top_p=float(options.get("top_p", 1.0)),
        max_tokens=int(max_tokens) if max_tokens and 0 < max_tokens < MAX_TOKEN_COUNT else None,
    )
    cleaned = [(message, clean(message)) for message in call.messages]
    seen = [
        clean_message
        for message, clean_message in cleaned
        if not message.get("content") or _says(clean_message)
    ]
    return Transition(
        id=id,
        attempt="",
        index=index,
        prompt=NO_TOKENS,
        completion=NO_TOKENS,
        logprobs=NO_LOGPROBS,
        role=node.role[:MAX_NAME_CHARS] or "agent",
        policy=call.model[:MAX_NAME_CHARS] or UNKNOWN,
        sampling=sampling,
        finish=call.finish,
        exact=False,
        messages=seen,
        tools=[storable(tool) for tool in call.tools],
        answer=clean(call.answer or {}),
        span=span_id(node.id),
        started=min(node.start, LATEST - 1) / 1e9,
        seconds=max(0, node.end - node.start) / 1e9 if node.start else 0.0,
        images=tuple(dict.fromkeys(digests(seen))),
    )


def _with_digests(message: Object, images: list[Image], issues: Issues) -> Object:
    """A message with digests of its images in place of data URLs, and without parts that are
    neither text nor an image, such as a search by a tool of the server."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        url = url_of(part) if isinstance(part, dict) else None
        kind = part.get("type") if isinstance(part, dict) else None
        if url is None and kind != "text":
            issues.add(
                "a part of a message that is neither text nor a readable image is left out",
                str(kind),
            )
            continue
        if url and url.startswith("data:"):
            try:
                images.append(image := read_image(part))
                part = {"type": KIND, KIND: {"url": SCHEME + image.digest}}
            except ImageRefusedError as error:
                issues.add("an image cannot be seen and is a text", str(error))
                part = {"type": "text", "text": "[image]"}
        elif url and url.startswith(SCHEME):
            issues.add("an image is named by its digest alone and is a text")
            part = {"type": "text", "text": "[image]"}
        parts.append(part)
    if len(parts) < len(content) and all(part["type"] == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _says(message: Object) -> bool:
    """Whether a message has any content left."""
    return any(message.get(key) for key in ("content", "tool_calls", "reasoning_content"))


def span_id(id: str) -> str:
    """The id of a span: OpenTelemetry's, or a digest of other tools' ids."""
    if len(id) == 16 and all(letter in "0123456789abcdef" for letter in id):
        return id
    return sha256(id.encode()).hexdigest()[:16]


def _span(node: Node, issues: Issues) -> Span:
    about: Object = {key: value for key, value in node.about.items() if value is not None}
    if node.role:
        about[AGENT_NAME] = node.role
    if node.error:
        about[DESCRIPTION] = node.error
    if node.tool:
        about[TOOL_NAME] = node.tool.name
        about |= {
            "gen_ai.tool.call.arguments": node.tool.arguments,
            "gen_ai.tool.call.result": node.tool.result,
        }
        about |= {TOOL_SCHEMA: node.tool.schema} if node.tool.schema else {}
    elif node.call:
        about["gen_ai.response.model"] = node.call.model
    elif node.kind != "llm":
        about |= {"input.value": plain(node.input), "output.value": plain(node.output)}
    attributes = {key: value for key, value in about.items() if value not in (None, "")}
    start, end = (min(max(0, time), LATEST) for time in (node.start, max(node.start, node.end)))
    return Span(
        id=span_id(node.id),
        attempt="",
        parent=span_id(node.parent) if node.parent else None,
        name=node.name[:MAX_NAME_CHARS],
        kind=node.kind,
        start=start,
        end=end,
        ok=not node.error,
        attributes=shortened(storable(attributes), issues, node.trace[:40]),
    )


def _rewards(
    tree: Tree, spans: list[Span], calls: dict[str, str], issues: Issues
) -> Iterator[Reward]:
    """Convert feedback: numbers to rewards, anything else to attributes of its spans."""
    by_id = {node.id: (node, span) for node, span in zip(tree.nodes, spans, strict=True)}
    taken: Counter[tuple[str, str, str]] = Counter()
    direct = {(note.name, note.node or tree.root.id) for note in tree.notes if not note.derived}
    for note in tree.notes:
        if note.derived and (note.name, note.node or tree.root.id) in direct:
            continue
        if note.node and note.node not in by_id:
            issues.add("feedback is about a step that was not recorded and is left out", note.name)
            continue
        node, span = by_id[note.node or tree.root.id]
        name = note.name[:MAX_NAME_CHARS] or "feedback"
        if note.text and note.value is None:
            span.attributes[f"feedback.{name}"] = storable(note.text)
        if note.correction is not None:
            span.attributes[f"feedback.{name}.correction"] = storable(note.correction)
        if note.value is None:
            issues.add("feedback without a number is kept with its span and trains nothing", name)
            continue
        scope, target = Scope.ROLLOUT, ""
        if node.id in calls:
            scope, target = Scope.TRANSITION, calls[node.id]
        elif node.id != tree.root.id and node.role:
            scope, target = Scope.ROLE, node.role[:MAX_NAME_CHARS]
        elif node.id != tree.root.id:
            span.attributes[f"feedback.{name}"] = note.value
            issues.add(
                "feedback on a step of no role is kept with its span and trains nothing", name
            )
            continue
        taken[key := (name, target, note.source)] += 1
        number = f"-{taken[key]}" if taken[key] > 1 else ""
        # The source includes the feedback's id, so that another person's feedback in a later import
        # does not replace it.
        source = f"{note.source}-{_digest(note.key)[:8]}" if note.key else note.source + number
        yield Reward(
            value=note.value,
            name=name,
            scope=scope,
            target=target or None,
            source=source,
            note=note.text[:2000],
        )
