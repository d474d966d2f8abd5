"""Which classes of transformers are trained correctly, compared with a model's own forward pass.

Every class of `MODEL_FOR_CAUSAL_LM_MAPPING`, and the image-text classes that can be policies, small
(see `model_classes`) and random. The reference is the model as transformers runs it: float32, SDPA
or eager, one row at a time, on rows beyond every window, chunk and index, with sizes, weights and
rows that the proof at load has not seen. `right`: log-probs and every gradient of the learner,
and the log-probs that the engine reports, are the model's own, in batches; `plain`: the same, where
learner or engine take one row at a time; `refused`: a sentence at load; `wrong`: other values;
`bare_errors`: an unclear error. Gradients are relative to the largest one of the class.

    python -m tests.benchmarks.models --group 1/3 --json   # each ends within ten minutes
    python -m tests.benchmarks.models --write   # the page, from stored figures
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.engines.embedded.proof import prove_engine, sampling_gap
from agentrl.algorithms.model.forward import (
    check_model,
    gap_between,
    own_results,
    prove,
    results,
)
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.scaled import inputs_of, randomise, soften
from agentrl.algorithms.vision.inputs import CLASSES
from agentrl.core.errors import PolicyError
from agentrl.tiny import vision
from tests.benchmarks import model_classes
from tests.benchmarks.report import arguments

STORED = Path(__file__).parent / "results" / "models.json"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
LOGPROBS, GRADIENTS = 1e-4, 1e-5  # largest difference of log-probs in nats, and of gradients
SAMPLED = 5e-4  # likewise of sampled tokens, in float32: some recurrent models round more


def models() -> Iterator[tuple[str, Any]]:
    """Name of each class, and a function that makes its model."""
    seen = set()
    for kind in model_classes.names():
        if (name := model_classes.class_name(kind)) not in seen:
            seen.add(name)
            yield name, (lambda k=kind: built(k))
    for kind in CLASSES:
        yield f"{kind} (image-text)", (lambda k=kind: vision.make(k, ["a", "b"])[0])


def built(kind: str) -> Any:
    """A model of the class whose contexts matter; of those that cannot be built, what `load_model`
    says."""
    if kind in model_classes.UNBUILT:
        with tempfile.TemporaryDirectory() as folder:
            model_classes.save(kind, Path(folder))
            try:
                return load_model(folder, template=False)[0]
            except PolicyError as error:
                raise PolicyError(str(error).partition("cannot be loaded: ")[2]) from error
    model = model_classes.build(kind, seed=7)
    randomise(model)
    with suppress(Exception):  # what cannot read token ids alone is for `check_model` to refuse
        soften(model)
    return model


def rows(vocabulary: int) -> list[TokenRow]:
    """Three branches of one prompt, another one, and short rows; seeds are not the proof's."""
    draw = torch.Generator().manual_seed(5)

    def some(n: int) -> list[int]:
        return torch.randint(3, vocabulary, (n,), generator=draw).tolist()

    prompt = some(25)
    sequences = [[*prompt, *some(n)] for n in (18, 9, 14)] + [some(44), some(9), some(12)]
    found = []
    for tokens in sequences:
        actions = torch.arange(4, len(tokens))
        ones = torch.ones(len(actions))
        found.append(TokenRow(torch.tensor(tokens), actions, ones, ones, torch.zeros_like(actions)))
    return found


def judged(make: Any) -> dict[str, Any]:
    """The outcome of one class."""
    try:
        model = make()
        text = model.get_decoder().config if inputs_of(model) else model.config.get_text_config()
        given = rows(min(64, int(text.vocab_size)))
        check_model(model)
        proof = prove(model)
        try:
            exact = own_results(model, given)
        except Exception as error:  # noqa: BLE001  nothing to compare with, and nothing to train
            return {"outcome": "refused", "why": f"its own forward pass fails: {error}"}
        gap = gap_between(results(model, given, proof.packing, proof.way), exact)
        found: dict[str, Any] = {"way": proof.way, "packing": proof.packing, "why": proof.reason}
        found |= {"logprobs": gap.logprobs, "gradients": gap.gradients}
        try:
            engine, reason = prove_engine(model)
        except PolicyError as error:
            return {**found, **outcome(found), "engine": "refused", "engine_why": str(error)}
        found |= {"engine": engine, "engine_why": reason}
        if not inputs_of(model):
            found["engine_logprobs"], _ = sampling_gap(make(), engine)
        return {**found, **outcome(found)}
    except PolicyError as error:
        return {"outcome": "refused", "why": str(error)}
    except Exception as error:
        logging.getLogger(__name__).debug("bare", exc_info=True)
        return {"outcome": "bare_error", "why": f"{type(error).__name__}: {error}"[:200]}


def outcome(found: dict[str, Any]) -> dict[str, str]:
    """NaN is wrong."""
    right = found["logprobs"] <= LOGPROBS and found["gradients"] <= GRADIENTS
    right &= found.get("engine_logprobs", 0.0) <= SAMPLED
    slow = found["way"] == "plain" or found.get("engine") in ("cached", "whole")
    return {"outcome": ("plain" if slow else "right") if right else "wrong"}


def summary(stored: dict[str, Any]) -> dict[str, Any]:
    of = [each["outcome"] for each in stored.values()]
    counts = {name: of.count(name) for name in ("right", "plain", "refused", "wrong")}
    gradients = [e["gradients"] for e in stored.values() if "gradients" in e]
    return {
        "classes": len(of), **counts, "bare_errors": of.count("bare_error"),
        "gradients_most": max(gradients, default=0.0), "transformers": transformers.__version__,
    }  # fmt: skip


LEARNERS = {
    ("packed", "trie"): "trie", ("packed", "rows"): "packed rows",
    ("padded", "rows"): "padded", ("plain", "rows"): "one row at a time",
}  # fmt: skip
ENGINES = {
    "batched": "batched", "cached": "one call at a time", "whole": "one call at a time, no cache",
    "refused": "vLLM alone",
}  # fmt: skip


LAYERS = re.compile(r"has layers of type '(\w+)'")


def page(stored: dict[str, Any], version: str) -> str:
    counts = summary(stored)
    lines = [
        "# Models",
        "",
        f"Classes of transformers {version} by how they are trained and sampled, written by "
        "`python -m tests.benchmarks.models --write`. Before the first step learner and engine are "
        "compared with the model's own forward pass, on a small copy, and the fastest way that "
        "gives its log-probs and gradients is used; the console says which and why.",
        "",
        f"Of {counts['classes']} classes {counts['right']} train in batches, {counts['plain']} one "
        f"row or call at a time, and {counts['refused']} are refused; {counts['wrong']} are wrong. "
        f"Gradients differ by at most {counts['gradients_most']:.0e} of the largest one.",
        "",
        "| learner | engine | why not faster, or why refused | classes |",
        "|---|---|---|---|",
    ]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, each in sorted(stored.items(), key=lambda item: item[0].lower()):
        learner, engine, why = _handling(name, each)
        if layers := LAYERS.fullmatch(why):  # one row for all types of layers
            name, why = f"{name} ({layers[1]})", "has layers of the type in brackets"
        alike.setdefault((learner, engine, why), []).append(name)
    for (learner, engine, why), names in sorted(alike.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {learner} | {engine} | {_cell(why)} | {', '.join(names)} |")
    return "\n".join([*lines, ""])


def _handling(name: str, each: dict[str, Any]) -> tuple[str, str, str]:
    """Way of training, way of sampling, and the reason."""
    if "way" not in each:
        return each["outcome"], "", each["why"].removeprefix(f"{name}: ")
    learner = LEARNERS[each["way"], each["packing"]]
    why = each["why"] or each["engine_why"] if each["outcome"] != "right" else each["why"]
    return learner, ENGINES[each["engine"]], why


def _cell(text: str) -> str:
    short = text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return short if len(short) <= 400 else f"{short[:397]}..."


def store(path: Path, found: dict[str, Any], version: str) -> None:
    """Add figures to those of the same version of transformers. Groups may run together."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        kept = json.loads(file.read() or "{}")
        known = kept["classes"] if kept.get("transformers") == version else {}
        file.truncate(0)
        file.write(json.dumps({"transformers": version, "classes": known | found}, indent=1) + "\n")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--group", default="1/1", help="K/N: every Nth class, from the Kth")
    parser.add_argument("--only", nargs="*", default=(), help="names of classes")
    parser.add_argument("--write", action="store_true", help="write the page of stored figures")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger("agentrl").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if given.write:
        kept = json.loads(STORED.read_text())
        PAGE.write_text(page(kept["classes"], kept["transformers"]))
        return
    k, n = map(int, given.group.split("/"))
    found = {}
    for index, (name, make) in enumerate(models()):
        if (name in given.only) if given.only else index % n == k - 1:
            started = time.monotonic()
            found[name] = judged(make) | {"seconds": round(time.monotonic() - started, 2)}
            if not given.json:
                print(name, found[name], flush=True)
    store(STORED, found, transformers.__version__)
    print(json.dumps(summary(found) | {"bad": {
        name: each for name, each in found.items() if each["outcome"] in ("wrong", "bare_error")
    }}))  # fmt: skip


if __name__ == "__main__":
    main()
