"""The code of the README runs, with a tiny model in place of the one it names; the pages that it
leads to name ways to train and words that exist."""

import importlib
import re
import shlex
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, get_args

import pytest
from msgspec.structs import fields

from agentrl.algorithms.train.stages import load_algorithms
from agentrl.core.config import RunConfig, load
from tests import warm

README = Path(__file__).parents[1] / "README.md"
WAYS = README.parent / "docs" / "how-to" / "README.md"
WORDS = README.parent / "docs" / "concepts" / "README.md"


(WRAP,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_wrap_your_own_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    script = WRAP.replace("Qwen/Qwen2.5-0.5B-Instruct", str(tiny_model_dir))
    script = script.replace("steps=20", "steps=2, sampling={'max_tokens': 8}")
    script = script.replace("tasks[300:]", "tasks[300:304]")
    assert script.count(str(tiny_model_dir)) == script.count("steps=2,") == 1
    (tmp_path / "script.py").write_text(script)
    result = warm.run("-m", "script", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "measured: policy.dtype = " in result.stdout
    assert "Result(" in result.stdout
    assert (tmp_path / "runs" / "run" / "curve.png").is_file()


def test_its_verifier_pays_only_for_the_answer() -> None:
    names: dict[str, Any] = {}
    start = WRAP.index("def verify")
    exec("from agentrl.verify import number\n" + WRAP[start : WRAP.index("trainer = ")], names)
    verify, task = names["verify"], {"input": "What is 8 plus 8?", "answer": 16}
    assert [verify(task, right) for right in ("16", " 16.\n", "016")] == [1.0] * 3
    every = " ".join(map(str, range(40)))
    wrong = ("", every, f"{every} 16", "It is not 16.", "16 or 17", "116", "1", "6", "-16", "16 16")
    assert [verify(task, reply) for reply in wrong] == [0.0] * len(wrong)


EXACT: list[str] = []
ONE_NUMBER = ["The lamp costs 16 dollars.", "16. There is no other.", "I'm not sure! It costs $16"]
LAST_NUMBER = [*ONE_NUMBER, "8 plus 8 is 16", "8 + 8 = 16."]
PAID = {
    "docs/own-agent.md": EXACT,
    "docs/how-to/README.md": EXACT,
    "docs/how-to/teams.md": EXACT,
    "agentrl/cli/SKILL.md": EXACT,
    "agentrl/cli/starter/verifier.py": EXACT,
    "agentrl/cli/starter/pretrained/verifier.py": EXACT,
    "examples/staff/verifier.py": EXACT,
    "examples/look/verifier.py": EXACT,
    "examples/smollm/verifier.py": ONE_NUMBER,
    "examples/smollm/calculator/verifier.py": LAST_NUMBER,
    "examples/frameworks/verifier.py": LAST_NUMBER,
}  # beside the answer alone
UNPAID = ["", "It is not 16.", "It isn't 16.", "It isn\u2019t 16", "16 is wrong",
          "No lamp costs 16.", "never 16!", "Neither 8 nor 16", "116 16", "1, 2, 16", "16 or 17",
          "16 16", "16, no, 17", "-16", "16.5", "160", "1", "6"]  # fmt: skip


@pytest.mark.parametrize("source", PAID)
def test_no_verifier_that_is_shown_pays_for_a_list_of_answers_or_a_denied_one(source: str) -> None:
    text = (README.parent / source).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) or [text]
    (block,) = [block for block in blocks if "def verify" in block]
    block = block[: block.find("\n\n\ntrainer =")] if "\n\n\ntrainer =" in block else block
    names: dict[str, Any] = {}
    exec(block, names)
    verify = names["verify"]
    given = [verify.__code__.co_varnames[n] for n in range(verify.__code__.co_argcount)]

    def score(reply: str) -> float:
        trace = SimpleNamespace(transitions=[])
        known = {"task": {"input": "8 + 8 =", "answer": "16"}, "result": reply, "trace": trace}
        value = verify(*(known[name] for name in given))
        return float(value if isinstance(value, float) else value[0].value)

    assert score("16") == 1.0
    sprays = [" ".join(map(str, range(17 + n))) for n in (1, 20)]
    replies = [*LAST_NUMBER, *sprays, *UNPAID]
    assert [reply for reply in replies if score(reply)] == PAID[source]


def test_the_streaming_example_pays_for_a_sentence_and_not_for_its_subject_eight_times() -> None:
    names: dict[str, Any] = {}
    exec((README.parent / "examples/streaming/verifier.py").read_text(), names)
    task = {"input": "the sea"}
    told = names["verify"](task, "The sea is a wide blue body of")
    assert told == {"outcome": 1.0, "length": 1.0}
    for reply in ("sea " * 8, "seaside seats are nice on days in May", ""):
        assert names["verify"](task, reply)["outcome"] == 0.0


TRAIN = re.findall(
    r"^agentrl train (examples\S+)(.*?)(?: +#.*)?$", WAYS.read_text(), flags=re.MULTILINE
)


@pytest.mark.parametrize(("run_file", "rest"), TRAIN)
def test_every_way_to_train_is_one(run_file: str, rest: str) -> None:
    pytest.importorskip("tensorboard")
    overrides = [word for word in shlex.split(rest) if "=" in word]
    load_algorithms(load(README.parent / run_file, overrides))


def test_the_table_names_settings() -> None:
    names = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", WAYS.read_text()))
    tables = {field.name: field.type for field in fields(RunConfig)}
    found = {name for name in names if name.split(".")[0] in tables and not name.endswith(".py")}
    assert {"policy.lora", "learner.packing", "metrics.sinks"} <= found
    for name in found:
        kind: Any = RunConfig
        for part in name.split("."):
            kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
            known = {field.name: field.type for one in kinds for field in fields(one)}
            known |= {one.__struct_config__.tag_field: str for one in kinds}
            kind = known[part]


NOUNS = re.findall(
    r"^\| ([a-z ]+) \| [^|]+ \| `([\w.]+)` \|$", WORDS.read_text(), flags=re.MULTILINE
)


def test_each_noun_has_one_thing_that_exists() -> None:
    assert len(NOUNS) > 20
    assert len({word for word, _ in NOUNS}) == len({path for _, path in NOUNS}) == len(NOUNS)
    for _, path in NOUNS:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
