"""Functions of the run file measure checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms.sampling.evaluate import EvalFunctions, evaluate_functions
from agentrl.core.errors import ConfigError
from agentrl.store import open_store
from tests.factories import config as run_config


async def test_functions_of_the_run_file_measure_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "own_measure.py").write_text(
        "def size(path): return len(path.name)\n"
        "def pair(path): return {'a': 1, 'b': 2.5}\n"
        "def wrong(path): 1 / 0\n"
        "def silent(path): return {'a': None}\n"
    )
    names = ["own_measure.py:size", "own_measure.py:pair"]
    config = run_config(tmp_path, eval={"functions": names}, policy={"model": "some/base"})
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        functions = EvalFunctions()
        live: Any = SimpleNamespace(config=config, store=store, state=await store.run("r"))
        await functions.start(live)
        await functions.evaluate(0, 5)
        (row,) = await store.steps("r")
    named = {"size": 4.0, "pair/a": 1.0, "pair/b": 2.5}
    assert row.metrics == {f"eval/function/{name}": x for name, x in named.items()}
    lora = {"model": "some/base", "lora": {"rank": 2, "adapter": "begun"}}
    config = run_config(tmp_path, eval={"functions": names[:1]}, policy=lora)
    async with open_store(config.store) as store:
        await evaluate_functions(store, config, 1, 0)  # the adapter that the run begins with
        (row,) = await store.steps("r")
    assert row.metrics["eval/function/size"] == len("begun")
    for name, problem in (
        ("wrong", "raised ZeroDivisionError"),
        ("silent", r"returned {'a': None}"),
    ):
        config = run_config(tmp_path, eval={"functions": [f"own_measure.py:{name}"]})
        async with open_store(config.store) as store:
            with pytest.raises(ConfigError, match=f"own_measure.py:{name}' {problem}"):
                await evaluate_functions(store, config, 1, 0)
    upstream = {"u": {"base_url": "http://u/v1"}}
    with pytest.raises(ConfigError, match=r"eval.functions are given a checkpoint"):
        run_config(tmp_path, eval={"functions": names}, upstreams=upstream)
