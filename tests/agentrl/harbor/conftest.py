"""Real containers."""

from tests.runners.containers.real import real as real
