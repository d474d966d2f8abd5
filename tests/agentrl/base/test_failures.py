from __future__ import annotations

import pytest

from agentrl.base.failures import cure_of
from agentrl.types import ErrorKind


@pytest.mark.parametrize("kind", [ErrorKind.AGENT, ErrorKind.MODEL])
def test_a_prompt_that_is_too_long_is_not_cured_by_another_agent_or_server(kind: ErrorKind) -> None:
    assert "engine.max_context" in cure_of(kind, "the model's context is 512 tokens")
    assert "engine.max_context" not in cure_of(kind, "KeyError: 'context'")
