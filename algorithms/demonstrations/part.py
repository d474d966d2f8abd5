from agentrl.base.parts import Part

HERE = "agentrl.algorithms.demonstrations"

PART = Part(
    name="demonstrations",
    summary="Imitate conversations before the first step, and let a stronger model make them.",
    uses=("evaluation",),
    needs=("preflight",),
    outputs=("warmup", "warmup.tmp-*"),
    tables={"warmup": f"{HERE}.table:WarmupConfig"},
    commands={
        "algorithm demonstrate": f"{HERE}.command:play_demonstrations",
        "demonstrate": f"{HERE}.command:demonstrate",
    },
    imitated={"demonstrations": f"{HERE}.imitated:format_problem"},
    initial={"warmup": f"{HERE}.warmup:warm_up"},
)
