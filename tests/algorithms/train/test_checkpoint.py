from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import LossCoefficients, StepReport
from agentrl.algorithms.model import digests
from agentrl.algorithms.train.checkpoint import (
    STATE,
    checkpoint_name,
    earlier_checkpoints,
    export_checkpoint,
    load_checkpoint,
    prune,
    random_state,
    save_checkpoint,
    set_random_state,
)
from agentrl.core import files
from agentrl.core.errors import AgentRLError, ConfigError, DamagedError, PolicyError
from agentrl.core.files import atomic_directory, delete_directory


class OneNumber:
    """A learner whose weights are one number in one file."""

    def __init__(self, weight: int = 0, error: Exception | None = None) -> None:
        self.weight = weight
        self.error = error

    def logprobs(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def step(self, batch: Batch, psi: LossCoefficients, *, lr: float) -> StepReport:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        (directory / "weight").write_text(str(self.weight))
        if self.error:
            raise self.error

    def load(self, directory: Path) -> None:
        self.weight = int((directory / "weight").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    state = {"baseline": {"easy": 0.5}, "seen": [1, 2]}
    save_checkpoint(tmp_path / "runs" / "1", OneNumber(7), state)
    learner = OneNumber()
    assert load_checkpoint(tmp_path / "runs" / "1", learner) == state
    assert learner.weight == 7
    assert names(tmp_path / "runs") == ["1"]


def test_random_streams_continue_where_they_were_saved(tmp_path: Path) -> None:
    random.gauss(0, 1)
    save_checkpoint(tmp_path / "1", OneNumber(), {})
    drawn = random.random(), random.gauss(0, 1), torch.rand(3).tolist()
    load_checkpoint(tmp_path / "1", OneNumber())
    assert (random.random(), random.gauss(0, 1), torch.rand(3).tolist()) == drawn


def test_random_state_is_what_was_set() -> None:
    state = random_state()
    random.random()
    torch.rand(1)
    set_random_state(state)
    assert random_state() == state


def test_saving_again_replaces(tmp_path: Path) -> None:
    for weight in (1, 2):
        save_checkpoint(tmp_path / "1", OneNumber(weight), {"weight": weight})
    learner = OneNumber()
    assert load_checkpoint(tmp_path / "1", learner) == {"weight": 2}
    assert learner.weight == 2
    assert names(tmp_path) == ["1"]


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, kind: type[Exception]) -> None:
    save_checkpoint(tmp_path / "1", OneNumber(1), {})
    full = OneNumber(2, kind("No space left on device"))
    with pytest.raises(AgentRLError, match=r"No space left on device.*free disk space") as raised:
        save_checkpoint(tmp_path / "1", full, {})
    assert type(raised.value) is AgentRLError  # no session of a live run is the cause
    assert names(tmp_path) == ["1"]
    assert (tmp_path / "1" / "weight").read_text() == "1"


def test_a_process_killed_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    script = f"""
import os, pathlib
from agentrl.core.files import atomic_directory
with atomic_directory(pathlib.Path({str(tmp_path)!r}, "2")) as partial:
    (partial / "weight").write_text("half")
    os.kill(os.getpid(), {signal.SIGKILL.value})
"""
    save_checkpoint(tmp_path / "1", OneNumber(1), {})
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "2").exists()
    assert len(names(tmp_path)) == 2
    prune(tmp_path, keep=2, last=tmp_path / "2")
    assert names(tmp_path) == ["1"]


def test_an_error_inside_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "1") as partial:
        (partial / "folder" / "file").touch()
    assert names(tmp_path) == []


DAMAGED = [
    None, "", '{"state": {}', '{"state": {}}', "[]", "null", '{"state": {}, "random": {}}',
    '{"state": {}, "random": {"python": [3, [1], null], "torch": "AA=="}}',
    '{"state": {}, "random": {"python": [3, [], null], "torch": ""}}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_checkpoint_without_its_state_is_refused(tmp_path: Path, content: str | None) -> None:
    save_checkpoint(tmp_path / "1", OneNumber(7), {})
    (tmp_path / "1" / STATE).unlink()
    (tmp_path / "1" / digests.FILE).unlink()  # as an earlier version left it
    if content is not None:
        (tmp_path / "1" / STATE).write_text(content)
    learner, before = OneNumber(3), random_state()
    with pytest.raises(PolicyError, match="missing or incomplete; resume from another"):
        load_checkpoint(tmp_path / "1", learner)
    assert learner.weight == 3
    assert random_state() == before


def checkpoints(folder: Path, *made: str, run: str = "mine@1") -> None:
    for name in made:
        save_checkpoint(folder / name, OneNumber(), {}, run)


def test_prune_keeps_the_newest_and_what_is_no_checkpoint(tmp_path: Path) -> None:
    ten = checkpoint_name(10, epoch=1), checkpoint_name(10, epoch=2)
    checkpoints(tmp_path, "000001", "000002", "000009", *ten, "best")
    (tmp_path / "000003").write_text("a file")
    prune(tmp_path, keep=2, last=tmp_path / ten[1], run="mine@1")
    assert names(tmp_path) == ["000003", "000009", "000010.2", "best"]


def test_prune_leaves_what_another_run_or_owner_wrote(tmp_path: Path) -> None:
    checkpoints(tmp_path, "000001.2", "000002.2", "000003.2")
    checkpoints(tmp_path, "000001", "000001.3", run="other@2")
    checkpoints(tmp_path, "000001.4", "000009.4")
    (tmp_path / "000002.4.tmp-1234").mkdir()
    (tmp_path / "000002.2.tmp-1234").mkdir()
    prune(tmp_path, keep=1, last=tmp_path / "000003.2", run="mine@1")
    stay = ["000001", "000001.3", "000001.4", "000002.4.tmp-1234", "000003.2", "000009.4"]
    assert names(tmp_path) == stay


def test_prune_deletes_checkpoints_of_rolled_back_steps(tmp_path: Path) -> None:
    checkpoints(tmp_path, "000002", "000003", "000004", "000003.3")
    prune(tmp_path, keep=2, last=tmp_path / "000003.3", run="mine@1")
    assert names(tmp_path) == ["000002", "000003.3"]  # the rewound 3 may be damaged


def test_prune_keeps_the_best_although_it_was_trained_again(tmp_path: Path) -> None:
    checkpoints(tmp_path, "000002", "000003", "000003.3")
    (tmp_path / "best").symlink_to("000003")
    prune(tmp_path, keep=1, last=tmp_path / "000003.3", run="mine@1")
    assert names(tmp_path) == ["000003", "000003.3", "best"]


def test_prune_keeps_what_a_reader_holds_until_it_is_done(tmp_path: Path) -> None:
    checkpoints(tmp_path, "000001", "000002", "000003")
    with files.reading(tmp_path / "000001"):
        prune(tmp_path, keep=1, last=tmp_path / "000003", run="mine@1")
        assert names(tmp_path) == ["000001", "000003"]
    prune(tmp_path, keep=1, last=tmp_path / "000003", run="mine@1")
    assert names(tmp_path) == ["000003"]
    message = "000001: the run has deleted this checkpoint"
    both = files.reading(tmp_path / "000003", tmp_path / "000001")
    with pytest.raises(ConfigError, match=message), both:
        pytest.fail("read")


def test_a_reader_that_waited_for_a_deletion_reads_nothing(tmp_path: Path) -> None:
    """It opened the folder before it was deleted, and gets its lock afterwards."""
    checkpoints(tmp_path, "000001")
    opened, gone = threading.Event(), list[str]()

    def read() -> None:
        opened.set()
        try:
            with files.reading(tmp_path / "000001"):
                gone.append("read")
        except ConfigError as error:
            gone.append(str(error))

    with files.deleting(tmp_path / "000001") as unread:
        assert unread
        reader = threading.Thread(target=read)
        reader.start()
        opened.wait()
        delete_directory(tmp_path / "000001")
    reader.join()
    assert "has deleted this checkpoint" in gone[0]


def test_earlier_checkpoints_are_those_of_the_run_newest_first(tmp_path: Path) -> None:
    checkpoints(tmp_path, "000001", "000002", "000002.3", "000003", "000004")
    checkpoints(tmp_path, "000002.5", run="other@2")
    found = earlier_checkpoints(tmp_path, tmp_path / "000003", "mine@1")
    assert [path.name for path in found] == ["000002.3", "000002", "000001"]
    assert earlier_checkpoints(tmp_path / "none", tmp_path / "000003", "mine@1") == []


def flip(file: Path) -> None:
    """2 kB of it, or what it has, as a failing disk or a bad copy would."""
    content = bytearray(file.read_bytes())
    start = len(content) // 2
    content[start : start + 2048] = bytes(byte ^ 0xFF for byte in content[start : start + 2048])
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["weight", STATE, digests.FILE])
@pytest.mark.parametrize("how", [flip, Path.unlink])
def test_a_damaged_checkpoint_is_refused_before_loading(
    tmp_path: Path, file: str, how: Callable[[Path], None]
) -> None:
    save_checkpoint(tmp_path / "1", OneNumber(7), {}, "mine@1")
    how(tmp_path / "1" / file)
    learner, before = OneNumber(3), random_state()
    with pytest.raises(DamagedError, match=r"is damaged|is missing"):
        load_checkpoint(tmp_path / "1", learner)
    assert learner.weight == 3
    assert random_state() == before


def test_a_checkpoint_without_digests_is_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "1", OneNumber(7), {})
    (tmp_path / "1" / digests.FILE).unlink()
    content = json.loads((tmp_path / "1" / STATE).read_text())
    del content["run"]
    (tmp_path / "1" / STATE).write_text(json.dumps(content))
    learner = OneNumber()
    load_checkpoint(tmp_path / "1", learner)
    assert learner.weight == 7


def test_digests_are_what_sha256sum_checks(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "1", OneNumber(7), {})
    command = ["sha256sum", "--check", "--strict", digests.FILE]
    assert subprocess.run(command, cwd=tmp_path / "1", check=False).returncode == 0


def make_checkpoint(folder: Path) -> Path:
    """With what a run keeps beside the policy."""
    files = ("config.json", "tokenizer.json", "chat_template.jinja", STATE)
    for name in files:
        (folder / "critic").mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("model-00001-of-00002", "model-00002-of-00002", "optimizer", "critic/head"):
        save_file({"w": torch.arange(3)}, folder / f"{name}.safetensors")
    return folder


def test_an_export_holds_the_policy_alone(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "000001")
    export_checkpoint(source, tmp_path / "exported" / "policy")
    assert names(tmp_path / "exported") == ["policy"]
    assert names(tmp_path / "exported" / "policy") == [
        "chat_template.jinja", "config.json", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_what_is_no_whole_checkpoint_is_not_exported(tmp_path: Path) -> None:
    source, target = make_checkpoint(tmp_path / "000001"), tmp_path / "policy"
    weights = source / "model-00002-of-00002.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    with pytest.raises(PolicyError, match=r"000001: model-00002.*is incomplete.*another"):
        export_checkpoint(source, target)
    weights.write_bytes(content)
    (source / STATE).unlink()
    with pytest.raises(PolicyError, match="not a checkpoint of a run"):
        export_checkpoint(source, target)
    with pytest.raises(PolicyError, match="not a checkpoint of a run"):
        export_checkpoint(tmp_path / "none", target)
    assert not target.exists()
    with pytest.raises(PolicyError, match="exists already"):
        export_checkpoint(source, tmp_path)
