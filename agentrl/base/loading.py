"""Load users' objects (`file.py:name`, `package.module:name`) and task files."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from agentrl.base.jsonvalues import NotJsonError, as_json, check_json
from agentrl.base.parts import installed_plugins, known, missing
from agentrl.base.row_files import read_rows
from agentrl.errors import ConfigError, nearest
from agentrl.types import Json

INPUTS = ("input", "prompt", "question", "problem", "instruction")
_entered: set[str] = set()  # folders of runs that this process has loaded files from


def load_attribute(path: str, root: Path, *, key: str) -> Any:
    """The object that `path` names. A file is relative to `root`; its folder joins `sys.path`.

    Raises ConfigError, which names the setting `key`, if the file, module or attribute is missing
    or the import fails."""
    for point in installed_plugins("references"):
        if path.startswith(f"{point.name}:"):
            return point.load()(path, root, key)
    source, colon, name = path.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f"{key} = {path!r}: write it as file.py:name or package.module:name")
    folder = root.resolve()
    if source.endswith(".py"):
        file = (root / source).resolve()
        if not file.is_file():
            raise ConfigError(f"{key} = {path!r}: there is no file {file}")
        folder, source = file.parent, file.stem
        loaded = sys.modules.get(source)
        if loaded is not None and getattr(loaded, "__file__", None) != str(file):
            del sys.modules[source]  # another run's file of the same name
    _enter(str(folder))
    try:
        module = importlib.import_module(source)
    except ImportError as error:
        why = _of_a_missing_part(error.name or "") or error
        raise ConfigError(f"{key} = {path!r}: cannot import it: {why}") from error
    except Exception as error:  # a user's module may raise anything
        raise import_error(f"{key} = {path!r}: importing it", error) from error
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")]
        raise ConfigError(f"{key} = {path!r}: it has no {name!r}; {nearest(name, public)}")
    return getattr(module, name)


def _of_a_missing_part(module: str) -> str | None:
    """A sentence about the part that has a module that could not be found, if so."""
    inside = (name for name in known("libraries") if f"{name}.".startswith(f"{module}."))
    return next((why for name in inside if (why := missing("libraries", name))), None)


def _enter(folder: str) -> None:
    """Put a run's folder first in `sys.path`. Unload modules of other runs' folders for which this
    folder has a file of the same name: `import tasks` must load the neighbouring file."""
    if sys.path[:1] != [folder]:
        sys.path[:] = [folder, *(other for other in sys.path if other != folder)]
    for file in Path(folder).glob("*.py"):
        origin = Path(getattr(sys.modules.get(file.stem), "__file__", None) or file)
        if origin != file and str(origin.parent) in _entered:
            del sys.modules[file.stem]
    _entered.add(folder)


def import_error(what: str, error: Exception) -> ConfigError:
    """A ConfigError about an exception raised by an imported module, with file and line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"{what} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    )


def load_tasks(path: str, root: Path, *, key: str, needs: str = "input") -> list[dict[str, Json]]:
    """Tasks of a `.jsonl` file (one JSON object per line), of a `file.py:name`, or of a hub data
    set "hf:owner/name[/config][@revision][:split]", whose input is the first of the columns
    `INPUTS`.

    needs: a required key. Raises ConfigError, with file and line or index, for an item that is not
    a JSON object with this key, or would change when it is stored."""
    if path.endswith(".jsonl"):
        return _checked(_read_jsonl(root / path, key), key, needs)
    if path.startswith("hf:"):
        rows = {place: _hub_task(row) for place, row in read_rows(path)}
        return _checked(rows, key, needs)
    with _placeholder_keys():
        found = load_attribute(path, root, key=key)
    try:
        items = list(found() if callable(found) else found)
    except Exception as error:
        raise ConfigError(
            f"{key} = {path!r}: getting its tasks raised {type(error).__name__}: {error}"
        ) from error
    return _checked({f"{path}[{index}]": item for index, item in enumerate(items)}, key, needs)


@contextmanager
def _placeholder_keys() -> Iterator[None]:
    """Let a file that also has the agent create its model client, which needs a key. Runners import
    the file again, with the gateway's URL and key."""
    missing = {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"} - os.environ.keys()
    os.environ |= dict.fromkeys(missing, "agentrl")
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _hub_task(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an input, dates and the like as text: no file of the user's has other values."""
    with suppress(NotJsonError):  # `_checked` says where
        row = {key: as_json(value) for key, value in row.items()}
    found = next((row[name] for name in INPUTS if name in row), None)
    return row if found is None else {**row, "input": found}


def task_file(tasks: Iterable[dict[str, Json]] | str, file: Path) -> str:
    """The name of a task file; writes tasks given as objects to `file`."""
    if isinstance(tasks, str):
        return tasks
    items = _checked({f"task {index}": item for index, item in enumerate(tasks)}, file.stem)
    file.write_bytes(msgspec.json.Encoder().encode_lines(items))
    return str(file)


def _checked(items: dict[str, Any], key: str, needs: str = "input") -> list[dict[str, Json]]:
    """The values of `items`, which maps sources to tasks. Raises ConfigError for a task that is not
    a JSON object with the key `needs`, or that changes when it is stored as JSON: its verifier
    would see another task."""
    if not items:
        raise ConfigError(f"{key}: there are no tasks in it")
    for source, item in items.items():
        if not isinstance(item, dict):
            raise ConfigError(f"{key}: {source} is not a JSON object but {type(item).__name__}")
        if needs not in item:
            what = {"input": "the agent's input", "messages": "a chat to imitate"}
            raise ConfigError(f"{key}: {source} has no {needs!r}, {what[needs]}")
        try:
            check_json(item)
        except NotJsonError as error:
            raise ConfigError(f"{key}: {error.at(f'{source}: task')}") from None
    return list(items.values())


def _read_jsonl(file: Path, key: str) -> dict[str, Any]:
    try:
        # Not `splitlines`: JSON strings may contain U+2028 and other line separators.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} = {str(file)!r}: cannot read the task file: {error}") from None
    items: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                items[f"{file}:{number}"] = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{key}: {file}:{number} is not JSON: {error}") from None
    return items


def is_installed(package: str) -> bool:
    """Whether a package is installed, not just a folder of that name, which has no origin."""
    spec: Any = find_spec(package)
    return spec is not None and spec.origin is not None
