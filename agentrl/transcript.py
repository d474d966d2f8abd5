"""Rollouts on the console: one in full, and a success and a failure of a finished run.

Tokens are decoded with the policy's tokenizer, without torch.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from agentrl.core.config import RunConfig, derived, from_store
from agentrl.core.errors import AgentRLError, Invalid, StoreError
from agentrl.core.images import describe, described
from agentrl.core.otlp import DIFF
from agentrl.core.types import (
    POLICY,
    ROUNDING,
    Json,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Scope,
    StepRow,
    Trace,
    Transition,
    are_shares,
    step_in_words,
)
from agentrl.store import Store, open_store, unknown_rollout
from agentrl.store.records import RolloutRow

MAX_TITLE_CHARS = 74  # in a panel of 80 columns
# Limits of the short form, as on the pages of `agentrl view`.
CALLS_PER_PAGE = 50
MAX_MESSAGES = 100  # of a call: its last messages
MAX_CHARACTERS = 2000  # of a message, of a call's arguments
MAX_DIFF = 50_000  # characters
STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


async def show_rollout(
    store_url: str, rollout: str, *, prompts: bool = False, first: int = 0, whole: bool = False
) -> None:
    """Print a rollout of a store, or the prompts of its calls as the policy read them: rendered by
    the chat template. Prints one page of calls from the call `first` on and shortens long messages,
    unless `whole`. Raises StoreError for an unknown id, Invalid for a call that does not exist."""
    async with open_store(store_url, readonly=True) as store:
        page = await read_page(store, rollout, first, limit=None if whole else CALLS_PER_PAGE)
        if page is None:
            raise StoreError(await unknown_rollout(store, rollout))
        state = await store.run(page.trace.rollout.run)
    if prompts:
        shown = render_prompts(page.trace, state.config if state else {}, page.first)
    else:
        shown = render_trace(page.trace, None if whole else MAX_CHARACTERS, page.before)
    console = Console()
    console.print(shown, soft_wrap=prompts)  # keeps the lines of the prompt
    if page.left_out:
        more = f"; --call {page.end} prints the next" if page.end < page.total else ""
        console.print(f"{page.left_out}{more}, --full all.", highlight=False)


class TracePage(NamedTuple):
    """Some calls of a rollout."""

    trace: Trace  # with these calls only
    first: int  # position of the first shown call
    total: int  # calls of the rollout
    before: Transition | None  # the call before these calls

    @property
    def end(self) -> int:
        return self.first + len(self.trace.transitions)

    @property
    def left_out(self) -> str:
        """The range of the shown calls; empty if all are shown."""
        all_of_them = len(self.trace.transitions) == self.total
        return "" if all_of_them else f"Calls {self.first} to {self.end - 1} of {self.total:,}"


async def read_page(store: Store, rollout: str, first: int, limit: int | None) -> TracePage | None:
    """At most `limit` calls of a rollout from position `first` on, with images in words. None for
    an unknown rollout. Raises Invalid for a call that does not exist."""
    start = max(first - 1, 0)
    size = None if limit is None else limit + first - start
    trace = await store.trace(rollout, first=start, limit=size)
    if trace is None:
        return None
    total = start + len(trace.transitions)
    if start or len(trace.transitions) == size:
        total = len(await store.outline(rollout))
    if first < 0 or first >= max(total, 1):
        calls = f"{total:,} calls, which count from 0"
        raise Invalid(f"{rollout} has {calls}: there is no call {first}")
    trace = await in_words(store, trace)
    before = trace.transitions[0] if first > start else None
    return TracePage(
        replace(trace, transitions=trace.transitions[first - start :]), first, total, before
    )


async def in_words(store: Store, trace: Trace) -> Trace:
    """The trace with descriptions of images, in messages and in the `images` of calls."""
    digests = sorted({digest for call in trace.transitions for digest in call.images})
    found = await store.images(trace.rollout.run, digests) if digests else {}
    calls = [
        replace(
            call,
            messages=described(call.messages, found),
            images=tuple(describe(found.get(digest)) for digest in call.images),
        )
        for call in trace.transitions
    ]
    return replace(trace, transitions=calls)


def render_prompts(trace: Trace, config: dict[str, Json], first: int = 0) -> RenderableType:
    """Prompt and completion of each call with special tokens, decoded from the token ids. config:
    the stored settings of the run, which name the tokenizers. first: the position of the trace's
    first call in its rollout."""
    parts: list[RenderableType] = []
    for at, call in enumerate(trace.transitions, first):
        if not call.exact:
            text = "its tokens are not known; without --prompt its messages are printed"
            parts.append(Text(f"call {at}, {call.role}: {text}", style="bold"))
            continue
        own = spelling(config, call.policy)
        note = f": token ids, because {own.missing}" if own.missing else ""
        size = f"{len(call.prompt)} + {len(call.completion)} tokens"
        parts.append(Text(f"call {at}, {call.role}, {size}{note}", style="bold"))
        shown = own.prompt(call.prompt.tolist(), call.images) + " " * bool(own.missing)
        prompt = Text(shown, style="cyan")
        parts.append(prompt.append(own.text(call.completion.tolist()), style="green"))
    return Group(*parts or [Text("no model call")])


def render_trace(
    trace: Trace, longest: int | None = None, before: Transition | None = None
) -> RenderableType:
    """A rollout as a rich panel: its seats, the rollout that it repeats, every message of these
    calls once, and the diff of its workspace. Model calls show role, policy, version, numbers of
    tokens and options without effect. longest: maximum characters of a message; if set, only the
    last messages of a call and the beginning of a diff are shown. before: the call before these
    calls; its messages are left out."""
    parts: list[RenderableType] = []
    # Messages of the last call of each role, that of the last call last.
    shown = {before.role: before.messages} if before else {}
    if trace.rollout.seats:
        seats = ", ".join(f"{role}: {policy}" for role, policy in trace.rollout.seats.items())
        parts.append(Text(f"seats     {seats}", style="dim"))
    if (branch := trace.rollout.branch) is not None:
        lost = f" without {', '.join(branch.without)}" if branch.without else ""
        parts.append(Text(f"repeats   {branch.rollout}{lost}", style="dim"))
    by_call: dict[str | None, list[Reward]] = {}
    for row in trace.rollout.rewards:
        by_call.setdefault(row.target, []).append(row)
    for call in trace.transitions:
        messages = call.messages
        earlier = [*[*shown.values()][-1:], shown.get(call.role, [])]
        known = max(len(one) if messages[: len(one)] == one else 0 for one in earlier)
        if known and len(messages) > known and messages[known].get("role") == "assistant":
            known += 1  # the previous answer, in the agent's form
        if longest and (skipped := len(messages) - known - MAX_MESSAGES) > 0:
            parts.append(Text(f"... {skipped:,} messages before these", style="dim"))
            known += skipped
        parts += [_message(message, longest=longest) for message in messages[known:]]
        parts.append(_answer(call, by_call.get(call.id, []), longest))
        shown.pop(call.role, None)
        shown[call.role] = messages
    if trace.rollout.failure:
        failure = trace.rollout.failure
        parts.append(Text(f"{failure.kind}: {failure.message}", style="bold red"))
        if failure.traceback:
            parts.append(Text(failure.traceback.rstrip(), style="red dim"))
    diffs = [str(span.attributes[DIFF]) for span in trace.spans if span.attributes.get(DIFF)]
    parts += [
        Syntax(_cut(diff, longest and MAX_DIFF), "diff", background_color="default")
        for diff in diffs
    ]
    rollout = trace.rollout
    rewards = rewards_in_words(rollout.rewards) or "no reward"
    tries = f", attempt {rollout.attempts}" if rollout.attempts > 1 else ""
    state = state_in_words(rollout)
    if rollout.purpose is Purpose.TRAIN and rollout.step >= 0:  # its id has another number
        state = f"{step_in_words(rollout.step)}, {state}"
    title = f"{rollout.id}: {state}, {rewards}, {rollout.seconds:.2f} s{tries}"
    if len(title) > MAX_TITLE_CHARS:  # a border would cut it off
        parts.insert(0, Text(title.removeprefix(f"{rollout.id}: "), style="bold"))
        title = rollout.id
    return Panel(Group(*parts), title=Text(title), title_align="left")


def state_in_words(rollout: Rollout | RolloutRow) -> str:
    """The state of a rollout as text: a completed rollout is called successful only if its outcome
    is."""
    rows = (row for row in rollout.rewards if row.scope is Scope.ROLLOUT and row.name == "outcome")
    won = next((row.value for row in rows), 0.0) > 0
    ended = rollout.state is RolloutState.SUCCEEDED and not won
    return "completed" if ended else rollout.state.value


def _message(message: dict[str, Any], note: str = "", longest: int | None = None) -> Text:
    role = str(message.get("role", "?"))
    text = Text(f"{role:<10}", style=f"bold {STYLES.get(role, '')}")
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = msgspec.json.encode(content).decode()
    text.append(_cut(content, longest), style=STYLES.get(role, ""))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        arguments = _cut(str(function.get("arguments")), longest)
        text.append(f"{function.get('name')}({arguments}) ", style="magenta")
    text.append(note, style="dim")
    return text


def _cut(text: str, longest: int | None) -> str:
    if longest is None or len(text) <= longest:
        return text
    return f"{text[:longest]} ... ({len(text) - longest} characters more)"


def rewards_in_words(rewards: Sequence[Reward]) -> str:
    """Rewards of a rollout and its roles as text; rewards of calls are shown with the calls."""
    return ", ".join(
        f"{row.target}: {_valued(row)}" if row.scope is Scope.ROLE else _valued(row)
        for row in rewards
        if row.scope is not Scope.TRANSITION
    )


def _valued(reward: Reward) -> str:
    return f"{reward.name} {reward.value:g}"


def _answer(call: Transition, rewards: Sequence[Reward], longest: int | None) -> Text:
    by = "" if call.policy == POLICY else f" by {call.policy}"
    versions = f" {call.versions}" if call.versions else ""
    note = (
        f"   [{call.role}{by}{versions}, {len(call.prompt)} +"
        f" {len(call.completion)} tokens, {', '.join([call.finish, *map(_valued, rewards)])}]"
    )
    if call.processors:
        values = (f"{name} = {value}" for name, value in call.processors.items())
        note += f"\n          processors: {', '.join(values)}"
    if call.ignored:
        note += f"\n          ignored: {', '.join(call.ignored)}"
    return _message({"role": "assistant"} | (call.answer or {}), note, longest)


LOOK_BACK = 3  # last evaluations to search for examples


async def examples(
    store: Store, config: RunConfig, steps: list[StepRow]
) -> AsyncIterator[tuple[str, RenderableType]]:
    """Titles and panels of the example rollouts."""
    for title, rollout in (await find(store, config, steps)).items():
        trace = await store.trace(rollout.id)
        if trace:
            yield title, render_trace(await in_words(store, trace), longest=400)


async def find(store: Store, config: RunConfig, steps: list[StepRow]) -> dict[str, Rollout]:
    """Title -> the best rollout of the last evaluations with an outcome above 0, and one with
    outcome 0; a failed rollout only if there is no other, because the report lists failures."""
    found: dict[str, Rollout] = {}
    best: Rollout | None = None
    evaluated = [row.step for row in steps if any(name.startswith("eval/") for name in row.metrics)]
    for step in evaluated[: -LOOK_BACK - 1 : -1]:
        rows = await store.rollouts(config.name, purpose=Purpose.EVAL, step=step)
        share = are_shares((row.metrics for row in steps), (row.reward() for row in rows))
        done = [row for row in rows if row.state is RolloutState.SUCCEEDED and row.reward() > 0]
        if done and best is None:
            best = max(done, key=Rollout.reward)
            found[best_title(best.reward(), share=share)] = best
        bad = [row for row in rows if row not in done]
        if bad and "A failure" not in found:
            found["A failure"] = min(bad, key=lambda row: row.state is RolloutState.FAILED)
        if len(found) == 2:
            break
    after = ", after {} steps" if config.steps else ""
    titles = sorted(found, key="A failure".__eq__)
    return {title + after.format(found[title].step): found[title] for title in titles}


def best_title(outcome: float, *, share: bool) -> str:
    """The title of the best rollout. share: whether outcomes are from 0 to 1, so that less than 1
    is not a success."""
    return f"Best, {outcome:.2g} of 1" if share and outcome < 1 - ROUNDING else "A success"


REPLACEMENT = "\ufffd"  # the text of a token that is part of a character


class Spelling:
    """Decodes the tokens of one policy. `missing`: why it cannot and shows ids instead."""

    def __init__(self, file: Path | None, missing: str = "") -> None:
        self._tokenizer, self.missing = None, missing
        self._image: int | None = None  # placeholder token of images
        if file is not None:
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_buffer(file.read_bytes())
                self._image = _image_token(file.parent)
            except (ImportError, OSError, ValueError) as error:
                self.missing = f"{file} cannot be read ({error})"

    def text(self, ids: Sequence[int]) -> str:
        """The text of all tokens, including special ones; their ids without a tokenizer."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def prompt(self, ids: Sequence[int], images: Sequence[str]) -> str:
        """The text of a prompt with descriptions of images in place of placeholders."""
        runs = [(image, [*run]) for image, run in groupby(ids, self._image.__eq__)]
        sizes = [len(run) for image, run in runs if image is True]
        if not sizes or not images or self._tokenizer is None:
            return self.text(ids)
        once = [id for image, run in runs for id in (run[:1] if image is True else run)]
        texts = self.text(once).split(self._tokenizer.id_to_token(self._image))
        if len(texts) != len(sizes) + 1:  # other tokens have the same text
            return self.text(ids)
        # Adjacent images form one run of placeholders, and the policy may have sampled a
        # placeholder itself.
        named = images if len(images) == len(sizes) else ["[image]"] * len(sizes)
        shown = (f"{one[:-1]}, {n} tokens]" for one, n in zip(named, sizes, strict=True))
        return "".join(text + next(shown, "") for text in texts)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; joined they are `text(ids)`. Tokens that end inside a character
        have the text '', and the token that completes it has the whole character.

        Each token is decoded together with only the token before it, so the time is linear."""
        if self._tokenizer is None:
            return [f"{id} " for id in ids[:-1]] + [str(id) for id in ids[-1:]]
        found, start, read = list[str](), 0, 0
        for end in range(1, len(ids) + 1):
            text, known = self.text(ids[start:end]), self.text(ids[start:read])
            if text.endswith(REPLACEMENT) and end < len(ids):
                found.append("")
                continue
            found.append(text[len(known) :])
            start, read = read, end
        return found


def _image_token(folder: Path) -> int | None:
    """The token for images of the model in a folder, if it reads images."""
    file = folder / "config.json"
    shape = json.loads(file.read_bytes()) if file.is_file() else {}
    found = shape.get("image_token_id", shape.get("image_token_index"))
    return found if isinstance(found, int) else None


def spelling(config: dict[str, Json], policy: str) -> Spelling:
    """The spelling of a policy's tokens, from the settings that its run stored."""
    try:
        run = from_store(config)
        name = (derived.view(run, policy) if policy in run.policies else run).model_path()
    except AgentRLError as error:
        return Spelling(None, f"the settings of the run cannot be read: {error}")
    file = Path(name, "tokenizer.json")
    if name and file.is_file():
        return Spelling(file)
    try:
        from huggingface_hub import try_to_load_from_cache  # never downloads

        cached = try_to_load_from_cache(name, file.name)
    except (ImportError, ValueError):  # not a hub name
        cached = None
    if isinstance(cached, str):
        return Spelling(Path(cached))
    return Spelling(None, f"the tokenizer of {name or policy} is not on this machine")
