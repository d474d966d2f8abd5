from agentrl.base.parts import Part

HERE = "agentrl.algorithms.learners.verl"

PART = Part(
    name="verl",
    summary="Training on many GPUs: verl's workers under Ray.",
    kinds={"learner.verl": f"{HERE}.table:VerlLearnerConfig"},
    checks={"learner.verl": f"{HERE}.settings:check"},
    learners={"verl": f"{HERE}.factory:verl_learner"},
)
