"""Tasks about files, generated from bugs or read from folders, and a verifier that runs their
hidden tests in the workspace."""

from agentrl.tasks.folders import bugs as bugs
from agentrl.tasks.folders import harbor as harbor
from agentrl.tasks.folders import swe as swe
from agentrl.tasks.rewards import TestsError as TestsError
from agentrl.tasks.rewards import run_tests as run_tests
