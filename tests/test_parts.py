"""Parts are folders that the rest of the library does not import, and say what they contribute."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import grimp
import pytest

from agentrl.base.parts import KNOWN, Part, index, parts

ROOT = Path(__file__).parents[1]
FOLDERS = {  # the folder of each part, by its name
    point.load().name: point.module.removesuffix(".part")
    for point in entry_points(group="agentrl.parts")
    if point.module.startswith("agentrl.")
}
OWN = [part for part in parts() if part.name in FOLDERS]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("agentrl", exclude_type_checking_imports=True)


def part_of(module: str) -> str | None:
    inside = (n for n, folder in FOLDERS.items() if f"{module}.".startswith(f"{folder}."))
    return next(inside, None)


def test_the_spine_imports_no_part_and_a_part_only_those_that_it_declares(
    graph: grimp.ImportGraph,
) -> None:
    uses = {part.name: {part.name, *part.uses} for part in OWN}
    wrong = [
        f"{importer} imports {imported} of the part {part_of(imported)!r}"
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if (own := part_of(imported)) and own not in uses.get(part_of(importer) or "", ())
    ]
    assert wrong == []


def test_the_spine_asks_for_no_kind_that_a_part_contributes(graph: grimp.ImportGraph) -> None:
    kinds = [f'"{name.rpartition(".")[2]}"' for part in OWN for name in part.kinds]
    asked = re.compile(rf"(==|!=|\bin \(.*) ?({'|'.join(kinds)})")
    wrong = []
    for module in sorted(module for module in graph.modules if not part_of(module)):
        path = ROOT.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        wrong += [
            f"{module}: {line}" for line in file.read_text().splitlines() if asked.search(line)
        ]
    assert wrong == []


def test_what_parts_contribute_is_in_their_folders() -> None:
    for part in OWN:
        for kind in Part.__struct_fields__[4:]:
            for name, target in getattr(part, kind).items():
                assert target.startswith(f"{FOLDERS[part.name]}."), (part.name, kind, name)


def test_errors_know_where_each_thing_belongs() -> None:
    known = json.loads(KNOWN.read_bytes())
    now = {kind: dict(sorted(names.items())) for kind, names in index().items() if names}
    assert known == now, f"write this into {KNOWN}: {json.dumps(now, indent=1)}"


def test_a_record_imports_nothing_of_its_part() -> None:
    code = (
        "import sys; from agentrl.base.parts import parts; parts();"
        "print({'torch', 'aiohttp', 'agentrl.config'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "target", [one for part in OWN for one in (*part.tables.values(), *part.kinds.values())]
)
def test_a_table_may_be_imported_before_the_settings(target: str) -> None:
    module, _, name = target.partition(":")
    code = (
        f"from {module} import {name}; from agentrl.config import AlgorithmConfig, RunConfig;"
        "from agentrl.config.base import structs_of; import msgspec;"
        "tables = (RunConfig, AlgorithmConfig);"
        "every = [f.type for table in tables for f in msgspec.structs.fields(table)];"
        f"own = structs_of({name});"
        "assert any(set(own) <= set(structs_of(kind)) for kind in every)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [point.name for point in entry_points(group="agentrl.parts")])
def test_without_a_part_the_others_import_and_what_needs_it_says_so(name: str) -> None:
    (point,) = entry_points(group="agentrl.parts", name=name)
    own = point.load()
    fields = {"runner": "executor", "selfplay": "opponents"}
    settings = [f"{table}.x=1" for table in own.tables]
    for kind in own.kinds:
        table, _, tag = kind.rpartition(".")
        settings.append(f"{table}.{fields.get(table, 'kind')}={tag}")
        settings.append(f"{kind}.x=1")
    settings += [f"{setting}=x" for setting in own.runner]
    posts = [*own.dialects, *own.spans]
    contributed = own.commands, settings, own.kinds, own.libraries, own.stores, posts
    asked = json.dumps([list(names) for names in contributed])
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "without"), "WITHOUT_PARTS": name}
    command = [sys.executable, str(ROOT / "tests" / "without" / "look.py"), asked]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parts"] == len(parts()) - 1
    for sentence in found["sentences"]:
        assert f"it belongs to the part {own.name!r}" in sentence
