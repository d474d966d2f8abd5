"""Import and export data sets: JSONL, parquet and Hugging Face data sets, in the usual formats.

The columns determine the format. Imported items have no tokens: a run renders them with its
policy's chat template and learns from the tokens that the template adds for each answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.datasets.draft import Draft
from agentrl.datasets.records import Item
from agentrl.errors import ConfigError
from agentrl.store.base import Store
from agentrl.types import Json, Transition, float32, int32

Message = dict[str, Json]
FORMATS = (
    "chosen and rejected (with prompt, or messages that begin alike); prompt, completion, label; "
    "prompt, completions and labels; context and completions with ranks; messages; PRM800K's "
    "question and label; Math-Shepherd's input and label"
)
STEP = "ки"  # ends a step in Math-Shepherd's text


def read_rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of "file.jsonl", "file.parquet" or "hf:owner/name[/config][@revision][:split]".

    Raises ConfigError if it cannot be read."""
    path = Path(source)
    try:
        if source.startswith("hf:"):
            from datasets import load_dataset

            name, _, split = source.removeprefix("hf:").partition(":")
            name, _, revision = name.partition("@")
            parts = name.split("/")
            name, options = "/".join(parts[:2]), {"revision": revision or None}
            yield from load_dataset(name, *parts[2:], split=split or "train", **options)
        elif path.suffix == ".parquet":
            from pyarrow import parquet

            for batch in parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        else:
            with path.open("rb") as lines:
                reader = msgspec.json.Decoder(dict[str, Any])
                yield from (reader.decode(line) for line in lines if line.strip())
    except ImportError as error:
        raise ConfigError(
            f"{source}: {error.name} is missing: pip install 'agentrl[data]'"
        ) from None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read as JSONL, parquet or hf:NAME: {error}"
        ) from None


def add_row(draft: Draft, row: dict[str, Any]) -> None:
    """Add the items of a row, or count why it is unusable.

    Raises ConfigError for columns of an unknown format."""
    row = {key: value for key, value in row.items() if value is not None}
    tools = row.get("tools") or []
    tools = msgspec.json.decode(tools) if isinstance(tools, str) else tools
    prompt = _messages(row.get("prompt", row.get("context", [])), "user")

    def add(kind: Any, prompt: Sequence[Message], *answers: Any, **fields: Any) -> None:
        said = [_messages(answer, "assistant") for answer in answers]
        sides = [_calls(prompt, one, tools, alone=kind == "steps") for one in said]
        if not all(sides) or not prompt:
            draft.counts["rows without a prompt or an answer"] += 1
            return
        digests = [draft.side(calls) for calls in sides]
        fields |= {"rejected": digests[1]} if len(digests) > 1 else {}
        draft.add(kind, msgspec.json.encode(prompt), digests[0], **fields)

    if (labelled := _labelled_steps(row)) is not None:
        question, texts, labels = labelled
        if len(texts) != len(labels):
            draft.counts["rows with more or fewer labels than steps"] += 1
            return
        # One call per label: the answer up to the end of its step.
        ends = ["\n".join(texts[:n]) for n in range(1, len(texts) + 1)]
        said = [{"role": "assistant", "content": text} for text in ends]
        add("steps", _messages(question, "user"), said, steps=list(map(float, labels)))
    elif "chosen" in row and "rejected" in row:
        chosen, rejected = row["chosen"], row["rejected"]
        if not prompt and isinstance(chosen, list):
            size = _common(chosen, rejected)
            prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        rated: list[Any] = [
            row.get(f"{w}_rating", row.get(f"score_{w}")) for w in ("chosen", "rejected")
        ]
        margin = row.get("margin", None if None in rated else rated[0] - rated[1])
        if margin is not None and margin <= 0:
            draft.counts["ties, or the worse side first"] += 1
            return
        add("pair", prompt, chosen, rejected, margin=margin)
    elif "completion" in row and "label" in row:
        add("label", prompt, row["completion"], label=float(row["label"]))
    elif "completions" in row:
        ranked = sorted(row["completions"], key=lambda one: one["rank"])
        for worse in ranked[1:]:
            if worse["rank"] == ranked[0]["rank"]:
                draft.counts["ties, or the worse side first"] += 1
            else:
                add("pair", prompt, ranked[0]["completion"], worse["completion"])
    elif "messages" in row:
        said = row["messages"]
        size = next((i for i, m in enumerate(said) if m["role"] == "assistant"), len(said))
        add("demonstration", said[:size], said[size:])
    else:
        raise ConfigError(f"columns {', '.join(row)}: no known format. Known are {FORMATS}")


async def export_rows(store: Store, items: Iterable[Item]) -> list[dict[str, Any]]:
    """The items in TRL's columns, with exact token ids if they are known."""
    rows: list[dict[str, Any]] = []
    for item in items:
        names = {"chosen": item.chosen, "rejected": item.rejected}
        sides = await store.sides([name for name in names.values() if name])
        first = sides[item.chosen][0]
        row: dict[str, Any] = {"prompt": first.messages, "split": item.split}
        for word, digest in names.items():
            if digest:
                calls = sides[digest]
                said = [*calls[-1].messages[len(first.messages) :], calls[-1].answer]
                key = word if item.kind == "pair" else "completion"
                row[key] = [message for message in said if message]
                if all(call.exact for call in calls):
                    start = len(first.prompt)
                    whole = [*calls[-1].prompt[start:], *calls[-1].completion]
                    row |= {"prompt_ids": list(first.prompt), f"{key}_ids": whole}
        known = {"label": item.label, "labels": item.steps, "margin": item.margin}
        rows.append(row | {key: value for key, value in known.items() if value not in (None, [])})
    return rows


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet or JSONL, depending on the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'agentrl[data]'") from None
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)


def _labelled_steps(row: dict[str, Any]) -> tuple[Any, list[str], list[Any]] | None:
    """Question, steps and labels from TRL's, PRM800K's or Math-Shepherd's columns, or None."""
    if "completions" in row and "labels" in row:
        return row.get("prompt", []), list(map(_text, row["completions"])), row["labels"]
    if "question" in row and "label" in row:
        said = [s["completions"][s.get("chosen_completion") or 0] for s in row["label"]["steps"]]
        right = [(step["rating"] or 0) > 0 for step in said]
        return row["question"]["problem"], [step["text"] for step in said], right
    if "input" in row and "label" in row:
        first, *rest = row["input"].split(STEP)[:-1] or [row["input"]]
        question, _, start = first.partition(" Step 1:")
        lines = [line.strip() for line in row["label"].split("\n")]  # a step may have several
        marks = [line[-1] == "+" for line in lines if line.endswith(("+", "-"))]
        return question, [part.strip() for part in (f"Step 1:{start}", *rest)], marks
    return None


def _messages(said: Any, role: str) -> list[Message]:
    if isinstance(said, str):
        return [{"role": role, "content": said}] if said else []
    return [said] if isinstance(said, dict) else list(said)


def _text(said: Any) -> str:
    return said if isinstance(said, str) else "\n".join(m["content"] for m in _messages(said, ""))


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """The number of leading messages that two conversations share, without their last ones."""
    size = min(len(one), len(other)) - 1
    return next((i for i in range(size) if one[i] != other[i]), max(size, 0))


def _calls(
    prompt: Sequence[Message], said: Sequence[Message], tools: list[dict[str, Json]], *, alone: bool
) -> list[Transition]:
    """A call for each answer, with the prompt and, unless `alone`, earlier messages as context."""
    return [
        Transition(
            id=f"{index}", attempt="import", index=index, exact=False, tools=tools,
            prompt=int32(), completion=int32(), logprobs=float32(),
            messages=[*prompt, *([] if alone else said[:index])], answer=message,
        )
        for index, message in enumerate(said)
        if message["role"] == "assistant"
    ]  # fmt: skip
