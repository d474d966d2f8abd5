"""The folder of a run with two debaters, who share an adapter, and a judge."""

from __future__ import annotations

from pathlib import Path

HEAD = """
name = "debate"
output = "out"
steps = 2
audit.before = false
[agent]
path = "agent.py:agent"
[tasks]
train = "tasks.jsonl"
[verifier]
path = "verifier.py:verify"
[policy]
model = "{model}"
[policies.debater]
roles = ["left", "right"]
lora.rank = 2
[policies.judge]
roles = ["judge"]
lora.rank = 4
"""


def written(folder: Path, rest: str, agent: str, verifier: str, model: Path) -> Path:
    """rest: the tables of the run file that tests differ in."""
    (folder / "agent.py").write_text(agent)
    (folder / "verifier.py").write_text(verifier)
    (folder / "tasks.jsonl").write_text('{"input": "Oslo"}\n{"input": "Lima"}\n')
    (folder / "run.toml").write_text((HEAD + rest).format(model=model))
    return folder
