"""The code of the README runs, with a tiny model in place of the one it names; the pages that it
leads to name ways to train and words that exist."""

import importlib
import re
import shlex
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
from msgspec.structs import fields

from agentrl.algorithms.train.build import load_algorithms
from agentrl.config import RunConfig, load
from tests import warm

README = Path(__file__).parents[1] / "README.md"
WAYS = README.parent / "docs" / "how-to" / "README.md"
WORDS = README.parent / "docs" / "concepts" / "README.md"


def test_wrap_your_own_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    statements = [line for line in block.splitlines() if line.strip()]
    assert len(statements) <= 12
    script = block.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model_dir))
    script = script.replace("steps=50", "steps=2, sampling={'max_tokens': 8}")
    assert script != block
    (tmp_path / "script.py").write_text(script)
    result = warm.run("-m", "script", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Result(" in result.stdout
    assert (tmp_path / "runs" / "run" / "curve.png").is_file()


TRAIN = re.findall(
    r"^agentrl train (examples\S+)(.*?)(?: +#.*)?$", WAYS.read_text(), flags=re.MULTILINE
)


@pytest.mark.parametrize(("run_file", "rest"), TRAIN)
def test_every_way_to_train_is_one(run_file: str, rest: str) -> None:
    pytest.importorskip("tensorboard")
    overrides = [word for word in shlex.split(rest) if "=" in word]
    load_algorithms(load(README.parent / run_file, overrides))


def test_the_table_names_settings() -> None:
    names = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", WAYS.read_text()))
    tables = {field.name: field.type for field in fields(RunConfig)}
    found = {name for name in names if name.split(".")[0] in tables and not name.endswith(".py")}
    assert {"policy.lora", "learner.packing", "metrics.sinks"} <= found
    for name in found:
        kind: Any = RunConfig
        for part in name.split("."):
            kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            known = {field.name: field.type for one in kinds for field in fields(one)}
            known |= {one.__struct_config__.tag_field: str for one in kinds}
            kind = known[part]


NOUNS = re.findall(
    r"^\| ([a-z ]+) \| [^|]+ \| `([\w.]+)` \|$", WORDS.read_text(), flags=re.MULTILINE
)


def test_each_noun_has_one_thing_that_exists() -> None:
    assert len(NOUNS) > 20
    assert len({word for word, _ in NOUNS}) == len({path for _, path in NOUNS}) == len(NOUNS)
    for _, path in NOUNS:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
