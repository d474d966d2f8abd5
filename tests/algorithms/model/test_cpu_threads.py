"""The number of threads: measured with a clock, and without effect on what is computed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from agentrl.algorithms.model import lm_head
from agentrl.algorithms.model.lm_head import (
    CALLS_BETWEEN_TRIALS,
    PAIRS_PER_TRIAL,
    ThreadTuner,
    largest_power_of_two,
    sampling_threads,
    thread_tuner,
)
from agentrl.core.processes import environment

STEP = """
import hashlib, torch
from transformers import LlamaConfig, LlamaForCausalLM
from agentrl.algorithms.model.lm_head import computing_with
torch.manual_seed(0)
config = LlamaConfig(vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config)
tokens = torch.randint(1024, (8, 125))
for number in (1, 2, 4):
    model.zero_grad()
    with computing_with(number):
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    sums = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(sums).hexdigest())
"""


class Machine:
    """A clock that goes on by what a step costs with the present number of threads."""

    def __init__(self, costs: Mapping[int, float]) -> None:
        self.now, self.costs = 0.0, costs
        self.used: list[int] = []

    def clock(self) -> float:
        return self.now

    def work(self, measured: ThreadTuner, steps: int) -> list[int]:
        """The number of threads of each step."""
        self.used = []
        for _ in range(steps):
            with measured.working(10.0):
                self.used.append(torch.get_num_threads())
                self.now += self.costs[torch.get_num_threads()]
        return self.used


def test_the_faster_number_is_kept_and_tried_again_now_and_then() -> None:
    machine = Machine({1: 3.0, 4: 2.0})
    measured = ThreadTuner(4, 4, "it computes", machine.clock)
    trial = [1, 4] * PAIRS_PER_TRIAL
    assert machine.work(measured, 1 + 2 * PAIRS_PER_TRIAL + CALLS_BETWEEN_TRIALS) == [
        4,
        *trial,
        *[4] * CALLS_BETWEEN_TRIALS,
    ]
    machine.costs = {1: 3.0, 4: 2.9}  # hardly faster: the cores are of more use to others
    assert (
        machine.work(measured, 2 * PAIRS_PER_TRIAL + CALLS_BETWEEN_TRIALS)
        == trial + [1] * CALLS_BETWEEN_TRIALS
    )


def test_a_crowded_machine_pays_for_one_pair_only() -> None:
    machine = Machine({1: 1.0, 4: 20.0})
    measured = ThreadTuner(4, 4, "it computes", machine.clock)
    assert machine.work(measured, 3 + CALLS_BETWEEN_TRIALS) == [
        4,
        1,
        4,
        *[1] * CALLS_BETWEEN_TRIALS,
    ]
    assert machine.work(measured, 3) == [1, 4, 1]


def test_what_was_chosen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine({1: 1.0, 4: 20.0})
    measured = ThreadTuner(4, 4, "it computes", machine.clock)
    with caplog.at_level(logging.INFO, logger="agentrl.algorithm"):
        machine.work(measured, 4 * CALLS_BETWEEN_TRIALS)
    assert caplog.messages == ["it computes with 1 thread: 4 take 20.0 times as long as 1"]


def test_nothing_is_tried_where_the_numbers_would_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    assert thread_tuner(1000, "it", otherwise=3) == ThreadTuner(3)
    monkeypatch.setenv("MKL_CBWR", environment()["MKL_CBWR"])
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert thread_tuner(1000, "it", otherwise=3) == ThreadTuner(4, 4, "it")
    assert thread_tuner(lm_head.SMALL_MODEL + 1, "it", otherwise=3) == ThreadTuner(3)
    machine = Machine({3: 1.0})
    assert (
        machine.work(ThreadTuner(3, clock=machine.clock), 2 * CALLS_BETWEEN_TRIALS)
        == [3] * 2 * CALLS_BETWEEN_TRIALS
    )


@pytest.mark.parametrize(("cores", "power"), [(1, 1), (2, 2), (3, 2), (7, 4), (8, 8)])
def test_the_largest_power_of_two(cores: int, power: int) -> None:
    assert largest_power_of_two(cores) == power


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch multiplies without MKL")
@pytest.mark.parametrize(("cores", "number"), [(1, 1), (2, 2), (3, 2), (8, 8), (96, 8)])
def test_a_tiny_model_samples_with_one_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, number: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert sampling_threads(lm_head.SMALL_MODEL) == 1
    assert sampling_threads(lm_head.SMALL_MODEL + 1) == number


def test_a_child_computes_the_same_bits_with_any_power_of_two() -> None:
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    digests = done.stdout.split()
    assert len(digests) == 3
    assert len(set(digests)) == 1
