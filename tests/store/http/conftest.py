"""A served store that strangers talk to, without the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ADMIN, RUNNER = "admin-secret", "runner-secret"


@pytest.fixture
def address(serving, tmp_path: Path) -> Iterator[str]:
    """Of a server with one key of each scope."""
    keys = f"admin:{ADMIN}\nrunner:{RUNNER}"
    with serving(f"sqlite:///{tmp_path / 'store.db'}", keys, largest=2**20) as url:
        yield url


@pytest.fixture
def admin(address: str) -> Iterator[httpx.Client]:
    """With a run named `run`, opened once."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=address, headers=headers) as client:
        assert client.post("/v1/open_run", json={"run": "run", "config": {}}).status_code == 200
        yield client


@pytest.fixture
def runner(admin: httpx.Client) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {RUNNER}"}
    with httpx.Client(base_url=admin.base_url, headers=headers) as client:
        yield client
