"""Users' objects and task files, and the variables that model clients read.

An object is `file.py:name` or `package.module:name`; the variables have address and key.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from agentrl.core.data_files import LINES, is_row_file, read_rows, suffixes
from agentrl.core.errors import ConfigError, nearest
from agentrl.core.types import Json
from agentrl.core.user_code import cause_of, contained, text_of
from agentrl.core.values import NotJsonError, as_json, check_json

NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
INPUTS = ("input", "prompt", "question", "problem", "instruction")
INPUT_HINTS = {
    "input": "the agent's input; set tasks.columns.input to the field or column that has it",
    "messages": "a chat to imitate",
}
LIBRARY, STDLIB = Path(__file__).parents[1], Path(os.__file__).parent
PACKAGES = {"site-packages", "dist-packages"}
# Functions that resolve references "SCHEME:...": (reference, root, key) -> object. Imported at the
# first use, in any process that loads an agent, tasks or a verifier.
REFERENCES = {"environment": "agentrl.environments.hosted:load_reference"}
_entered: set[str] = set()  # folders of runs that this process has loaded files from
_unconnected: set[str] = set()  # user modules that were imported without a gateway


def load_attribute(path: str, root: Path, *, key: str) -> Any:
    """The object that `path` names. A file is relative to `root`; its folder joins `sys.path`.

    Raises ConfigError, which names the setting `key`, if the file, module or attribute is missing
    or the import fails."""
    scheme, colon, _ = path.partition(":")
    if colon and scheme in REFERENCES:
        return resolve_name(REFERENCES[scheme])(path, root, key)
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
        with contained():
            module = _import(source)
    except ImportError as error:
        raise ConfigError(f"{key} = {path!r}: cannot import it: {error}{_place(error)}") from error
    except Exception as error:  # a user's module may raise anything
        raise import_error(f"{key} = {path!r}: importing it", error) from error
    if not hasattr(module, name):
        public = [item for item in vars(module) if not item.startswith("_")]
        raise ConfigError(f"{key} = {path!r}: it has no {name!r}; {nearest(name, public)}")
    return getattr(module, name)


def _import(source: str) -> ModuleType:
    """Import a user's module. Where the gateway's variables are now set, modules that were imported
    without them are imported again: they may hold model clients with other addresses."""
    with placeholders() as unconnected:
        if not unconnected:
            for name in _unconnected:
                sys.modules.pop(name, None)
            _unconnected.clear()
        before = set(sys.modules)
        module = importlib.import_module(source)
        if unconnected:
            new = ((name, sys.modules.get(name)) for name in sys.modules.keys() - before)
            users = (name for name, loaded in new if _folder(loaded) in _entered)
            _unconnected.update(users)
        return module


def _folder(module: ModuleType | None) -> str:
    return str(Path(getattr(module, "__file__", None) or "").parent)


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
    """A ConfigError about an exception raised by an imported module."""
    return ConfigError(f"{what} raised {raised(error)}")


def raised(error: BaseException) -> str:
    """Describe an exception of user code with the line of the user's code, even if a library raised
    it."""
    error = cause_of(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}{_place(error)}"
    return f"{text_of(error)}{_place(error)}"


def kind_of(error: BaseException) -> str:
    """An exception with its line, but without its message, which may quote users."""
    error = cause_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{_place(error) or last}"


def _place(error: BaseException) -> str:
    """File and line in brackets: the innermost frame outside of libraries, else the call of an
    installed plug-in; empty if neither is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    packages, users = list[str](), list[str]()
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        packaged = bool(PACKAGES.intersection(file.parts))
        library = LIBRARY in file.parents or (STDLIB in file.parents and not packaged)
        if file.is_file() and not library:
            (packages if packaged else users).append(f" ({file}:{frame.lineno})")
    return next(iter([*users[-1:], *packages]), "")


def load_tasks(
    path: str,
    root: Path,
    *,
    key: str,
    needs: str = "input",
    columns: Mapping[str, str] = NO_COLUMNS,
) -> list[dict[str, Json]]:
    """Tasks of a file of rows, of "hf:owner/name[/config][@revision][:split]" or "file.py:name".

    needs: a required key; columns: field of a task -> the column that it is read from. Other fields
    keep their names. Without a column for the input, files other than JSON lines use the first
    column of `INPUTS` that they have. Raises ConfigError, with file and line or index, for an item
    that is not a JSON object with this key, or would change when it is stored, and for two tasks
    with one id."""
    items: dict[str, Any] = {}
    if is_row_file(path) and path.partition(":")[0] not in REFERENCES:
        inputs = () if path.endswith(LINES) else INPUTS
        try:
            for place, row in read_rows(path, root):
                items[place] = _plain_task(row, inputs)
        except ConfigError as error:
            raise ConfigError(f"{key} = {path!r}: cannot read the task file: {error}") from None
    elif ":" not in path:
        raise ConfigError(
            f"{key} = {path!r}: tasks are in a file that ends in {', '.join(suffixes())}, or write"
            " file.py:name or package.module:name"
        )
    else:
        source = load_attribute(path, root, key=key)
        try:
            with contained():
                items = {f"{path}[{n}]": item for n, item in enumerate(_listed(source))}
        except Exception as error:
            raise import_error(f"{key} = {path!r}: getting its tasks", error) from error
    return _checked(items, key, needs, columns)


def _listed(source: Any) -> Iterable[Any]:
    items: Iterable[Any] = source() if callable(source) else source
    return items


def _plain_task(row: dict[str, Any], inputs: Iterable[str]) -> dict[str, Any]:
    """The row of a file with an input, dates and the like as text. A null input counts as
    missing."""
    with suppress(NotJsonError):  # `_checked` says where
        row = {key: as_json(item) for key, item in row.items()}
    item = next((row[name] for name in inputs if row.get(name) is not None), None)
    if item is not None:
        return {**row, "input": item}
    return {key: item for key, item in row.items() if key != "input"} if inputs else row


def task_file(
    tasks: Iterable[dict[str, Json]] | str,
    file: Path,
    columns: Mapping[str, str] = NO_COLUMNS,
    needs: str = "input",
) -> str:
    """The name of a task file; writes tasks given as objects to `file`. needs: a required key.

    Raises ConfigError, as `load_tasks` does."""
    if isinstance(tasks, str):
        return tasks
    items = {f"task {index}": item for index, item in enumerate(tasks)}
    _checked(items, file.stem, needs, columns)
    file.write_bytes(msgspec.json.Encoder().encode_lines(items.values()))
    return str(file)


def _checked(
    items: dict[str, Any], key: str, needs: str = "input", columns: Mapping[str, str] = NO_COLUMNS
) -> list[dict[str, Json]]:
    """The values of `items`, which maps sources to tasks, with the fields of `columns`. Raises
    ConfigError for a task that is not a JSON object with the key `needs`, or that changes when it
    is stored as JSON: its verifier would see another task; and for two tasks with one id."""
    if not items:
        raise ConfigError(f"{key}: there are no tasks in it")
    ids: dict[Any, tuple[str, Any]] = {}
    for source, item in items.items():
        if not isinstance(item, dict):
            raise ConfigError(f"{key}: {source} is not a JSON object but {type(item).__name__}")
        where = f"{source} (id {item['id']!r:.80})" if "id" in item else source
        for field, column in columns.items():
            if column not in item:
                raise ConfigError(
                    f"{key}: {where} has no column {column!r}, which tasks.columns.{field} names;"
                    f" {nearest(column, item)}"
                )
        mapped = {field: item[column] for field, column in columns.items()}
        task = items[source] = item | mapped if mapped else item
        if needs not in task:
            raise ConfigError(
                f"{key}: {where} has no {needs!r}, {INPUT_HINTS[needs]}{_names(item)}"
            )
        try:
            check_json(item)
        except NotJsonError as error:
            raise ConfigError(f"{key}: {error.at(f'{where}: task')}") from None
        if isinstance(name := task.get("id"), str | int):
            other, first = ids.setdefault(str(name), (source, task))
            if first != task:
                raise ConfigError(
                    f"{key}: {other} and {source} are two tasks with the id {name!r:.80}, by which"
                    " statistics are kept; make ids unique, or leave them out"
                )
    return list(items.values())


def _names(item: dict[Any, Any]) -> str:
    return f" (it has {', '.join(map(repr, item))})"[:400] if item else ""


def is_installed(package: str) -> bool:
    """Whether a package is installed, not just a folder of that name, which has no origin."""
    spec: Any = find_spec(package)
    return spec is not None and spec.origin is not None


# By default, frameworks send their traces to api.openai.com and telemetry.crewai.com.
NO_TELEMETRY = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "CREWAI_DISABLE_TELEMETRY": "true"}
KEY = "agentrl"  # replaces the user's keys, which the gateway does not use
GOOGLE_KEYS = {"GEMINI_API_KEY", "GOOGLE_API_KEY"}  # from which Google's clients read a key
NOWHERE = "http://127.0.0.1:9/v1"  # nothing listens at the port `discard`


def model_variables(
    gateway: str, key: str, agent_variables: Collection[str] = ()
) -> dict[str, str]:
    """Variables from which model clients read base URL and key; `gateway` ends in /v1.

    agent_variables: names of variables that the user sets for the agent. With a key of Google's
    among them, for a tool perhaps, Google's clients keep their address: there is no other key for
    tools."""
    variables = {
        "OPENAI_BASE_URL": gateway,
        "OPENAI_API_BASE": gateway,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        **NO_TELEMETRY,
    }
    if GOOGLE_KEYS.isdisjoint(agent_variables):
        variables["GOOGLE_GEMINI_BASE_URL"] = gateway.removesuffix("/v1")
        variables["GEMINI_API_BASE"] = gateway  # litellm's, which appends /models/...
        variables["GEMINI_API_KEY"] = key
    return variables


@contextmanager
def placeholders() -> Iterator[bool]:
    """Let a user's file create model clients on import in a process without a gateway, for example
    a process that needs only the tasks of a file. A key that the user has set, and its address, are
    kept. Yields whether a variable was missing."""
    configured = [name for name in ("OPENAI", "ANTHROPIC") if f"{name}_API_KEY" in os.environ]
    added = {
        name: value
        for name, value in model_variables(NOWHERE, KEY, os.environ).items()
        if name not in os.environ and not name.startswith(tuple(configured))
    }
    os.environ |= added
    try:
        yield bool(added)
    finally:
        for name in added:
            os.environ.pop(name, None)
