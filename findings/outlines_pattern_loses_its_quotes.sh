#!/usr/bin/env bash
# Natural guess: guided by a JSON schema, a model can write nothing but JSON that fits the schema.
# What is so: outlines-core, which compiles schemas for Outlines and for vLLM, writes quotes around a string's `pattern` and
# no parentheses. With "low|high" (or "^low|high$") the two texts that the guide lets through are `"low` and `high"`, of which
# neither is JSON; "low" and "high" in quotes are refused. "(low|high)" works, as does an `enum`.
# Why it matters: tools whose schemas come from Pydantic or zod have such patterns. All calls of that tool fail to parse, the
# policy has no way to write another, and its log-probs under the guide say that it was sure.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check outlines-core==0.2.14 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import json
import sys
from importlib.metadata import version

from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

LETTERS = sorted(set('"lowhigh'))
TOKENS = Vocabulary(len(LETTERS), {letter: [number] for number, letter in enumerate(LETTERS)})


def can_write(schema: dict) -> list[str]:
    """Every text that a model of single letters can end with under the guide."""
    index = Index(build_regex_from_schema(json.dumps(schema)), TOKENS)
    texts, open_ = [], [(index.get_initial_state(), "")]
    while open_:
        state, text = open_.pop()
        if index.is_final_state(state):
            texts.append(text)
        steps = index.get_transitions().get(state, {})
        open_ += [(after, text + LETTERS[token]) for token, after in steps.items() if token < len(LETTERS)]
    return sorted(texts)


print("outlines-core", version("outlines-core"))
broken, whole = ['"low', 'high"'], ['"high"', '"low"']
expected = {
    '{"type": "string", "pattern": "low|high"}': broken,
    '{"type": "string", "pattern": "^low|high$"}': broken,
    '{"type": "string", "pattern": "(low|high)"}': whole,
    '{"enum": ["low", "high"]}': whole,
}
seen = {}
for schema in expected:
    seen[schema] = can_write(json.loads(schema))
    print(f"{schema}: {' or '.join(seen[schema])}")
sys.exit(seen != expected)
PY
