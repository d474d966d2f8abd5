"""Secrets stay out of the URLs that are shown, and reach the processes by their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.errors import Invalid
from agentrl.core.processes import environment_without_secrets
from agentrl.store import open_store
from agentrl.store.backends import SQLITE
from agentrl.store.urls import backend_of, split_secret


@pytest.mark.parametrize(
    ("url", "public", "secrets"),
    [
        ("sqlite:///runs/store.db", "sqlite:///runs/store.db", {}),
        ("runs/store.db", "runs/store.db", {}),
        ("postgresql://me@host/db", "postgresql://me@host/db", {}),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db", {}),
        ("postgresql://u:s%40@h:1/d?a=b", "postgresql://u@h:1/d?a=b", {"PGPASSWORD": "s@"}),
        (
            "postgresql:///d?host=/run&password=s+x&user=u",
            "postgresql:///d?host=/run&user=u",
            {"PGPASSWORD": "s x"},
        ),
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
    assert backend_of(path) is SQLITE


@pytest.mark.parametrize(
    "url",
    [
        "postgre://me:secret@host/db",
        "postgres//me:secret@host/db",
        "htp://secret@host:7411",
        "redis://host?key=secret",
    ],
)
def test_a_misspelled_url_does_not_tell_its_password(url: str) -> None:
    with pytest.raises(Invalid, match="host") as raised:
        backend_of(url)
    assert "secret" not in str(raised.value)


PACKAGE = """
from agentrl.store import open_store
from agentrl.store.urls import StoreBackend

def open_folder(url, **options):
    return open_store(url.removeprefix("folder://") + "/store.db", **options)

def split_secret(url):
    public, _, key = url.partition("#")
    return public, {"AGENTRL_STORE_WORD": key}

FOLDER = StoreBackend(form="folder://path", open=open_folder, split_secret=split_secret)
"""


async def test_a_package_adds_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_store.py").write_text(PACKAGE)
    package = tmp_path / "folder_store-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-store\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[agentrl.stores]\nfolder = folder_store:FOLDER\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with open_store(f"folder://{tmp_path}", readonly=False) as store:
        await store.open_run("run", {})
    assert (tmp_path / "store.db").exists()
    assert split_secret("folder://a#hush") == ("folder://a", {"AGENTRL_STORE_WORD": "hush"})
    with pytest.raises(Invalid, match="write it as folder://path"):
        open_store(f"foldr://{tmp_path}")
    with pytest.raises(Invalid, match=r"sqlite:///path.* folder://path"):
        open_store("redis://host")
    monkeypatch.setenv("AGENTRL_STORE_WORD", "hush")
    assert "hush" not in environment_without_secrets().values()
