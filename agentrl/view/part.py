from agentrl.base.parts import Part

PART = Part(
    name="view",
    summary="A store in the browser: runs, groups, rollouts, every token and its credit.",
    uses=("asgi",),
    commands={"view": "agentrl.view.command:view"},
)
