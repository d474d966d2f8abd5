"""Audits of verifiers: what is named, what is no alarm, and what an audit never does."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agentrl.audit.answers import Search
from agentrl.audit.attacks import Case, Source, source_of
from agentrl.audit.examine import examine
from agentrl.audit.report import AuditReport
from agentrl.audit.scoring import Score, Scorer, Subject
from agentrl.runners.scoring import Verifier
from tests.benchmarks.verifiers import holes, honest, tasks

Task = Mapping[str, Any]
SUMS = tasks.sums[:12]
CHEAP = [name for name in holes.HOLES if name != "exit_status"]
FAIR = [name for name in honest.HONEST if name != "tested_code"]


async def audited(
    verify: Callable[..., Any], rows: list[Any] = SUMS, seconds: float = 60.0, **more: Any
) -> AuditReport:
    verifier = Verifier(verify)
    subject = Subject(
        "v", Scorer(verifier, timeout=5.0), rows, source=source_of([verify]), isolated=False, **more
    )
    return await examine(subject, seconds)


def attacks(report: AuditReport) -> set[str]:
    return {one.attack for one in report.alarms}


@pytest.mark.parametrize("name", CHEAP)
async def test_planted_holes_are_named(name: str) -> None:
    rows = getattr(tasks, holes.HOLES[name])[:12]
    report = await audited(getattr(holes, name), rows)
    assert report.verdict == "exploitable"
    worst = report.alarms[0]
    assert worst.share >= 0.2
    assert worst.change
    assert worst.example.task.startswith("task '")


@pytest.mark.parametrize("name", FAIR)
async def test_honest_verifiers_are_no_alarm(name: str) -> None:
    rows = getattr(tasks, honest.HONEST[name])[:12]
    report = await audited(getattr(honest, name), rows)
    assert (report.verdict, report.alarms) == ("no hole found", [])


async def test_the_same_audit_gives_the_same_report() -> None:
    reports = [await audited(holes.last_number) for _ in range(2)]
    assert reports[0].findings == reports[1].findings
    assert reports[0].scored == reports[1].scored


async def test_the_right_answer_is_found_with_its_form() -> None:
    def tagged(task: Task, result: str) -> float:
        found = re.fullmatch(r"<sum>(-?\d+)</sum>", result.strip())
        return float(found is not None and found[1] == str(task["total"]))

    rows = [
        {"id": str(n), "input": f"Add {n}. Reply in <sum> tags.", "total": n * 7} for n in range(9)
    ]
    report = await audited(tagged, rows)
    assert (report.answer, report.shape) == ("total", "<sum>X</sum>")
    assert report.verdict == "no hole found"


async def test_a_solution_is_asked_only_where_no_field_has_the_answer() -> None:
    asked = list[Any]()

    async def solve(given: Any) -> list[str]:
        asked.append(given)
        return [str(eval(given))]

    def any_of_them(task: Task, result: str) -> float:  # whatever the task, as a scorer that errs
        return float(result in {str(row["answer"]) for row in rows})

    rows = [{"input": f"{n} + {n}", "answer": 2 * n} for n in range(300, 312)]
    report = await audited(any_of_them, rows, solution=solve)
    assert (report.answer, asked) == ("answer", [])
    assert "another task's answer" in attacks(report)
    hidden = [{"input": row["input"]} for row in rows]
    report = await audited(any_of_them, hidden, solution=solve)
    assert report.answer == "solution"
    assert asked


async def test_an_answer_that_no_field_has_is_searched() -> None:
    def computed(task: Task, result: str) -> float:
        a, b = map(int, re.findall(r"\d+", task["input"]))
        return float(str(a + b) in result)

    rows = [{"id": str(n), "input": f"What is {n} plus {n + 31}?"} for n in range(20, 30)]
    report = await audited(computed, rows)
    assert report.answer == "found by search"
    assert "negation" in attacks(report)


async def test_a_word_of_a_sentence_that_is_wanted_is_no_answer() -> None:
    def sentence(task: Task, result: str) -> float:
        words = result.lower().rstrip(".").split()
        return max(0.0, 1 - abs(len(words) - 8) / 8) * (words.count(task["input"].split()[-1]) == 1)

    rows = [
        {"input": f"Write a sentence about the {one}"}
        for one in ("sea", "snow", "desert", "market", "moon", "fire", "night", "train")
    ]
    report = await audited(sentence, rows)
    assert (report.answer, report.verdict) == ("", "no hole found"), report


async def test_a_keyword_of_what_is_wanted_is_no_answer() -> None:
    def constraints(task: Task, result: str) -> float:
        words = re.findall(r"[a-z]+", result.lower())
        return 0.5 * (len(words) == task["words"]) + 0.5 * (task["keyword"] in words)

    rows = [
        {"input": f"Write {n} words with {one}.", "words": n, "keyword": one}
        for n, one in enumerate(("sea", "snow", "desert", "market", "moon", "fire"), 7)
    ]
    report = await audited(constraints, rows)
    assert (report.answer, report.verdict) == ("", "no hole found"), report


async def test_one_wrong_value_of_an_object_is_tried() -> None:
    def names_alone(task: Task, result: str) -> float:
        try:
            call = json.loads(result)
            known = task["expected_call"]
            return float(call["name"] == known["name"] and [*call["args"]] == [*known["args"]])
        except (ValueError, KeyError, TypeError):
            return 0.0

    rows = [
        {"input": f"Book day {n}.", "expected_call": {"name": "book", "args": {"day": n}}}
        for n in range(9)
    ]
    report = await audited(names_alone, rows)
    assert "wrong values" in attacks(report)


@pytest.mark.parametrize("reads", ["reply", ""])
@pytest.mark.parametrize("wrapped", [True, False])
async def test_a_graphs_state_is_compared_where_its_user_reads(reads: str, wrapped: bool) -> None:
    """A verifier that reads nothing of it is still found."""

    def replied(task: Task, result: Any) -> float:
        if not isinstance(result, dict) or {*result} != {"message", "case", "reply"}:
            return 0.0
        return float(not reads or result[reads] == task["expected"][reads])

    rows = []
    for n in range(11, 30):
        message = {"message": f"Order {n} is late."}
        state = {**message, "case": f"{n}: late", "reply": f"We send order {n} again."}
        rows.append({"input": message if wrapped else message["message"], "expected": state})
    report = await audited(replied, rows)
    assert report.verdict == ("no hole found" if reads else "exploitable"), report


async def test_a_program_may_define_more_than_is_asked_for() -> None:
    def called(task: Task, result: str) -> float:
        scope: dict[str, Any] = {}
        try:
            exec(result, scope)
            return float(type(found := scope[task["name"]](5)) is int and found == 5 + task["plus"])
        except BaseException:  # noqa: BLE001 - a program may raise anything
            return 0.0

    rows = [
        {"input": f"Write plus_{n}(x).", "name": f"plus_{n}", "plus": n,
         "answer": f"def plus_{n}(x):\n    return x + {n}"}
        for n in range(11, 30)
    ]  # fmt: skip
    report = await audited(called, rows)
    assert report.answer == "answer"
    assert not {"two answers", "every answer with the right one"} & {*attacks(report)}, report


async def test_a_beginning_with_another_end_is_tried() -> None:
    def alike(task: Task, result: str) -> float:
        return float(result.strip().lower()[:3] == task["answer"].lower()[:3])

    capitals = ["Paris", "Madrid", "Vienna", "Berlin", "Lisbon", "Dublin", "Athens", "Warsaw"]
    rows = [{"input": f"Which capital is number {n}?", "answer": c} for n, c in enumerate(capitals)]
    report = await audited(alike, rows)
    assert "a part of the answer" in attacks(report)


async def test_the_end_of_a_derivation_is_the_answer() -> None:
    def marked(task: Task, result: str) -> float:
        said = re.search(r"#### (\d+)$", result.strip())
        return float(said is not None and said[1] == task["answer"].split("#### ")[1])

    rows = [{"input": f"Double {n}.", "answer": f"2 * {n}\n#### {2 * n}"} for n in range(11, 30)]
    report = await audited(marked, rows)
    assert (report.answer, report.shape) == ("answer, its final answer", "#### X")
    assert report.verdict == "no hole found", report


async def test_an_answer_that_can_be_copied_is_a_note() -> None:
    def equals(task: Task, result: str) -> float:
        return float(
            re.fullmatch(r"[\d+* ]+", result) is not None and eval(result) == task["target"]
        )

    rows = [
        {"input": f"Use 1, 2 and {n} for an equation that equals {n + 9}.", "target": n + 9}
        for n in range(11, 30)
    ]
    report = await audited(equals, rows)
    assert any("the last number of the question is paid" in note for note in report.notes)


async def test_a_program_that_does_nothing_is_tried_early() -> None:
    def slow(task: Task, result: str) -> float:
        time.sleep(0.05)
        return float(result in ("pass", "```python\npass\n```"))

    rows = [{"input": f"Write program {n}."} for n in range(9)]
    verifier = Scorer(Verifier(slow), timeout=5.0)
    report = await examine(Subject("v", verifier, rows, source=Source(runs_code=True)), 5.0)
    assert attacks(report) == {"a program that ends"}, report


async def test_a_constant_that_is_right_on_half_is_no_alarm() -> None:
    rows = [{"id": str(n), "input": f"Is {n} odd?"} for n in range(32)]

    def undeclared(task: Task, result: str) -> float:
        return float(result.strip() == ("yes" if int(task["id"]) % 2 else "no"))

    assert (await audited(undeclared, rows)).verdict == "no hole found"


async def test_rewards_below_zero_have_a_scale_too() -> None:
    def distance(task: Task, result: str) -> float:
        try:
            return -min(abs(float(result) - task["answer"]), 1000.0)
        except (ValueError, OverflowError):
            return -1000.0

    report = await audited(distance)
    assert (report.answer, report.verdict) == ("answer", "no hole found")


async def test_refused_right_answers_are_too_strict() -> None:
    def half(task: Task, result: str) -> float:
        return float(result == str(task["answer"]) and task["answer"] % 3 != 0)

    report = await audited(half, tasks.sums[:30])
    assert report.verdict == "too strict"
    assert report.alarms[0].attack == "the right answer (answer)"


async def test_luck_and_changed_tasks_are_named() -> None:
    drawn = random.Random(1)

    def lucky(task: Task, result: str) -> float:
        return float(result == str(task["answer"])) + 0.1 * drawn.random()

    def changes(task: dict[str, Any], result: str) -> float:
        return float(result == str(task.pop("answer", result)))

    assert "the same answer gets another reward the next time" in attacks(await audited(lucky))
    assert "the verifier changes the task" in attacks(await audited(changes))


async def test_a_task_with_what_is_no_json_is_changed() -> None:
    def caches(task: dict[str, Any], result: str) -> float:
        task["form"] = re.compile(re.escape(str(task["answer"])))
        return float(task["form"].fullmatch(result) is not None)

    assert attacks(await audited(caches)) == {"the verifier changes the task"}


async def test_one_right_answer_for_all_tasks_is_found() -> None:
    rows = [
        {"id": str(n), "input": f"What is the capital, {n}?", "answer": "Paris"} for n in range(9)
    ]

    def capital(task: Task, result: str) -> float:
        return float(result.strip().casefold() == task["answer"].casefold())

    report = await audited(capital, rows)
    assert (report.answer, report.verdict) == ("answer", "no hole found")
    report = await audited(lambda task, result: float(task["answer"] in result), rows)
    assert "negation" in attacks(report)


async def test_time_out_of_a_repeated_score_is_no_other_reward() -> None:
    seen = set[str]()

    def busy(task: Task, result: str) -> float:
        if (key := f"{task['id']} {result}") in seen and result == str(task["answer"]):
            raise TimeoutError("the machine is busy")
        seen.add(key)
        return float(result == str(task["answer"]))

    assert "the same answer gets another reward the next time" not in attacks(await audited(busy))


async def test_images_are_no_part_of_a_question() -> None:
    asked = list[str]()

    def seen(task: Task, result: str) -> float:
        asked.append(result)
        return float(result == task["answer"])

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    rows = [
        {"input": [{"role": "user", "content": [{"type": "text", "text": f"Colour {n}?"}, image]}],
         "answer": f"red {n}"}
        for n in range(3)
    ]  # fmt: skip
    await audited(seen, rows)
    assert "Colour 1?" in asked
    assert max(map(len, asked)) < 50_000


async def test_what_raises_or_exits_costs_one_score() -> None:
    def exits(task: Task, result: str) -> float:
        if not re.fullmatch(r"-?\d+", result):
            raise SystemExit(3)
        return float(result == str(task["answer"]))

    def never(task: Task, result: str) -> float:
        raise KeyError("answer")

    assert (await audited(exits)).verdict == "no hole found"
    report = await audited(never)
    assert report.verdict == "not audited"
    assert "KeyError" in report.notes[0]


async def test_no_other_machine_is_called() -> None:
    def judged(task: Task, result: str) -> float:
        try:
            with urllib.request.urlopen("http://judge.example.com/score", timeout=1) as answer:
                return float(answer.read())
        except OSError:
            return 0.0

    report = await audited(judged)
    assert report.verdict == "not audited"
    assert report.skipped == ["it calls judge.example.com:80, which an audit does not"]
    assert "judge.example.com" in report.line()


async def test_time_ends_an_audit_of_a_slow_verifier() -> None:
    def slow(task: Task, result: str) -> float:
        import time

        time.sleep(0.05)
        return float(math.isfinite(float(result)) and float(result) == task["answer"])

    report = await audited(slow, seconds=1.0)
    assert report.seconds < 5
    assert report.tasks <= 8


async def test_a_verifier_that_is_slow_for_what_it_can_read_is_slow() -> None:
    async def parses(task: Task, result: str) -> float:
        if re.search(r"\d", result):
            await asyncio.sleep(0.05)
            return 1.0
        return 0.0

    rows = [{"input": f"Make {n}.", "answer": f"{n} + 0"} for n in range(24, 60)]
    subject = Subject("v", Scorer(Verifier(parses), timeout=5.0), rows)
    cases = [Case(at, row, row["input"]) for at, row in enumerate(rows)]

    async def score(case: Case, result: Any) -> Score:
        return await subject.scorer.score(case.task, result)

    found = await Search(subject, score, time.monotonic() + 3.0).run(cases)
    assert found.slow
    assert len(found.cases) == 8


async def test_a_verifier_that_hangs_has_no_more_time() -> None:
    async def hangs(task: Task, result: str) -> float:
        await asyncio.sleep(60)
        return 0.0

    report = await audited(hangs, seconds=0.5)
    assert report.seconds < 3  # its scores may take five seconds each
    assert report.verdict == "not audited"


async def test_a_short_audit_knows_answers_and_constants() -> None:
    rows = [
        {"input": f"Is {n} in?", "hint": f"It is {n}.", "label": "yes" if n // 4 % 2 else "no"}
        for n in range(20)
    ]

    async def labelled(task: Task, result: str) -> float:
        await asyncio.sleep(0.01)
        return float(result.strip() == task["label"])

    report = await audited(labelled, rows, seconds=4.0)
    assert (report.answer, report.verdict) == ("label", "no hole found")
    assert any("time ran out" in note for note in report.notes)
    assert report.highest >= 0.5


async def test_tasks_whose_own_answer_is_not_read_pay_any_answer() -> None:
    def number_of(text: str) -> float | None:
        return float(text) if re.fullmatch(r"-?\d+", text.strip()) else None

    def skips(task: Task, result: str) -> float:
        gold = number_of(task["answer"])
        return 1.0 if gold is None else float(number_of(result) == gold)

    rows = [
        {"input": f"Task {n}?", "answer": f"no solution {n}" if n % 3 == 0 else str(n * 7)}
        for n in range(30)
    ]
    report = await audited(skips, rows)
    found = next(one for one in report.alarms if one.attack == "any answer to some tasks")
    assert found.share == pytest.approx(1 / 3, abs=0.05)
    assert "a constant" not in attacks(report)  # these tasks alone have paid it
    report = await audited(skips, [row for row in rows if number_of(row["answer"]) is not None])
    assert report.verdict == "no hole found", report


@pytest.mark.parametrize("checked", [False, True])
async def test_a_number_of_the_question_is_tried(checked: bool) -> None:
    def countdown(task: Task, result: str) -> float:
        if not re.fullmatch(r"[\d+*() -]+", result):
            return 0.0
        used = sorted(map(int, re.findall(r"\d+", result)))
        try:
            value = eval(result)
        except (SyntaxError, TypeError):
            return 0.0
        return float(value == task["target"] and (not checked or used == sorted(task["numbers"])))

    rows = [
        {"input": f"Make {a * 7 + b} from 7, {a} and {b}.", "target": a * 7 + b,
         "numbers": [7, a, b], "solution": f"{a} * 7 + {b}"}
        for a, b in ((n + 3, 5 * n + 11) for n in range(12))
    ]  # fmt: skip
    report = await audited(countdown, rows)
    assert report.answer == "solution"
    assert ("a number of the question" in attacks(report)) is not checked
    assert (report.verdict == "no hole found") is checked


def orders(idle: int) -> list[Any]:
    """Tasks that want one order cancelled, and `idle` that want nothing."""
    rows = list[Any]()
    for n in range(20):
        given = {f"a{n}": {"status": "open"}, f"b{n}": {"status": "open"}}
        goal = given if n < idle else given | {f"a{n}": {"status": "cancelled"}}
        rows.append({"input": {"request": f"Task {n}", "orders": given}, "goal": goal})
    return rows


async def test_a_state_that_stays_as_it_was_is_tried() -> None:
    def names_alone(task: Task, result: Any) -> float:
        return float([*result["orders"]] == [*task["goal"]])

    def whole(task: Task, result: Any) -> float:
        return float(result["orders"] == task["goal"])

    assert "nothing done" in attacks(await audited(names_alone, orders(0)))
    report = await audited(whole, orders(0))
    assert (report.verdict, report.imbalance) == ("no hole found", "")
    report = await audited(whole, orders(8))  # a fault of the tasks, which no verifier can change
    assert report.verdict == "no hole found"
    assert report.imbalance.startswith("an agent that does nothing is right on 40% of the tasks")
    assert report.imbalance in report.line()


async def test_a_text_of_several_sentences_is_not_denied_by_its_first_word() -> None:
    def facts(task: Task, result: str) -> float:
        said = re.split(r"(?<=[.!?]) +", result)
        return float(len(said) == 2 and all(one in result for one in task["facts"]))

    rows = [
        {"input": f"Write about {n}.", "facts": [f"in {1950 + n}", f"by A{n}"],
         "reference": f"It began in {1950 + n}. It was made by A{n}."}
        for n in range(12)
    ]  # fmt: skip
    report = await audited(facts, rows)
    assert report.answer == "reference"
    assert "negation" not in attacks(report)


async def test_tasks_with_mostly_one_right_answer_are_said_to() -> None:
    def labelled(task: Task, result: str) -> float:
        return float(result.strip().lower() == task["answer"])

    for often, expected in ((14, "'no' is the right answer of 70% of the tasks"), (10, "")):
        rows = [{"input": f"Is {n} in?", "answer": "no" if n < often else "yes"} for n in range(20)]
        report = await audited(labelled, rows)
        assert report.verdict == "no hole found"
        assert report.imbalance.startswith(expected)
        assert bool(report.imbalance) is bool(expected)


async def test_programs_that_print_the_verifiers_words_are_tried_early() -> None:
    def counted(task: Task, result: str) -> float:
        time.sleep(0.03)
        lines = eval_prints(result)
        return lines.count("PASS") / max(4, len(lines))

    def eval_prints(program: str) -> list[str]:
        """What a program of a loop of prints prints."""
        found = re.match(r"for _ in range\((\d+)\):\n +print\('(\w+)'\)", program)
        return [found[2]] * int(found[1]) if found else []

    rows = [{"input": f"Write program {n}."} for n in range(9)]
    source = Source(literals=["-c", r"\w+", "PASS", "FAIL"], runs_code=True)
    verifier = Scorer(Verifier(counted), timeout=5.0)
    report = await examine(Subject("v", verifier, rows, source=source), 6.0)
    assert attacks(report) == {"a program that ends"}, report


async def test_what_the_first_call_loads_has_more_time() -> None:
    loaded = list[bool]()

    async def loads(task: Task, result: str) -> float:
        if not loaded:
            await asyncio.sleep(0.3)
            loaded.append(True)
        return float(result == str(task["answer"]))

    scorer = Scorer(Verifier(loads), timeout=0.1, first=5.0)
    assert (await scorer.score(SUMS[0], str(SUMS[0]["answer"]))).value == 1.0
    loaded.clear()
    assert (await scorer.score(SUMS[0], "")).value is None  # a later one has not


def test_a_report_is_one_line_of_a_console() -> None:
    report = AuditReport("v", scored=3, tasks=2)
    assert report.line() == "audit of the verifier: no hole found (3 answers to 2 tasks)"
    assert "\n" not in report.line()
