"""What `make newest` concludes from versions and failures, and that it tries what there is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import newest
from tests.agentrl.doctor.test_tried import pins
from tests.newest import Failure, Packages

PACKAGES = Packages(
    pinned={"openai": "3.54.0", "langchain-core": "1.7.2", "aiohttp": "3.14.5", "mypy": "2.4.1"},
    newest={"openai": "3.57.0", "langchain-core": "1.8.3", "aiohttp": "3.14.5", "mypy": "2.4"},
    modules={"openai": "openai", "langchain_core": "langchain-core", "pytest": "pytest"}
    | {"_pytest": "pytest", "aiohttp": "aiohttp"},
)
SITE = ".venv-newest/lib/python3.11/site-packages"
DEEP = f"""tests/x.py:3: in test_a
{SITE}/langchain_core/runnables/base.py:4: in invoke
{SITE}/openai/_client.py:9: in post
{SITE}/_pytest/recwarn.py:1: in warn
E   TypeError: unexpected keyword"""


def failure(test: str, traceback: str = "", broken: bool = True) -> Failure:
    return Failure(f"tests/{test}", "TypeError: no", traceback, broken)


def test_the_package_whose_code_raised_is_named() -> None:
    """And not pytest, nor the caller."""
    assert newest.suspects(failure("store/http/test_server.py::test", DEEP), PACKAGES) == ["openai"]


def test_without_its_code_the_newer_packages_of_the_test_are_named() -> None:
    in_file = failure("runners/gateway/test_gateway.py::test_b", "E   assert 1 == 2")
    in_folder = failure("runners/tracing/test_roles.py::test_c[x::y]", "E   assert 1 == 2")
    assert newest.suspects(in_file, PACKAGES) == ["openai"]  # aiohttp is as pinned
    assert newest.suspects(in_folder, PACKAGES) == ["langchain-core"]
    other = failure("runners/tracing_more/test_roles.py::test_d")
    assert newest.suspects(other, PACKAGES) == [newest.UNKNOWN]


def test_the_table_has_what_is_newer_or_failed() -> None:
    failures = [
        failure("runners/gateway/test_gateway.py::test_b"),
        failure("store/test_server.py::test", DEEP, broken=False),
        failure("x.py::test", f"{SITE}/aiohttp/web.py:1: in run"),
        failure("unknown.py::test"),
    ]
    assert newest.table(PACKAGES, failures) == [
        ("(none of them)", "-", "-", "1 broken"),
        ("aiohttp", "3.14.5", "3.14.5", "1 broken"),
        ("openai", "3.54.0", "3.57.0", "1 broken, 1 with warnings"),
        ("langchain-core", "1.7.2", "1.8.3", "nothing"),
    ]
    unfinished = newest.table(PACKAGES, [Failure(newest.ALL, "not finished in time", "")])
    assert {row[3] for row in unfinished[1:]} == {"not all tried"}
    assert newest.report(PACKAGES, failures[1:2]).splitlines() == [
        "package         pin     newest  what failed",
        "openai          3.54.0  3.57.0  1 with warnings",
        "langchain-core  1.7.2   1.8.3   nothing",
        "warns   tests/store/test_server.py::test [openai]",
        "        TypeError: no",
    ]


def test_what_fails_without_warnings_as_errors_is_broken() -> None:
    warned, both, once = failure("a.py::a"), failure("b.py::b"), failure("c.py::c")
    error = both._replace(message="the error")
    assert newest.graded([warned, both], [error, once]) == [
        warned._replace(broken=False),
        error,
        once,
    ]


def test_an_unfinished_second_run_clears_nothing() -> None:
    overtime = Failure(newest.ALL, "not finished in time", "")
    first = failure("a.py::a")
    assert newest.graded([first], [overtime]) == [first, overtime]
    assert newest.graded([first, overtime], []) == [first._replace(broken=False), overtime]


def test_failures_are_read_from_a_run_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(
        "import pytest\n@pytest.mark.parametrize('x', ['a.b::c'])\n"
        "def test_one(x):\n    raise ValueError('first\\nsecond')\n"
        "@pytest.fixture\ndef broken():\n    raise KeyError('fixture')\n"
        "def test_two(broken): pass\ndef test_three(): pass\n"
    )
    (tmp_path / "test_import.py").write_text("from openai import Nothing\n")
    file = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "--tb=short", f"--junitxml={file}", "-c/dev/null"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path)]
    subprocess.run([*command, f"--rootdir={tmp_path}"], cwd=tmp_path, capture_output=True)
    found = {each.test: each for each in newest.read_junit(file)}
    assert found.keys() == {
        "test_fails.py::test_one[a.b::c]",
        "test_fails.py::test_two",
        "test_import.py",
    }
    assert found["test_fails.py::test_one[a.b::c]"].message == "ValueError: first"
    assert "KeyError" in found["test_fails.py::test_two"].message
    imported = found["test_import.py"]
    assert imported.message.startswith("ImportError: cannot import name 'Nothing' from 'openai'")
    assert newest.FRAME.findall(imported.traceback)[-1] == "openai"


def test_a_command_is_stopped_at_the_deadline() -> None:
    started = time.monotonic()
    loop = "import time; print('so far', flush=True); time.sleep(60)"
    code, output = newest.run([sys.executable, "-c", loop], started + 2)
    assert (code, output.splitlines()[0]) == (newest.OVERTIME, "so far")
    assert time.monotonic() - started < 30


def test_torch_is_read_from_this_environment(tmp_path: Path) -> None:
    (constraint, *_) = (each for each in newest.borrow(tmp_path / "site") if "torch" in each)
    assert constraint.startswith("torch==")
    assert (tmp_path / "site/torch/__init__.py").is_file()
    assert [*(tmp_path / "site").glob("torch-*.dist-info/METADATA")]
    assert not (tmp_path / "site/transformers").exists()


@pytest.mark.parametrize("path", newest.TESTS)
def test_every_test_named_exists_and_its_packages_are_pinned(path: str) -> None:
    assert (Path(newest.__file__).parent / path).exists()
    assert not {*newest.TESTS[path]} - pins("constraints.txt").keys()


@pytest.mark.slow
def test_without_a_registry_it_ends_soon_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest, "ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="Could not install the newest packages: see pip's"):
        newest.install(time.monotonic() + 100)
