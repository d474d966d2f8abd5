"""The documents: every block of code is checked, and the reference has all that the code has."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import click
import msgspec
import pytest

import agentrl
from agentrl.cli.init import run_file_schema
from agentrl.cli.main import cli
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import check_presets
from agentrl.core.config.validate import check_keys
from agentrl.core.types import ErrorKind

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "algorithms", "runners", "store")
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),  # of earlier versions
    *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md")),
    ROOT / "examples/README.md",
    *(ROOT / "agentrl/coding_agents").glob("*.md"),
    ROOT / "tests/benchmarks/README.md",
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TARGETS = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def blocks(*languages: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{path.relative_to(ROOT)}:{number}")
        for path in sorted(PAGES)
        for number, (language, text) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
        if language in languages
    ]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The module that writes the reference."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("text", blocks("toml"))
def test_settings_are_of_a_run_file(text: str, tmp_path: Path) -> None:
    data = tomllib.loads(text)
    if "program" in data:
        from agentrl.runners.harness import load_preset  # of a part

        (tmp_path / "mine.toml").write_text(text)
        assert load_preset("mine.toml", tmp_path)
        return
    rules = data.get("roles", {}).pop("match", [])
    data |= {"role_rules": rules} if rules else {}
    config = msgspec.convert(check_keys(RunConfig, data, source="the page"), RunConfig)
    check_presets(config)  # names and options; those of a user's file are checked where it is


@pytest.mark.parametrize("text", blocks("json"))
def test_json_is_json(text: str) -> None:
    json.loads(text)


@pytest.mark.parametrize("text", blocks("python"))
def test_code_compiles(text: str) -> None:
    compile(text, "the page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.stem)
def test_code_of_the_guide_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for language, text in BLOCK.findall(path.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(text, str(path), "exec"), {})


def test_no_page_holds_two_versions() -> None:
    """As git leaves them where it cannot merge."""
    marks = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)
    assert not [path for path in PAGES if marks.search(path.read_text(encoding="utf-8"))]


def test_messages_of_the_troubleshooting_page_are_real() -> None:
    """Every word of a message that is no placeholder stands in the code."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    before, kinds, after = re.split(r"^## (?:Failed rollouts|While it trains)$", page, flags=re.M)
    folders = (ROOT / name for name in ("agentrl", "algorithms", "runners", "store"))
    files = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r"\"\s*\n\s*f?\"", "", code)  # a message of several lines
    for row in re.findall(r"^\| (`.+?) \| ", before + after, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            if not message.endswith("/"):
                pieces = re.split(r"'?\b[A-Z]+\b'?|'[a-z._]+'|\.\.\.|\b20\b|\[\w+\]", message)
                missing = [piece for piece in map(str.strip, pieces) if piece not in code]
                assert not missing, (message, missing)
    assert set(re.findall(r"^\| `(\w+)`", kinds, re.MULTILINE)) == {
        kind.value for kind in ErrorKind
    }


def test_every_extra_is_described() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if f"`{name}`" not in page] == []


def lines_of(text: str) -> Iterator[list[str]]:
    """The commands of a block, as words without the variables before them."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        words = words[: next((n for n, word in enumerate(words) if word in (">", "|")), None)]
        if words:
            yield words


@pytest.mark.parametrize("text", blocks("bash"))
def test_commands_are_understood(text: str) -> None:
    for program, *words in lines_of(text):
        if program.endswith("agentrl"):
            parse(words)
        elif program == "make":
            named = [word for word in words if "=" not in word]
            assert all(any(name in line.split() for line in TARGETS) for name in named), words
        elif program.endswith("python") and words[0] == "-m" and words[1].startswith("tests."):
            assert importlib.util.find_spec(words[1]) is not None, words
        elif program.endswith("pip") and words[0] == "install":
            extras = re.findall(r"agentrl\[([\w,-]+)\]", " ".join(words))
            assert {name for found in extras for name in found.split(",")} <= EXTRAS.keys()


def parse(words: list[str]) -> None:
    """By the real argument parser, which is told that every file exists."""
    command: click.Command = cli
    context = None
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        context = click.Context(command, parent=context, info_name=command.name)
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    parser = command.make_parser(click.Context(command, parent=context, info_name=command.name))
    options, rest, _ = parser.parse_args(list(words))
    given = [
        p for p in command.params if isinstance(p, click.Argument) and options.get(str(p.name))
    ]
    needed = [p for p in command.params if isinstance(p, click.Argument) and p.required]
    assert not rest, f"{command.name} does not take {rest}"
    assert "help" in options or len(given) >= len(needed), f"{command.name} needs an argument"


def test_commands_inside_sentences_exist() -> None:
    for path in PAGES:
        text = BLOCK.sub("", path.read_text(encoding="utf-8"))
        for found in re.findall(r"`agentrl ([a-z][^`]*)`", text.replace("\n", " ")):
            words = [word for word in shlex.split(found) if word != "…"]
            try:
                parse(words)
            except (click.UsageError, AssertionError) as error:
                if "argument" not in str(error).lower():  # a sentence may leave them out
                    raise AssertionError(f"{path}: agentrl {found}: {error}") from None


SET_BY_AGENTRL = {"file", "live.running"}  # fields of a run's settings that no run file has


def keys_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every setting of a table, with its tables' own; NAME for the names of the user's tables."""
    if get_origin(kind) in (UnionType, Union):
        for one in get_args(kind):
            yield from keys_of(one, prefix)
    elif get_origin(kind) is dict:
        yield from keys_of(get_args(kind)[1], f"{prefix}NAME.")
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            if field.name not in ("factory", "role_rules"):
                yield prefix + field.name
                yield from keys_of(field.type, f"{prefix}{field.name}.")


def test_every_setting_is_in_the_reference(reference: Any) -> None:
    page = reference.settings()
    sections = set(re.findall(r"^## `\[(.+)\]`$", page, re.MULTILINE))
    for key in keys_of(RunConfig):
        if key in SET_BY_AGENTRL:
            continue
        table, _, name = key.rpartition(".")
        elsewhere = table not in sections  # a table that another one has, too
        assert f"| `{key}` |" in page or (elsewhere and f".{name}` |" in page), key


def test_every_setting_says_what_it_does(reference: Any) -> None:
    rows = [line for line in reference.settings().splitlines() if line.startswith("| `")]
    assert len(rows) > 250
    assert [row for row in rows if row.endswith("|  |")] == []
    for name, table in run_file_schema()["$defs"].items():
        silent = [key for key, one in table["properties"].items() if not one.get("description")]
        assert silent == [], name


def test_every_description_is_a_sentence_that_begins_with_the_thing(reference: Any) -> None:
    rows = [line for line in reference.settings().splitlines() if line.startswith("| `")]
    fragment = (
        r"\| (of|for|per|at|in|by|with|without|after|until|and|it|its|default|none|0)\b[^|]*\|$"
    )
    assert [row for row in rows if re.search(fragment, row, re.IGNORECASE)] == []
    assert [row for row in rows if not re.search(r"\| [A-Z][^|]*[.!?] \|$", row)] == []


def test_the_reference_in_the_repository_is_current(reference: Any) -> None:
    now = reference.pages()
    old = [file for file, text in now.items() if file.read_text(encoding="utf-8") != text]
    assert old + reference.left_over(now) == [], "run: make reference"
    assert len(now) >= 16


def test_every_command_is_in_the_reference(reference: Any) -> None:
    page = reference.commands()

    def check(command: click.Command, name: str) -> None:
        if isinstance(command, click.Group):
            for inner in command.commands.values():
                if not inner.hidden:
                    check(inner, f"{name} {inner.name}")
            return
        assert f"\n## `{name}`\n" in page
        section = page.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
        for option in command.params:
            assert (
                option.opts[-1]
                if "-" in option.opts[-1]
                else option.make_metavar(click.Context(command))
            ) in section

    check(cli, "agentrl")


def metrics_in(tree: ast.AST, groups: set[str]) -> Iterator[str]:
    """Strings that look like metrics of these groups; * for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "*" for p in node.values]
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if re.fullmatch(r"[a-z_]+(/[a-z0-9_*]+)+", text) and text.split("/")[0] in groups:
            yield text


def test_every_metric_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    names = {re.sub(r"<\w+>", "*", n) for cell in cells for n in re.findall(r"`([^`]+)`", cell)}
    groups = {name.split("/")[0] for name in names if "/" in name} - {"*"}
    folder = Path(str(agentrl.__file__)).parent
    code = [
        p
        for part in ("algorithms", "evaluation", "telemetry")
        for p in (folder / part).rglob("*.py")
    ]
    found = {name for path in code for name in metrics_in(ast.parse(path.read_text()), groups)}
    assert {"loss", "reward/mean", "selfplay/elo"} <= names
    unknown = {
        name for name in found
        if not any(fnmatchcase(name, known) or fnmatchcase(known, f"{name}*") for known in names)
    }  # fmt: skip
    assert not unknown
    assert len(found) > 80


def test_every_preset_has_a_page_and_every_recipe_a_row(reference: Any) -> None:
    pages = "".join(reference.families().values())
    known = reference.words().items()
    assert [name for name, made in known if (f"\n## `{name}`\n" in pages) == bool(made.of)] == []
    table = reference.recipes()
    assert [name for name, made in known if (f"\n| `{name}` |" in table) != bool(made.of)] == []
    site = (ROOT / "docs" / "mkdocs.yml").read_text()
    listed = re.findall(r"- docs/reference/algorithms/(?!README)([\w-]+)\.md\n", site)
    assert sorted(listed) == sorted(reference.families())
