"""What references to an environment (`agentrl.config.derived`) stand for: its agent, tasks and
verifier."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from agentrl.base.jsonvalues import NotJsonError, check_json
from agentrl.base.loading import load_attribute
from agentrl.base.user_code import cause_of, contained, text_of
from agentrl.config.derived import Named
from agentrl.environments.base import KINDS, Environment
from agentrl.errors import ConfigError
from agentrl.plugins import load_plugin
from agentrl.types import Json

MOST_TASKS = 1_000_000  # of a split; all are held in memory
_making = threading.RLock()


def parse(reference: str, root: Path) -> tuple[str, Named]:
    """What it contributes, and the environment."""
    _, which, name = reference.split(":", 2)
    name, brace, options = name.partition(" {")
    given = msgspec.json.decode(f"{{{options}", type=dict[str, Any]) if brace else {}
    return which, Named.read(name, given, root.resolve())


def resolve(reference: str, root: Path, key: str) -> Any:
    """The agent, tasks or verifier that a reference names. Raises ConfigError."""
    from agentrl.environments import hosted

    which, named = parse(reference, root)
    if which == "agent":
        return lambda: hosted.agent(named)  # made by each process of its own
    if which == "verifier":
        return hosted.verifier(named)
    return hosted.tasks(named, which)


def load_class(named: Named) -> type[Environment]:
    """The plug-in's class. Raises ConfigError."""
    key, plugin = "environment", named.plugin
    if plugin.partition(":")[0].endswith(".py"):
        found = load_attribute(plugin, Path(named.root), key=key)
    else:
        found = load_plugin("environments", plugin, (), Path(named.root), key=key)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(
            f"environment = {named.name!r}: {found!r:.80} is no class that inherits from"
            " agentrl.environments.Environment"
        )
    has = [kind for kind in KINDS if callable(getattr(found, kind, None))]
    if len(has) != 1:
        raise ConfigError(
            f"environment = {named.name!r}: {found.__name__} has {' and '.join(has) or 'none'} of"
            " run, open and verify; it needs exactly one"
        )
    return found


def kind_of(class_: type[Environment]) -> str:
    return next(kind for kind in KINDS if hasattr(class_, kind))


@cache
def _made(named: Named) -> Environment:
    class_ = load_class(named)
    environment = class_.__new__(class_)
    environment.root = Path(named.root)
    with explained(named, "cannot be made"):
        environment.__init__(named.what, **named.given)  # type: ignore[misc]
    return environment


def made(named: Named) -> Environment:
    """This process's own environment of this name. Raises ConfigError."""
    with _making:
        return _made(named)


@contextmanager
def explained(named: Named, what: str) -> Iterator[None]:
    """Turns what a plug-in raises into a ConfigError with the environment's name and a cure."""
    known = f"environment = {named.name!r}"
    try:
        with contained():
            yield
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{known}: there is no module {error.name!r} for {sys.executable}; {named.cure}"
        ) from error
    except Exception as error:  # a plug-in may raise anything
        last = traceback.extract_tb(cause_of(error).__traceback__)[-1]
        raise ConfigError(
            f"{known} {what}: {text_of(error)} ({last.filename}:{last.lineno})"
        ) from error


def checked_tasks(named: Named, split: str) -> list[dict[str, Json]]:
    """The tasks of a split, each with an id and an input that survive JSON. Raises ConfigError."""
    environment = made(named)
    with explained(named, f"raised in tasks({split!r})"):
        rows = list(islice(environment.tasks(split), MOST_TASKS + 1))
    known, ids = f"environment = {named.name!r}", set[str]()
    if not rows:
        raise ConfigError(f"{known}: tasks({split!r}) has none; set tasks.{split} to others")
    if len(rows) > MOST_TASKS:
        raise ConfigError(f"{known}: tasks({split!r}) has more than {MOST_TASKS:,}; let it end")
    for index, row in enumerate(rows):
        where = f"{known}: task {index} of {split!r}"
        if not isinstance(row, dict) or not {"id", "input"} <= row.keys():
            raise ConfigError(f"{where} is {row!r:.80}; it needs an 'id' and an 'input'")
        id = row["id"]
        if not (isinstance(id, str) and id) or id in ids:
            why = "is there twice" if isinstance(id, str) and id else "is no text"
            raise ConfigError(f"{where} has the id {id!r:.80}, which {why}")
        ids.add(id)
        try:
            check_json(row)
        except NotJsonError as error:
            raise ConfigError(
                f"{known}: {error.at(f'task {id!r}')}: it would change when it is stored, so"
                " keep an index or a seed in it instead"
            ) from None
    return rows


def check_unique(named: Named, splits: Iterable[list[dict[str, Json]]]) -> None:
    """Raises ConfigError if two splits have the same id."""
    first, second = ({str(row["id"]) for row in rows} for rows in splits)
    if both := sorted(first & second):
        raise ConfigError(
            f"environment = {named.name!r}: {len(both)} ids, such as {both[0]!r}, are in"
            " 'train' and in 'heldout'; a task is trained on, or held out"
        )
