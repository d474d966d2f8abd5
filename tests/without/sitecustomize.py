"""Makes Python behave as if some parts were not installed: the variable WITHOUT_PARTS has the names
of their entry points, separated by commas, or `all`. These are gone, and their folders cannot be
imported.

Every process that has this folder in PYTHONPATH does so, and the processes that it starts.
"""

import importlib.abc
import importlib.metadata
import os
import sys

NAMES = [name for name in os.environ.get("WITHOUT_PARTS", "").split(",") if name]


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if any(fullname == folder or fullname.startswith(f"{folder}.") for folder in FOLDERS):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return


every = importlib.metadata.entry_points
FOLDERS = [
    point.module.removesuffix(".part")
    for point in every(group="agentrl.parts")
    if point.name in NAMES or NAMES == ["all"]
]


def entry_points(**chosen):  # type: ignore[no-untyped-def]
    found = every()
    points = importlib.metadata.EntryPoints(
        point
        for group in found.groups
        for point in found.select(group=group)
        if not point.value.startswith(tuple(FOLDERS))
    )
    return points.select(**chosen) if chosen else points


if NAMES:
    importlib.metadata.entry_points = entry_points
    sys.meta_path.insert(0, Blocked())
