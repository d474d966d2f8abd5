"""The worked example of the token tree is what the store does."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from agentrl.store import open_store
from agentrl.store.rows import from_blob
from agentrl.store.sql import database

FOLDER = database.SQL_FOLDER.parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| (\d)[^|]*\| `([\d ]+)` \| `([\d ]+)` \| (none|\d) \| `([\d ]+)` \|$", PAGE, re.MULTILINE
)


async def test_the_token_tree(tmp_path: Path, kit) -> None:
    path = tmp_path / "store.db"
    async with open_store(str(path)) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a"))
        (attempt,) = await store.claim(1, runner="test", lease=60)
        for _, prompt, completion, _, _ in ROWS:
            tokens = [[int(word) for word in text.split()] for text in (prompt, completion)]
            call = kit.call(attempt, *tokens)
            await store.add_transitions([call])
    conn = sqlite3.connect(path)
    found = [
        (seq, parent, from_blob("i", prompt).tolist())
        for seq, parent, prompt in conn.execute("select seq, parent, prompt from transitions")
    ]
    conn.close()
    assert len(found) == 5
    assert found == [
        (int(seq), None if parent == "none" else int(parent), [int(word) for word in new.split()])
        for seq, _, _, parent, new in ROWS
    ]
