from agentrl.base.parts import Part

HERE = "agentrl.algorithms.preferences"

PART = Part(
    name="data sets",
    summary="Pairs, labels and demonstrations in a store, and runs on them.",
    tables={"data": f"{HERE}.table:DataConfig"},
    commands={"data": f"{HERE}.command:data"},
    settles={"data": f"{HERE}.pin:pin_dataset"},
    training={"data": f"{HERE}.training:join"},
)
