from agentrl.base.parts import Part

HERE = "agentrl.algorithms.selfplay"

PART = Part(
    name="self-play",
    summary="Train a policy against itself and its snapshots; play checkpoints against each other.",
    uses=("checkpoints", "evaluation plans"),
    outputs=("pool",),
    tables={"selfplay": f"{HERE}.table:Selfplay"},
    commands={"crossplay": f"{HERE}.command:crossplay"},
    training={"selfplay": f"{HERE}.training:join"},
    figures={"selfplay": f"{HERE}.report:game_figures"},
    reports={"selfplay": f"{HERE}.report:win_rate_table"},
)
