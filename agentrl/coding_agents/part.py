from agentrl.base.parts import Part

HERE = "agentrl.coding_agents"

PART = Part(
    name="coding-agents",
    summary="Coding agents run experiments: a skill that they read, and an MCP server.",
    uses=("traces",),
    commands={"mcp": f"{HERE}.command:mcp", "skill": f"{HERE}.command:skill"},
)
