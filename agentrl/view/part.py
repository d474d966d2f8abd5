from agentrl.base.parts import Part

PART = Part(
    name="view",
    summary="All runs in the browser: verdicts, tasks, rollouts, every token and its credit.",
    uses=("asgi", "traces"),
    commands={"compare": "agentrl.view.command:compare", "view": "agentrl.view.command:view"},
    training={"origin": "agentrl.view.training:join"},
    finders={"below": "agentrl.run_stores:find"},
)
