"""Names of a package that are imported at their first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_attributes(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package. names: relative module -> its
    attributes, separated by spaces."""
    module_of = {
        name: module for module, attributes in names.items() for name in attributes.split()
    }

    def attribute(name: str) -> object:
        if name in module_of:
            return getattr(import_module(f"{package}.{module_of[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
