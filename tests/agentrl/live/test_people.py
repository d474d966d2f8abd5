"""People's data: deletion, export, retention, hashes and tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.cli.live import users
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, NotFound
from agentrl.core.types import StepCommit
from agentrl.live import records
from agentrl.live.records import (
    Version,
    expire,
    forget_user,
    is_token,
    put_version,
    secret_of,
    token_of,
    user_id,
)
from agentrl.runners.feedback import Feedback, give_feedback
from agentrl.store import open_store
from agentrl.store.records import Item, Side, digest_of
from tests.agentrl.live.labels.test_label import label
from tests.agentrl.live.sessions import NOW, RUN, ended

CANARY = "CANARY-7131"


@pytest.fixture
def config(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    (tmp_path / "shop.toml").write_text(f'name = "{RUN}"\nstore = "{url}"\n')
    return resolve({"name": RUN, "store": url}, source="test")


@pytest.fixture
async def store(config):
    async with open_store(config.store) as opened:
        await opened.open_run(RUN, {})
        yield opened


def on_disk(folder: Path, text: str) -> list[str]:
    """Files below a folder that have a text."""
    return [f.name for f in folder.rglob("*") if f.is_file() and text.encode() in f.read_bytes()]


async def of_user(store, config, user, name, *texts, **more):
    known = user_id(await secret_of(store, config), user)
    return await ended(store, name, *texts, user=known, **more)


async def mined(store, rollout):
    (call,) = (await store.calls([rollout]))[rollout]
    await store.draft_dataset("good", {})
    side = Side(digest=digest_of([call]), rollout=rollout)
    item = Item(position=0, kind="label", chosen=side.digest, label=1.0)
    await store.add_items("good", 1, [item], [side])
    await store.commit_dataset("good", 1)


async def trained(store, *rollouts):
    rows = {row.id: row.group for row in await store.rollouts(RUN)}
    groups = [rows[id] for id in rollouts]
    state = await store.run(RUN)
    claimed = await store.claim_groups(RUN, state.epoch, 99, timeout=0)
    discarded = [group.id for group in claimed if group.id not in groups]
    step = {"step": state.step, "versions": {}, "checkpoint": None, "metrics": {}}
    await store.commit_step(
        StepCommit(run=RUN, epoch=state.epoch, groups=groups, discarded=discarded, **step)
    )


async def test_a_user_is_deleted_with_all_that_was_made_of_it(store, config, tmp_path):
    mine = await of_user(store, config, "ann", "a", f"my card {CANARY}", f"echo {CANARY}")
    await give_feedback(store, RUN, Feedback(session="a", correction=f"{CANARY}!", note=CANARY))
    await mined(store, mine)
    await trained(store, mine)
    await of_user(store, config, "ann", "a2", f"{CANARY} again", "ok")
    other = await of_user(store, config, "bob", "b", "hello", "echo hello")
    for version, step in ((0, 0), (1, 1), (2, 2)):
        await put_version(
            store, RUN, Version(version=version, step=step, path="versions/x", offered=NOW)
        )
    assert on_disk(tmp_path, CANARY)
    ran = await asyncio.to_thread(
        CliRunner().invoke, users, [str(tmp_path / "shop.toml"), "--user", "ann", "--forget"]
    )
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines() == [
        "2 sessions and their replays are deleted",
        "1 items of data set good@1 are deleted, which has a new digest",
        "versions 1, 2 have learned from them, or may continue from a version that has; weights "
        "cannot be taken apart",
    ]
    assert on_disk(tmp_path, CANARY) == []
    assert [row.id for row in await store.rollouts(RUN)] == [other]


async def test_a_session_in_progress_is_ended_and_deleted(store, config, monkeypatch):
    monkeypatch.setattr(records, "NOTICED", 0.0)
    id = await of_user(store, config, "ann", "a", running=True)
    said = []
    gone = await forget_user(store, config, "ann", said.append)
    assert (gone.rollouts, gone.left) == (1, [])
    assert said == ["1 sessions are in progress: they are ended now"]
    assert id not in [row.id for row in await store.rollouts(RUN)]


class Waits:
    """A store of which somebody waits for a change."""

    def __init__(self, store):
        self._store, self.waited = store, asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def wait(self, cursor, *, timeout):
        self.waited.set()
        return await self._store.wait(cursor, timeout=timeout)


async def test_what_a_step_is_training_on_is_deleted_after_it(store, config):
    id = await of_user(store, config, "ann", "a")
    await store.claim_groups(RUN, (await store.run(RUN)).epoch, 1)
    waits = Waits(store)
    forgetting = asyncio.create_task(forget_user(waits, config, "ann", print))
    await waits.waited.wait()
    await trained(store, id)
    assert (await forgetting).rollouts == 1
    assert await store.rollouts(RUN) == []


async def test_what_a_dead_step_has_claimed_is_left_and_it_is_said(
    store, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(records, "PATIENCE", 0.0)
    await of_user(store, config, "ann", "a")
    await store.claim_groups(RUN, (await store.run(RUN)).epoch, 1)
    arguments = [str(tmp_path / "shop.toml"), "--user", "ann", "--forget"]
    ran = await asyncio.to_thread(CliRunner().invoke, users, arguments)
    assert "1 sessions are being trained on: rerun the command" in str(ran.exception)


async def test_all_that_is_known_of_a_user_is_exported(store, config, tmp_path):
    mine = await of_user(store, config, "ann", "a", "hi", "good one", version=3)
    await of_user(store, config, "bob", "b", f"{CANARY}", "x")
    await give_feedback(store, RUN, Feedback(session="a", value=1.0, note="right"))
    await label(store)
    await mined(store, mine)
    arguments = [str(tmp_path / "shop.toml"), "--user", "ann", "--export"]
    ran = await asyncio.to_thread(CliRunner().invoke, users, arguments)
    session, last = map(json.loads, ran.output.splitlines())
    assert session["calls"][0]["messages"] == [{"role": "user", "content": "hi"}]
    assert session["calls"][0]["answer"]["content"] == "good one"
    found = {(r["name"], r["source"]): (r["value"], r["note"]) for r in session["rewards"]}
    assert found["feedback", "feedback"] == (1.0, "right")
    assert found["outcome", "live"][0] == 1.0
    assert (session["task"]["version"], session["ended"]) == (3, NOW)
    assert last["items"] == {"good@1": 1}
    assert CANARY not in ran.output


async def test_users_are_listed_by_hash_with_what_is_held_back(store, config, tmp_path):
    for n in range(3):
        await of_user(store, config, "ann", f"a{n}", "q", "good")
    await of_user(store, config, "bob", "b", "q", "good")
    await give_feedback(store, RUN, Feedback(session="b", value=0.0))
    await label(store)
    file = str(tmp_path / "shop.toml")
    ran = await asyncio.to_thread(CliRunner().invoke, users, [file, "--json"])
    rows = [json.loads(line) for line in ran.output.splitlines()]
    ann, bob = rows
    assert (ann["sessions"], ann["counted"]) == (3, 1)
    assert ann["held"] == {"it repeats another session of its user": 2}
    assert (bob["votes"], bob["mean_vote"], bob["outlier"]) == (1, 0.0, [])
    ran = await asyncio.to_thread(CliRunner().invoke, users, [file, "--user", "bob"])
    assert bob["user"] in ran.output
    assert ann["user"] not in ran.output


async def test_old_sessions_are_deleted_trained_or_not(store, config, tmp_path, caplog):
    old = [await of_user(store, config, "ann", f"o{n}", f"{CANARY} {n}", "x") for n in range(2)]
    await mined(store, old[0])
    await trained(store, old[0])
    old.append(await of_user(store, config, "", "anonymous", CANARY, "x"))
    new = await of_user(store, config, "ann", "n", "hi", "x", at=NOW + 90.0)
    kept = resolve(
        {"name": RUN, "store": config.store, "live": {"people": {"retention": 100.0}}},
        source="test",
    )
    for jumped in (-1e9, 0.0, 100.0):  # a clock that jumps back deletes nothing
        assert await expire(store, kept, NOW + jumped) == 0
    assert await expire(store, kept, NOW + 101.0) == 3
    assert [row.id for row in await store.rollouts(RUN)] == [new]
    assert (await store.datasets("good"))[0].items == 0
    assert await expire(store, config, NOW + 1e9) == 0  # there is no limit
    with pytest.raises(NotFound):
        await give_feedback(store, RUN, Feedback(session="o0", value=1.0))


async def test_a_session_whose_end_nobody_wrote_is_deleted_by_when_it_was_labelled(store, config):
    id = await ended(store, "a", "hi", "x", at=None)
    await label(store)
    kept = resolve(
        {"name": RUN, "store": config.store, "live": {"people": {"retention": 100.0}}},
        source="test",
    )
    assert await expire(store, kept, NOW + 60.0 + 99.0) == 0
    assert await expire(store, kept, NOW + 60.0 + 101.0) == 1
    assert id not in [row.id for row in await store.rollouts(RUN)]


async def test_the_secret_is_made_once_or_given(store, config, monkeypatch):
    one, two = await asyncio.gather(secret_of(store, config), secret_of(store, config))
    assert one == two == await secret_of(store, config)
    assert len(one) == 64
    people_ = {"secret_env": "SHOP_SECRET"}
    given = resolve({"name": RUN, "store": config.store, "live": {"people": people_}}, source="t")
    with pytest.raises(ConfigError, match="the environment has no SHOP_SECRET"):
        await secret_of(store, given)
    monkeypatch.setenv("SHOP_SECRET", "abc")
    assert await secret_of(store, given) == b"abc"


def test_users_and_tokens_depend_on_the_secret():
    assert user_id(b"a", "ann@home") != user_id(b"b", "ann@home")
    assert user_id(b"a", "") == ""
    assert user_id(b"a", "jos\udce9") != user_id(b"a", "jos\udce8") != user_id(b"a", "jos?")
    token = token_of(b"a", "s-1")
    assert is_token(b"a", "s-1", token)
    for secret, session, given in ((b"a", "s-2", token), (b"b", "s-1", token), (b"a", "s-1", "é")):
        assert not is_token(secret, session, given)
