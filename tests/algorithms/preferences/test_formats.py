"""Rows of every format, and every value of them replaced by what a file may have there."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl.algorithms.preferences.draft import Draft
from agentrl.algorithms.preferences.formats import add_row, export_rows
from agentrl.cli.data import data
from agentrl.core.errors import ConfigError, NotFound
from agentrl.store import Store, open_store
from agentrl.store.records import Item

ASKED = {"role": "user", "content": "6 * 7?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("42", "41"))
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SHARED = [{"from": "human", "value": "6 * 7?"}, {"from": "gpt", "value": "42"}]
STEPS = [
    {"completions": [{"text": "a", "rating": 1}], "chosen_completion": 0},
    {"completions": [{"text": "b", "rating": None}, {"text": "c", "rating": -1}]},
]
ROWS: dict[str, dict[str, Any]] = {
    "pair": {"prompt": "6 * 7?", "chosen": "42", "rejected": "41", "margin": 0.5},
    "chats": {"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG], "tools": TOOLS},
    "rated": {
        "prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG],
        "score_chosen": 4.5, "score_rejected": 2.0, "tools": msgspec.json.encode(TOOLS).decode(),
    },
    "label": {"prompt": [ASKED], "completion": [RIGHT], "label": True},
    "steps": {"prompt": "6 * 7?", "completions": ["a", "b"], "labels": [True, False]},
    "ranked": {
        "context": [ASKED],
        "completions": [{"completion": [RIGHT], "rank": 0}, {"completion": "41", "rank": 1}],
    },
    "messages": {"messages": [ASKED, RIGHT], "tools": TOOLS},
    "sharegpt": {"conversations": SHARED, "system": "Be brief.", "tools": "[]"},
    "sharegpt pair": {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": WRONG},
    "prm800k": {"question": {"problem": "6 * 7?"}, "label": {"steps": STEPS}},
    "math-shepherd": {"input": "1? Step 1: a ки\nStep 2: b ки", "label": "Step 1: +\nStep 2: -"},
}  # fmt: skip
GONE: Any = object()
OTHERS: list[Any] = [
    GONE, None, True, 0, -1, 7, 2**70, 1e300, "", "x", "true", "nan", "-inf", "4.5", "9" * 400,
    [], [None], ["x"], [[]], [{}], [7], {}, {"a": 1}, {"role": "user"}, {"from": "gpt"},
    {"from": [], "value": 1}, {"from": "function_call", "value": "{"}, [RIGHT], [ASKED], "[1]", "{",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a value."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(row: dict[str, Any], path: tuple[Any, ...], other: Any) -> dict[str, Any]:
    row = copy.deepcopy(row)
    *inner, last = path
    holder: Any = row
    for key in inner:
        holder = holder[key]
    if other is GONE:
        del holder[last]
    else:
        holder[last] = other
    return row


def mutants(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every value replaced, and samples with two of them replaced."""
    ones = [changed(row, path, other) for path in places(row) for other in OTHERS]
    yield from ones
    chance = random.Random(1)
    for one in chance.sample(ones, min(200, len(ones))):
        if paths := list(places(one)):
            yield changed(one, chance.choice(paths), chance.choice(OTHERS))


@pytest.fixture
async def draft(tmp_path: Path) -> Any:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        yield Draft(store, "d", await store.draft_dataset("d", {}), test=0.0, conflicts="keep")


async def items(draft: Draft) -> list[Item]:
    await draft.commit()
    return await draft.store.items("d", 1)


async def rows(store: Store, found: list[Item]) -> list[dict[str, Any]]:
    return await export_rows(store, found)


@pytest.mark.parametrize("name", ROWS)
async def test_every_value_of_a_row_is_usable_or_named(draft: Draft, name: str) -> None:
    refused = list[str]()
    add_row(draft, "file.jsonl:1", ROWS[name])
    assert len(draft.items) == 1
    for row in mutants(ROWS[name]):
        try:
            add_row(draft, "file.jsonl:2", row)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert [text for text in refused if not text.startswith("file.jsonl:2: ")] == []
    assert [text for text in refused if len(text) > 600] == []
    assert await rows(draft.store, await items(draft))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"content": "6 * 7?"}]}, r'messages\[0\]: the message has no "role"'),
        ({"messages": ["6 * 7?"]}, r"messages\[0\] is '6 \* 7\?', not a message"),
        (
            {"conversations": [{"from": "me", "value": "a"}]},
            r"\S+\[0\]: from 'me' is not a known role",
        ),
        (ROWS["pair"] | {"chosen": 42}, "chosen: 42 is neither text nor messages"),
        (ROWS["rated"] | {"score_chosen": "high"}, "score_chosen: 'high' is neither a number"),
        (ROWS["pair"] | {"margin": "nan"}, "margin: 'nan' is neither a number"),
        (ROWS["label"] | {"label": "maybe"}, "label: 'maybe' is neither a number"),
        (ROWS["label"] | {"tools": "{"}, "tools: the text is not JSON"),
        (ROWS["label"] | {"tools": "7"}, "tools: Expected `array`"),
        (ROWS["prm800k"] | {"label": {"steps": "a"}}, r"label: Expected .*`\$.steps`"),
        ({"chosen": "a"}, "columns chosen: no known format"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(row: dict[str, Any], message: str) -> None:
    unused: Any = None
    with pytest.raises(ConfigError, match=f"^f.jsonl:3: {message}"):
        add_row(Draft(unused, "d", 1, 0.0), "f.jsonl:3", row)


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        (ROWS["label"] | {"label": "true"}, "label", 1.0),
        (ROWS["label"] | {"label": " 0 "}, "label", 0.0),
        (ROWS["rated"] | {"score_chosen": "4.5", "score_rejected": "2"}, "margin", 2.5),
        (ROWS["steps"] | {"labels": ["true", None]}, "steps", [1.0, None]),
    ],
)
async def test_numbers_may_be_text(draft: Draft, row: Any, field: str, value: Any) -> None:
    add_row(draft, "f:1", row)
    (item,) = await items(draft)
    assert getattr(item, field) == value


async def test_sharegpt_becomes_messages(draft: Draft) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    said = [
        {"from": "human", "value": "1 + 1?"}, {"from": "function_call", "value": call},
        {"from": "observation", "value": "2"}, {"from": "gpt", "value": "two"},
    ]  # fmt: skip
    add_row(draft, "f:1", {"conversations": said, "system": "Be brief."})
    (row,) = await rows(draft.store, await items(draft))
    function = {"name": "add", "arguments": '{"a":1}'}
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}
    ]  # fmt: skip
    assert row["completion"] == [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]


async def test_sharegpt_and_openai_make_the_same_pair(draft: Draft) -> None:
    add_row(draft, "f:1", ROWS["sharegpt pair"])
    add_row(draft, "f:2", {"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]})
    assert len(draft.items) == 1


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [ASKED, RIGHT, {"role": "user", "content": "Sure?"}]
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "6 * 7?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, [ASKED]),
        ({"prompt": [ASKED], "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, [ASKED]),
        ({"prompt": "6 * 7? ", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, [ASKED]),
        ({"prompt": "6 * 7?", "chosen": [ASKED, YES], "rejected": "No."}, [ASKED]),
        ({"prompt": "6 * 7?", "chosen": [*TALK, YES], "rejected": [*TALK, NO]}, TALK),
        ({"prompt": "Sure?", "chosen": [*TALK, YES], "rejected": [*TALK, NO]}, TALK),
        (
            {
                "prompt": "6 * 7?", "system": "Be brief.",
                "chosen": [ASKED, YES], "rejected": [ASKED, NO],
            },
            [SYSTEM, ASKED],
        ),
        (
            {
                "prompt": "6 * 7?", "system": "Be brief.",
                "chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO],
            },
            [SYSTEM, ASKED],
        ),
        (
            {
                "chosen": "\n\nHuman: 6 * 7?\n\nAssistant: 42\n\nHuman: Sure?\n\nAssistant: Yes.",
                "rejected": "\n\nHuman: 6 * 7?\n\nAssistant: 42\n\nHuman: Sure?\n\nAssistant: No.",
            },
            TALK,
        ),
        (
            {
                "prompt": "\n\nHuman: 6 * 7?\n\nAssistant: 42\n\nHuman: Sure?\n\nAssistant:",
                "chosen": "Yes.", "rejected": "No.",
            },
            TALK,
        ),
    ],
)  # fmt: skip
async def test_a_prompt_that_answers_repeat_is_asked_once(
    draft: Draft, row: Any, prompt: Any
) -> None:
    """UltraFeedback's `prompt` beside whole conversations, and HH-RLHF's texts."""
    add_row(draft, "f:1", row)
    (found,) = await rows(draft.store, await items(draft))
    assert (found["prompt"], found["chosen"], found["rejected"]) == (prompt, [YES], [NO])


async def test_an_answer_of_several_turns_continues_its_prompt(draft: Draft) -> None:
    """Even if the user says the same again."""
    sides = {"chosen": [RIGHT, ASKED, YES], "rejected": [RIGHT, ASKED, NO]}
    add_row(draft, "f:1", {"prompt": [ASKED], **sides})
    (found,) = await rows(draft.store, await items(draft))
    assert (found["prompt"], found["chosen"], found["rejected"]) == ([ASKED], *sides.values())


async def test_a_completion_that_repeats_its_prompt_is_an_answer(draft: Draft) -> None:
    add_row(draft, "f:1", {"prompt": [ASKED], "completion": [ASKED, RIGHT], "label": True})
    (found,) = await rows(draft.store, await items(draft))
    assert (found["prompt"], found["completion"]) == ([ASKED], [RIGHT])


@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
async def test_messages_may_be_a_text_of_json(draft: Draft, column: str) -> None:
    said = [ASKED] if column == "prompt" else [ASKED, RIGHT]
    row = {column: msgspec.json.encode(said).decode()}
    add_row(draft, "f:1", row | ({"completion": "42"} if column == "prompt" else {}))
    (found,) = await rows(draft.store, await items(draft))
    assert (found["prompt"], found["completion"]) == ([ASKED], [RIGHT])


async def test_a_prompt_of_json_that_is_no_chat_is_a_text(draft: Draft) -> None:
    for number, text in enumerate(('[{"name": "a"}]', "[1, 2]", "[]", "[link](x)")):
        add_row(draft, f"f:{number}", {"prompt": text, "completion": "42"})
    found = await rows(draft.store, await items(draft))
    assert [row["prompt"][0]["content"][0] for row in found] == ["["] * 4


async def test_only_marked_answers_are_learned(draft: Draft) -> None:
    """`imitate` of `agentrl demonstrate`, and OpenAI's weights."""
    talk = [ASKED, WRONG, {"role": "user", "content": "Sure?"}, RIGHT]
    add_row(draft, "f:1", {"messages": talk, "imitate": [3]})
    add_row(draft, "f:2", {"messages": [ASKED, WRONG | {"weight": 0}, *talk[2:]]})
    found = await rows(draft.store, await items(draft))
    assert [row["completion"] for row in found] == [[RIGHT]] * len(found)


async def test_calls_at_once_and_tools_alone_have_the_form_of_the_api(draft: Draft) -> None:
    calls = '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'
    said = [*SHARED[:1], {"from": "function_call", "value": calls}]
    function = TOOLS[0]["function"]
    for tools in ([function], [msgspec.json.encode(function).decode()], TOOLS):
        add_row(draft, "f:1", {"conversations": said, "tools": tools})
    (found,) = await rows(draft.store, await items(draft))
    made = [call["function"]["arguments"] for call in found["completion"][0]["tool_calls"]]
    assert (made, found["tools"]) == (['{"a":1}', '{"a":2}'], TOOLS)


async def test_the_order_of_fields_makes_no_other_prompt(draft: Draft) -> None:
    """Otherwise one of two equal prompts could be held out."""
    draft.test = 0.5
    for number in range(20):
        asked = {"role": "user", "content": f"{number}?"}
        add_row(draft, "f:1", {"messages": [asked, YES]})
        add_row(draft, "f:2", {"messages": [{**dict(reversed(asked.items()))}, NO]})
    splits = [item.split for item in draft.items.values()]
    assert splits[::2] == splits[1::2]
    assert {*splits} == {"train", "test"}


async def test_a_greeting_of_the_assistant_is_part_of_the_prompt(draft: Draft) -> None:
    add_row(draft, "f:1", {"messages": [YES, ASKED, RIGHT]})
    (found,) = await rows(draft.store, await items(draft))
    assert (found["prompt"], found["completion"]) == ([YES, ASKED], [RIGHT])


async def test_a_row_of_prm800k_without_steps_is_counted(draft: Draft) -> None:
    for label in ({}, {"steps": None}, {"steps": []}, {"steps": [{"completions": None}]}):
        add_row(draft, "f:1", ROWS["prm800k"] | {"label": label})
    assert draft.counts["rows without a prompt or an answer"] == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "f.jsonl:2 is not a JSON object: Expected `object`, got `array`"),
        (
            b'{"id": 18446744073709551616}',
            "f.jsonl:2: row['id'] is an integer of more than 64 bits",
        ),
        (b'{"a":', "f.jsonl:2 is not a JSON object: Input data was truncated"),
        (b'{"a": "\xff"}', "f.jsonl:2 is not a JSON object: 'utf-8' codec"),
        (b'{"a": ' + b"[" * 9000 + b"]" * 9000 + b"}", "f.jsonl:2 is not a JSON object: "),
        (b'{"chosen": 1, "rejected": 2}', "f.jsonl:2: chosen: 1 is neither"),
    ],
)
def test_the_line_of_a_file_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    good = msgspec.json.encode(ROWS["pair"])
    (tmp_path / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\n" + line)
    store = str(tmp_path / "runs" / "prefs" / "store.db")  # of no run yet
    arguments = ["import", "d", str(tmp_path / "f.jsonl"), "--store", store]
    failed = CliRunner().invoke(data, arguments)
    assert isinstance(failed.exception, ConfigError)
    assert message in str(failed.exception)


def test_a_data_set_may_be_imported_before_there_is_a_store(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_bytes(msgspec.json.encode(ROWS["pair"]))
    store = str(tmp_path / "runs" / "prefs" / "store.db")
    arguments = ["import", "d", str(tmp_path / "f.jsonl"), "--store", store]
    assert CliRunner().invoke(data, arguments).exit_code == 0
    assert "d version 1" in CliRunner().invoke(data, ["show", "d", "--store", store]).output
    missing = CliRunner().invoke(data, ["show", "--store", f"{tmp_path}/other.db"])
    assert isinstance(missing.exception, NotFound)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_mixed_data_set_comes_back_from_its_export(suffix: str, tmp_path: Path) -> None:
    """Of a set with several kinds no column is lost: the import of the export is the same set."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pip install 'agentrl[data]'")
    names = ("messages", "label", "chats", "pair", "rated", "sharegpt")
    lines = [msgspec.json.encode(ROWS[name]) for name in names]
    call = {"name": "add", "arguments": {"a": 1, "unit": None}}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "42"}]}
    lines.append(msgspec.json.encode({"messages": [parts, asked]}))
    (tmp_path / "f.jsonl").write_bytes(b"\n".join(lines))
    store, file = str(tmp_path / "store.db"), str(tmp_path / f"out{suffix}")
    said = []
    for command in (
        ["import", "d", str(tmp_path / "f.jsonl")], ["export", "d", file], ["import", "e", file]
    ):  # fmt: skip
        done = CliRunner().invoke(data, [*command, "--store", store], catch_exceptions=False)
        said.append(done.output)
    first, second = (text.split("digest ")[1].split()[0] for text in said[::2])
    assert first == second
    assert "6 items" in said[0]  # the two of one conversation are the same


def test_nan_is_named(tmp_path: Path) -> None:
    unused: Any = None
    with pytest.raises(ConfigError, match=r"f:1: row\['label'\] is nan"):
        add_row(Draft(unused, "d", 1, 0.0), "f:1", ROWS["label"] | {"label": float("nan")})
