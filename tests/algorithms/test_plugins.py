"""Policy servers and learners from outside the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from agentrl.algorithms.learners.factory import make_learner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.plugins import engine_factory, learner_factory
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.serving import policy_server
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError
from tests import factories
from tests.algorithms.learners.test_learner import make_batch

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"


async def test_an_engine_of_the_users_serves_the_policy(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    run = factories.config(EXAMPLES, engine={"kind": "engine.py:patient"})
    server = policy_server(run, model, tokenizer, None, "solver")
    await server.start()
    try:
        async with server.updating():
            await server.publish(3)
    finally:
        await server.close()
    assert type(server).__name__ == "PatientServer"
    assert capsys.readouterr().out == "solver is served as version 3\n"


def test_a_learner_of_the_users_trains_the_policy(tiny_model_dir: Path) -> None:
    algo, batch = registry.make("grpo", {}), make_batch()
    moved = []
    for kind, lr in (("torch", 0.5e-2), ("learner.py:half", 1e-2)):
        model, tokenizer = load_model(tiny_model_dir, device="cpu")
        run = factories.config(EXAMPLES, learner={"kind": kind})
        learner = make_learner(run, algo, model, tokenizer)
        report = learner.step(batch, lambda now, index: torch.ones_like(now), lr=lr)
        assert report.applied
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*moved)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mine.py:short", r"short .*mine\.py:1\) must take \(config, "),
        ("mine.py:number", "3 is int, not a function or class"),
        ("mine.py:missing", "it has no 'missing'"),
        ("none.py:make", "there is no file"),
    ],
)
def test_what_cannot_be_called_is_refused_before_a_run(tmp_path: Path, kind: str, why: str) -> None:
    (tmp_path / "mine.py").write_text("def short(config): ...\n\n\nnumber = 3\n")
    with pytest.raises(ConfigError, match=f"^engine.kind.*{why}"):
        engine_factory(factories.config(tmp_path, engine={"kind": kind}))
    with pytest.raises(ConfigError, match=f"^learner.kind.*{why}"):
        learner_factory(kind, tmp_path)


def test_what_is_made_must_fit_the_protocol(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "unfit.py").write_text("def make(*given):\n    return 5\n")
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    with pytest.raises(ConfigError, match=r"unfit\.py:1\) returned int, which is no PolicyServer"):
        policy_server(
            factories.config(tmp_path, engine={"kind": "unfit.py:make"}), model, tokenizer
        )
    run = factories.config(tmp_path, learner={"kind": "unfit.py:make"})
    with pytest.raises(ConfigError, match=r"unfit\.py:1\) returned int, which is no Learner"):
        make_learner(run, registry.make("grpo", {}), model, tokenizer)


def poor_learner(folder: Path, model: Path) -> tuple[Any, ...]:
    """A run with a learner that supplies "old" alone, a preset that reads the reference, and what
    else makes the learner."""
    source = (EXAMPLES / "learner.py").read_text()
    source = source.replace("    return HalfLearner(", "    return PoorLearner(")
    source += """

class PoorLearner(HalfLearner):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.supplies = {"old"}

    def close(self):
        print("closed")
"""
    (folder / "poor.py").write_text(source)
    run = factories.config(folder, learner={"kind": "poor.py:half"})
    algo = registry.make("grpo", {"kl": 0.1}, supplies=("old", "sampler", "reference"))
    return run, algo, *load_model(model, device="cpu")


def test_a_learner_without_what_the_preset_reads_is_refused(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"'grpo' reads reference, and the learner supplies old$"):
        make_learner(*poor_learner(tmp_path, tiny_model_dir))
    assert capsys.readouterr().out == "closed\n"


def test_a_run_on_data_reads_the_references_log_probs(tmp_path: Path, tiny_model_dir: Path) -> None:
    from agentrl.core.config.learning import DataConfig

    run, *more = poor_learner(tmp_path, tiny_model_dir)
    stored = msgspec.structs.replace(run, data=DataConfig(name="pairs"))
    assert make_learner(stored, *more).supplies == {"old"}


def test_the_front_checks_a_run_without_torch(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"input": 1}\n')
    run = {"tasks": {"train": "tasks.jsonl"}, "policy": {"model": "m"}, "root": str(tmp_path)}
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'vllm'));"
        "from agentrl import trainer; from agentrl.core.config import resolve;"
        f"trainer.check(resolve({run | {'engine': {'kind': 'vllm'}}}, source='run.toml'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("table", "kind"), [("engine", "vlm"), ("learner", "verrl")])
def test_an_unknown_kind_is_refused_with_the_nearest(table: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.toml: {table}\.kind = '{kind}'; did you mean"):
        resolve({table: {"kind": kind}}, source="run.toml")
