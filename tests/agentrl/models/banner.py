"""What `agentrl serve` prints once it answers."""

from __future__ import annotations

import re
from subprocess import Popen


def read_banner(process: Popen[str]) -> tuple[str, str]:
    """The address for OpenAI's clients, and all that was printed."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ctrl-C" in line:
            break
    found = re.search(r"OPENAI_BASE_URL=(\S+)", said)
    assert found, said
    return found[1], said
