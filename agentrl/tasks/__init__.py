"""Tasks about files, generated from bugs or read from folders, and a verifier that runs their
hidden tests in the workspace."""

from agentrl.tasks.folders import harbor as harbor
from agentrl.tasks.folders import swe as swe
from agentrl.tasks.repos import bugs as bugs
from agentrl.tasks.verify import TestsError as TestsError
from agentrl.tasks.verify import run_tests as run_tests
