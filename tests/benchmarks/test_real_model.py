"""The benchmark of real models measures what it says, on a tiny one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.config import load
from tests.benchmarks import real_model

TINY = [
    "steps=2", "algorithm.groups=2", "algorithm.group_size=4", "sampling.max_tokens=4",
    "eval.tasks=2", "eval.every=0", "policy.lora.rank=2",
]  # fmt: skip


def options(model: Path, **changes: object) -> argparse.Namespace:
    given = {"model": model, "seeds": [3], "only": ["prices"], "trl": "", "set": TINY}
    return argparse.Namespace(**given | {"trl_evaluate": False} | changes)


@pytest.mark.slow
def test_a_run_is_scored_before_and_after(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("langchain")
    verifier = tmp_path / "verifier.py"  # the tiny model is never right
    verifier.write_text("def verify(task, result):\n    return float(len(result) % 2)\n")
    settings = [*TINY, f"verifier.path={verifier}:verify"]
    given = options(tiny_model_dir, only=["prices", "trl"], set=settings)
    found = real_model.measure(given, tmp_path)
    assert found["seeds"] == [3]
    assert found["absent"]["trl"] == "give --trl PYTHON, one that has TRL"
    for when in ("greedy_before", "sampled_before", "greedy_after", "sampled_after"):
        (score,) = found[when]
        assert 0 <= score <= 1
    (seconds,), (step,) = found["seconds"], found["cpu_per_step"]
    assert 0 <= step < seconds * 64
    assert found["peak_mb"][0] > 100
    assert 0 < found["checkpoint_share"][0] < 1


def test_cpu_seconds_are_of_a_process_and_of_what_it_started() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    code = (
        f"import subprocess, sys; x = {busy!r}; exec(x)\n"
        "subprocess.run([sys.executable, '-S', '-c', x]); print('done', flush=True); input()"
    )
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.5 <= real_model.cpu_seconds(process.pid) < 2
        process.kill()


def test_trl_gets_the_settings_of_the_run_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("langchain")
    python = tmp_path / "python"
    python.write_text(
        f'#!{sys.executable}\nimport json, sys\nprint("noise")\n'
        'print(json.dumps({"given": json.load(open(sys.argv[2])), "trl": "1.16"}))\n'
    )
    python.chmod(0o755)
    config = load(real_model.AGENTS["prices"], [f"policy.model={tiny_model_dir}", "steps=7"])
    found = real_model.trl(str(python), config, 5, tmp_path, evaluate=True)
    given = found.pop("trl_given")
    assert found == {}
    numbers = {"steps": 7, "seed": 5, "max_tokens": 12, "groups": 4, "group_size": 8, "lr": 2e-4}
    assert {key: given[key] for key in numbers} == numbers
    assert (given["rank"], given["alpha"], given["dtype"]) == (16, 32.0, "bfloat16")
    assert (len(given["train"]), len(given["heldout"])) == (128, 64)
    assert "77 dollars" in given["prompt"]
    assert Path(given["verifier"]).is_file()
    assert json.dumps(given)


def test_what_is_missing_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="there is no tests/benchmarks/none"):
        real_model.beside("none", str(tiny_model_dir))
    assert real_model.differences([1.0, 3.0, 8.0]) == [2.0, 5.0]
