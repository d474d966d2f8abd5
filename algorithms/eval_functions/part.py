from agentrl.base.parts import Part

HERE = "agentrl.algorithms.eval_functions"

PART = Part(
    name="eval-functions",
    summary="Measure checkpoints with functions of your own.",
    training={"eval.functions": f"{HERE}.training:join"},
)
