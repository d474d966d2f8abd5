"""Twenty honest verifiers: strict, tolerant, with partial credit. `HONEST`: name -> its tasks."""

import json
import math
import re
import secrets
import subprocess
import sys

from agentrl import Reward

HONEST = {
    "exact": "capitals", "plain_equality": "capitals", "any_case": "capitals", "number": "sums",
    "near": "decimals", "choice": "choices", "answer_line": "sums", "tags": "tagged",
    "boxed": "sums", "colours": "lists", "in_order": "lists", "record": "records",
    "yes_or_no": "booleans", "letters": "copies", "overlap": "copies", "form_and_answer": "tagged",
    "tested_code": "code", "any_factors": "factors", "several_rewards": "sums",
    "plus_minus": "capitals",
}  # fmt: skip


def exact(task, result):
    return float(result.strip() == task["answer"])


def plain_equality(task, result):
    return float(result == task["answer"])


async def any_case(task, result):
    return float(result.strip().rstrip(".").casefold() == task["answer"].casefold())


def number(task, result):
    said = re.fullmatch(r"\s*(-?[\d,]+)(\.0*)?\.?\s*", result)
    return float(said is not None and said[1].replace(",", "") == str(task["answer"]))


def near(task, result):
    try:
        said = float(result)
    except ValueError:
        return 0.0
    return float(math.isfinite(said) and abs(said - task["answer"]) <= 0.01)


def choice(task, result):
    said = re.fullmatch(r"\(?([A-D])\)?\.?", result.strip())
    return float(said is not None and said[1] == task["answer"])


def answer_line(task, result):
    said = re.search(r"Answer: (-?\d+)\s*\Z", result)
    return float(said is not None and said[1] == str(task["answer"]))


def tags(task, result):
    said = re.findall(r"<answer>([^<]*)</answer>", result)
    return float(len(said) == 1 and said[0].strip() == str(task["answer"]))


def boxed(task, result):
    said = re.findall(r"\\boxed\{([^{}]*)\}", result)
    return float(bool(said) and len(set(said)) == 1 and said[0].strip() == str(task["answer"]))


def colours(task, result):
    said = [word.strip().lower() for word in result.split(",")]
    return float(sorted(said) == sorted(task["answer"]))


def in_order(task, result):
    try:
        return float(json.loads(result) == task["answer"])
    except (ValueError, RecursionError):
        return 0.0


def record(task, result):
    try:
        return float(json.loads(result) == task["expected"])
    except (ValueError, RecursionError):
        return 0.0


def yes_or_no(task, result):
    return float(result.strip().lower().rstrip(".") == task["answer"])


def letters(task, result):
    right = task["target"]
    hits = sum(a == b for a, b in zip(result, right, strict=False))
    return hits / max(len(right), len(result))


def overlap(task, result):
    said, right = result.lower().split(), task["target"].lower().split()
    both = len({*said} & {*right})
    if not both:
        return 0.0
    precision, recall = both / len(said), both / len(right)
    return 2 * precision * recall / (precision + recall)


def form_and_answer(task, result):
    said = re.fullmatch(r"\s*<answer>([^<]*)</answer>\s*", result)
    if said is None:
        return 0.0
    return 1.0 if said[1].strip() == str(task["answer"]) else 0.1


def tested_code(task, result):
    word = secrets.token_hex(8)
    calls = json.dumps(task["cases"])
    name = task["name"]
    tests = (
        "import json, sys\n"
        f"found = [{name}(x) for x, _ in {calls}]\n"
        "sys.stdout.write(sys.stdin.read() + json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{result}\n{tests}"],
        input=word, capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    return float(done.stdout == word + json.dumps([y for _, y in task["cases"]]))


def any_factors(task, result):
    said = re.fullmatch(r"(\d{1,6}) x (\d{1,6})", result.strip())
    if said is None:
        return 0.0
    a, b = int(said[1]), int(said[2])
    return float(a > 1 and b > 1 and a * b == task["number"])


def several_rewards(task, result):
    right = float(result.strip() == str(task["answer"]))
    return {"outcome": right, "short": float(len(result) < 20)}


def plus_minus(task, result, trace):
    right = result.strip() == task["answer"]
    return [Reward(1.0 if right else -1.0), Reward(float(len(trace.transitions)), name="calls")]
