"""A gateway with a scripted model, as in the tests of runners."""

from tests.runners.conftest import bench, impatient, model, store

__all__ = ["bench", "impatient", "model", "store"]
