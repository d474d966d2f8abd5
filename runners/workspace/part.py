from agentrl.base.parts import Part

HERE = "agentrl.runners.workspace"

PART = Part(
    name="workspaces",
    summary="A folder for each attempt of a command, copied from a source, sandboxed and scored.",
    uses=("processes",),
    tables={"workspace": f"{HERE}.table:WorkspaceConfig"},
    runner={"workspace.source": f"{HERE}.hooks:join"},
)
