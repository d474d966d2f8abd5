from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from agentrl.algorithms.learners import optimizer
from agentrl.algorithms.learners.optimizer import FILE, Optimizer
from agentrl.algorithms.learners.torch import WeightCopy
from agentrl.core.errors import PolicyError, TrainingError


def make(dtype: torch.dtype = torch.bfloat16, **settings: object) -> Optimizer:
    weights = torch.linspace(1, 2, 12, dtype=torch.float32).view(3, 4).to(dtype)
    named = {"layer.weight": Parameter(weights), "bias": Parameter(torch.ones(3, dtype=dtype))}
    return Optimizer(named, **settings)  # type: ignore[arg-type]


def backward(made: Optimizer, scale: float = 1.0) -> None:
    sum(scale * parameter.sum() for parameter in made.parameters.values()).backward()


def train(made: Optimizer, steps: int = 3, lr: float = 1e-2) -> list[Tensor]:
    for number in range(steps):
        backward(made, scale=1.0 + number)
        made.clip(1.0)
        made.step(lr)
        made.zero_grad()
    return [parameter.detach().clone() for parameter in made.parameters.values()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_small_updates_of_narrow_weights_are_not_lost() -> None:
    narrow, wide = make(torch.bfloat16), make(torch.float32)
    for made in (narrow, wide):
        train(made, steps=50, lr=1e-4)  # each far less than bfloat16 resolves at 1
    for name, parameter in narrow.parameters.items():
        assert parameter.dtype is torch.bfloat16
        assert parameter.grad is None
        assert torch.equal(parameter, narrow.masters[name].bfloat16())
        torch.testing.assert_close(narrow.masters[name], wide.masters[name], rtol=0, atol=5e-3)
    assert not torch.equal(narrow.parameters["bias"], torch.ones(3, dtype=torch.bfloat16))


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    made = make()
    backward(made, 256.0)
    for _ in range(8):
        backward(made, 0.5)  # 256.5 is 256 in bfloat16
    assert made.masters["bias"].grad is not None
    assert made.masters["bias"].grad.tolist() == [260.0] * 3
    assert made.parameters["bias"].grad is None
    assert made.clip(1.0) == pytest.approx(260.0 * 15**0.5)


def test_wide_weights_are_their_own_masters(tmp_path: Path) -> None:
    made = make(torch.float64)
    train(made)
    assert all(made.masters[name] is p for name, p in made.parameters.items())
    made.save(tmp_path)
    assert not any("master" in name for name in load_file(tmp_path / FILE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_saved_continues_bitwise(dtype: torch.dtype, tmp_path: Path) -> None:
    made, resumed = make(dtype), make(dtype)
    train(made)
    made.save(tmp_path)
    if dtype is torch.float32:  # the model's own file holds these
        with torch.no_grad():
            for name, parameter in resumed.parameters.items():
                parameter.copy_(made.parameters[name])
    resumed.read(tmp_path)()
    assert same(train(made), train(resumed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_without_gradient_may_begin_to_learn_later(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Such as a vision tower's in training on text. One that is not in the model is refused."""

    def on_layer_alone(made: Optimizer) -> None:
        for _ in range(2):
            made.parameters["layer.weight"].sum().backward()
            made.step(1e-2)
            made.zero_grad()

    made, resumed = make(dtype), make(dtype)
    on_layer_alone(made)
    made.save(tmp_path)
    with torch.no_grad():
        for name, parameter in resumed.parameters.items():
            parameter.copy_(made.parameters[name])
    resumed.read(tmp_path)()
    assert resumed.masters["bias"] not in resumed.inner.state
    on_layer_alone(made)
    on_layer_alone(resumed)
    assert same(train(made), train(resumed))
    with pytest.raises(PolicyError, match=r"bias is in the file, not in the policy"):
        Optimizer({"layer.weight": made.parameters["layer.weight"]}).read(tmp_path)


class Eight(torch.optim.Optimizer):
    """Keeps its state as bitsandbytes does: bytes and scales, and the step as a Python int."""

    def __init__(self, weights: Iterable[Parameter]) -> None:
        super().__init__(weights, {"lr": 0.0})

    def step(self) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state.setdefault("step", 0)
            state.setdefault("state1", torch.zeros(weight.shape, dtype=torch.uint8))
            state.setdefault("absmax1", torch.ones(1))
            state["step"] += 1
            state["state1"] += 3
            weight.data -= self.param_groups[0]["lr"] * state["step"] * state["state1"]


def test_states_of_other_optimizers_are_kept_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "_make", lambda kind, weights, *_: Eight(weights))
    made, resumed = (make(kind="adamw8bit") for _ in range(2))
    train(made)
    made.save(tmp_path)
    resumed.read(tmp_path)()
    assert resumed.inner.state[resumed.masters["bias"]]["step"] == 3
    resumed.move(torch.device("cpu"))  # learner.offload
    resumed.move(None)
    assert same(train(made), train(resumed))


def test_a_file_of_another_optimizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().save(tmp_path)
    monkeypatch.setattr(optimizer, "_make", lambda kind, weights, *_: Eight(weights))
    with pytest.raises(
        PolicyError, match=r"its optimizer is 'adamw', not 'adamw8bit'; set learner"
    ):
        make(kind="adamw8bit").read(tmp_path)


def test_a_file_of_another_dtype_or_shape_is_refused(tmp_path: Path) -> None:
    made = make()
    train(made)
    made.save(tmp_path)
    with pytest.raises(PolicyError, match=r"bias is in the file, not in .*policy\.dtype"):
        make(torch.float32).read(tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors["bias/exp_avg"] = torch.zeros(4)
    save_file(tensors, tmp_path / FILE, metadata={"optimizer": "adamw"})
    with pytest.raises(PolicyError, match=r"bias/exp_avg is \[4\], \[3\] in the policy"):
        make().read(tmp_path)
    del tensors["bias/exp_avg"], tensors["bias/exp_avg_sq"], tensors["bias/step"]
    save_file(tensors, tmp_path / FILE, metadata={"optimizer": "adamw"})
    with pytest.raises(PolicyError, match="bias is only in the policy"):
        make().read(tmp_path)


def test_eight_bit_optimizers_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"'paged_adamw8bit': it needs a CUDA device.*on cpu"):
        make(kind="paged_adamw8bit")
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(PolicyError, match=r"pip install .*\[eight-bit\]'"):
        optimizer._make("adamw8bit", [], 0.0)


def test_no_memory_for_moments_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    backward(made)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(made.inner, "step", full)
    with pytest.raises(
        TrainingError, match=r"optimizer \(CUDA out of memory\.\); set learner\.opt"
    ):
        made.step(1e-2)
    assert made.parameters["bias"].tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_waits_in_host_memory_is_what_it_was(dtype: torch.dtype) -> None:
    stays, moves = make(dtype), make(dtype)
    train(stays)
    train(moves)
    moves.move(torch.device("cpu"))
    moves.move(None)
    assert same(train(stays), train(moves))
    moves.move(torch.device("meta"))  # shows what is moved
    for name, parameter in moves.parameters.items():
        assert parameter.device.type == "cpu"
        master = moves.masters[name]
        assert (master.device.type == "meta") == (dtype is torch.bfloat16)
        moments = moves.inner.state[master]
        where = {key: value.device.type for key, value in moments.items()}
        assert where == {"step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_shrunk_towards_the_mark(dtype: torch.dtype) -> None:
    """Twice by half is a quarter of the rate, decay included; to nothing is the mark itself."""
    quarter, made = make(dtype, weight_decay=0.1), make(dtype, weight_decay=0.1)
    for one in (quarter, made):
        train(one)
    mark = WeightCopy()
    mark.take(list(made.masters.values()))
    before = [p.detach().clone() for p in made.parameters.values()]
    train(quarter, steps=1, lr=0.25)
    train(made, steps=1, lr=1.0)
    for _ in range(2):
        mark.shrink(made.masters.values(), 0.5)
        made.shrunk(0.5)
    for name, master in made.masters.items():
        torch.testing.assert_close(master, quarter.masters[name])
        assert torch.equal(made.parameters[name], master.to(dtype))
    moments = [state["exp_avg_sq"] for state in made.inner.state.values()]
    assert same(moments, [state["exp_avg_sq"] for state in quarter.inner.state.values()])
    mark.shrink(made.masters.values(), 0.0)
    made.shrunk(0.0)
    assert same(before, [p.detach() for p in made.parameters.values()])
    assert not any(state["exp_avg"].any() for state in made.inner.state.values())


def test_eight_bit_moments_shrink_by_their_scale() -> None:
    """Those of large weights are codes with a scale for each block, of which no code means 0."""
    large = {"state1": torch.full((4,), 7), "absmax1": torch.ones(1), "state2": torch.ones(4)}
    small = {"step": 3, "state1": torch.ones(4), "state2": torch.ones(4)}
    kept = torch.optim.SGD([Parameter(torch.ones(1))])
    kept.state.update({Parameter(torch.ones(1)): each for each in (large, small)})
    optimizer.shrink_momentum(kept, 0.5)
    assert large["state1"].tolist() == [7] * 4
    assert large["absmax1"].tolist() == [0.25]
    assert small["state1"].tolist() == [0.25] * 4
    assert large["state2"].tolist() == small["state2"].tolist() == [1] * 4
