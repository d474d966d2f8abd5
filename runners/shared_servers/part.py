from agentrl.base.parts import Part

PART = Part(
    name="shared servers",
    summary="Calls of a server or queue that rollouts share are recorded in none by accident.",
    tracing={"servers": "agentrl.runners.shared_servers.servers:join"},
)
