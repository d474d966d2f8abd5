"""Print a rollout on the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from agentrl.base.images import describe, described
from agentrl.base.span_names import DIFF
from agentrl.errors import Invalid, StoreError
from agentrl.store import Store, open_store, unknown_rollout
from agentrl.store.records import RolloutRow
from agentrl.traces.spelling import spelling
from agentrl.types import POLICY, Json, Reward, Rollout, RolloutState, Scope, Trace, Transition

LONGEST_TITLE = 74  # of a panel of 80 columns
# Of what is printed unless all is asked for, as on the pages of `agentrl view`.
CALLS_PER_PAGE = 50
MAX_MESSAGES = 100  # of a call, the last ones
MAX_CHARACTERS = 2000  # of a message, of a call's arguments
MAX_DIFF = 50_000  # characters
STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


async def show_rollout(
    store_url: str, rollout: str, *, prompts: bool = False, first: int = 0, whole: bool = False
) -> None:
    """Print a rollout of a store, or the prompts of its calls as the policy read them: rendered by
    the chat template. A page of its calls, from the call `first`, with the ends of long messages
    cut off, unless it is the `whole` rollout. Raises StoreError for an unknown id, Invalid for a
    call that it does not have."""
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
    console.print(shown, soft_wrap=prompts)  # a prompt has its own lines only
    if page.left_out:
        more = f"; --call {page.end} prints the next" if page.end < page.total else ""
        console.print(f"{page.left_out}{more}, --full all.", highlight=False)


class TracePage(NamedTuple):
    """Some calls of a rollout."""

    trace: Trace  # with these calls only
    first: int  # position of the first of them
    total: int  # calls of the rollout
    before: Transition | None  # the call before them

    @property
    def end(self) -> int:
        return self.first + len(self.trace.transitions)

    @property
    def left_out(self) -> str:
        """Which calls these are; empty if they are all."""
        all_of_them = len(self.trace.transitions) == self.total
        return "" if all_of_them else f"Calls {self.first} to {self.end - 1} of {self.total:,}"


async def read_page(store: Store, rollout: str, first: int, limit: int | None) -> TracePage | None:
    """At most `limit` calls of a rollout from position `first` on, with images in words. None for
    an unknown rollout. Raises Invalid for a call that it does not have."""
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
    """The trace with images in words, in messages and as the `images` of its calls."""
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
    """What the policy read and wrote in each call, with the special tokens. config: the stored
    settings of the run, which name the tokenizers. first: the position of the trace's first call
    in its rollout."""
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
    tokens and options without effect. longest: characters of a message; with it only the last
    messages of a call are shown, and the beginning of a diff. before: the call before them, whose
    messages are left out."""
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
    title = f"{rollout.id}: {state_in_words(rollout)}, {rewards}, {rollout.seconds:.2f} s{tries}"
    if len(title) > LONGEST_TITLE:  # a border would cut it off
        parts.insert(0, Text(title.removeprefix(f"{rollout.id}: "), style="bold"))
        title = rollout.id
    return Panel(Group(*parts), title=Text(title), title_align="left")


def state_in_words(rollout: Rollout | RolloutRow) -> str:
    """How a rollout ended: one that nothing stopped has succeeded only if its outcome says so."""
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
    """Those of a rollout and its roles; calls have theirs beside them."""
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
        told = (f"{name} = {value}" for name, value in call.processors.items())
        note += f"\n          processors: {', '.join(told)}"
    if call.ignored:
        note += f"\n          ignored: {', '.join(call.ignored)}"
    return _message({"role": "assistant"} | (call.answer or {}), note, longest)
