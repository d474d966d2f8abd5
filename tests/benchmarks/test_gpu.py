"""The benchmark for GPUs runs on a CPU, with everything tiny: each section says its figures."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.autograd import DeviceType

from agentrl.core.types import StepRow
from tests import warm
from tests.benchmarks import gpu, gpu_loads, gpu_sections, real_model, utilisation

Figures = dict[str, Any]


def figures(section: str, name: str, model: Path | str, folder: Path) -> Figures:
    found: Figures = {}
    case = gpu_sections.Case(section, name, "cpu", model=str(model), folder=str(folder))
    gpu_sections.measure(case, found.update)
    return found


# -- sections --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0.5B lora", "0.5B"])
def test_an_updates_time_is_divided_into_kinds_of_work(name: str, tmp_path: Path) -> None:
    found = figures("update", name, "", tmp_path)
    shares = {kind: found[f"share_{kind}"] for kind in utilisation.KINDS}
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0
    assert 0 < found["distinct_tokens"] == found["packed_tokens"]
    assert 0 < found["utilisation"] < 0.01
    assert found["busy"] > 0
    assert "aten::mm" not in found["largest_other"]


def test_an_adapters_update_needs_no_gradient_of_frozen_weights() -> None:
    given: Any = {"groups": 1, "repeats": 1, "turns": (24, 4, 4, 3), "device": "cpu"}
    counted = [
        found["model_tflops"] * found["update_seconds"]
        for found in (utilisation.utilisation("tiny", rank=rank, **given) for rank in (0, 1))
    ]
    assert 0.6 < counted[1] / counted[0] < 0.8  # 4 of 6, and the adapter


def test_kernels_belong_to_what_started_them() -> None:
    def event(name: str, parent: Any = None, **kernels: float) -> Any:
        started = [SimpleNamespace(name=k, duration=d) for k, d in kernels.items()]
        return SimpleNamespace(
            name=name, cpu_parent=parent, kernels=started, device_type=DeviceType.CPU
        )

    head = event("_HeadBackward")
    events = [
        event("aten::mm", gemm=40.0),
        event("aten::mm", head, gemm=20.0),
        event("aten::exp_", head, elementwise=5.0),
        event("Torch-Compiled Region", triton_tem_fused_flex_attention_0=15.0),
        event("aten::_fused_adamw_", event("Optimizer.step#AdamW.step"), multi_tensor=10.0),
        event("aten::mul", elementwise=8.0),
        event("aten::copy_", copy=2.0),
    ]
    on_gpu = SimpleNamespace(name="gemm", device_type=DeviceType.CUDA, kernels=[])
    found = utilisation.spent([*events, on_gpu], 200e-6, "cuda")
    largest = found.pop("largest_other")
    assert largest == pytest.approx({"aten::mul": 0.08, "aten::copy_": 0.02})
    assert found == pytest.approx(
        {
            "share_products": 0.4, "share_head": 0.25, "share_attention": 0.15,
            "share_optimizer": 0.1, "share_other": 0.1, "busy": 0.5,
        }
    )  # fmt: skip


def test_sampling_is_counted_by_calls_at_a_time(tiny_model_dir: Path, tmp_path: Path) -> None:
    found = figures("sampling", "embedded", tiny_model_dir, tmp_path)
    assert found.keys() == {"1_tokens_per_s", "4_tokens_per_s"}
    assert min(found.values()) > 0


def test_a_setting_is_compared_with_the_same_steps_without_it(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    found = figures("options", "checkpointing", tiny_model_dir, tmp_path)
    assert found["moved"] == found["plain_moved"] > 1e-3
    assert found["difference_max"] == found["difference_before"] == 0
    assert found["finite"]
    assert found["step_seconds"] > 0 < found["plain_step_seconds"]


@pytest.mark.parametrize("bits", gpu_sections.QUANTIZED)
def test_a_quantised_base_is_another_policy_that_learns(
    bits: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    found = figures("options", bits, tiny_model_dir, tmp_path)
    assert found["finite"]
    assert 0 < found["difference_before"] < 0.5
    assert 0.5 < found["moved"] / found["plain_moved"] < 2


async def test_weights_are_published_between_calls(tiny_model_dir: Path, tmp_path: Path) -> None:
    case = gpu_sections.Case("options", "", "cpu", str(tiny_model_dir), folder=str(tmp_path))
    said: list[Figures] = []
    await gpu_sections.publish(case, {"kind": "embedded"}, said.append)
    assert [one.keys() for one in said] == [{"publish_seconds", "freed_mb"}] * 3


@pytest.mark.parametrize("name", ["64", "128"])
def test_gradients_of_a_trie_are_those_of_rows_one_by_one(
    name: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    found = figures("tree", name, tiny_model_dir, tmp_path)
    for packing in ("trie", "rows"):
        assert 0 < found[f"float32_{packing}_gradient"] < 1e-5
        assert 0 < found[f"float32_{packing}_worst_weight"] < 1e-4
        assert 1e-4 < found[f"bfloat16_{packing}_gradient"] < 0.05
    assert ("float32_doctor" in found) == (name == "64")


@pytest.mark.parametrize("name", ["prices", pytest.param("calculator", marks=pytest.mark.slow)])
def test_an_agent_is_trained_and_its_steps_are_read(
    name: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("langchain")

    def train(run_file: Path, output: Path, overrides: list[str]) -> Figures:
        given = [str(run_file), f"output={output}", *overrides]
        given += ["warmup.steps=1"] * (name == "calculator")
        done = warm.run("-m", "agentrl", "train", *given)
        assert done.returncode == 0, done.stderr
        return {"greedy_after": 0.0}

    monkeypatch.setattr(real_model, "train", train)
    found = figures("agents", name, tiny_model_dir, tmp_path)
    assert found["greedy_after"] == 0
    assert found["curve"].keys() == {0, 2}
    assert found["sampled_tokens_per_s"] > 0


def test_an_unfinished_run_is_read_as_far_as_it_came(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[StepRow] = []

    async def read(output: Path) -> list[StepRow]:
        (row,) = rows  # ValueError without one, as of a store without a run
        return [row]

    def train(*_: object) -> Figures:
        (tmp_path / "prices").mkdir()  # what an earlier command has left is gone
        (tmp_path / "prices" / "store.db").touch()
        raise gpu_sections.LateError

    monkeypatch.setattr(real_model, "train", train)
    monkeypatch.setattr(gpu_sections, "read_steps", read)
    late = {"late": "the run did not end in the time of this case"}
    assert figures("agents", "prices", tiny_model_dir, tmp_path) == late
    metrics = {"time/update": 2.0, "time/rollouts": 4.0, "tokens/completion": 200.0}
    metrics |= {"tokens/forwarded": 900.0, "eval/score": 0.5, "logprob_difference/mean": 0.03}
    rows.append(StepRow(run="r", step=7, metrics=metrics, committed=True, at=0.0))
    found = figures("agents", "prices", tiny_model_dir, tmp_path)
    assert late.items() < found.items()
    assert (found["steps"], found["curve"]) == (1, {7: 0.5})
    assert (found["sampled_tokens_per_s"], found["updated_tokens_per_s"]) == (50, 450)
    assert found["logprob_difference_mean"] == 0.03


def test_what_a_machine_lacks_is_said(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert figures("options", "offload", tiny_model_dir, tmp_path) == {"absent": "it needs a GPU"}
    case = gpu_sections.Case("tree", "64", "cpu", why="it is not here", folder=str(tmp_path))
    found: Figures = {}
    gpu_sections.measure(case, found.update)
    assert found == {"absent": "it is not here"}
    if not gpu_sections.find_spec("vllm"):
        for section, name in (("options", "nccl"), ("sampling", "vllm")):
            said = figures(section, name, tiny_model_dir, tmp_path)
            assert said == {"absent": "vLLM is not installed"}


# -- the processes of cases ------------------------------------------------------------------------


def program(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_what_a_case_said_before_its_time_was_over_is_kept(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def late(*_): print('{\"steps\": 7}', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, late)\n"
        "print('{\"a\": 1}', flush=True); print('noise'); time.sleep(60)"
    )
    started = time.monotonic()
    found = gpu.measured(program(code), 2.0, tmp_path / "log")
    assert time.monotonic() - started < 30
    assert found.pop("case_seconds") >= 2
    assert found == {"a": 1, "steps": 7, "late": "it did not end in 2 s"}


def test_a_case_that_does_not_end_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "END", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-S', '-c', "
        f"{stubborn!r}]); print('{{\"child\": %d}}' % child.pid, flush=True); exec({stubborn!r})"
    )
    found = gpu.measured(program(code), 2.0, tmp_path / "log")
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(found["child"])
        if child.status() != psutil.STATUS_ZOMBIE:
            child.wait(30)  # raises TimeoutExpired; left alone it runs for two minutes


def test_a_failure_is_the_last_line_of_its_log(tmp_path: Path) -> None:
    code = "print('{\"a\": 1}', flush=True); raise ValueError('no such kernel')"
    found = gpu.measured(program(code), 60, tmp_path / "log")
    assert found["a"] == 1
    assert found["failed"] == "exit code 1: ValueError: no such kernel"
    assert "Traceback" in (tmp_path / "log").read_text()


def options(**changes: Any) -> Namespace:
    given = {"only": gpu.SECTIONS, "model": None, "seconds": 540.0, "tflops": 1.0}
    return Namespace(**given | {"prepared": None} | changes)


def test_cases_are_measured_in_order_until_no_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written, limits = [0.0], list[list[str]](), list[float]()

    def measured(command: list[str], limit: float, log: Path) -> Figures:
        if command[-1] == "machine":
            return {"cuda": True, "device": "H100", "case_seconds": 9}
        case = json.loads(command[-1])
        assert case["device"] == "cuda"
        assert "make smollm-model" in case["why"]
        kept = json.loads((tmp_path / "gpu.json").read_text())
        written.append([*kept.get("agents", ()), *kept.get("update", ())])
        limits.append(limit)
        now[0] += 160  # seconds
        return {"a": 1}

    monkeypatch.setattr(gpu, "MODEL", tmp_path / "none")
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "measured", measured)
    results = gpu.Measurements(tmp_path)
    gpu.measure(options(), results)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept == results.figures
    assert kept["device"] == "H100"
    done = ["prices", "calculator", "7B lora liger", "1.5B lora liger"]
    assert written == [done[:number] for number in range(4)]
    assert [*kept["agents"], *kept["update"]] == done
    assert limits == [170, 150, 120, 540 - 480 - gpu.END]
    assert [*kept["agents"].values()] == [{"a": 1}] * 2
    every = [f"{section} {name}" for section, name, _ in gpu.order(gpu.SECTIONS)]
    assert kept["left_out"] == every[4:]


def test_every_section_is_measured_and_can_be_chosen() -> None:
    every = gpu.order(gpu.SECTIONS)
    assert {section for section, _, _ in every} == gpu_sections.SECTIONS.keys()
    assert [section for section, _, _ in gpu.order(["tree"])] == ["tree", "tree"]
    assert every[0][:2] == ("agents", "prices")
    assert {name for section, name, _ in every if section == "options"} == {
        *gpu_sections.LEARNERS, *gpu_sections.QUANTIZED, *gpu_sections.VLLM,
    }  # fmt: skip


# -- files for a machine without a network ---------------------------------------------------------


def test_large_files_travel_in_pieces_and_come_back_whole(tmp_path: Path) -> None:
    room = 2**16
    files = {
        "model-1.whl": bytes(range(256)) * 1000,  # four times the room
        "kernels-2.whl": b"k" * 40_000,
        **{f"small-{n}.whl": bytes([n]) * 9000 for n in range(12)},
        "empty.whl": b"",
    }
    loads = gpu_loads.pack(files, room)
    assert all(sum(map(len, load.values())) <= room for load in loads)
    gpu_loads.write(loads, tmp_path)
    assert gpu_loads.read(tmp_path) == files
    assert len(loads) == -(-sum(map(len, files.values())) // room)
    told = gpu_loads.instructions(tmp_path, loads)
    assert f"transfer {len(loads)}: the repository and {tmp_path / str(len(loads))}" in told


def test_a_load_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    gpu_loads.write(
        gpu_loads.pack({"a.whl": b"a" * 50_000, "b.whl": b"b" * 60_000}, 2**16), tmp_path
    )
    with pytest.raises(SystemExit, match="nothing prepared is there"):
        gpu_loads.read(tmp_path / "other")
    second = next(file for file in (tmp_path / "2").iterdir() if file.name != gpu_loads.MANIFEST)
    second.write_bytes(b"x" * second.stat().st_size)
    with pytest.raises(SystemExit, match=rf"{second} is damaged"):
        gpu_loads.read(tmp_path)
    second.unlink()
    with pytest.raises(SystemExit, match=rf"{second} is missing: bring {second.parent} too"):
        gpu_loads.read(tmp_path)


def test_the_command_itself_needs_nothing_but_python(tmp_path: Path) -> None:
    """A machine gets the packages only by it."""
    code = (
        "import json, sys; sys.path.insert(0, '.'); import tests.benchmarks.gpu as gpu; "
        "print(json.dumps({'cases': len(gpu.order(gpu.SECTIONS))}))"
    )
    found = gpu.measured([sys.executable, "-I", "-S", "-c", code], 60, tmp_path / "log")
    assert found["cases"] == len(gpu.order(gpu.SECTIONS))


@pytest.mark.slow
def test_the_command_measures_in_processes_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main(["--only", "tree", "--output", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "gpu.json").read_text())
    assert found["left_out"] == []
    if not found["cuda"]:
        assert "tiny shapes" in found["device"]
    for case in found["tree"].values():
        assert case["float32_trie_gradient"] < 1e-3
        assert "failed" not in case
