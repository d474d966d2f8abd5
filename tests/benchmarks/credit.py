"""Credit and psi for a large step on one core, against the same numbers as loops over rollouts; and
the variance of the policy gradient by scheme of credit, on a task whose gradient is known; and the
error of the gradient by preset, in worlds of a few states (`--only worlds`, `world_figures`).

python -m tests.benchmarks.credit --json
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import torch

from agentrl.algorithms.credit.calls import Returns, StepGae, ValuesFromReward
from agentrl.algorithms.credit.core import Credit, GroupRelative
from agentrl.algorithms.credit.states import PeerAdvantages
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import compute_advantages, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.presets.states import BatchTd
from tests.benchmarks.report import arguments

from . import world_figures
from .team_variance import team_variance

ROLLOUTS, CALLS, TOKENS = 20_000, 5, 10  # 1 M action tokens
GROUP = 8
STREAMS = {
    "outcome": {"norm": "std"},
    "process": {"scope": "transition", "gamma": 0.95, "weight": 0.5, "gate": "agree"},
}
PRESETS: dict[str, dict[str, object]] = {
    "grpo": {},
    "gspo+tis": {},
    "reinforce++": {},
    "gigpo+tis": {},
    "hgpo": {},
    "treerl": {},
    "streams+opsm": {"streams": STREAMS},
}


def batch(rollouts: int) -> Batch:
    """Every group like every other: 5 calls of 10 tokens, a row per rollout, 6 states."""
    draw = torch.Generator().manual_seed(0)
    calls, n = rollouts * CALLS, rollouts * CALLS * TOKENS
    rollout = torch.arange(rollouts).repeat_interleave(CALLS)
    group = torch.arange(rollouts) // GROUP
    return Batch(
        rows=[],
        token_row=torch.arange(rollouts).repeat_interleave(CALLS * TOKENS),
        token_transition=torch.arange(calls).repeat_interleave(TOKENS),
        sampler_logprobs=-torch.rand(n, generator=draw),
        transition_rollout=rollout,
        transition_role=torch.randint(0, 2, (calls,), generator=draw),
        row_rollout=torch.arange(rollouts),
        rollout_group=group,
        rewards={
            "outcome": torch.rand(rollouts, generator=draw).round().double(),
            "transition:process": torch.rand(calls, generator=draw).double(),
        },
        roles=["actor", "critic"],
        groups=[str(g) for g in range(int(group.max()) + 1)],
        rollouts=[str(u) for u in range(rollouts)],
        transitions=[str(s) for s in range(calls)],
        transition_state=torch.randint(0, 6, (calls,), generator=draw),
        transition_node=torch.where(
            torch.rand(calls, generator=draw) < 0.5, 0, torch.arange(calls)
        ),
    )


def step(name: str, data: Batch) -> float:
    """CPU seconds of credit, weights and psi of one optimizer step."""
    algo = make(name, PRESETS[name])
    b = data.sampler_logprobs.double()
    p, index = b + 0.01, torch.arange(data.n_tokens)
    started = time.process_time()
    loss_coefficients(algo, loss_terms(algo, data, GivenLogProbs(old=b)), p, index)
    return time.process_time() - started


def loops(data: Batch) -> float:
    """CPU seconds of GRPO with Python loops over groups, rollouts and tokens."""
    reward, group = data.rewards["outcome"].tolist(), data.rollout_group.tolist()
    p = (data.sampler_logprobs.double() + 0.01).tolist()
    o, owner = data.sampler_logprobs.double().tolist(), data.token_rollout.tolist()
    started = time.process_time()
    members: dict[int, list[float]] = {}
    for g, r in zip(group, reward, strict=True):
        members.setdefault(g, []).append(r)
    scale = {g: (fmean(x), stdev(x) + 1e-6) for g, x in members.items()}
    advantage = [(r - scale[g][0]) / scale[g][1] for g, r in zip(group, reward, strict=True)]
    share = 1 / len(reward) / (CALLS * TOKENS)
    for t, u in enumerate(owner):
        ratio = 2.718281828459045 ** (p[t] - o[t])
        a = advantage[u]
        inside = ratio <= 1.2 if a >= 0 else ratio >= 0.8
        _ = share * ratio * a * inside
    return time.process_time() - started


def best(measure: Callable[[], float], repeats: int) -> float:
    return min(measure() for _ in range(repeats))


# -- variance --------------------------------------------------------------------------------------

STEPS, GROUPS, SOURCES = 8, 4000, 2
PROCESS, TURN = "transition:process", ("group", "turn")
SCHEMES: dict[str, Credit] = {
    "broadcast": GroupRelative("total", base="loo"),
    "returns": GroupRelative(Returns(PROCESS), by=TURN, base="loo"),
    "states": GroupRelative(Returns(PROCESS), by=("group", "state"), base="loo"),
    "peers": GroupRelative(PeerAdvantages(PROCESS, 1.0, 0.5), base="none"),
    "batch-td": GroupRelative(BatchTd(PROCESS), base="none"),
    "values": GroupRelative(
        StepGae(ValuesFromReward("transition:v"), PROCESS, 1.0, 0.5), base="none"
    ),
}


def walks(actions: torch.Tensor, repeated: torch.Tensor, draw: torch.Generator) -> Batch:
    """Groups of rollouts of 8 calls with one binary action each, actions [M, G, 8]. The state is
    the step and the action before; a step pays 1 for another action than the one before, with
    noise. Of the calls that are `repeated` [M, G, 8] there are no tokens."""
    count, size, _ = actions.shape
    before = torch.nn.functional.pad(actions, (1, 0))[..., :-1]
    paid = (actions != before).double() + 0.1 * torch.randn(actions.shape, generator=draw)
    place = 2 ** torch.arange(STEPS)  # of the action before, in binary behind a leading 1
    history = (before * place).cumsum(-1) + 2 * place
    prompt = history + 2**STEPS * 2 * torch.arange(count)[:, None, None]
    rollouts = count * size
    rollout = torch.arange(rollouts * STEPS) // STEPS
    tokens = (~repeated).flatten().nonzero().squeeze(1)
    return Batch(
        rows=[],
        token_row=torch.arange(tokens.numel()),
        token_transition=tokens,
        sampler_logprobs=torch.full((tokens.numel(),), 0.5).log(),
        transition_rollout=rollout,
        transition_role=torch.zeros_like(rollout),
        row_rollout=rollout[tokens],
        rollout_group=torch.arange(rollouts) // size,
        rewards={
            "total": paid.sum(-1).flatten(),
            PROCESS: paid.flatten(),
            "transition:v": ((STEPS - torch.arange(STEPS)) / 2).repeat(rollouts).double(),
        },
        roles=["agent"],
        groups=[str(g) for g in range(count)],
        rollouts=[str(u) for u in range(rollouts)],
        transitions=[str(s) for s in range(rollouts * STEPS)],
        transition_state=(2 * torch.arange(STEPS) + before).flatten(),
        transition_action=actions.flatten(),
        transition_prompt=prompt.flatten(),
        transition_node=(2 * prompt + actions).flatten(),
        transition_repeats=repeated.flatten(),
    )


def branched(draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions and which of them are repeated: of each of a group's two rollouts a branch before
    every call but the first, which is 72 calls where the other groups have 64."""
    sources = torch.randint(0, 2, (GROUPS, SOURCES, 1, STEPS), generator=draw)
    anew = torch.randint(0, 2, (GROUPS, SOURCES, STEPS, STEPS), generator=draw)
    step = torch.arange(STEPS)
    repeated = (step < step[:, None]).expand(anew.shape)
    anew[:, :, 0] = sources[:, :, 0]  # the first of the eight is the rollout itself
    actions = torch.where(repeated, sources, anew)
    shape = (GROUPS, SOURCES * STEPS, STEPS)
    return actions.reshape(shape), repeated.reshape(shape)


def exact() -> torch.Tensor:
    """d (expected total) / d logits [STEPS * 2] at the uniform policy, by dynamic programming."""
    logits = torch.zeros(STEPS, 2, dtype=torch.float64, requires_grad=True)
    change = logits.sigmoid()  # probability of action 1 by (step, action before)
    value = torch.zeros(2, dtype=torch.float64)  # of the action before
    for s in reversed(range(STEPS)):
        stay, switch = 1 - change[s, 0], change[s, 0]
        zero = stay * value[0] + switch * (1 + value[1])
        one = change[s, 1] * value[1] + (1 - change[s, 1]) * (1 + value[0])
        value = torch.stack([zero, one])
    return torch.autograd.grad(value[0], logits)[0].flatten()


def gradients(credit: Credit, data: Batch, actions: torch.Tensor) -> torch.Tensor:
    """Estimates of d (expected total) / d logits by group [M, STEPS * 2]: the mean over rollouts
    that have credit."""
    token = data.token_transition
    advantage = credit(data)
    score = (actions.flatten()[token] - 0.5) * advantage.nan_to_num(nan=0.0)
    cell = data.token_group * 2 * STEPS + data.transition_state[token]
    total = torch.zeros(GROUPS * 2 * STEPS, dtype=torch.float64).index_add_(0, cell, score)
    learned = data.token_rollout[~advantage.isnan()].unique().numel() / GROUPS
    return total.view(GROUPS, 2 * STEPS) / learned


def variance() -> dict[str, float]:
    """How much smaller the trace of the covariance of a group's gradient is than with broadcast
    credit, at equal numbers of sampled calls, and the largest bias of its 15 parameters in standard
    errors."""
    draw = torch.Generator().manual_seed(0)
    actions = torch.randint(0, 2, (GROUPS, GROUP, STEPS), generator=draw)
    plain = walks(actions, torch.zeros_like(actions).bool(), draw)
    found = {name: gradients(credit, plain, actions) for name, credit in SCHEMES.items()}
    calls = dict.fromkeys(found, plain.n_tokens)
    actions, repeated = branched(draw)
    trees = walks(actions, repeated, draw)
    found["branches"] = gradients(vine, trees, actions)
    calls["branches"] = trees.n_tokens
    truth, cost, result = exact(), {}, {}
    for name, gradient in found.items():
        cost[name] = float(gradient.var(0).sum()) * calls[name]
        error = gradient.std(0) / GROUPS**0.5
        off = (gradient.mean(0) - truth).abs() / error.clamp(min=1e-12)
        result[f"variance reduction {name}"] = cost["broadcast"] / cost[name]
        result[f"bias {name}"] = float(off[error > 0].max())
    return result


def vine(data: Batch) -> torch.Tensor:
    return compute_advantages(make("vineppo", {"reward": "total"}), data)


def peak() -> float:
    """Largest resident memory of the process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(repeats: int) -> dict[str, float]:
    half, whole = batch(ROLLOUTS // 2), batch(ROLLOUTS)
    result: dict[str, float] = {"rollouts": ROLLOUTS, "tokens": whole.n_tokens}
    before = peak()
    for name in PRESETS:
        result[f"seconds {name}"] = best(lambda name=name: step(name, whole), repeats)  # type: ignore[misc]
    result["bytes_per_token"] = (peak() - before) * 2**20 / whole.n_tokens
    result["seconds grpo, half"] = best(lambda: step("grpo", half), repeats)
    result["seconds grpo, loops"] = best(lambda: loops(whole), 1)
    result["loops_over_ours"] = result["seconds grpo, loops"] / result["seconds grpo"]
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["seconds", "variance", "worlds"])
    parser.add_argument("--batches", type=int, default=300, help="per world and size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "seconds": lambda: seconds(options.repeats),
        "variance": lambda: variance() | team_variance(),
        "worlds": lambda: world_figures.measure(options.batches),
    }
    result: dict[str, Any] = {}
    for name in [options.only] if options.only else sections:
        result |= sections[name]()
    if options.json:
        print(json.dumps(result))
        return
    worlds = result.pop("worlds", None)
    for key, value in result.items():
        print(f"{key:<40}{value:>14.4g}" if isinstance(value, float | int) else f"{key:<40}{value}")
    if worlds:
        print(world_figures.table(worlds))


if __name__ == "__main__":
    main()
