"""Every setting of a run file can be set from Python, and measured are those that are not."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl import Trainer, measured, trainer
from agentrl.core.config import RunConfig, derived, resolve
from agentrl.core.config.learning import WarmupConfig
from agentrl.core.config.run_file import trainer_arguments
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_tasks

ROOT = Path(__file__).parents[2]
RUN_FILES = sorted(
    path for path in (ROOT / "examples").rglob("*.toml") if "[policy" in path.read_text()
)
PATHS = set(derived._paths(RunConfig)) - {"role_rules"}


def tables_of(**settings: Any) -> dict[str, Any]:
    return Trainer(**settings).arguments.tables


def test_every_setting_arrives_where_a_run_file_has_it() -> None:
    """By a name with dots and as a dict, beside what the named parameters give."""
    for path in PATHS - {"agent", "tasks", "verifier", "policy"}:
        *parents, last = path.split(".")
        nested: dict[str, Any] = {last: "v"}
        for name in reversed(parents):
            nested = {name: nested}
        expected = tomllib.loads(f"{path} = 'v'")
        assert tables_of(**{path: "v"}) == expected
        assert tables_of(**nested) == expected


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_run_file_and_its_tables_from_python_are_one_run(path: Path) -> None:
    tables = tomllib.loads(path.read_text()) | {"root": str(path.parent)}
    try:
        expected = resolve(tables, source="file")
    except ConfigError as error:  # a run file that is completed on the command line
        pytest.skip(str(error))
    assert resolve(tables_of(**tables), source="Trainer") == expected


def test_a_dict_is_the_table_and_anything_else_its_first_setting(tmp_path: Path) -> None:
    table = {"model": "m", "dtype": "bfloat16", "lora": {"rank": 16}}
    assert tables_of(policy=table) == {"policy": table}
    assert tables_of(policy="m") == tables_of(policy=Path("m")) == {"policy": {"model": "m"}}
    more = {"policy": "m", "policy.lora": {"rank": 8}, "policy.lora.alpha": 16.0}
    assert tables_of(**more) == {"policy": {"model": "m", "lora": {"rank": 8, "alpha": 16.0}}}

    made = trainer_arguments(
        {"agent": {"path": print, "max_calls": 3}, "verifier": len}, [{"input": "a"}], {}
    )
    assert made.tables == {"agent": {"max_calls": 3}, "verifier": {}, "tasks": {}}
    assert (made.agent, made.verifier, made.heldout) == (print, len, [{"input": "a"}])
    tasks = {"train": [{"input": "b"}], "columns": {"answer": "a"}}
    made = trainer_arguments({"tasks": tasks}, "held.jsonl", {})
    assert made.tables == {"tasks": {"columns": {"answer": "a"}, "heldout": "held.jsonl"}}
    assert made.train == [{"input": "b"}]


def test_conversations_to_imitate_may_be_objects(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunConfig] = []

    async def launch(config: RunConfig, **_: Any) -> None:
        started.append(config)

    monkeypatch.setattr(trainer, "launch", launch)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

    def train(demonstrations: Any) -> WarmupConfig:
        Trainer(
            *(print, [{"input": "a"}], len, tiny_model_dir),
            **{"output": str(tmp_path), "warmup.steps": 3, "warmup.data": demonstrations},
            **{"policy.device": "cpu"},  # so that nothing is measured, which takes seconds
        ).fit(fresh=True)
        return started[-1].warmup

    for written in ([chat, chat], (one for one in (chat, chat))):
        settings = train(written)
        assert settings.steps == 3
        assert load_tasks(settings.data, tmp_path, key="k", needs="messages") == [chat, chat]
    assert train(str(tmp_path / "own.jsonl")).data == str(tmp_path / "own.jsonl")
    assert not (tmp_path / "demonstrations.jsonl").exists()  # of the run before, which was cleared
    with pytest.raises(ConfigError, match="task 1 has no 'messages', a chat to imitate"):
        train([chat, {"input": "a"}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "m", "policy.model": "n"}, "policy.model is given twice"),
        ({"heldout": "a.jsonl", "tasks": {"heldout": "b.jsonl"}}, "tasks.heldout is given twice"),
        ({"steps": 3, "steps.more": 4}, "'steps' is a value already, not a table"),
        ({"eval": {3: 4}}, "has the key 3, which is not text"),
        ({"policy": {"model": "m", "dtyp": "bfloat16"}}, "unknown key 'policy.dtyp'.*'dtype'"),
        ({"policy": "m", "polcy.dtype": "x"}, "unknown key 'polcy'"),
    ],
)
def test_what_is_given_twice_or_unknown_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(output=str(tmp_path), **settings).fit()


async def completed(tables: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    written = io.StringIO()
    console = Console(file=written, width=400)
    return await measured.complete(tables, folder, console), written.getvalue()


async def test_what_python_does_not_say_is_measured_once_and_printed(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    tables = {"policy": {"model": str(tiny_model_dir)}, "sampling": {"max_tokens": 7}}
    chosen, text = await completed(tables, tmp_path)
    assert chosen.keys() == measured.SETTINGS.keys() - {"sampling.max_tokens"}
    assert (chosen["policy.lora.rank"], chosen["algorithm.lr"]) == (16, 2.8e-3)
    assert f"policy.dtype = {chosen['policy.dtype']}" in text
    again, text = await completed(tables, tmp_path)  # a resumed run has the same settings
    assert again == chosen
    assert "measuring" not in text


@pytest.mark.parametrize("said", [{"algorithm": {"lr": 1e-5}}, {"policy": {"lora": {"alpha": 8}}}])
async def test_an_adapter_and_its_learning_rate_are_one_choice(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    write_measured(tmp_path)
    chosen, _ = await completed(trainer_arguments({"policy": "m"}, "", said).tables, tmp_path)
    assert chosen.keys() == measured.SETTINGS.keys() - measured.ADAPTER


def write_measured(folder: Path, **figures: Any) -> None:
    """What an earlier measurement of the model "m" has left in the output folder."""
    found = dict.fromkeys(measured.SETTINGS.values(), 1) | {"of": "m", "per_token": 1} | figures
    (folder / measured.FILE).write_bytes(measured.json.dumps(found).encode())


@pytest.mark.parametrize(
    ("max_tokens", "seconds"), [(None, 260), (16, 60), (64, 130), (128, 260), (2048, 4100)]
)
async def test_the_time_out_is_that_of_the_completions_that_are_allowed(
    tmp_path: Path, max_tokens: int | None, seconds: int
) -> None:
    """Four times as long as four completions of that length take; a minute at least."""
    write_measured(tmp_path, per_token=0.125, max_tokens=128, timeout=260)
    said: dict[str, Any] = {"policy": {"model": "m"}}
    if max_tokens is not None:
        said["sampling"] = {"max_tokens": max_tokens}
    chosen, _ = await completed(said, tmp_path)
    assert chosen["agent.timeout"] == seconds
    assert chosen.get("sampling.max_tokens") == (128 if max_tokens is None else None)
    own, _ = await completed({**said, "agent": {"timeout": 5.0}}, tmp_path)
    assert "agent.timeout" not in own


@pytest.mark.parametrize(("size", "groups"), [(None, 4), (2, 16), (8, 4), (64, 4)])
async def test_the_rollouts_of_a_step_are_those_that_are_decoded_together(
    tmp_path: Path, size: int | None, groups: int
) -> None:
    """As `agentrl init --model` has it; no step has fewer than four tasks."""
    write_measured(tmp_path, concurrency=32)
    tables = trainer_arguments(
        {"policy": "m"}, "", {} if size is None else {"algorithm.group_size": size}
    )
    chosen, _ = await completed(tables.tables, tmp_path)
    assert chosen["algorithm.groups"] == groups
    console = Console(file=io.StringIO())
    chosen = await measured.complete(tables.tables, tmp_path, console, plays_rollouts=False)
    assert "algorithm.groups" not in chosen  # there it is the rows of a step


@pytest.mark.parametrize(
    "said",
    [
        {"engine.kind": "vllm"},
        {"learner.kind": "verl"},
        {"policies": {"a": {}}},
        {"policy.build": "b"},
    ],
)
async def test_what_other_machines_or_several_policies_do_is_not_measured(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    assert await completed(trainer_arguments({"policy": "m"}, "", said).tables, tmp_path) == (
        {},
        "",
    )


async def test_a_model_that_cannot_be_measured_is_said(tmp_path: Path) -> None:
    chosen, text = await completed({"policy": {"model": str(tmp_path / "none")}}, tmp_path)
    assert chosen == {}
    assert "not measured, so the defaults are used: " in text
    assert "none" in text


def test_the_measured_settings_are_those_of_the_run(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunConfig] = []

    async def launch(config: RunConfig, **_: Any) -> None:
        started.append(config)

    monkeypatch.setattr(trainer, "launch", launch)
    write_measured(tmp_path, of=str(tiny_model_dir), rank=16, lr=2e-4, dtype="bfloat16")
    tasks = [{"input": "a"}]
    for settings in ({}, {"policy.dtype": "float32", "algorithm.lr": 1e-3}):
        Trainer(
            print, tasks, len, tiny_model_dir, heldout=tasks, output=str(tmp_path), **settings
        ).fit()
    first, second = started
    assert (first.policy.lora.rank, first.algorithm.lr) == (16, 2e-4)
    assert (second.policy.lora.rank, second.algorithm.lr) == (0, 1e-3)
    assert second.policy.dtype == "float32"
    assert first.engine.threads == second.engine.threads > 0
