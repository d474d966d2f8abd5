#!/usr/bin/env bash
# Natural guess: DeepEval's ToolCorrectnessMetric gives 1.0 to an agent that makes exactly the calls that are expected.
# What is so: each call that was made may count once, and "which" is decided by its name, arguments and output, not by its
# place. Of calls that are equal only one can count: next_page() twice where it is expected twice has 0.5, three times a
# third. Who calls next_page(1) and next_page(2) instead has 1.0, since arguments are not compared. With
# should_consider_ordering or should_exact_match the same calls have 1.0.
# Why it matters: turning pages, rolling dice, polling and undoing are the same call again. As a reward it pays a policy
# half for the right trajectory and in full for one with a made-up argument, which is what the policy then learns.
# The metric wants a key when it is made, for judgements by a model that are not asked for here; any word will do.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check deepeval==4.3.1 2>&1 | grep -v WARNING || true
cd "$folder"
export DEEPEVAL_TELEMETRY_OPT_OUT=YES OPENAI_API_KEY=none
env/bin/python - <<'PY'
import sys
from importlib.metadata import version

from deepeval.metrics import ToolCorrectnessMetric
from deepeval.test_case import LLMTestCase, ToolCall


def score(called: list[dict], expected: list[dict], **options: bool) -> float:
    made, wanted = ([ToolCall(name="next_page", input_parameters=one) for one in calls] for calls in (called, expected))
    case = LLMTestCase(input="Read on.", actual_output="Done.", tools_called=made, expected_tools=wanted)
    return ToolCorrectnessMetric(async_mode=False, **options).measure(case, _show_indicator=False)


print("deepeval", version("deepeval"))
seen = {
    "expected twice, made twice": score([{}] * 2, [{}] * 2),
    "expected three times, made three times": score([{}] * 3, [{}] * 3),
    "expected twice, made once": score([{}], [{}] * 2),
    "expected twice, made with 1 and with 2": score([{"page": 1}, {"page": 2}], [{}] * 2),
    "expected twice, made twice, ordering considered": score([{}] * 2, [{}] * 2, should_consider_ordering=True),
    "expected twice, made twice, exact": score([{}] * 2, [{}] * 2, should_exact_match=True),
}
for name, value in seen.items():
    print(f"{name}: {value:.2f}")
sys.exit([round(value, 2) for value in seen.values()] != [0.5, 0.33, 0.5, 1.0, 1.0, 1.0])
PY
