from agentrl.base.parts import Part

HERE = "agentrl.runners.harnesses"

PART = Part(
    name="harnesses",
    summary="Coding harnesses such as Codex as agents, by presets.",
    uses=("processes", "workspaces"),
    commands={"harness": f"{HERE}.command:harness"},
    runner={"agent.harness": f"{HERE}.hooks:join"},
)
