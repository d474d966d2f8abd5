"""Made once per test session: tiny random checkpoints, an empty store and a PostgreSQL server."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import certifi
import hypothesis
import pytest

from agentrl.store import open_store, sqlite
from agentrl.store.sqlite import Location
from tests.factories import Register
from tests.store import postgres_server
from tests.system.conftest import run_folder as run_folder

hypothesis.settings.register_profile("no clock", deadline=None)  # a busy machine fails no example
hypothesis.settings.load_profile("no clock")

LONG = ("tests/system/", "tests/examples/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the longest come first: none waits for another at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not (item.nodeid.startswith(LONG) or runs_processes(item)))


def runs_processes(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "module", None), "warm")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: the garbage collector need not look through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Imported by who runs tests, and not by the process that only hands them out."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test asks a server elsewhere. Every HTTP client reads the certificates of all authorities,
    which takes 20 ms; here, and in all processes that are started, there is one."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def new_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A new SQLite store is a copy of an empty one: its migrations take longer than many a test.
    Those of `tests/store/test_migrations.py` apply them."""
    empty = tmp_path_factory.mktemp("store") / "empty.db"
    asyncio.run(open_store(f"sqlite:///{empty}").close())
    prepare = sqlite.prepare

    def copied(location: Location, *, create: bool = True) -> None:
        if create and not location.path.exists() and location.path.parent.is_dir():
            copy = location.path.with_name(f"{location.path.name}.{threading.get_ident()}")
            with suppress(OSError):  # another thread was first, or the folder is the test's subject
                shutil.copyfile(empty, copy)
                location.path.hardlink_to(copy)
            copy.unlink(missing_ok=True)
        prepare(location, create=create)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "prepare", copied)
        yield


@pytest.fixture
def register(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Installs a package, until the test ends, with one entry point: group, name and object."""

    def install(group: str, name: str, target: str) -> None:
        folder = tmp_path_factory.mktemp("theirs")
        about = folder / f"{folder.name}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
        monkeypatch.syspath_prepend(folder)

    return install


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of a certificate for this machine, by an authority of its own, and of its key."""
    folder = tmp_path_factory.mktemp("certificate")
    files = {"ssl_certfile": str(folder / "cert.pem"), "ssl_keyfile": str(folder / "key.pem")}
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    out = ["-out", files["ssl_certfile"], "-keyout", files["ssl_keyfile"]]
    command = ["openssl", "req", *options, "-days", "1", *subject, *out]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Qwen2 with 512 tokens, 2 layers, grouped-query heads and tied embeddings."""
    from tests.tiny_models import qwen2

    return qwen2(tmp_path_factory.mktemp("qwen2"), seed=0)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Llama of the same shape with untied embeddings."""
    from tests.tiny_models import llama

    return llama(tmp_path_factory.mktemp("llama"), seed=1)


@pytest.fixture(scope="session")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model_dir` with heads of 32, the smallest that vLLM's attention takes on a CPU."""
    from tests.tiny_models import qwen2

    shape = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return qwen2(tmp_path_factory.mktemp("wide"), seed=2, **shape)


@pytest.fixture(scope="session")
def server() -> Iterator[postgres_server.Server]:
    """A PostgreSQL server for all tests."""
    if postgres_server.binaries() is None:
        pytest.skip("PostgreSQL is not installed: neither on PATH nor in /usr/lib/postgresql")
    with postgres_server.running() as server:
        yield server


@pytest.fixture(scope="session")
def postgres(server: postgres_server.Server) -> Callable[[], str]:
    """Makes databases with an empty store."""
    template = server.make()
    asyncio.run(open_store(template).close())
    name = template.removeprefix("postgresql:///").partition("?")[0]
    return lambda: server.make(name)
