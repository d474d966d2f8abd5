from agentrl.base.parts import Part

HERE = "agentrl.algorithms.why"

PART = Part(
    name="why",
    summary="The most likely reasons that a run does not learn, with the settings to change.",
    commands={"why": f"{HERE}.command:why"},
    causes={"why": f"{HERE}.sentences:cause"},
    findings={"why": f"{HERE}.findings:findings"},
    verdicts={"why": f"{HERE}.sentences:verdict"},
)
