"""Parts are folders that the rest of the library does not import, and say what they contribute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import grimp
import pytest

from agentrl.base.parts import KINDS, KNOWN, Part, index, parts

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
    uses = {part.name: {part.name, *part.uses, *part.needs} for part in OWN}
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
        for kind in KINDS:
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


TABLES = sorted({one for part in OWN for one in (*part.tables.values(), *part.kinds.values())})
VALUES = {  # of settings that need another one than "x"
    "runner.framework_spans": "true", "policy.lora.rank": "8",
    "learner.liger_kernel": "true",
    "eval.functions": '["f.py:f"]', "reference.target_kl": "0.1", "tasks.order": "difficulty",
}  # fmt: skip
NAMES = {point.name: point.load() for point in entry_points(group="agentrl.parts")}


def things_of(part: Part) -> list[list[str]]:
    """What it contributes that somebody without it may ask for."""
    fields = {"runner": "executor", "selfplay": "opponents"}
    settings = [f"{table}.x=1" for table in part.tables]
    for kind in part.kinds:
        table, _, tag = kind.rpartition(".")
        settings.append(f"{table}.{fields.get(table, 'kind')}={tag}")
        settings.append(f"{kind}.x=1")
    named = [*part.runner, *(setting for setting in part.training if "." in setting)]
    named += [*(f"{setting}.rank" for setting in part.adapters), *part.patches]
    settings += [f"{setting}={VALUES.get(setting, 'x')}" for setting in named]
    posts = [*part.dialects, *part.spans]
    commands = [
        *part.commands,
        *(f"{option} 0 examples/staff/run.toml" for option in part.restarts),
    ]
    contributed = commands, settings, part.libraries, part.stores, posts
    return [list(names) for names in contributed]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """What was found without each part."""
    folder = tmp_path_factory.mktemp("without")
    asked = {name: things_of(part) for name, part in NAMES.items()} | {"all": [[]] * 5}
    command = [str(ROOT / "tests/without/each.py"), str(tiny_model_dir), str(folder)]
    subprocess.run(
        [sys.executable, *command, " ".join(TABLES)],
        input=json.dumps(asked), text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    return {file.stem: json.loads(file.read_bytes()) for file in folder.glob("*.json")}


@pytest.mark.timeout(600)  # the first of these tests waits for all
@pytest.mark.parametrize("target", TABLES)
def test_a_table_may_be_imported_before_the_settings(found: dict[str, Any], target: str) -> None:
    assert found[target] is True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_without_a_part_the_others_import_train_and_what_needs_it_says_so(
    found: dict[str, Any], name: str
) -> None:
    there = found[name]
    assert "error" not in there, there["error"]
    left = [part for other, part in NAMES.items() if name not in (other, "all")]
    assert there["parts"] == sum(NAMES[name].name not in part.needs for part in left)
    for sentence in there["sentences"]:
        assert f"it belongs to the part {NAMES[name].name!r}" in sentence
    assert there["steps"] == 2
