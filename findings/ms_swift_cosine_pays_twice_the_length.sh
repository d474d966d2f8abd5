#!/usr/bin/env bash
# Natural guess: ms-swift's cosine reward, which pays a right answer less the longer it is, pays least at `cosine_max_len` and
# beyond it.
# What is so: beyond it the cosine goes on. A right answer has 1.0 at once, 0.5 at the length, and 1.0 again at twice the
# length; wrong ones, which are to be encouraged to think on, have -0.5, 0 and -0.5. The tokens of all turns are added up, and
# the length defaults to `max_completion_length`, which by default limits each turn, so rollouts of several turns come there.
# Why it matters: of two right rollouts the longer one may be paid more, and from the second turn on a group's differences may
# have the wrong sign. Lengths go to twice a setting that was meant as the end.
# The reward is loaded alone, as its package imports torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check --no-deps ms-swift==4.6.0
cd "$folder"
env/bin/python - <<'PY'
import runpy
import sys
from importlib.metadata import files, version
from types import ModuleType, SimpleNamespace

engine = ModuleType("swift.infer_engine")  # of which one name is imported, for an annotation
engine.InferRequest = None
sys.modules |= {"swift": ModuleType("swift"), engine.__name__: engine}
[path] = [file for file in files("ms-swift") if str(file) == "swift/rewards/orm.py"]
CosineReward = runpy.run_path(str(path.locate()))["CosineReward"]

settings = SimpleNamespace(  # the values by default, and a round length
    cosine_min_len_value_wrong=-0.5, cosine_max_len_value_wrong=0.0, cosine_min_len_value_correct=1.0,
    cosine_max_len_value_correct=0.5, cosine_max_len=1000,
)


def accuracy(completions, solution, **_):
    return [float(text == right) for text, right in zip(completions, solution)]


reward = CosineReward(settings, accuracy_orm=accuracy)
print("ms-swift", version("ms-swift"))
expected = {  # the tokens of each turn, the reward of a right answer, and that of a wrong one
    "no tokens": ([0], 1.0, -0.5),
    "half the length": ([500], 0.75, -0.25),
    "the length": ([1000], 0.5, 0.0),
    "twice the length": ([2000], 1.0, -0.5),
    "three turns of half the length": ([500] * 3, 0.75, -0.25),
    "four turns of half the length": ([500] * 4, 1.0, -0.5),
}
seen = {}
for name, (turns, *_) in expected.items():
    tokens = [[0] * count for count in turns]
    right, wrong = reward(["16", "17"], ["16", "16"], response_token_ids=[tokens, tokens])
    seen[name] = (turns, round(right, 6), round(wrong, 6))
    print(f"{name}: {seen[name][1]} if right, {seen[name][2]} if wrong")
sys.exit(seen != expected)
PY
