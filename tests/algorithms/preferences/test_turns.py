import pytest

from agentrl.algorithms.preferences.turns import written


@pytest.mark.parametrize(
    "odd",
    [
        '{"role": "assistant"}',
        '{"role": "assistant", "tool_calls": []}',
        '{"role": "assistant", "content": [1]}',
        "[1]",
        "On Monday.",
    ],
)
def test_a_correction_that_is_no_whole_message_is_a_text(odd: str) -> None:
    assert written(odd) == {"role": "assistant", "content": odd}


def test_a_correction_may_be_a_whole_message() -> None:
    call = '{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}'
    assert written(call)["tool_calls"] == [{"id": "1"}]
