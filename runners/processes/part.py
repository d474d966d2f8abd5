from agentrl.base.parts import Part

HERE = "agentrl.runners.processes"

PART = Part(
    name="processes",
    summary="Agents in processes of their own: warm ones of Python, or a command for each attempt.",
    uses=("LangChain steps",),
    kinds={
        "runner.command": f"{HERE}.table:CommandRunnerConfig",
        "runner.pool": f"{HERE}.table:PoolRunnerConfig",
    },
    executors={"command": f"{HERE}.factory:command", "pool": f"{HERE}.factory:pool"},
)
