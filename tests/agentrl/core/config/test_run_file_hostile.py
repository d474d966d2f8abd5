"""Run files that are deep, long or large in one value."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agentrl.core.config.run_file import load, read_toml, resolve
from agentrl.core.errors import ConfigError

N = 20_000
QUOTED = ['"a"'] * N


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"x = {'[' * N}{']' * N}", "levels"),
        (f"x = {'{a = ' * N}1{'}' * N}", "levels"),
        (f"{'.'.join('a' * N)} = 1", "levels"),
        (f"[{' . '.join('a' * N)}]", "levels"),
        (f"x = {{b = 1, {'.'.join(QUOTED)} = 1}}", "levels"),
        (f"steps = {'9' * 5000}", "64 bits"),
        (f"steps = 0x{'f' * 5000}", "64 bits"),
    ],
)
def test_a_deep_or_large_value_is_a_sentence_at_once(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError, match=why) as caught:
        load(file)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (f"steps={'9' * 5000}", "64 bits"),
        (f"agent.env.x={'[' * N}", "levels"),
        (f"{'.'.join('a' * N)}=1", "levels"),
    ],
)
def test_a_deep_or_large_override_is_a_sentence(override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        resolve({}, source="test", overrides=[override])
    assert len(str(caught.value)) < 1000


def test_the_greatest_integer_and_a_key_of_several_parts_are_read() -> None:
    text = f'a.b."c.d".e = {2**63 - 1}\ntext = """{"a." * N}"""'
    assert read_toml(text)["a"]["b"]["c.d"]["e"] == 2**63 - 1
