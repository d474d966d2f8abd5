"""Advantages, psi and gradients of every preset and modifier on stored batches: `presets.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.golden import access, batches, files
from tests.golden.tiny import TinyModel, wave

STREAMS = {"outcome": {"norm": "std"}, "process": {"scope": "transition", "gate": "agree"}}
PLAIN_STREAMS = {"outcome": {}, "process": {"scope": "transition"}}
ROLES = {"team": ["planner", "solver", "critic"], "process": ["planner", "agent"]}  # else: agent
COMA = {"roles": ROLES["team"], "actions": ["left", "right"], "width": 8}
# What a preset or modifier needs in addition to its defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "streams": {"streams": STREAMS},
    "gdpo": {"rewards": {"outcome": 1.0, "style": 0.5}},
    "coma": COMA,
    "m-grpo": {"main": "planner"},
    "+credit": {"credit": "own_credit.py:halves"},
    "+process": {"process_streams": {"process": {"scope": "transition"}}},
    "+mean-by": {"mean_by_units": ["role"]},
}
HOSTS = {"+nll": "dpo"}  # of modifiers; default: grpo
# Further names and options that people combine.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("grpo+tis", {"kl": 0.04, "clip_high": 0.28, "tis_cap": 1.1}),
    ("dapo+seq-mask-tis", {"overlong_limit": 3, "overlong_cache": 2, "drop_truncated": True}),
    ("grpo+per-role+ema", {"ema_decay": 0.5}),
    ("gspo+opsm", {"reward": "style"}),
    ("gspo", {"reward": "transition:process"}),
    ("ppo+icepop", {"kl_reward": 0.1, "gamma": 0.9, "icepop_low": 0.9, "icepop_high": 1.1}),
    ("spiral", {"key": "kind", "gamma": 0.5}),
    ("dpo+nll", {"how": "all", "nll_share": 0.3}),
    ("rloo+decoupled", {"entropy": 0.01}),
    ("dr-mas+only", {"only_roles": ["solver"]}),
    ("distill", {"top": 4, "of": "policy"}),
    ("grpo+distill", {"distill_top": 3, "distill_beta": 0.5}),
    ("coma", COMA | {"critic": "qmix"}),
    ("coma", COMA | {"critic": "vdn"}),
    ("streams", {"streams": PLAIN_STREAMS, "mix": "returns", "gamma": 0.5}),
    ("streams", {"streams": PLAIN_STREAMS, "mix": "rewards", "gamma": 0.5, "norm": "std"}),
    ("dppo-topk", {"low": 0.001, "high": 0.001}),
    ("dppo-topk", {"kind": "kl", "low": 1e-4, "high": 1e-4, "k": 3}),
    ("grpo+seq-mask-tis", {"seq_mask_low": 0.5, "seq_mask_high": 2.0}),
]
# The batch on which the options of a name are varied; default: text.
HOME = {
    "team": "at-grpo coma difference shapley m-grpo magrpo maporl marti sage spiral dr-mas"
    " +per-role +call-discount +mean-by +only",
    "branches": "c3 tree-grpo treerl vineppo +tree",
    "process": "streams gdpo mt-grpo istar prime hcapo hgpo gigpo batch-td peers auto hiper"
    " agent-r1 pspo ragen turn-ppo archer +corrections +self-distill +told +hcapo +hgpo +gigpo"
    " +batch-td +peers +hiper +process +step-gae +tabular",
    "pairs": "dpo kto aot apo-down apo-zero bco cdpo cpo exo hinge ipo nca orpo robust simpo sppo"
    " +nll +pairs rft sft",
}
LOOSE = {"coma": 1e-3}  # what is trained in float32 differs between processors


@cache
def listed() -> tuple[str, ...]:
    """The names that `agentrl algorithms` prints."""
    text = access.command("algorithms").text
    return tuple(re.findall(r"^  (\S+)", text, re.MULTILINE))


def home(name: str) -> str:
    return next((kind for kind, names in HOME.items() if name in names.split()), "text")


def named(name: str) -> str:
    """What one would write as `algorithm.preset`."""
    return HOSTS.get(name, "grpo") + name if name.startswith("+") else name


def needed(name: str, kind: str) -> dict[str, Any]:
    own = {"only_roles": ROLES.get(kind, ["agent"])[:2]} if name == "+only" else {}
    return NEEDED.get(name, {}) | own


Spec = tuple[str, str, dict[str, Any], bool]  # kind of batch, preset, options, all numbers


@cache
def specs() -> dict[str, Spec]:
    """The cases by name: all names on all batches, then each option on one of them."""
    found: dict[str, Spec] = {}

    def add(
        kind: str,
        preset: str,
        options: dict[str, Any],
        whole: bool = True,
        known: Collection[str] | None = None,
    ) -> None:
        text = " ".join(f"{key}={value}" for key, value in sorted(options.items()))
        name = f"{preset} on {kind}{' with ' + text if text else ''}"
        if known is None or name in known:
            found[name] = kind, preset, options, whole

    for name in listed():
        for kind in batches.KINDS:
            add(kind, named(name), needed(name, kind))
    for preset, options in MORE:
        for kind in ("text", "team", "process", "pairs"):
            add(kind, preset, options, whole=False)
    kept = files.read("presets").keys()
    for name in listed():
        given = needed(name, home(name))
        # A recipe has the options of its preset: those that were recorded tell it from others.
        known = kept if access.is_recipe(name) else None
        for option, default in access.algorithm_options(name).items():
            for changed in others(name, option, default):
                if option not in given:
                    add(home(name), named(name), given | changed, whole=False, known=known)
    return found


def others(name: str, option: str, default: object) -> list[dict[str, Any]]:
    """Options in which one is not its default, with what it needs to have an effect."""
    for key in (f"{name}.{option}", option):
        if key in VALUES:
            return [v if isinstance(v, dict) else {option: v} for v in VALUES[key]]
    value: Any = None
    if isinstance(default, bool):
        value = not default
    elif isinstance(default, int):
        value = default + 2
    elif isinstance(default, float):
        value = 0.02 if default == 0.0 else 0.1 if default < 0.001 else default * 0.5
    elif option == "reward" and isinstance(default, str):
        roles = "role:difference" if default == "role:outcome" else "role:outcome"
        kinds = {"role": roles, "transition": "transition:cross"}
        value = kinds.get(default.partition(":")[0], "style")
    return [] if value is None else [{option: value}]


V = ["transition:v"]
VALUES: dict[str, list[Any]] = {
    "how": ["all"], "treerl.how": ["parent"], "within": ["prompt"], "norm": ["std"],
    "baseline": ["none", "max"], "grpo.baseline": ["loo"], "reinforce.baseline": ["mean"],
    "value": V, "mode": ["cross"], "kind": ["kl"], "key": ["kind"],
    "ema_key": ["kind"], "step_value": V, "advantage": V, "pairs_loss": ["ipo"], "mix": [],
    "process": ["transition:turn"], "gigpo_norm": ["std"], "hgpo_norm": ["std"], "hiper.high": V,
    "hiper.low": V, "hiper_high": V, "hiper_low": V, "streams.norm": [], "streams.gamma": [],
    "of": [{"top": 3, "of": "policy"}], "distill_of": [{"distill_top": 3, "distill_of": "policy"}],
    "per_group": [{"how": "all", "per_group": 2}],
    "least": [0.8], "rft.least": [0.25], "best": [{"best": 1, "least": 0.0}],
    "overlong_limit": [], "overlong_cache": [{"overlong_limit": 3, "overlong_cache": 2}],
    "cap": [1.05], "low": [0.001], "high": [0.001], "cispo.low": [0.99], "clip_dual": [1.05],
    "mis_cap": [1.01], "icepop_low": [0.95], "icepop_high": [1.05], "tis_cap": [1.01],
    "seq_tis_cap": [1.01], "log_low": [0.05], "log_high": [0.05], "k": [3], "pass-at-k.k": [3],
    "seq_mask_low": [{"seq_mask_low": 0.5, "seq_mask_high": 2.0}],
    "told_use": ["scale", "belief"], "told_top": [0, 3], "told_blend": [0.5],
    "told_limit": [{"told_top": 0, "told_limit": 2.5}],
    "told_of": [{"told_top": 3, "told_of": "policy"}], "told_temperature": [], "told_retire": [],
    "told_least": [{"told_use": "belief", "told_least": 0.5}], "told_failures_only": [],
    "told_band": [{"told_use": "scale", "told_band": 0.05}], "echo_weight": [],
    "clip_cov_share": [{"clip_cov_share": 0.2, "clip_cov_low": 0.0}], "clip_cov_low": [],
    "clip_cov_high": [], "kl_cov_share": [0.2],
    "behaviour_quantile": [0.7], "clip_cov_beta": [], "tis_low": [0.99], "tis_high": [1.01],
    "seq_mask_high": [], "seq_mask_cap": [{"seq_mask_cap": 1.0, "seq_mask_high": 2.0}],
}  # fmt: skip


def numbers(kind: str, preset: str, options: dict[str, Any], whole: bool) -> files.Case:
    """What an optimizer step on a batch is; whole: with the number of each token."""
    try:
        step, psi, gradient = played(preset, options, groups_of(kind))
    except Exception as error:  # part of what is kept: which sentence a user reads
        if type(error).__module__.partition(".")[0] != "agentrl":
            raise
        return {"error": str(error)}
    advantage = torch.tensor(step.advantages, dtype=torch.float64)
    if whole:
        credit = by_call(step.calls, step.advantages)
        return {"advantages": credit, "psi": psi.flatten().tolist(), "gradient": gradient}
    known = advantage.nan_to_num(0.0)
    way = wave(len(known), pace=0.7)
    return {
        "advantages": [float(known.norm()), float(known @ way), int(advantage.isnan().sum())],
        "psi": [float(psi.norm()), float(psi.flatten() @ wave(psi.numel(), pace=0.7))],
        "gradient": gradient,
    }


@cache
def groups_of(kind: str) -> list[Any]:
    return access.groups_of(batches.stored()[kind])


def by_call(calls: list[str], values: list[float]) -> dict[str, Any]:
    """A number for each call, or one for each of its tokens where they differ."""
    found: dict[str, list[float]] = {}
    for call, value in zip(calls, values, strict=True):
        found.setdefault(call, []).append(value)
    return {
        call: some[0] if len({repr(x) for x in some}) == 1 else some for call, some in found.items()
    }


def played(
    preset: str, options: dict[str, Any], groups: list[Any]
) -> tuple[access.Step, Tensor, dict[str, Any]]:
    """A step of the tiny model: the algorithm's numbers, psi, and the gradient of its loss."""
    prepare = access.prepare_step(preset, options, groups, files.HERE)
    n = prepare.batch.n_tokens  # type: ignore[attr-defined]
    rows = tuple(tuple(tuple(x.tolist()) for x in (row.tokens, row.actions, row.temperature))
                 for row in prepare.batch.rows)  # type: ignore[attr-defined]  # fmt: skip
    model, every = computed(rows)
    sampled = torch.tensor([tokens[at] for tokens, actions, _ in rows for at in actions])
    current = every[torch.arange(n), sampled]
    now = current.detach()

    def other(pace: float, size: float) -> Tensor:
        """The log-probs of another model, all below 0."""
        return (now + size * wave(n, pace=pace)).clamp(max=-1e-3)

    values = wave(n, pace=0.37) / 2 + 0.5
    reference = other(5.1, 0.3)
    step = prepare(values, reference)
    given = {"old": other(3.3, 0.25), "reference": reference, "teacher": other(7.7, 0.4)}
    candidates, p = None, current
    if step.candidates:
        k = min(step.candidates, 5)
        first = every.detach().scatter(1, sampled[:, None], torch.inf)
        candidates = first.topk(k).indices
        p = every.gather(1, candidates)
        for name, pace in (("old_candidates", 2.1), ("teacher_candidates", 4.3)):
            moved = (every.detach() + 0.3 * wave(*every.shape, pace=pace)).log_softmax(-1)
            given[name] = moved.gather(1, candidates)
        if step.algo.distill is None:
            del given["teacher_candidates"]
    psi = step.psi(p, given, candidates)
    loss = -(psi * (p if psi.dim() == p.dim() else current)).sum()
    eta = step.entropy_weights(given)
    if eta is not None:
        loss = loss + (eta[:, None] * every.exp() * every).sum()
    model.embedding.grad = model.head.grad = None
    loss.backward(retain_graph=True)
    return step, psi, model.gradient()


@cache
def computed(rows: tuple[tuple[Any, ...], ...]) -> tuple[TinyModel, Tensor]:
    """The model and its log-probs of all tokens, [N, V], which all presets have alike."""
    model = TinyModel()
    return model, torch.cat([model.logprobs(*map(list, row)) for row in rows])


def cases() -> Iterator[tuple[str, files.Case]]:
    for name, spec in specs().items():
        yield name, numbers(*spec)


if __name__ == "__main__":
    torch.set_num_threads(1)
    files.main("presets", cases)
