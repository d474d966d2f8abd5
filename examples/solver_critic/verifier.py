"""An outcome for the rollout, a process reward for every step, and a reward for the critic's
role."""

from agentrl import Reward, Scope, Trace


def verify(task: dict[str, str], result: str, trace: Trace) -> list[Reward]:
    rewards = [Reward(value=float(result.strip() == task["answer"]))]
    proposal, hits = "", []
    for call in trace.transitions:
        said = (call.answer or {}).get("content") or ""
        if call.role == "solver":
            proposal = said.strip()
            good = proposal == task["answer"]
        else:
            right = "right" if proposal == task["answer"] else "wrong"
            good = said.strip().lower() == right
            hits.append(good)
        step = Reward(value=float(good), name="step", scope=Scope.TRANSITION, target=call.id)
        rewards.append(step)
    record = sum(hits) / len(hits)
    return [*rewards, Reward(value=record, name="record", scope=Scope.ROLE, target="critic")]
