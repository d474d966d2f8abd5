"""Secrets stay out of the URLs that are shown, and reach the processes by their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import Invalid
from agentrl.store import open_store
from agentrl.store.urls import scheme_of, split_secret


@pytest.mark.parametrize(
    ("url", "public", "secrets"),
    [
        ("sqlite:///runs/store.db", "sqlite:///runs/store.db", {}),
        ("runs/store.db", "runs/store.db", {}),
        ("postgresql://me@host/db", "postgresql://me@host/db", {}),
        ("postgresql://me:s%40@host/db", "postgresql://me@host/db", {"PGPASSWORD": "s@"}),
        ("http://host:7411", "http://host:7411", {}),
        ("http://k%2Fy@host:7411", "http://host:7411", {"AGENTRL_STORE_KEY": "k/y"}),
        ("http://:k%2Fy@host", "http://host", {"AGENTRL_STORE_KEY": "k/y"}),
        ("http://key:@host", "http://host", {"AGENTRL_STORE_KEY": "key"}),
        (
            "https://host/a?key=secret&patience=5",
            "https://host/a?patience=5",
            {"AGENTRL_STORE_KEY": "secret"},
        ),
    ],
)
def test_concealed(url: str, public: str, secrets: dict[str, str]) -> None:
    assert split_secret(url) == (public, secrets)


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("postgres//x", "postgresql://host/database"),
        ("postgresql:/host/db", "postgresql://host/database"),
        ("postgrsql://host/db", "postgresql://host/database"),
        ("Postgres://host/db", "postgresql://host/database"),
        ("http:/host:7411", "http://host:port"),
        ("https//host", "https://host:port"),
        ("sqlite//store.db", "sqlite:///path"),
        ("sqlite:store.db", "sqlite:///path"),
        ("sqllite:///store.db", "sqlite:///path"),
        ("redis://host", "sqlite:///path, postgresql://host/database or http://host:port"),
    ],
)
def test_a_misspelled_url_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Invalid, match=f"is invalid: write it as {form}"):
        open_store(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["runs/store.db", "/tmp/x.db", "runs//s.db", "sqlite/s.db", "s"])
def test_a_path_is_a_file(path: str) -> None:
    assert scheme_of(path) is None


def test_a_misspelled_url_does_not_tell_its_password() -> None:
    with pytest.raises(Invalid) as raised:
        scheme_of("postgre://me:secret@host/db")
    assert "secret" not in str(raised.value)
