"""The comparisons for verifiers: their documented examples, programs, and mathematics."""

from __future__ import annotations

import doctest
import time

import pytest

from agentrl import verify

ADDS = "def add(x):\n    return x + 2\n"
CASES = [([1], 3), ([5], 7)]


def test_the_documented_examples_hold() -> None:
    found = doctest.testmod(verify)
    assert found.failed == 0
    assert found.attempted > 15


@pytest.mark.parametrize(
    ("program", "right"),
    [
        (ADDS, True),
        (f"Here:\n```python\n{ADDS}```", True),
        ("def add(x):\n    return 3\n", False),
        ("import os\nos._exit(0)\n", False),
        ("raise SystemExit(0)\n", False),
        ("class E:\n    def __eq__(self, other): return True\ndef add(x): return E()\n", False),
        ("print('[3, 7]')\n", False),
        ("while True:\n    pass\n", False),
        ("", False),
    ],
)
async def test_programs_are_judged_by_what_they_return(program: str, right: bool) -> None:
    assert await verify.code(program, "add", CASES, timeout=3.0) is right


async def test_no_case_is_no_proof() -> None:
    assert await verify.code(ADDS, "add", []) is False


@pytest.mark.parametrize(
    ("said", "right", "equal"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("It is not 16.", "16", False),
        ("15, 16", "16", False),
        ("(1,2)", "\\{1,2\\}", False),
        ("\\boxed{15} \\boxed{16}", "16", False),
    ],
)
def test_mathematics_is_compared_without_words(said: str, right: str, equal: bool) -> None:
    pytest.importorskip("math_verify")
    assert verify.latex(said, right) is equal


def test_mathematics_without_end_is_no_right_answer() -> None:
    pytest.importorskip("math_verify")
    assert not verify.latex("9^{9^{9}}", "16")
    assert verify.latex("\\frac{32}{2}", "16")


@pytest.mark.parametrize(
    "said", ["\n" * 90_000, "<answer>" * 12_000, f"#### a{' ' * 90_000}b", "answer:\n" * 11_000]
)
def test_answers_of_any_length_are_read_in_time(said: str) -> None:
    started = time.process_time()
    assert not verify.number(verify.final(said), 16)
    assert time.process_time() - started < 2


def test_a_minus_is_no_other_number() -> None:
    assert verify.number_in_text("12 - 4 = 8.", 8, given="What is 12-4?")
    assert verify.number_in_text("12-4 = 8", 8, given="What is 12 - 4?")
    assert not verify.number_in_text("7 12 4 8", 8, given="What is 12 - 4?")


def test_a_result_that_is_an_object_is_compared() -> None:
    assert verify.json_value({"a": [1.0]}, {"a": [1]})
    assert not verify.json_value({"a": True}, {"a": 1})


def test_nothing_a_model_writes_raises() -> None:
    odd = ["", "[" * 5000, "{" * 5000, "1e999", "\x00", "\\boxed{", "9" * 5000, None, 3, ["a"]]
    for one in odd:
        assert not verify.number(one, 16)
        assert not verify.number_in_text(one, 16)
        assert not verify.text(one, "Paris")
        assert not verify.choice(one, "B")
        assert not verify.items(one, ["red"])
        assert not verify.item_set(one, ["red"])
        assert not verify.json_value(one, {"a": 1})
        assert isinstance(verify.final(one), str)
