"""The executors of processes, as the tests of every executor make them."""

from tests.runners.executors.conftest import docker as docker
from tests.runners.executors.conftest import hanging as hanging
from tests.runners.executors.conftest import kubernetes as kubernetes
from tests.runners.executors.conftest import make as make
