"""How large the library is: lines, functions, modules, folders.

python -m tests.benchmarks.size [--json]
"""

from __future__ import annotations

import ast
import io
import json
import re
import resource
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles
from types import CodeType
from typing import Any

import grimp

from tests.benchmarks.report import arguments

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentrl"
LIBRARY = ("agentrl", "algorithms", "runners", "store")
LONG = 900  # lines of a module that is too long
SHORT = 60  # lines below which a module is hardly a noun that a reader looks for
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)  # code in a document
TRIES = 5  # of a command whose time is measured


def folders(top: Path) -> set[Path]:
    """The package with what is linked into it, each folder once."""
    own = {folder for folder in top.rglob("*") if folder.is_dir()} | {top}
    links = {link.resolve() for link in own if link.is_symlink()}
    linked = {folder for link in links for folder in folders(link)}
    return {folder for folder in own if not folder.is_symlink()} | linked


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def functions(file: Path) -> Iterator[int]:
    """Lines of each function, those inside others too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def comment_lines(file: Path) -> int:
    """Lines that have a comment, alone or after code."""
    with io.BytesIO(file.read_bytes()) as text:
        tokens = tokenize.tokenize(text.readline)
        return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def docstring_lines(file: Path) -> int:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = 0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            found += (text.end_lineno or text.lineno) - text.lineno + 1
    return found


def in_library(code: CodeType) -> bool:
    parts = Path(code.co_filename).resolve().parts[len(ROOT.parts) :]
    return bool(parts) and parts[0] in LIBRARY


def files(codes: set[CodeType]) -> list[str]:
    return sorted({str(Path(code.co_filename).resolve().relative_to(ROOT)) for code in codes})


def rooms() -> tuple[int, int]:
    """Imports between folders, and folders on a circle of them. Modules of `agentrl/` itself are
    each alone; commands import what they like."""
    graph = grimp.build_graph("agentrl", exclude_type_checking_imports=True)

    def room(module: str) -> str:
        folder, _, _ = module.rpartition(".")
        inside = PACKAGE.joinpath(*module.split(".")[1:], "__init__.py").is_file()
        return module if inside or folder == "agentrl" else folder

    pairs = {
        (room(module), room(other))
        for module in graph.modules
        if not module.endswith(".command")
        for other in graph.find_modules_directly_imported_by(module)
    }
    arrows = {(one, other) for one, other in pairs if one != other}
    below: dict[str, set[str]] = defaultdict(set)
    for room, other in arrows:
        below[room].add(other)

    def reach(room: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*below[room]]
        while waiting:
            if (one := waiting.pop()) not in seen:
                seen.add(one)
                waiting += below[one]
        return seen

    return len(arrows), sum(room in reach(room) for room in list(below))


def imports() -> dict[str, set[str]]:
    """What each module of the library imports, also within functions."""
    graph = grimp.build_graph("agentrl", exclude_type_checking_imports=True)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def cycles(imported: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other in a circle; each cycle once."""
    importing: dict[str, set[str]] = defaultdict(set)
    for module, others in imported.items():
        for other in others:
            importing[other].add(module)

    def reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
        found, waiting = {start}, [start]
        while waiting:
            new = arrows.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    left, circles = set(imported), list[list[str]]()
    while left:
        module = left.pop()
        circle = reached(module, imported) & reached(module, importing)
        left -= circle
        if len(circle) > 1:
            circles.append(sorted(circle))
    return sorted(circles)


def contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def upward(imported: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Imports from a layer of a contract to one above it, which the contract leaves out."""
    found = set[tuple[str, str]]()
    for contract in contracts():
        for container in contract.get("containers", [""]) if contract["type"] == "layers" else ():
            place = {
                f"{container}.{name.strip().strip('()')}".lstrip("."): number
                for number, layer in enumerate(contract["layers"])
                for name in layer.split("|")
            }

            def layer_of(module: str, place: Mapping[str, int] = place) -> tuple[int, str] | None:
                while module and module not in place:
                    module = module.rpartition(".")[0]
                return (place[module], module) if module else None

            for module, others in imported.items():
                own = layer_of(module)
                for other in others if own else ():
                    its = layer_of(other)
                    if own and its and own[1] != its[1] and its[0] <= own[0]:
                        found.add((module, other))
    return found


def settings() -> int:
    """Settings of the run file, by the table that they are in; tables are not counted. A name that
    several kinds of one table have counts once."""
    text = run_command("init", "--schema")
    schema = json.loads(text)
    tables = schema["$defs"]

    def tables_in(one: Mapping[str, Any]) -> list[str]:
        names = [one["$ref"].rpartition("/")[2]] if "$ref" in one else []
        inner = [part for key in ("anyOf", "oneOf", "allOf") for part in one.get(key, ())]
        inner += [one[key] for key in ("additionalProperties", "items") if one.get(key)]
        names += [name for part in inner if isinstance(part, dict) for name in tables_in(part)]
        return [
            name
            for found in names
            for name in ([found] if "properties" in tables[found] else tables_in(tables[found]))
        ]

    waiting, done = [("", tables_in(schema))], set[tuple[str, ...]]()
    count = set[str]()
    for path, kinds in waiting:  # grows during the loop
        for kind in kinds:
            for name, one in tables[kind]["properties"].items():
                inner = tuple(tables_in(one))
                if not inner:
                    count.add(f"{path}.{name}")
                elif inner not in done:
                    done.add(inner)
                    waiting.append((f"{path}.{name}", list(inner)))
    return len(count)


def run_command(*words: str) -> str:
    command = [sys.executable, "-m", "agentrl", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def commands() -> int:
    """Commands that a user can type, hidden ones too, and groups that do something themselves."""
    import click

    from tests.golden import access

    def inside(group: click.Group) -> int:
        context = click.Context(group)
        names = group.list_commands(context)
        found = [one for name in names if (one := group.get_command(context, name)) is not None]
        groups = [one for one in found if isinstance(one, click.Group)]
        runnable = sum(one.invoke_without_command for one in groups)
        return len(found) - len(groups) + runnable + sum(map(inside, groups))

    return inside(access.commands())


def presets() -> tuple[int, int]:
    """Presets and modifiers, and recipes, which are presets or modifiers with other options."""
    own, _, recipes = run_command("algorithms").partition("\nrecipes\n")
    names = re.compile(r"^  \S", re.MULTILINE)
    return len(names.findall(own)), len(names.findall(recipes))


def documents() -> list[Path]:
    listed = ["git", "ls-files", "-z", "*.md"]
    names = subprocess.run(listed, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return [ROOT / name for name in names.split("\0") if name]


def words() -> int:
    """Words of all documents, without blocks of code."""
    return sum(len(FENCED.sub("", file.read_text()).split()) for file in documents())


def processor_seconds(*command: str) -> float:
    """The least processor time of a process in a few tries."""
    found = []
    for _ in range(TRIES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        found.append(sum(used))
    return round(min(found), 3)


def house() -> dict[str, Any]:
    """What a reader and a user see, apart from the lines of the library."""
    imported = imports()
    circles, arrows = cycles(imported), upward(imported)
    named, recipes = presets()
    return {
        "test_lines": sum(lines(file) for file in (ROOT / "tests").rglob("*.py")),
        "settings": settings(),
        "commands": commands(),
        "presets_and_modifiers": named,
        "recipes": recipes,
        "documents": len(documents()),
        "words": words(),
        "import_cycles": len(circles),
        "modules_on_cycles": sum(map(len, circles)),
        "imports_upward": len(arrows),
        "contracts": len(contracts()),
        "help_seconds": processor_seconds("-m", "agentrl", "--help"),
        "import_seconds": processor_seconds("-c", "import agentrl"),
        "python_seconds": processor_seconds("-c", "pass"),
    }


def measure(package: Path = PACKAGE) -> dict[str, Any]:
    root = package.resolve().parent
    modules = [file for folder in sorted(folders(package)) for file in sorted(folder.glob("*.py"))]
    sizes = {file: lines(file) for file in modules}
    lengths = [length for file in modules for length in functions(file)]
    by_folder: Counter[str] = Counter()
    for file, size in sizes.items():
        by_folder[str(file.parent.relative_to(root))] += size
    return {
        "lines": sum(sizes.values()),
        "lines_by_folder": dict(by_folder),
        "sql_lines": sum(lines(file) for f in folders(package) for file in f.glob("*.sql")),
        "modules": len(modules),
        "function_median": median(lengths),
        "function_p95": quantiles(lengths, n=20)[-1],
        "modules_over_900": sum(size > LONG for size in sizes.values()),
        "modules_below_60": sum(
            size < SHORT for file, size in sizes.items() if file.name != "__init__.py"
        ),
        "largest_module": max(sizes.values()),
        "longest_function": max(lengths),
        "comment_share": round(sum(map(comment_lines, modules)) / sum(sizes.values()), 4),
        "docstring_share": round(sum(map(docstring_lines, modules)) / sum(sizes.values()), 4),
        "most_modules_in_a_folder": max(
            Counter(file.parent for file in modules if file.name != "__init__.py").values()
        ),
    }


def main() -> None:
    as_json = arguments(__doc__).parse_args().json
    # They import torch and aiohttp, which `measure` does not need.
    from tests.benchmarks import call_trace, stays_trace, step_trace

    arrows, on_circles = rooms()
    measured = measure() | {"arrows": arrows, "rooms_on_circles": on_circles}
    measured |= step_trace.measure() | call_trace.measure() | house() | stays_trace.measure()
    if as_json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        if not isinstance(value, dict):
            print(f"{name:26} {value:8g}")
    for folder, size in measured["lines_by_folder"].items():
        print(f"  {folder:24} {size:8}")


if __name__ == "__main__":
    main()
