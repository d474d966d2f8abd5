"""Attempts to export: a gateway and a worker in front of a scripted model server."""

from tests.runners.conftest import bench as bench
from tests.runners.conftest import model as model
from tests.runners.conftest import store as store
