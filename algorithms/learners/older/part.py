from agentrl.base.parts import Part

PART = Part(
    name="older learners",
    summary="Learners of packages for version 0.1 work in a run.",
    older={"learner": "agentrl.algorithms.learners.older.forms:current_form"},
)
