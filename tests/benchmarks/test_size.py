"""Each line counts once, however a folder is reached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.benchmarks import step_trace
from tests.benchmarks.size import cycles, files, measure
from tests.benchmarks.stays_trace import Journey

MAX_FILES = 19  # of a step up to its gradient; only falls
MAX_CALL_FILES = 17  # of a model call up to its row; only falls


def test_what_is_linked_counts_once(tmp_path: Path) -> None:
    package, linked = tmp_path / "package", tmp_path / "linked"
    (package / "inner").mkdir(parents=True)
    (linked / "sql").mkdir(parents=True)
    (package / "linked").symlink_to(linked)
    (package / "one.py").write_text("def f():\n    def g():\n        return 1\n    return g\n")
    (package / "inner" / "two.py").write_text("x = 1\n" * 901)
    (linked / "three.py").write_text("x = 1\n")
    (linked / "sql" / "four.sql").write_text("select 1;\n" * 7)
    found = measure(package)
    assert found["lines"] == 4 + 901 + 1
    assert found["lines_by_folder"] == {"package": 4, "package/inner": 901, "linked": 1}
    assert found["sql_lines"] == 7
    assert (found["modules"], found["modules_over_900"]) == (3, 1)
    assert (found["function_median"], found["most_modules_in_a_folder"]) == (3.0, 1)
    assert (found["modules_below_60"], found["largest_module"]) == (2, 901)
    assert found["longest_function"] == 4


def test_comments_and_docstrings_are_shares_of_lines(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        '"""A page\n\nof text."""\n# why\nx = "# no comment"  # a comment\n\n\n'
        'def f():\n    """One line."""\n    return """no docstring"""\n'
    )
    (tmp_path / "two.py").write_text("def g():\n" + "    x = 1\n" * 9)
    found = measure(tmp_path)
    assert (found["comment_share"], found["docstring_share"]) == (0.1, 0.2)


def test_modules_that_import_each_other_are_one_cycle() -> None:
    imported = {
        "a": {"b"},
        "b": {"c", "x"},
        "c": {"a", "b"},
        "d": {"a", "d"},
        "x": set(),
        "y": {"x"},
    }
    assert cycles(imported) == [["a", "b", "c"]]


def test_stays_are_of_rooms_and_stops_of_modules() -> None:
    journey = Journey(bool, ["a/one.py", "a/two.py", "b/one.py", "a/two.py"])
    figures = {"stays": 3, "rooms": 2, "returns": 1, "stops": 4, "modules": 3}
    assert journey.figures() == figures


def test_the_library_is_measured_whole() -> None:
    found = measure()
    assert sum(found["lines_by_folder"].values()) == found["lines"] > 10_000
    assert {"agentrl", "store", "runners", "algorithms"} <= found["lines_by_folder"].keys()
    assert not any("tests" in folder for folder in found["lines_by_folder"])
    assert found["function_median"] <= found["function_p95"]


def test_a_training_step_is_one_page_and_its_files_are_counted(tmp_path: Path) -> None:
    found = step_trace.measure()
    assert found["step_module_lines"] <= 200
    assert found["step_files"] <= found["step_files_to_the_end"]
    assert found["step_functions"] < found["step_functions_to_the_end"]
    groups = step_trace.groups_of(step_trace.rows(step_trace.SHAPE, 2, step_trace.VOCABULARY))
    to_gradient, _ = step_trace.traced(step_trace.updater(tmp_path), groups)
    passed = files(to_gradient)
    assert len(passed) == found["step_files"] <= MAX_FILES
    names = {code.co_qualname for code in to_gradient}
    assert {"Updater.update", "build_batch", "loss_coefficients"} <= names
    assert "batch_metrics" not in names  # it is behind the gradient
    assert not any(".venv" in file or file.startswith("tests") for file in passed)


def test_the_files_of_a_model_call_are_counted() -> None:
    """In a process of its own: where agents run, HTTP clients are patched, the gateway's too."""
    trace = [sys.executable, "-m", "tests.benchmarks.call_trace"]
    asked = subprocess.run(trace, capture_output=True, text=True, check=True)
    passed, names = json.loads(asked.stdout)
    assert len(passed) <= MAX_CALL_FILES, passed
    stages = {"receive", "CallHandler._prepare", "CallHandler._whole", "CallHandler._make_rows"}
    assert {*stages, "Upstream.post", "SqlStore.add_transitions", "Writer._commit"} <= set(names)
    assert {Path(file).parts[0] for file in passed} <= {"agentrl", "runners", "store"}
