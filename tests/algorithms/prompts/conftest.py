"""A store, as in the tests of runners."""

from tests.runners.conftest import store

__all__ = ["store"]
