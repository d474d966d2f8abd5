"""Policies that look, where the installed transformers has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from agentrl.algorithms.vision.inputs import MIN_TRANSFORMERS
from tests.runners.conftest import store as store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Older versions of transformers have no policies that look, and say so."""
    if Version(transformers.__version__) >= Version(MIN_TRANSFORMERS):
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and "too_old" not in item.name:
            item.add_marker(pytest.mark.skip(reason=f"the extra `vision` needs {MIN_TRANSFORMERS}"))
