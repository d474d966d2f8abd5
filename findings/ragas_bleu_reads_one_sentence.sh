#!/usr/bin/env bash
# Natural guess: Ragas' BleuScore compares a response with its reference, as whole texts or sentence by sentence.
# What is so: it splits both at ". " and hands SacreBLEU each sentence of the reference as a set of references of its own, and
# SacreBLEU compares as many sentences as the smallest set has: one. The first sentence of the response is compared with all
# sentences of the reference, and the rest is not read. A response that opens with one right sentence and goes on with
# anything has 1.0; the whole reference after "Well. " has 0.
# Why it matters: as a reward for summaries or reports it pays for an opening and teaches that nothing after it counts; what
# is said before the answer, such as a greeting, costs all of it.
# Ragas' class is a file that needs SacreBLEU and two small classes of Ragas, which are replaced; the rest of the package
# (LangChain, datasets and others) is not installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check sacrebleu==2.6.0 2>&1 | grep -v WARNING || true
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps ragas==0.4.3 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import asyncio
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace


class Metric:
    def __init__(self, **_: object) -> None:
        pass


base, result = ModuleType("ragas.metrics.collections.base"), ModuleType("ragas.metrics.result")
base.BaseMetric, result.MetricResult = Metric, SimpleNamespace
sys.modules |= {base.__name__: base, result.__name__: result}
package = Path(find_spec("ragas").submodule_search_locations[0])
spec = spec_from_file_location("bleu", package / "metrics/collections/_bleu_score.py")
bleu = module_from_spec(spec)
spec.loader.exec_module(bleu)

one, two = "The pump stopped at noon because the valve was shut.", "It ran again an hour later without a fault."
other = "The plant was sold to a circus in the spring of last year."
responses = {
    "the reference": (f"{one} {two}", 1.0),
    "its first sentence, then another story": (f"{one} {other}", 1.0),
    "its first sentence, then one word": (f"{one} No.", 1.0),
    "the reference after another word": (f"Well. {one} {two}", 0.0),
}
print(*(f"{name} {version(name)}" for name in ("ragas", "sacrebleu")), sep=", ")
wrong = False
for name, (response, expected) in responses.items():
    score = asyncio.run(bleu.BleuScore().ascore(f"{one} {two}", response)).value
    print(f"{name}: {score:.2f}")
    wrong |= abs(score - expected) > 1e-9
sys.exit(wrong)
PY
