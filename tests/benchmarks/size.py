"""How large the library is: lines, functions, modules, folders.

python -m tests.benchmarks.size [--json]
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median, quantiles
from types import CodeType
from typing import Any

import grimp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agentrl"
LIBRARY = ("agentrl", "algorithms", "runners", "store")
LONG = 900  # lines of a module that is too long


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


def in_library(code: CodeType) -> bool:
    parts = Path(code.co_filename).resolve().parts[len(ROOT.parts) :]
    return bool(parts) and parts[0] in LIBRARY


def files(codes: set[CodeType]) -> list[str]:
    return sorted({str(Path(code.co_filename).resolve().relative_to(ROOT)) for code in codes})


def lines_of_parts() -> dict[str, int]:
    """Lines of each part of the library, by its name."""
    found = {}
    for point in entry_points(group="agentrl.parts"):
        if point.module.startswith("agentrl."):
            folder = ROOT.joinpath(*point.module.split(".")[:-1]).resolve()
            found[point.name] = sum(lines(file) for file in folder.rglob("*.py"))
    return found


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
        "most_modules_in_a_folder": max(
            Counter(file.parent for file in modules if file.name != "__init__.py").values()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    # They import torch and aiohttp, which `measure` does not need.
    from tests.benchmarks import call_trace, step_trace

    parts = lines_of_parts()
    arrows, on_circles = rooms()
    measured = measure() | {"parts": parts, "arrows": arrows, "rooms_on_circles": on_circles}
    measured["spine_lines"] = measured["lines"] - sum(parts.values())
    measured |= step_trace.measure() | call_trace.measure()
    if parser.parse_args().json:
        print(json.dumps(measured))
        return
    for name, value in measured.items():
        if not isinstance(value, dict):
            print(f"{name:26} {value:8g}")
    for folder, size in (parts | measured["lines_by_folder"]).items():
        print(f"  {folder:24} {size:8}")


if __name__ == "__main__":
    main()
