from agentrl.base.parts import Part

HERE = "agentrl.runners.sessions"

PART = Part(
    name="sessions",
    summary="Record the sessions of a deployed agent and its users' feedback.",
    tables={"sessions": f"{HERE}.table:SessionsConfig"},
    commands={"gateway": f"{HERE}.command:gateway"},
    checks={"sessions": f"{HERE}.table:check_unread"},
)
