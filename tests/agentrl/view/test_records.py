"""The values that templates draw: conversations once, tokens, baselines, curves."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentrl.core.images import describe
from agentrl.core.types import Credit, Image, NewRollout, Outcome, Trace, Transition, float32, int32
from agentrl.store import open_store
from agentrl.store.records import CallRow
from agentrl.transcript import Spelling
from agentrl.view import records
from tests import factories


def call(index: int, messages: list[dict], tokens: int = 3, **more) -> Transition:
    about = {"index": index, "messages": messages, "answer": {"content": "a"}, "logprob": -0.5}
    return factories.call(f"t{index}", **{"completion": range(tokens), **about, **more})


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def shown(folder: Path, calls: list[Transition]) -> list[dict]:
    async with open_store(str(folder / "store.db")) as store:
        await store.open_run("run", {})
        await store.enqueue([NewRollout(id="g/0", run="run", group="g", index=0, task={})])
        (attempt,) = await store.claim(1, runner="r", lease=60)
        await store.add_transitions([replace(call, attempt=attempt.id) for call in calls])
        await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)])
        trace, outline = await store.trace("g/0"), await store.outline("g/0")
    return records.call_rows(trace, 0, outline, [], lambda _: Spelling(None))


async def test_every_message_is_shown_once(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "written otherwise"}
    rows = await shown(tmp_path, [call(0, [user("q")]), call(1, [user("q"), answer, user("more")])])
    assert [[m["text"] for m in row["new"]] for row in rows] == [["q"], ["more"]]
    assert not rows[1]["fresh"]
    assert not rows[1]["forked"]


async def test_branches_and_new_conversations_are_told_apart(tmp_path: Path) -> None:
    rest = [user("q"), {"role": "assistant", "content": "a"}]
    rows = await shown(
        tmp_path,
        [
            call(0, [user("q")]),
            call(1, [*rest, user("one")]),
            call(2, [*rest, user("two")]),
            call(3, [user("another")]),
        ],
    )
    assert [(row["parent"], row["fresh"], row["forked"]) for row in rows] == [
        (None, False, False), (0, False, False), (0, False, True), (None, True, False),
    ]  # fmt: skip


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_baselines_are_cut_where_the_step_joined_them(sizes, k, data) -> None:
    calls, credits = [], {}
    whole = [data.draw(st.booleans()) for _ in sizes]
    sizes = [*sizes, 7]  # one call of which the tokens are no multiple tells one from k apart
    whole.append(False)
    for at, (n, each) in enumerate(zip(sizes, whole, strict=True)):
        calls.append(call(at, [], n))
        stored = [float(b) for b in range(k) for _ in range(n if each else 1)]
        empty = float32()
        credits[f"t{at}"] = Credit(
            transition=f"t{at}", policy="policy", advantage=empty, baseline=float32(stored),
            gate=empty, weight=empty, psi=empty,
        )  # fmt: skip
    about = {"role": "agent", "policy": "policy", "version": 0, "spans": [], "sampled": ""}
    about |= {"started": 0.0, "seconds": 0.0, "messages": 0, "parent": None, "shared": 0}
    outline = [CallRow(id=one.id, tokens=len(one.completion), **about) for one in calls]
    found = records.baseline_count(outline, credits)
    assert found == k
    for one in calls:
        values = records.token_values(one, credits[one.id], Spelling(None), found)
        assert [set(row) for row in values["baseline"]] == [{float(b)} for b in range(k)]


@given(st.lists(st.floats(width=32, allow_infinity=False), min_size=1))
def test_numbers_are_exact(values: list[float]) -> None:
    stored = float32(values)
    for value, shown in zip(stored, map(records.number, stored), strict=True):
        assert (shown is None) == math.isnan(value)
        assert shown is None or float32([shown])[0] == value


@given(st.text(max_size=40))
def test_pieces_make_the_text(tiny_model_dir: Path, text: str) -> None:
    from tokenizers import Tokenizer

    file = tiny_model_dir / "tokenizer.json"
    ids = Tokenizer.from_file(str(file)).encode(text).ids
    pieces = Spelling(file).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == Spelling(file).text(ids)


def test_ids_are_shown_without_a_tokenizer(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    spelling = Spelling(broken)
    assert "cannot be read" in spelling.missing
    assert "".join(spelling.pieces([5, 7])) == "5 7"


@pytest.mark.parametrize(
    ("ids", "images", "shown"),
    [
        ([71, *[70] * 4, 72, *[70] * 6], ["[image a]", "[image b]"],
         'e[image a, 4 tokens]f[image b, 6 tokens]'),
        ([*[70] * 8], ["[image a]", "[image b]"], "[image, 8 tokens]"),  # side by side
        ([*[70] * 4, 71, 70], ["[image a]"], '[image, 4 tokens]e[image, 1 tokens]'),  # one sampled
        ([70, 71], [], 'de'),  # a text model's own word
        ([71, 72], ["[image a]"], "ef"),  # a template that drops images
    ],
)  # fmt: skip
def test_images_of_a_prompt_are_described(
    ids: list[int], images: list[str], shown: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    shutil.copy(tiny_model_dir / "tokenizer.json", tmp_path)
    text = Spelling(tmp_path / "tokenizer.json")
    assert text.prompt(ids, images) == text.text(ids)  # of a model that reads no images
    (tmp_path / "config.json").write_text('{"image_token_id": 70}')
    assert Spelling(tmp_path / "tokenizer.json").prompt(ids, images) == shown


@pytest.mark.parametrize(
    ("size", "words"), [(97, "97 B"), (1000, "1 kB"), (243_400, "243 kB"), (1_300_000, "1.3 MB")]
)
def test_an_image_in_words(size: int, words: str) -> None:
    assert (
        describe(Image("0", "image/png", 1280, 800, bytes(size))) == f"[image 1280x800 png {words}]"
    )


def test_a_comparison_is_by_tokens() -> None:
    a = Trace(rollout=factories.rollout(), attempt="a", transitions=[call(0, [])], spans=[])
    other = call(0, [], completion=int32([0, 9, 2]))
    b = Trace(rollout=factories.rollout(), attempt="a", transitions=[other, other], spans=[])
    first, second = records.compared(a, b, lambda _: Spelling(None), lambda _: Spelling(None))
    assert first["texts"] == (
        [(False, "0 "), (True, "1 "), (False, "2")],
        [(False, "0 "), (True, "9 "), (False, "2")],
    )
    assert second["x"] is None
    assert not second["same"]


@pytest.mark.parametrize("points", [[(3, 1.0)], [(0, 1.0), (1, math.nan), (5, 3.0)]])
def test_a_curve_leaves_out_what_is_missing(points: list[tuple[int, float]]) -> None:
    curve = records.curve(points)
    assert "nan" not in curve["path"]
    assert curve["last"] == points[-1][1]
    assert records.curve([(0, math.nan)]) is None
