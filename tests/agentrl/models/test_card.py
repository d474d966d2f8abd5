"""Which checkpoint is exported, and what its model card says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from agentrl.cli.main import cli
from agentrl.core.errors import AgentRLError
from agentrl.models import export as card
from agentrl.models.export import licence_of
from tests.agentrl.models import trained


@pytest.fixture
def root(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    trained.make(tmp_path, tiny_model_dir)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(*words: str) -> str:
    command = ["export", "model", "--to", "out", *words]
    return CliRunner().invoke(cli, command, catch_exceptions=False).output


@pytest.mark.parametrize(
    ("words", "taken", "why"),
    [
        ([], "000002", "the best by held-out score, 90.0%"),
        (["--step", "4"], "000004", "as asked for"),
        (["--step", "last"], "000006", "the last"),
    ],
)
def test_the_best_checkpoint_is_exported_unless_another_is_named(
    root: Path, words: list[str], taken: str, why: str
) -> None:
    said = export("--run", "mine", *words)
    assert said == f"wrote out from {root}/runs/mine/checkpoints/{taken}: {why}\n"
    assert load_file(root / "out" / "model.safetensors").keys()


def test_a_step_that_is_not_there_is_refused_with_those_that_are(root: Path) -> None:
    with pytest.raises(AgentRLError, match=r"after 5 steps in .*, only 000002, 000004, 000006"):
        export("--run", "mine", "--step", "5")
    assert not (root / "out").exists()


def test_without_its_best_on_disk_the_last_is_taken(root: Path) -> None:
    (root / "runs" / "mine" / "checkpoints" / "best").unlink()
    assert "the last: the best by held-out score is not on disk" in export("--run", "mine")


def test_the_card_has_data_settings_curve_licence_and_how_to_load_it(
    root: Path, tiny_model_dir: Path
) -> None:
    export("--run", "mine")
    text = (root / "out" / "README.md").read_text()
    head, body = text.split("---\n", 2)[1:]
    assert "library_name: transformers\n" in head
    assert "license" not in head
    assert f"| base model | {tiny_model_dir} |" in body
    assert "| licence of the base | unknown; that of the base model applies |" in body
    assert "| training tasks | `train.jsonl` |" in body
    assert "| held-out tasks | `heldout.jsonl` |" in body
    assert "| algorithm | `rloo`, learning rate 1e-05, 8 groups of 8 |" in body
    assert "| rollouts | 128 |" in body
    assert "| 0 | 20.0% | 10.0% to 30.0% |\n| 2 (this model) | 90.0% | 80.0% to 100.0% |" in body
    assert "AutoModelForCausalLM.from_pretrained('out')" in body
    flags = "--enable-auto-tool-choice --tool-call-parser hermes"
    assert f"vllm serve out {flags}\n" in body


def test_a_model_that_was_made_from_nothing_has_no_base(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "base_name", lambda *_: f"{card.MADE}policy.py:build")
    export("--run", "mine")
    text = (root / "out" / "README.md").read_text()
    assert "base_model:" not in text
    assert "| base model | made by policy.py:build |\n| licence of the base | none" in text


def test_a_checkpoint_by_its_path_has_the_same_card(root: Path) -> None:
    export("runs/mine/checkpoints/000004")
    assert "| 4 (this model) | 70.0% | 60.0% to 80.0% |" in (root / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("format", "parser"), [("llama3_json", "--tool-call-parser llama3_json"), ("mine.py:Own", "")]
)
def test_the_parser_of_tool_calls_is_that_of_the_models_format(
    tmp_path: Path, format: str, parser: str
) -> None:
    """vLLM has none for a format of the user's own."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tool_format": format}))
    assert card.tool_flags(tmp_path).rpartition("choice ")[2] == parser


def test_the_licence_is_that_of_the_bases_own_card(tmp_path: Path) -> None:
    assert licence_of(str(tmp_path)) == ""
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\ntags: []\n---\n# M\n")
    assert licence_of(str(tmp_path)) == "apache-2.0"
    assert licence_of("") == ""
    assert licence_of("nobody/has-this-model") == ""
