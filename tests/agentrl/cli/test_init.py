"""`agentrl init`, and its --schema."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from agentrl import trainer
from agentrl.algorithms import estimate
from agentrl.algorithms.model import lm_head
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.lm_head import sampling_threads
from agentrl.algorithms.model.load import load_model
from agentrl.cli import init
from agentrl.cli.init import FILES, PRETRAINED
from agentrl.cli.main import cli
from agentrl.core.config import RunConfig, load, to_toml
from agentrl.core.errors import ConfigError, PolicyError
from agentrl.models import pretrained
from agentrl.store import open_store

RUN_FILES = sorted((Path(__file__).parents[3] / "examples").glob("*/run.toml"))


@pytest.fixture(scope="module")
def schema() -> Any:
    result = CliRunner().invoke(cli, ["init", "--schema"])
    assert result.exit_code == 0
    return json.loads(result.output)


def errors(schema: Any, data: Any) -> list[str]:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(schema)
    return [error.message for error in validator(schema).iter_errors(data)]


def test_the_schema_says_what_a_setting_is(schema: Any) -> None:
    tables = schema["$defs"]
    assert "discriminator" not in json.dumps(schema)
    described = {
        "RunConfig.steps": "Updates of the policy; 0: only evaluate.",
        "RunConfig.policy": "The model to train: a Hugging Face checkpoint directory or hub name.",
        "VllmEngineConfig.kind": "A vLLM policy server.",
        "AlgorithmConfig.groups": "Groups of rollouts per step, one for each task.",
        "VllmConfig.arguments": "Additional arguments of `vllm serve`.",
        "VllmEngineConfig.max_batch": "Calls decoded together.",
    }
    for key, words in described.items():
        name, setting = key.split(".")
        assert tables[name]["properties"][setting].get("description") == words
    assert tables["ContainerConfig"]["required"] == ["image"]


def test_the_schema_accepts_run_files(schema: Any, tmp_path: Path) -> None:
    for file in RUN_FILES:
        assert errors(schema, tomllib.loads(file.read_text())) == [], file
    assert RUN_FILES
    outside = {"engine": {"kind": "mine.py:Own", "options": {"x": 1}}, "runner": {"executor": "p"}}
    assert errors(schema, outside) == []
    (tmp_path / "run.toml").write_text("")
    printed = to_toml(load(tmp_path / "run.toml", ["engine.kind=vllm", "learner.kind=a.py:b"]))
    assert errors(schema, tomllib.loads(printed)) == []


@pytest.mark.parametrize(
    "data",
    [
        {"sed": 1},
        {"steps": -1},
        {"engine": {"vllm": {"urls": []}}},
        {"engine": {"kind": "vllm", "vllm": {"sync": "fast"}}},
        {"runner": {"executor": "container", "container": {}}},
        {"reward_models": {"judge": {"kind": "scalar"}}},
    ],
)
def test_the_schema_refuses_what_the_run_file_would(schema: Any, data: Any) -> None:
    assert errors(schema, data)


@pytest.fixture
def started(tmp_path: Path) -> str:
    """The run file that `init` wrote."""
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine")])
    assert (result.exit_code, str(tmp_path / "mine" / "run.toml") in result.output) == (0, True)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == sorted(FILES)
    run_file = str(tmp_path / "mine" / "run.toml")
    assert (tmp_path / "mine" / "run.toml").read_text().count("#") > 10
    return run_file


def test_init_writes_a_run_file_that_is_accepted(started: str) -> None:
    result = CliRunner().invoke(cli, ["train", started, "--dry-run"])
    assert result.exit_code == 0, result.exception
    trainer.check(load(Path(started)))


@pytest.mark.parametrize("installed", [True, False])
def test_init_writes_the_agent_that_the_installed_packages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: name if installed else None)
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine")])
    assert result.exit_code == 0, result.exception
    assert ("is not installed" in result.output) is not installed
    agent = (tmp_path / "mine" / "agent.py").read_text()
    assert ("langchain" in agent, "AsyncOpenAI()" in agent) == (installed, not installed)


@pytest.mark.parametrize("options", [[], ["--model"]])
def test_held_out_tasks_are_others(
    tmp_path: Path, tiny_model_dir: Path, options: list[str]
) -> None:
    """Also in what they ask about: a product of a held-out task is in none that is trained on."""
    named = [*options, *([str(tiny_model_dir)] if options else [])]
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), *named])
    assert result.exit_code == 0, result.exception
    script = "import json, tasks; print(json.dumps([tasks.train, tasks.heldout]))"
    if options:
        train, heldout = (
            [json.loads(x) for x in (tmp_path / "mine" / name).read_text().splitlines()]
            for name in ("tasks.jsonl", "heldout.jsonl")
        )
    else:
        ran = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path / "mine", capture_output=True, check=True
        )
        train, heldout = json.loads(ran.stdout)
    for key in ("id", "input", "product"):
        known = {row[key] for row in train if key in row}
        assert not known & {row[key] for row in heldout if key in row}
    assert min(len(train), 3 * len(heldout)) >= 60


@pytest.mark.slow
def test_what_init_writes_trains(started: str, tmp_path: Path) -> None:
    few = ["algorithm.groups=2", "algorithm.group_size=2", "algorithm.dynamic_sampling=false"]
    command = [sys.executable, "-m", "agentrl", "train", started, "--steps", "1", *few]
    done = subprocess.run(
        [*command, "eval.tasks=2", "eval.samples=0", "algorithm.lr=1e-9"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs" / "mine" / "checkpoints").glob("000001*"))


def test_init_measures_what_a_pretrained_model_needs(tmp_path: Path, tiny_model_dir: Path) -> None:
    folder = tmp_path / "mine"
    result = CliRunner().invoke(cli, ["init", str(folder), "--model", str(tiny_model_dir)])
    assert result.exit_code == 0, result.exception
    assert sorted(path.name for path in folder.iterdir()) == sorted(PRETRAINED)
    config = load(folder / "run.toml")
    trainer.check(config)
    assert (config.policy.model, config.policy.build) == (str(tiny_model_dir), "")
    assert config.policy.lora.rank > 0
    model, _ = load_model(tiny_model_dir)
    assert config.engine.threads == sampling_threads(model.num_parameters())
    assert config.engine.max_context <= context_length(model)
    assert config.sampling.max_tokens < config.engine.max_context
    assert config.agent.timeout >= 60


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [(64, 2.8e-3), (576, 5e-4), (896, 3.5e-4), (1536, 2.3e-4), (4096, 1.1e-4)],
)
def test_a_wider_model_learns_at_a_lower_rate(hidden: int, expected: float) -> None:
    assert pretrained.learning_rate(hidden) == expected


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 4), (64, 8)])
def test_init_asks_for_no_more_threads_than_sampling_can_use(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(lm_head, "SMALL_MODEL", 0)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert pretrained.settings(str(tiny_model_dir))["threads"] == threads


@pytest.mark.parametrize("name", ['a "quoted" name', "back\\slash", "größe"])
def test_init_names_a_model_in_any_folder(tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    model = tmp_path / name
    shutil.copytree(tiny_model_dir, model)
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--model", str(model)])
    assert result.exit_code == 0, result.exception
    assert load(tmp_path / "mine" / "run.toml").policy.model == str(model)


@pytest.mark.parametrize(
    ("model", "sentence"), [("missing/model/dir", "missing/model/dir"), (".", "has no config.json")]
)
def test_init_of_a_model_that_is_none_writes_nothing(
    tmp_path: Path, model: str, sentence: str
) -> None:
    given = str(tmp_path) if model == "." else model
    result = CliRunner().invoke(cli, ["init", str(tmp_path / "mine"), "--model", given])
    assert isinstance(result.exception, PolicyError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "mine").exists()


def test_init_of_a_model_that_is_too_large_says_what_it_needs(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "available", lambda config: 1_000_000)
    with pytest.raises(PolicyError, match=r"needs more memory than available: .* GiB: libraries"):
        pretrained.settings(str(tiny_model_dir))


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("mine")
    result = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    assert "has agent.py already; name another folder" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["agent.py"]
    assert (tmp_path / "agent.py").read_text() == "mine"


# -- two run files share no run by accident --------------------------------------------------------


def start(file: Path, *overrides: str) -> None:
    init.check_name(load(file, overrides))


async def opened(config: RunConfig) -> None:
    async with open_store(config.store) as store:
        await store.open_run(config.name, msgspec.to_builtins(config))


def test_run_files_of_one_folder_name_share_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of two folders of one name, but not what was moved or renamed."""
    monkeypatch.chdir(tmp_path)
    first, beside, copied = (
        tmp_path / name for name in ("mine/run.toml", "mine/b.toml", "copy/mine/run.toml")
    )
    for file in (first, beside, copied):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        start(file)  # before there is a run
    config = load(first)
    Path(config.output).mkdir(parents=True)
    asyncio.run(opened(config))
    for file in (beside, copied):
        with pytest.raises(ConfigError) as refused:
            start(file)
        assert str(refused.value) == (
            f"run 'mine' in {config.output} is that of {first}: give name=NAME for a run of its"
            " own, or name=mine to continue that one"
        )
        for option in ([], ["--fresh"], ["--from", "0"], ["--take-over"]):
            said = CliRunner().invoke(cli, ["train", str(file), *option])
            assert isinstance(said.exception, ConfigError)
            assert "is that of" in str(said.exception)
        start(file, "name=mine")
        start(file, "name=other")
    start(first)
    first.rename(first.with_name("renamed.toml"))
    start(first.with_name("renamed.toml"))
    start(copied)


def test_a_typo_of_a_copy_is_said_before_the_clash_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[policy]\nmodel = "m"\n[tasks]\ntrain = "t.jsonl"\n[algorithm]\npreset = "{}"\n'
    first, copied = tmp_path / "run.toml", tmp_path / "copy.toml"
    (tmp_path / "t.jsonl").write_text('{"input": "a"}\n')
    first.write_text(text.format("grpo"))
    config = load(first)
    Path(config.output).mkdir(parents=True)
    asyncio.run(opened(config))
    for preset, said in (("gropo", "did you mean 'grpo'"), ("grpo", "is that of")):
        copied.write_text(text.format(preset))
        with pytest.raises(ConfigError, match=said):
            start(copied)
