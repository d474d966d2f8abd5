"""Real containers."""

from tests.runners.executors.real import real as real
