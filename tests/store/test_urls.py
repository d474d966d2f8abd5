"""Secrets stay out of the URLs that are shown, and reach the processes by their environment."""

from __future__ import annotations

import pytest

from agentrl.store.urls import concealed


@pytest.mark.parametrize(
    ("url", "public", "secrets"),
    [
        ("sqlite:///runs/store.db", "sqlite:///runs/store.db", {}),
        ("runs/store.db", "runs/store.db", {}),
        ("postgresql://me@host/db", "postgresql://me@host/db", {}),
        ("postgresql://me:s%40@host/db", "postgresql://me@host/db", {"PGPASSWORD": "s@"}),
        ("http://host:7411", "http://host:7411", {}),
        ("http://k%2Fy@host:7411", "http://host:7411", {"AGENTRL_STORE_KEY": "k/y"}),
        (
            "https://host/a?key=secret&patience=5",
            "https://host/a?patience=5",
            {"AGENTRL_STORE_KEY": "secret"},
        ),
    ],
)
def test_concealed(url: str, public: str, secrets: dict[str, str]) -> None:
    assert concealed(url) == (public, secrets)
