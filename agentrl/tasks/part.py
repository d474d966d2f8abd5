from agentrl.base.parts import Part

PART = Part(
    name="tasks with tests",
    summary="Tasks about files and their verifier, which a run file names as `agentrl.tasks:...`.",
)
