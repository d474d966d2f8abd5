#!/usr/bin/env bash
# Natural guess: the filter "flexible-extract" of lm-eval's gsm8k takes the last number of a reply, whatever stands around it.
# What is so: two or more of the signs $ . , in a row are a number for it, too. After "It is $\boxed{18}$." the last one is
# "$.", so that the reply is wrong where 18 is right, as are $$\boxed{18}$$, "18, i.e., a dozen and a half" and "18...".
# "It is $\boxed{18}$" without the full stop is right. "strict-match" wants "#### 18" and finds in these replies nothing.
# Why it matters: this is the number by which checkpoints are compared. Models write LaTeX the more they are trained for
# mathematics, and the accuracy of a run falls where its answers became right, or rises as it learns to drop the full stop.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check sacrebleu==2.6.0 pyyaml==6.0.3
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps lm-eval==0.4.13
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import yaml
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter

[root] = find_spec("lm_eval").submodule_search_locations
task = yaml.safe_load(Path(root, "tasks/gsm8k/gsm8k.yaml").read_text())
[metric] = task["metric_list"]
settings = {name: metric[name] for name in ("regexes_to_ignore", "ignore_case", "ignore_punctuation")}
extractors = {}
for one in task["filter_list"]:
    extractors[one["name"]] = RegexFilter(**{k: v for k, v in one["filter"][0].items() if k != "function"})

def score(name, reply):
    [[found]] = extractors[name].apply([[reply]], [{}])
    return found, exact_match_hf_evaluate([found], ["#### 18"], **settings)["exact_match"]

print("lm-eval", version("lm-eval"), "gsm8k, version", task["metadata"]["version"])
expected = {
    "It is 18.": 1, r"It is $\boxed{18}$": 1, "#### 18": 1, "It is 17.": 0,
    r"It is $\boxed{18}$.": 0, r"$$\boxed{18}$$": 0, "It is 18, i.e., a dozen and a half": 0, "It is 18...": 0,
}
seen = {}
for reply in expected:
    found, seen[reply] = score("flexible-extract", reply)
    print(f"{reply!r}: flexible-extract finds {found!r}: {seen[reply]}; strict-match {score('strict-match', reply)[1]}")
sys.exit(seen != expected)
PY
