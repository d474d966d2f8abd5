"""Agents in workspaces, whose hidden tests are run."""

from tests.runners.conftest import bench as bench
from tests.runners.conftest import model as model
from tests.runners.conftest import store as store
from tests.runners.workspace.conftest import play as play
from tests.runners.workspace.conftest import temporary as temporary
