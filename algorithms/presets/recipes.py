"""Recipes: algorithms that are a preset, or a modifier, with other options.

A run file names a recipe as it names a preset, `algorithm.preset = "dr-grpo"` or "grpo+mis", and
can set all options of the preset. After a change of the table, `python -m
tests.algorithms.presets.test_names` writes the list of names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import AlgoModifier, AlgoPreset, options_of_function


class Recipe(NamedTuple):
    """of: a preset, maybe with modifiers. A recipe of a modifier, such as "+mis", is based on a
    modifier, or on a preset that replaces the host's credit by its own; its options begin with its
    name, or with `prefix`."""

    name: str
    of: str
    options: Mapping[str, Any]
    text: str
    prefix: str = ""


RECIPES = (
    # Comparisons of rewards.
    Recipe("rloo", "reinforce", {"baseline": "loo"},
           "Leave-one-out mean as baseline, no clip. arXiv 2402.14740."),
    Recipe("opo", "reinforce", {"baseline": "length", "average": "token"},
           "Length-weighted group mean as baseline, for exact on-policy training. arXiv "
           "2505.23585."),
    Recipe("gpg", "reinforce", {"baseline": "scaled-mean", "average": "token"},
           "Group mean as baseline, scaled up for groups without a gradient. arXiv 2504.02546."),
    Recipe("remax", "reinforce", {"baseline": "greedy"},
           "A greedy rollout as baseline: the first of each group, not trained. arXiv 2310.10505."),
    Recipe("dr-grpo", "grpo", {"std": False, "length": 1024},
           "GRPO without standard deviation, rows divided by a constant length. arXiv 2503.20783."),
    Recipe("liteppo", "grpo", {"scale": "batch", "average": "token"},
           "Group mean, standard deviation of the whole batch, token mean. arXiv 2508.08221."),
    Recipe("maxrl", "grpo", {"scale": "mean", "average": "token"},
           "Group mean as baseline and as scale, for rewards >= 0. arXiv 2602.02710."),
    Recipe("reinforce++-baseline", "grpo", {"scale": "tokens", "average": "token"},
           "Group mean as baseline, whitened over all tokens. arXiv 2501.03262."),
    Recipe("agl-v0", "grpo", {"calls": True, "average": "token"},
           "LightningRL as first released: every call has the final reward, compared over calls, "
           "token mean. arXiv 2508.03680."),
    Recipe("agl-v1", "grpo", {"average": "rollout"},
           "GRPO averaged over rollouts, however many calls they took. arXiv 2608.17528."),
    Recipe("rft", "sft", {"least": 1.0},
           "Imitates the rollouts whose reward is at least `least`, or the `best` best of them in "
           "each group: rejection sampling, expert iteration. arXiv 2308.01825, 2304.06767."),
    # Trust regions and corrections.
    Recipe("gspo", "grpo", {"clip_by": "row", "clip_low": 3e-4, "clip_high": 4e-4},
           "GRPO with one ratio per row, the geometric mean of its tokens'; with a reward of "
           'calls, `reward = "transition:name"`, credit differs inside a row. arXiv 2507.18071.'),
    Recipe("luspo", "grpo",
           {"clip_by": "row", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sum"},
           "GSPO with row sums, which removes the bias towards short answers. arXiv 2602.05261."),
    Recipe("dppo-tv", "dppo", {"kind": "tv"},
           "Trust region on the change of probability instead of its ratio. arXiv 2602.04879."),
    Recipe("dppo-kl", "dppo", {"kind": "kl"},
           "Trust region on the KL divergence of a token's probability. arXiv 2602.04879."),
    Recipe("dppo-topk", "dppo", {"k": 20},
           "Trust region on the distance between current and old policy over the sampled and the "
           "most probable tokens, k in all, and the rest. No effect without minibatches or epochs. "
           "arXiv 2602.04879."),
    Recipe("+seq-tis", "+tis", {"by": "row"},
           "Truncated product of a row's weights. verl `rollout_corr_helper`."),
    Recipe("+mis", "+tis", {"by": "row", "drop": True, "cap": 3.0},
           "Drops rows whose product of weights is above the cap. TRL `sequence_mask`."),
    Recipe("+icepop", "+tis", {"cap": inf, "low": 0.5, "high": 5.0, "inside": "token"},
           "Drops tokens whose weight of trainer against sampler is out of range. arXiv "
           "2510.18855."),
    Recipe("+seq-mask-tis", "+tis", {"low": 0.99, "high": 1.01},
           "TIS within rows whose geometric mean weight is near 1. OpenRLHF `seq-mask-tis`.",
           prefix="seq_mask_"),
    Recipe("+sat", "+behaviour", {"quantile": 0.9},
           "PPO's clip against the sampler, tighter for the stalest tokens of a step, those whose "
           "|log-ratio| is above this quantile, on the side that they have left. Needs the "
           "log-probs of the whole step at once. arXiv 2607.18722."),
    Recipe("+kl-cov", "+clip-cov", {"how": "kl"},
           "The plain ratio in place of PPO's clip, and a penalty on the log-ratio to the old "
           "policy at the tokens that lower entropy most. arXiv 2505.22617."),
    # Credit of calls.
    Recipe("turn-ppo", "agent-r1", {"gamma": 0.99, "average": "token"},
           "Agent-R1 with a discount per turn, token mean. arXiv 2512.17008."),
    Recipe("pspo", "agent-r1",
           {"clip_by": "transition", "clip_low": 3e-4, "clip_high": 4e-4, "clip_dual": 10.0},
           "GAE over calls, and one clipped ratio per call. arXiv 2601.10029."),
    Recipe("peers", "auto", {"std": False},
           "Compares each call with other rollouts that came to the same state, as far as this and "
           "earlier batches show that states predict the outcome; without such states it is "
           "`rloo`. Needs no critic. GAE over calls as in arXiv 2511.14460, states as in "
           "2505.10978."),
    Recipe("tree-grpo", "grpo+tree", {},
           "Branches compared within the task and within their tree; rollouts with the same first "
           "call form one tree. arXiv 2509.21240."),
    Recipe("c3", "treerl", {"how": "siblings"},
           "Calls compared with the other samples of the same prompt, the rest replayed: "
           "counterfactual credit of one message. arXiv 2603.06859."),
    Recipe("vineppo", "treerl", {"how": "siblings", "train": "original"},
           "Values of calls from fresh continuations, which are not trained. For branching.kind = "
           '"mc". arXiv 2410.01679.'),
    Recipe("+step-gae", "agent-r1", {},
           "In place of the host's: GAE over calls, whitened over calls. arXiv 2511.14460.",
           prefix="step_"),
    Recipe("+tabular", "agent-r1", {"value": "mean-return"},
           "In place of the host's. The value of a state is the mean return of earlier steps from "
           "it, for tasks with few states. arXiv 1506.02438."),
    Recipe("+peers", "peers", {}, "In place of the host's. arXiv 2511.14460."),
    Recipe("+hgpo", "hgpo", {}, "In place of the host's. arXiv 2602.22817."),
    Recipe("+batch-td", "batch-td", {}, "In place of the host's. arXiv 2505.10978."),
    Recipe("+hiper", "hiper", {}, "In place of the host's. arXiv 2602.16165."),
    Recipe("+self-distill", "+told", {"source": "user", "top": 0, "beta": 1.0},
           "Adds distillation towards the policy itself after it has seen what the user said: "
           "reverse KL on the policy's own answers to what was corrected or asked again, no other "
           "model. arXiv 2601.19897, 2306.13649."),
    # Teams.
    Recipe("dr-mas", "grpo", {"calls": True, "within": "role"},
           "Calls compared with those of the same role. arXiv 2602.08847."),
    Recipe("at-grpo", "grpo", {"within": "turn"},
           'Calls compared with those of the same role and turn or, with `within` = "prompt", of '
           "the same role and prompt: solvers of one proposal, proposers of one task. arXiv "
           "2510.11062."),
    Recipe("marti", "grpo", {"reward": "transition:marti", "within": "turn"},
           "Answers compared with those of the same role and turn by a reward for improving on "
           "earlier answers, computed by the verifier with "
           "`agentrl.algorithms.team_rewards.marti`. MARTI, OpenReview E7jZqo0A50."),
    Recipe("sage", "grpo",
           {"reward": "role:outcome", "baseline": "none", "within": "role", "scale": "tokens",
            "average": "token"},
           "REINFORCE++ with rewards whitened per role over the whole batch: challenger, planner, "
           "solver and critic are each compared only with their own role. The KL penalty is in the "
           "loss; the paper does not say where. arXiv 2603.15255."),
    Recipe("difference", "grpo", {"reward": "role:difference", "within": "role", "std": False},
           "Each role's reward is the team's reward minus the team's reward without the role, from "
           "replays (`algorithm.counterfactual`) or the verifier "
           "(`agentrl.algorithms.team_rewards.difference`). baseline: the group's mean, or "
           "none, because it is a difference already. arXiv 2012.11258."),
    Recipe("shapley", "grpo", {"reward": "role:shapley", "within": "role", "std": False},
           "Each role compared by its Shapley value, the mean contribution to the coalitions of "
           "the others, from replays (`algorithm.counterfactual`) or the verifier "
           "(`agentrl.algorithms.team_rewards.shapley`). arXiv 1907.05707."),
    # Losses of pairs.
    Recipe("cdpo", "dpo", {"label_smoothing": 0.1},
           "DPO with smoothed labels, for noisy labels. ericmitchell.ai/cdpo.pdf, of arXiv "
           "2305.18290."),
    Recipe("robust", "dpo", {"loss": "robust", "label_smoothing": 0.1},
           "DPO with a loss that is unbiased under noisy labels. arXiv 2403.00409."),
    Recipe("ipo", "dpo", {"loss": "ipo"},
           "Squared loss on the difference of log-ratios per token. arXiv 2310.12036."),
    Recipe("hinge", "dpo", {"loss": "hinge"}, "SLiC's hinge on DPO's margin. arXiv 2305.10425."),
    Recipe("simpo", "dpo", {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
           "Mean log-probs per token with a margin gamma, no reference. arXiv 2405.14734."),
    Recipe("cpo", "dpo", {"loss": "cpo", "nll": 1.0},
           "DPO without a reference, plus the likelihood of the better completion. arXiv "
           "2401.08417."),
    Recipe("orpo", "dpo", {"loss": "orpo", "nll": 1.0},
           "The odds ratio per token, plus the likelihood of the better completion. arXiv "
           "2403.07691."),
    Recipe("apo-zero", "dpo", {"loss": "apo-zero"},
           "Better completions up, worse ones down, each against the reference. arXiv 2408.06266."),
    Recipe("apo-down", "dpo", {"loss": "apo-down"},
           "Both completions down, the worse one further: for completions worse than the policy. "
           "arXiv 2408.06266."),
    Recipe("nca", "dpo", {"loss": "nca"}, "Noise contrastive alignment. arXiv 2402.05369."),
    Recipe("bco", "dpo", {"loss": "bco"},
           "Binary classification of each completion against the reference. arXiv 2404.04656."),
    Recipe("exo", "dpo", {"loss": "exo", "label_smoothing": 0.001},
           "Reverse KL between the policy's preference and smoothed labels. arXiv 2402.00856."),
    Recipe("sppo", "dpo", {"loss": "sppo"},
           "Squared loss of each completion's h to +-1 / (2 beta), a win or a loss. arXiv "
           "2405.00675."),
    Recipe("aot", "dpo", {"loss": "aot"},
           "Sorted margins of all pairs of the step, compared with the reference's. arXiv "
           "2406.05882."),
)  # fmt: skip


def preset_of(row: Recipe) -> AlgoPreset:
    base = declare.presets[row.of.split("+")[0]]
    _check_options(row, base.options())
    return replace(base, name=row.name, of=row.of, defaults=row.options, text=row.text)


def modifier_of(row: Recipe) -> AlgoModifier:
    name = row.name.removeprefix("+")
    prefix = row.prefix or f"{name.replace('-', '_')}_"
    if row.of.startswith("+"):
        base: AlgoModifier | AlgoPreset = declare.modifiers[row.of[1:]]
    else:
        base = declare.presets[row.of]
    options = options_of_function(base.function)
    _check_options(row, options)
    defaults = {key: x for key, x in {**base.defaults, **row.options}.items() if key in options}
    return AlgoModifier(
        name,
        base.function,
        prefix,
        of=row.of,
        credit_only=isinstance(base, AlgoPreset),
        defaults=defaults,
        text=row.text,
    )


def _check_options(row: Recipe, options: Collection[str]) -> None:
    unknown = row.options.keys() - set(options)
    assert not unknown, f"recipe {row.name!r}: {row.of!r} has no option {sorted(unknown)}"


def register() -> None:
    """Add the recipes to the presets and modifiers, which must be registered before."""
    for row in RECIPES:
        if row.name.startswith("+"):
            declare.add_modifier(modifier_of(row))
        else:
            declare.add_preset(preset_of(row))
