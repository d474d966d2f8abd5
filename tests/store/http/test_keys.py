"""What keys open: for whom, for which run, until when."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from agentrl.errors import ConfigError
from agentrl.store.http.keys import LOOK, KeyFile, Keys
from agentrl.store.http.wire import KeyScope

OF_RUN = "of-one-run-only"
KEYS = f"admin:admin-secret\nrunner@mine:{OF_RUN}"


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
        headers = {"authorization": f"Bearer {OF_RUN}"}
        with httpx.Client(base_url=address, headers=headers) as client:
            yield client


CALLS = {
    "claim": {"n": 1, "runner": "r", "lease": 60, "run": "RUN"},
    "run": {"run": "RUN"},
    "policies": {"run": "RUN"},
    "trace": {"rollout": "RUN/0"},
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_key_of_a_run_opens_no_other(stranger: httpx.Client, verb: str) -> None:
    for run, status in (("other", 403), ("mine", 200)):
        body = {
            name: value.replace("RUN", run) if isinstance(value, str) else value
            for name, value in CALLS[verb].items()
        }
        answer = stranger.post(f"/v1/{verb}", json=body)
        assert answer.status_code == status, answer.text
        assert ("for run 'mine' only" in answer.text) == (status == 403)
        calls = {"calls": [{"verb": verb, "arguments": body}]}
        (batched,) = stranger.post("/v1/batch", json=calls).json()["results"]
        assert ("error" in batched) == (status == 403)


def test_a_key_of_a_run_says_which_run(stranger: httpx.Client) -> None:
    assert stranger.post("/v1/claim", json=CALLS["claim"] | {"run": None}).status_code == 403
    assert stranger.post("/v1/enqueue", json={"rollouts": []}).status_code == 403


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
    assert keys.caller(bearer("second-secret"), LOOK) is not None
    assert "still in use" in caplog.text


@pytest.mark.parametrize(
    "line", ["admin@run:long-enough", "runner@:long-enough", "runner:long-enough;until=soon"]
)
def test_what_is_no_key_is_refused_without_telling_it(line: str) -> None:
    with pytest.raises(ConfigError, match="line 1: write runner:KEY") as caught:
        Keys.parse(line, "keys")
    assert "long-enough" not in str(caught.value)
