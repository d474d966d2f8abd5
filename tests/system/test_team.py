"""An unmodified LangGraph of two roles trains two adapters of one model, by the run file alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig
from safetensors.torch import save_file

from agentrl.core.types import RolloutState
from agentrl.store import open_store
from tests.system.test_run import agentrl

EXAMPLE = Path(__file__).parents[2] / "examples" / "solver_critic"
RUN = """
name = "pair"
output = "out"
steps = 2
[agent]
path = "agent.py:agent"
[tasks]
train = "tasks.py:train"
heldout = "tasks.py:heldout"
[verifier]
path = "verifier.py:verify"
[policy]
model = "{model}"
[policies.proposer]
roles = ["solver"]
lora.rank = 4
[policies.checker]
roles = ["critic"]
lora.rank = 2
algorithm = {{ preset = "reinforce++", lr = 1e-2 }}
[audit]
before = false
[team]
schedule = "alternating"
[sampling]
max_tokens = 8
[eval]
tasks = 2
samples = 0
[algorithm]
lr = 1e-3
groups = 2
group_size = 4
"""
VERIFIER = """
def verify(task, result):
    return float(len(result) % 7)
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """Agent and tasks of the example; a reward that varies with every answer; an adapter of
    another model."""
    for name in ("agent.py", "tasks.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    (tmp_path / "verifier.py").write_text(VERIFIER)
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_model_dir))
    LoraConfig(r=2, base_model_name_or_path="foreign/base").save_pretrained(tmp_path / "foreign")
    save_file({}, tmp_path / "foreign" / "adapter_model.safetensors")
    return tmp_path


@pytest.mark.timeout(240)
async def test_a_graph_of_two_roles_trains_two_adapters(folder: Path) -> None:
    refused = agentrl(folder, "train", "run.toml", "policies.checker.lora.adapter=foreign")
    assert refused.returncode == 2
    assert "policies.checker: adapter" in refused.stderr
    assert "it was trained on another base ('foreign/base')" in refused.stderr
    trained = agentrl(folder, "train", "run.toml")  # mended, in the same store
    assert trained.returncode == 0, trained.stderr
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}", create=False) as store:
        rollouts = await store.rollouts("pair")
        traces = [await store.trace(row.id) for row in rollouts]
        steps = [row for row in await store.steps("pair") if row.committed]
        served = await store.policies("pair")
        state = await store.run("pair")
    assert {row.state for row in rollouts} == {RolloutState.SUCCEEDED}
    calls = [call for trace in traces if trace for call in trace.transitions]
    assert {(call.role, call.policy) for call in calls} == {
        ("solver", "proposer"), ("critic", "checker"),
    }  # fmt: skip
    assert {call.version for call in calls if call.policy == "proposer"} == {0, 1}
    assert {name: row.version for name, row in served.items()} == {"proposer": 1, "checker": 1}
    for row, name, other in zip(
        steps, ("proposer", "checker"), ("checker", "proposer"), strict=True
    ):
        assert row.metrics[f"{name}/logprob_difference/max"] <= 1e-4
        assert row.metrics[f"{name}/grad_norm"] > 0
        assert f"{other}/grad_norm" not in row.metrics
        assert row.metrics["rollouts"] == 8
    assert state is not None
    assert state.checkpoint is not None
    check_what_reads_it(folder, folder / "out" / state.checkpoint)


def check_what_reads_it(folder: Path, checkpoint: Path) -> None:
    """Every command that reads a run or a checkpoint knows both policies."""
    store = ("--store", f"sqlite:///{folder / 'out' / 'store.db'}")
    rollout = "pair/train/g0000000/0000"
    explained = agentrl(folder, "explain", rollout, *store)
    assert explained.returncode == 0, explained.stderr
    assert "policy proposer\n" in explained.stdout
    assert "policy checker\n  step 1 was not its turn to learn\n" in explained.stdout
    shown = agentrl(folder, "show", rollout, *store)
    assert "solver by proposer v0" in shown.stdout, shown.stderr
    exported = agentrl(
        folder, "export", "model", str(checkpoint), "--policy", "checker", "--to", "checker"
    )
    assert exported.returncode == 0, exported.stderr
    assert (folder / "checker" / "adapter_config.json").is_file()
    which = agentrl(folder, "export", "model", str(checkpoint), "--to", "both")
    assert which.returncode == 2
    assert "holds several policies; give --policy, one of checker, proposer" in which.stderr
    scored = agentrl(folder, "eval", "run.toml")
    assert scored.returncode == 0, scored.stderr
    assert "held-out tasks" in scored.stdout


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "teams.md"
GRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="policy")
graph = StateGraph(MessagesState)
graph.add_node("planner", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("solver", lambda state: {"messages": [model.invoke(state["messages"][:1])]})
graph.add_edge(START, "planner")
graph.add_edge("planner", "solver")
compiled = graph.compile()

def agent(text):
    return compiled.invoke({"messages": [("user", text)]})["messages"][-1].content
"""


async def test_rewards_by_role_of_the_guide_train_one_policy(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Settings and verifier are those of the page."""
    section = PAGE.read_text(encoding="utf-8").partition("## Rewards by role")[2]
    settings, code = re.findall(r"```(?:toml|python)\n(.*?)```", section, re.DOTALL)
    base = RUN.partition("[policies.proposer]")[0].format(model=tiny_model_dir)
    base = base.replace("tasks.py:train", "tasks.jsonl").replace("tasks.py:heldout", "tasks.jsonl")
    small = ["steps=1", "algorithm.groups=1", "algorithm.group_size=4", "sampling.max_tokens=8"]
    (tmp_path / "run.toml").write_text(base + settings)
    (tmp_path / "verifier.py").write_text(code)
    (tmp_path / "agent.py").write_text(GRAPH)
    (tmp_path / "tasks.jsonl").write_text('{"input": "What is 1 plus 2?", "answer": "3"}\n')
    trained = agentrl(tmp_path, "train", "run.toml", *small)
    assert trained.returncode == 0, trained.stderr
    async with open_store(f"sqlite:///{tmp_path / 'out' / 'store.db'}") as store:
        (rollout, *_) = rollouts = await store.rollouts("pair")
        trace = await store.trace(rollout.id)
    assert {row.state for row in rollouts} == {RolloutState.SUCCEEDED}
    assert trace is not None
    assert [call.role for call in trace.transitions] == ["planner", "solver"]
    assert {row.target for row in rollout.rewards if row.scope == "role"} == {"planner", "solver"}
