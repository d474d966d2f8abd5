"""What keys open: for whom, for which run, until when."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.core.errors import ConfigError, Forbidden
from agentrl.store import Store, open_store
from agentrl.store.http import keys, wire
from agentrl.store.http.keys import KEYS_LOOK_PAUSE, KeyFile, Keys
from agentrl.store.http.wire import CLAIM_SECRET, READERS, VERBS, KeyScope

OF_RUN = "of-one-run-only"
RUNNERS = "admin:admin-secret\nrunner:runner-secret"
READER = "reads-one-run-only"
KEYS = f"admin:admin-secret\nrunner@mine:{OF_RUN}\nreader@mine:{READER}\nreader:reads-all"


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


@pytest.fixture
def stranger(serving, tmp_path):
    """With the key of run `mine`, where there is a rollout of run `other` too."""
    with serving(f"sqlite:///{tmp_path / 'store.db'}", KEYS) as address:
        admin = {"authorization": "Bearer admin-secret"}
        for run in ("mine", "other"):
            row = {"id": f"{run}/0", "run": run, "group": run, "index": 0, "task": {"answer": 42}}
            for verb, body in (
                ("open_run", {"run": run, "config": {}}),
                ("enqueue", {"rollouts": [row]}),
                ("claim", {"n": 1, "runner": "r", "lease": 60, "run": run}),
            ):
                httpx.post(f"{address}/v1/{verb}", json=body, headers=admin).raise_for_status()
            row |= {"id": f"{run}/1", "index": 1}
            httpx.post(f"{address}/v1/enqueue", json={"rollouts": [row]}, headers=admin)
        headers = {"authorization": f"Bearer {OF_RUN}", CLAIM_SECRET: "s" * 16}
        with httpx.Client(base_url=address, headers=headers) as client:
            yield client


CALLS = {
    "claim": {"n": 1, "runner": "r", "lease": 60, "run": "RUN", "claim_id": "c-RUN"},
    "run": {"run": "RUN"},
    "policies": {"run": "RUN"},
    "trace": {"rollout": "RUN/0"},
}


def about(run: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.replace("RUN", run) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def test_a_key_of_a_run_opens_no_other(stranger: httpx.Client) -> None:
    for verb, arguments in CALLS.items():
        for run, status in (("other", 403), ("mine", 200)):
            body = about(run, arguments)
            answer = stranger.post(f"/v1/{verb}", json=body)
            assert answer.status_code == status, (verb, answer.text)
            assert ("for run 'mine' only" in answer.text) == (status == 403)
            calls = {"calls": [{"verb": verb, "arguments": body}]}
            (batched,) = stranger.post("/v1/batch", json=calls).json()["results"]
            assert ("error" in batched) == (status == 403), verb
    assert stranger.post("/v1/claim", json=CALLS["claim"] | {"run": None}).status_code == 403
    assert stranger.post("/v1/enqueue", json={"rollouts": []}).status_code == 403


def http(url: str, key: str) -> Store:
    return open_store(url.replace("http://", f"http://{key}@"))


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
async def test_only_who_claimed_an_attempt_writes_to_it(serving, url: str, kit) -> None:
    """Also after a restart of the server, of which the database does not tell the secret."""
    for life in range(2):
        with serving(url, RUNNERS) as address:
            async with contextlib.AsyncExitStack() as stack:
                names = ("runner-secret", "runner-secret", "admin-secret")
                stores = [await stack.enter_async_context(http(address, key)) for key in names]
                mine, thief, admin = stores
                if life == 0:
                    await admin.open_run("run", {})
                    await admin.enqueue(kit.group("a", 2))
                    secret = mine._headers[CLAIM_SECRET]
                    one, two = await mine.claim(2, runner="r", lease=600, claim_id="c")
                mine._headers[CLAIM_SECRET] = secret
                repeat = await mine.claim(2, runner="r", lease=600, claim_id="c")
                assert [attempt.id for attempt in repeat] == [one.id, two.id][life:]
                assert await thief.claim(2, runner="r", lease=600, claim_id="c") == []
                call = kit.call(two, [1, life], [2])
                for verb in (
                    thief.finish([kit.good(two, 9.0)]),
                    thief.finish([kit.good([one, two][life], 9.0)]),
                    thief.heartbeat([two.id], lease=60),
                    thief.add_transitions([call]),
                    thief.add_spans([kit.span(two)]),
                ):
                    with pytest.raises(Forbidden, match="was claimed by another caller"):
                        await verb
                assert await mine.heartbeat([two.id], lease=600) == [two.id]
                assert await mine.add_transitions([call]) == [True]
                await mine.add_spans([kit.span(two)])
                assert await mine.finish([kit.good([one, two][life])]) == [True]
    async with open_store(url) as store:
        assert [row.rewards[0].value for row in await store.rollouts("run")] == [1.0, 1.0]
        claims = await store.claims([one.id, two.id])
    assert all(secret not in claim for _, claim in claims.values())


async def test_an_attempt_that_the_server_forgets_is_still_of_who_claimed_it(
    serving, tmp_path: Path, kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MAX_ATTEMPTS_CACHED", 0)
    with serving(f"sqlite:///{tmp_path / 'store.db'}", RUNNERS) as address:
        async with http(address, "admin-secret") as admin:
            await admin.open_run("run", {})
            await admin.enqueue(kit.group("a"))
        async with http(address, "runner-secret") as mine, http(address, "runner-secret") as thief:
            (one,) = await mine.claim(1, runner="r", lease=600)
            assert await mine.heartbeat([one.id], lease=600) == [one.id]
            with pytest.raises(Forbidden, match="was claimed by another caller"):
                await thief.heartbeat([one.id, "unknown"], lease=600)


def test_a_runner_key_needs_a_claim_secret(serving, tmp_path: Path) -> None:
    body = {"n": 1, "runner": "r", "lease": 60, "claim_id": "c"}
    with serving(f"sqlite:///{tmp_path / 'store.db'}", RUNNERS) as address:
        for secret, claim_id, status in (("", "c", 403), ("s" * 15, "c", 403), ("s" * 16, "", 422)):
            headers = {"authorization": "Bearer runner-secret", CLAIM_SECRET: secret}
            answer = httpx.post(
                f"{address}/v1/claim", json=body | {"claim_id": claim_id}, headers=headers
            )
            assert answer.status_code == status, answer.text


READS = {
    "rollouts": {"run": "RUN"},
    "groups": {"run": "RUN"},
    "search": {"run": "RUN"},
    "steps": {"run": "RUN"},
    "series": {"run": "RUN", "names": []},
    "trace": {"rollout": "RUN/0"},
    "attempts": {"rollout": "RUN/0"},
    "outline": {"rollout": "RUN/0"},
    "credits": {"rollout": "RUN/0"},
    "settled": {"group": "RUN", "timeout": 0},
}


def test_a_reader_of_a_run_reads_no_other(stranger: httpx.Client) -> None:
    rows = (READER, "other", 403), (READER, "mine", 200), ("reads-all", "other", 200)
    for verb, arguments in READS.items():
        for key, run, status in rows:
            headers = {"authorization": f"Bearer {key}"}
            answer = stranger.post(f"/v1/{verb}", json=about(run, arguments), headers=headers)
            assert answer.status_code == status, (verb, key, run)
    headers = {"authorization": f"Bearer {READER}"}
    assert stranger.post("/v1/runs", json={}, headers=headers).json() == ["mine"]
    assert stranger.post("/v1/stats", json={}, headers=headers).status_code == 403
    assert stranger.post("/v1/cursor", json={}, headers=headers).status_code == 200
    assert stranger.post("/v1/trace", json={"rollout": "gone"}, headers=headers).json() is None


def test_a_reader_may_only_read(stranger: httpx.Client) -> None:
    headers = {"authorization": "Bearer reads-all"}
    for name in VERBS:
        status = stranger.post(f"/v1/{name}", json={"unknown": 1}, headers=headers).status_code
        assert status == (422 if name in READERS else 403), name
    assert stranger.post("/v1/traces", json={}, headers=headers).status_code == 403


WRITES = {
    "heartbeat": lambda attempt: {"attempts": [attempt], "lease": 60},
    "finish": lambda attempt: {"outcomes": [{"attempt": attempt, "fence": 1}]},
    "add_spans": lambda attempt: {
        "spans": [
            {"id": "1", "attempt": attempt, "parent": None, "name": "x", "kind": "tool"}
            | {"start": 1, "end": 2}
        ]
    },
}


def test_a_key_of_a_run_writes_to_no_attempt_of_another(stranger: httpx.Client) -> None:
    admin = {"authorization": "Bearer admin-secret"}
    trace = stranger.post("/v1/trace", json={"rollout": "other/0"}, headers=admin).json()
    for verb, body in WRITES.items():
        answer = stranger.post(f"/v1/{verb}", json=body(trace["attempt"]))
        assert (answer.status_code, "for run 'mine' only" in answer.text) == (403, True), verb


def test_keys_expire() -> None:
    keys = Keys.parse("runner:some-secret;until=1970-01-02", "keys")
    day = 86_400.0
    found = keys.caller(bearer("some-secret"), day - 1)
    assert found is not None
    assert found.scope is KeyScope.RUNNER
    assert keys.caller(bearer("some-secret"), day) is None


def test_a_file_of_keys_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"

    def write(text: str, seconds: int) -> None:
        file.write_text(text)
        os.utime(file, (seconds, seconds))

    write("admin:first-secret", 1)
    keys = KeyFile(file)
    write("admin:second-secret", 2)
    assert keys.caller(bearer("second-secret"), 0.0) is not None
    assert keys.caller(bearer("first-secret"), 0.0) is None
    write("nonsense", 3)
    assert keys.caller(bearer("second-secret"), KEYS_LOOK_PAUSE) is not None
    assert "still in use" in caplog.text


@pytest.mark.parametrize(
    "line", ["admin@run:long-enough", "runner@:long-enough", "runner:long-enough;until=soon"]
)
def test_what_is_no_key_is_refused_without_telling_it(line: str) -> None:
    with pytest.raises(ConfigError, match="line 1: write runner:KEY") as caught:
        Keys.parse(line, "keys")
    assert "long-enough" not in str(caught.value)


def test_the_page_says_what_each_scope_opens() -> None:
    page = Path(wire.__file__).with_name("README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `runner` \| (.+), and", page, re.MULTILINE)
    allowed = {name for name, verb in VERBS.items() if KeyScope.RUNNER in verb.scopes}
    assert set(re.findall(r"`(\w+)`", row)) == allowed
    (row,) = re.findall(r"^\| `reader` \| (.+) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == READERS
