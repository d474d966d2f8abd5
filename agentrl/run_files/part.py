from agentrl.base.parts import Part

HERE = "agentrl.run_files.command"

PART = Part(
    name="run-files",
    summary="Writes a first run file, and the JSON Schema with which editors complete one.",
    uses=("preflight",),
    hints={name: f"agentrl.run_files.hints:{name}" for name in ("preset", "setting", "syntax")},
    starts={"run-files": "agentrl.run_files.names:check"},
    commands={"config": f"{HERE}:config", "init": f"{HERE}:init"},
)
