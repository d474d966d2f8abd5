"""Print a rollout on the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from agentrl.base.images import describe, described
from agentrl.base.span_names import DIFF
from agentrl.errors import StoreError
from agentrl.store import Store, open_store, unknown_rollout
from agentrl.store.records import RolloutRow
from agentrl.traces.spelling import spelling
from agentrl.types import POLICY, Json, Reward, Rollout, RolloutState, Scope, Trace, Transition

LONGEST_TITLE = 74  # of a panel of 80 columns
STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


async def show_rollout(store_url: str, rollout: str, *, prompts: bool = False) -> None:
    """Print a rollout of a store, or the prompts of its calls as the policy read them: rendered by
    the chat template. Raises StoreError for an unknown id."""
    async with open_store(store_url, readonly=True) as store:
        trace = await store.trace(rollout)
        if trace is None:
            raise StoreError(await unknown_rollout(store, rollout))
        trace, state = await in_words(store, trace), await store.run(trace.rollout.run)
    shown = render_prompts(trace, state.config if state else {}) if prompts else render_trace(trace)
    Console().print(shown, soft_wrap=prompts)  # a prompt has its own lines only


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


def render_prompts(trace: Trace, config: dict[str, Json]) -> RenderableType:
    """What the policy read and wrote in each call, with the special tokens. config: the stored
    settings of the run, which name the tokenizers."""
    parts: list[RenderableType] = []
    for at, call in enumerate(trace.transitions):
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


def render_trace(trace: Trace, longest: int | None = None) -> RenderableType:
    """A rollout as a rich panel: its seats, the rollout that it repeats, every message once (its
    first `longest` characters), and the diff of its workspace. Model calls show role, policy,
    version, numbers of tokens and options without effect."""
    parts: list[RenderableType] = []
    shown: list[dict[str, Any]] = []
    if trace.rollout.seats:
        seats = ", ".join(f"{role}: {policy}" for role, policy in trace.rollout.seats.items())
        parts.append(Text(f"seats     {seats}", style="dim"))
    if (branch := trace.rollout.branch) is not None:
        lost = f" without {', '.join(branch.without)}" if branch.without else ""
        parts.append(Text(f"repeats   {branch.rollout}{lost}", style="dim"))
    for call in trace.transitions:
        messages = call.messages
        known = len(shown) if messages[: len(shown)] == shown else 0
        if known and len(messages) > known and messages[known].get("role") == "assistant":
            known += 1  # the previous answer, in the agent's form
        parts += [_message(message, longest=longest) for message in messages[known:]]
        parts.append(_answer(call, [row for row in trace.rollout.rewards if row.target == call.id]))
        shown = messages
    if trace.rollout.failure:
        failure = trace.rollout.failure
        parts.append(Text(f"{failure.kind}: {failure.message}", style="bold red"))
        if failure.traceback:
            parts.append(Text(failure.traceback.rstrip(), style="red dim"))
    diffs = [str(span.attributes[DIFF]) for span in trace.spans if span.attributes.get(DIFF)]
    parts += [Syntax(diff, "diff", background_color="default") for diff in diffs]
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
    if longest is not None and len(content) > longest:
        content = f"{content[:longest]} ... ({len(content) - longest} characters more)"
    text.append(content, style=STYLES.get(role, ""))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        text.append(f"{function.get('name')}({function.get('arguments')}) ", style="magenta")
    text.append(note, style="dim")
    return text


def rewards_in_words(rewards: Sequence[Reward]) -> str:
    """Those of a rollout and its roles; calls have theirs beside them."""
    return ", ".join(
        f"{row.target}: {_valued(row)}" if row.scope is Scope.ROLE else _valued(row)
        for row in rewards
        if row.scope is not Scope.TRANSITION
    )


def _valued(reward: Reward) -> str:
    return f"{reward.name} {reward.value:g}"


def _answer(call: Transition, rewards: Sequence[Reward]) -> Text:
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
    return _message({"role": "assistant"} | (call.answer or {}), note)
