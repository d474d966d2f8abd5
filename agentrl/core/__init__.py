"""Names of a package that are imported at their first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_attributes(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package. names: module, relative to the package -> what it has."""
    homes = {name: module for module, found in names.items() for name in found.split()}

    def attribute(name: str) -> object:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
